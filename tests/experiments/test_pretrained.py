"""Decoders trained one by one, on one page: who is set beside whom, what sets them apart, and the
commands that made them."""

import json
import re
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.errors import UsageError
from headwise.experiments import EXPERIMENTS, pretrained
from headwise.experiments.pages import shown_by, single_decoders
from headwise.shape import Shape
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.stats import difference
from headwise.store import Store


def row(bits, *, seed=0, digest="a", source="texts/book.txt", status="done", **changes):
    """A row of a decoder, by the fields that the page reads."""
    sizes = {
        "dim": 24,
        "depth": 2,
        "num_heads": 2,
        "head_dim": 12,
        "ffn_dim": 96,
        "vocab_size": 64,
        "causal": True,
    }
    recipe = {"steps": 10, "batch_tokens": 64, "length": 16, "lr": 0.01, "optimiser": "muon"}
    shape = Shape(
        **{k: v for k, v in {**sizes, **changes}.items() if k in Shape.__dataclass_fields__}
    )
    fields = {name: getattr(shape, name) for name in Shape.__dataclass_fields__}
    done = status == "done"
    evaluated = {
        "bits_per_byte": bits if done else None,
        "held_out": bits and bits * 0.7,
        "repeats": 0.25 if done else None,
    }
    measured = {
        "flops": 1000,
        "tokens_per_second": 7.0 + seed,
        "mfu": None,
        "status": status,
        "seed": seed,
        "digest": digest,
    }
    rest = {k: v for k, v in changes.items() if k not in Shape.__dataclass_fields__}
    return {**fields, **recipe, **evaluated, **measured, "source": source, "tokenizer": "", **rest}


def test_seeds_are_one_line_and_the_best_comes_first():
    rows = [
        row(2.5, seed=1),
        row(2.0, seed=1, num_heads=1, head_dim=24),
        row(2.7, seed=2),
        row(2.1, seed=2, num_heads=1, head_dim=24),
    ]
    first, second = pretrained.summary(rows)
    assert (first.name, first.n, second.name, second.n) == ("1 x 24", 2, "2 x 12", 2)
    assert first.held_out == pytest.approx(2.05)
    assert first.gap is None
    assert second.gap == difference([2.5, 2.7], [2.0, 2.1])
    assert second.tokens_per_second == 9.0
    assert (first.tokens, first.flops) == (640, "1e+04")


def test_name_says_what_differs_and_nothing_else():
    rows = [
        row(2.0),
        row(2.1, depth=3),
        row(2.2, lr=0.02),
        row(2.3, steps=2000),
        row(2.4, ffn_dim=48),
        row(2.5, optimiser="adamw"),
    ]
    names = [p.name for p in pretrained.summary(rows)]
    assert len(set(names)) == 6
    assert "dim" not in names[0], "what all share is not said"
    for name, said in zip(
        names[1:],
        ("3 layers", "rate 0.02", "2000 steps", "feed-forward 48", "optimiser adamw"),
        strict=True,
    ):
        assert said in name
        assert said not in names[0]


def test_texts_are_never_compared():
    rows = [
        row(2.0),
        row(1.0, digest="b", source="other.txt"),
        row(1.5, digest="b", source="other.txt", depth=3),
        row(2.2, digest="c"),
    ]
    points = pretrained.summary(rows)
    assert [(p.text, p.digest) for p in points] == [
        ("book.txt", "a"),
        ("book.txt", "c"),
        ("other.txt", "b"),
        ("other.txt", "b"),
    ]
    assert [p.gap and round(p.gap.mean, 6) for p in points] == [None, None, None, 0.5], (
        "one name, two contents: two texts"
    )
    assert len(pretrained.headline(points)) == 3
    assert [panel.title for panel in pretrained.figure(points).panels] == ["other.txt"], (
        "what stands alone is not drawn"
    )


def test_text_under_two_names_is_one_text():
    rows = [
        row(2.0),
        row(2.4, source="copy.txt", depth=3),
        row(2.1, source="copy.txt", seed=1),
        row(2.6, depth=4),
    ]
    points = pretrained.summary(rows)
    assert [(p.text, p.n) for p in points] == [
        ("book.txt = copy.txt", 2),
        ("book.txt = copy.txt", 1),
        ("book.txt = copy.txt", 1),
    ]
    assert len(pretrained.headline(points)) == len(pretrained.figure(points).panels) == 1


@pytest.mark.parametrize(
    "changes",
    [
        ({"qk_rope_head_dim": 12}, {"qk_rope_head_dim": 0}),
        (
            {"kv_lora_rank": 8},
            {"kv_lora_rank": 8, "num_heads": 4, "num_kv_heads": 4, "head_dim": 6, "v_head_dim": 6},
        ),
        ({"num_kv_heads": 1, "v_head_dim": 4}, {"num_kv_heads": 1, "v_head_dim": 32}),
        ({"windows": (0,)}, {"windows": (8,)}),
        ({"precision": "bf16"}, {"precision": "fp32"}),
    ],
)
def test_decoders_that_differ_have_names_that_differ(changes):
    names = [
        p.name
        for p in pretrained.summary(
            [row(2.0 + i, **change) for i, change in enumerate(changes)] + [row(9.0, depth=7)]
        )
    ]
    assert len(set(names)) == 3


def test_names_are_text_and_nothing_else(tmp_path):
    """A file may be called anything."""
    rows = [row(2.0, source='a$b_{$ <b>&"x.txt'), row(2.1, depth=3, source='a$b_{$ <b>&"x.txt')]
    description = pretrained.figure(pretrained.summary(rows))
    save(description, tmp_path / "p.png")
    (title,) = [
        a["text"]
        for a in plotly_figure(description)["layout"]["annotations"]
        if "x.txt" in a["text"]
    ]
    assert title == 'a$b_{$ &lt;b&gt;&amp;"x.txt'


def test_headline_says_what_cannot_be_distinguished():
    near = [row(b, seed=i, num_heads=4, head_dim=6) for i, b in enumerate((2.0, 2.2, 2.4))]
    far = [row(b, seed=i, num_heads=8, head_dim=3) for i, b in enumerate((3.0, 3.01, 3.02))]
    best, single = (
        [row(b, seed=i) for i, b in enumerate((2.0, 2.1, 2.2))],
        [row(2.9, num_heads=1, head_dim=24)],
    )
    (line,) = pretrained.headline(pretrained.summary([*near, *far, *best, *single]))
    assert line == (
        "book.txt: best 2 x 12, bits per byte 2.1000 ± 0.2484 (3 seeds); cannot be told apart from "
        "2 others of 4 decoders (4 x 6; 1 x 24, one seed)"
    )


def test_divergence_is_counted_and_not_averaged():
    points = pretrained.summary(
        [row(2.0), row(None, seed=1, status="diverged"), row(None, depth=3, status="diverged")]
    )
    assert [(p.n, p.diverged, p.held_out) for p in points] == [(1, 1, 2.0), (0, 1, None)]
    plotly_figure(pretrained.figure(points))
    alone = pretrained.summary([row(None, status="diverged")])
    assert pretrained.headline(alone) == []
    plotly_figure(pretrained.figure(alone))


def test_pretrained_is_shown_and_not_run(tmp_path):
    assert shown_by("pretrain").question == pretrained.EXPERIMENT.question
    assert "pretrain" not in EXPERIMENTS
    with pytest.raises(UsageError, match="unknown experiment 'pretrained'"):
        shown_by("pretrained")
    assert main(["run", "pretrain", "--store", str(tmp_path)]) == 2


def text_of(path: Path) -> str:
    html = re.sub(r"<(script|style).*?</\1>", "", path.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_page_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    common = [
        "pretrain",
        "--device",
        "cpu",
        "--store",
        str(store),
        "--steps",
        "2",
        "--batch-tokens",
        "256",
        "--eval-tokens",
        "256",
    ]
    tiny = ["--set", "dim=16", "depth=1", "ffn_dim=16"]
    for heads in (2, 1, 2):  # the last is there already
        assert main([*common, *tiny, f"num_heads={heads}"]) == 0
        assert f"beside others: headwise report --store {store}" in capsys.readouterr().err
    Store(store).note(
        "other", {"ids": [], "command": "", "preset": "quick", "settings": {}, "source": "gone.py"}
    )
    assert main(["report", "--store", str(store)]) == 0
    page = text_of(store / "report.html")
    assert "Which of the decoders trained here" in page
    assert "2 of 2 runs finished" in page
    assert "generated text: no best: none of the 2 decoders can be told apart at n=1" in page
    assert page.count("headwise pretrain --device cpu") == 2
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(r) + "\n" for r in Store(store).rows()))
    assert main(["draw", "pretrain", str(lines), "--output", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", "null", '{"ids": 5, "command": "", "preset": "", "settings": {}}']
)
def test_note_that_cannot_be_read_is_named_and_left_out(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path).note("fig1", {"ids": [], "command": "", "preset": "", "settings": {}})
    (tmp_path / "experiments" / "fig1.json").write_text(text)
    assert main(["report", "--store", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"headwise: {tmp_path / 'experiments' / 'fig1.json'} is damaged and left")
    assert err.count("\n") == 1
    assert "experiments/fig1.json is damaged and left out" in text_of(tmp_path / "report.html")


def test_decoder_of_an_experiment_is_on_the_experiments_page_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    whole = {
        "device": "x",
        "commit": "c",
        "seconds": 1.0,
        "curve": [1.0],
        "held_out_curve": [[1, 2.0]],
        "finished": "2026",
        "task": "language",
    }
    for name in ("one", "two"):
        store.add({**row(2.0), **whole, "id": name})
    store.note(
        "nanochat_heads",
        {"ids": ["one"], "command": "headwise run", "preset": "quick", "settings": {}},
    )
    (section,) = single_decoders(store, store.experiments())
    assert [made["id"] for made in section.rows] == ["two"]
