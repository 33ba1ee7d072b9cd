"""The nanochat question: arms at one budget of arithmetic, two rounds, and what is said of them."""

import dataclasses
import json
import subprocess
import sys

import pytest

from headwise import UsageError
from headwise.experiments import find
from headwise.experiments import nanochat_heads as nh
from headwise.experiments.nanochat_arms import FAMILIES, PRESETS, arms, base_of
from headwise.experiments.settings import settings_of
from headwise.show.figure import to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.stats import difference

QUICK, PAPER = PRESETS["quick"], PRESETS["paper"]
ALL = dataclasses.replace(QUICK, families=tuple(FAMILIES))


@pytest.mark.parametrize("settings", [ALL, PAPER], ids=["quick", "paper"])
def test_arms_have_the_bases_arithmetic_tokens_and_largest_score(settings):
    base, made = base_of(settings), arms(settings)
    assert base in made.values(), "at no cost"
    for (family, arm), shape in made.items():
        off = shape.flops(settings.length) / base.flops(settings.length) - 1
        assert abs(off) < 0.005, (family, arm, off)
        assert (shape.dim, shape.depth, shape.vocab_size) == (base.dim, base.depth, base.vocab_size)
        if family in ("split", "query", "kv", "latent"):
            assert shape.scale * shape.head_dim == pytest.approx(settings.max_logit), (
                "normed queries and keys: rank times scale"
            )
        if family == "logit" and shape != base:
            assert shape.scale * shape.head_dim == pytest.approx(float(arm.split(" to ")[1])), (
                "and no other"
            )
        if family in ("scale", "unnormed"):
            assert shape.scale == pytest.approx(shape.head_dim**-0.5)
        assert (shape.qk_norm == "none") == (family in ("unnormed", "mla"))
    assert {
        shape.num_heads * shape.head_dim for (family, _), shape in made.items() if family == "split"
    } == {settings.dim}
    assert {shape.v_head_dim for (family, _), shape in made.items() if family == "query"} == {
        settings.rank
    }
    for name in ("latent", "mla"):
        assert {shape.kv_lora_rank for (family, _), shape in made.items() if family == name} == {
            0,
            *settings.latents,
        }
    runs = nh.runs(settings)
    assert {(run.steps, run.batch_tokens, run.length, run.seed) for run in runs} == {
        (settings.steps, settings.batch_tokens, settings.length, 0)
    }
    assert len(runs) == len(set(made.values())) * len(settings.lrs)


def row_of(run, bits):
    spec = run.spec()
    return {
        "id": run.id,
        "status": "diverged" if bits is None else "done",
        **spec.pop("shape"),
        **spec,
        "params": run.shape.params,
        "flops": run.flops,
        "held_out": 9.0,
        "bits_per_byte": bits,
        "tokens_per_second": 100.0,
        "recall": None if bits is None else 1 / bits,
        "repeats": None if bits is None else 0.5 / bits,
    }


def bits_of(run):
    """Rank helps, the first rate is better for heads of 8, and the tuning seed is far too good."""
    rate = 0.0 if (run.lr == QUICK.lrs[0]) == (run.shape.head_dim == 8) else 0.5
    return 2.0 - run.shape.head_dim / 100 + rate + (0.01 * run.seed if run.seed else -1.0)


def rows_of(settings, bits=bits_of):
    rows, more = [], nh.runs(settings)
    while more:
        rows += [row_of(run, bits(run)) for run in more]
        more = [run for run in nh.then(settings, rows) if run.id not in {row["id"] for row in rows}]
    return rows


def test_arms_are_measured_at_their_best_rates_on_other_seeds():
    rows = rows_of(QUICK)
    first, later = [row for row in rows if row["seed"] == 0], [row for row in rows if row["seed"]]
    assert len(first) == len(nh.runs(QUICK)) + 1, "heads of 8 tried a rate below the smallest"
    assert {row["lr"] for row in first if row["head_dim"] == 8} == {QUICK.lrs[0] / 2, *QUICK.lrs}
    assert len(later) == len(nh.runs(QUICK)) // len(QUICK.lrs) * QUICK.seeds
    assert {row["seed"] for row in later} == {1, 2, 3}
    assert all((row["lr"] == QUICK.lrs[0]) == (row["head_dim"] == 8) for row in later)


@pytest.mark.parametrize(
    ("sign", "end"), [(1, QUICK.lrs[0] / 2**QUICK.further), (-1, QUICK.lrs[-1] * 2**QUICK.further)]
)
def test_rate_that_is_never_small_or_large_enough_is_given_up_and_reported(sign, end):
    rows = rows_of(QUICK, lambda run: 2.0 + sign * run.lr)
    assert {row["lr"] for row in rows if row["seed"]} == {end}
    points = nh.summary(rows)
    assert all(p.edge for p in points)
    assert nh.headline(points)[-1].startswith(
        f"the best rate is the smallest or the largest tried in {len(points) - 1} of"
    ), "the base twice"


@pytest.mark.parametrize(
    "families",
    [(family,) for family in FAMILIES] + [("logit", "scale"), ("kv", "latent"), ("latent", "mla")],
)
def test_base_is_the_base_whatever_is_varied(families):
    settings = dataclasses.replace(QUICK, families=families)
    points = nh.summary(rows_of(settings))
    assert {p.family for p in points} == set(families)
    for family in families:
        (base,) = [p for p in points if p.family == family and p.change is None]
        assert (base.heads, base.rank, base.kv, base.latent) == (4, 16, 4, None)
        assert base.logit == (
            6.0 if family in ("split", "logit", "query", "kv", "latent") else None
        )
        assert base.arm == "4 x 16"


def test_arm_that_only_the_tuning_has_seen_is_reported_and_not_drawn():
    rows = [row for row in rows_of(QUICK) if row["seed"] == 0 or row["head_dim"] != 64]
    points = nh.summary(rows)
    (wide,) = [p for p in points if p.rank == 64]
    assert wide.change.endswith(" (the tuning's seed)")
    assert wide.gap is None
    description = nh.figure(points)
    assert "1 x 64" not in {row.name for row in description.panels[0].ranges}
    assert description.panels[0].x_label == "more than 4 x 16 of its kind"


def test_arm_of_one_rate_is_not_tuned():
    rows = rows_of(dataclasses.replace(QUICK, lrs=(0.01,)))
    assert {row["lr"] for row in rows} == {0.01}
    assert not any(p.edge for p in nh.summary(rows))


def test_points_are_of_the_counted_seeds_and_against_the_base():
    rows = rows_of(ALL)
    points = nh.summary(rows)
    assert {p.family for p in points} == set(FAMILIES)
    at = {(p.family, p.arm): p for p in points}
    base = at["split", "4 x 16"]
    assert (base.n, base.change) == (3, None)
    assert base.held_out == pytest.approx(2.0 - 0.16 + 0.02), "the tuning seed is not counted"
    wide = at["split", "1 x 64"]
    gap = difference(wide.values, base.values)
    assert wide.change == f"{gap.mean:+.4f} ± {(gap.high - gap.low) / 2:.4f}"
    assert at["kv", "4 x 16"].values == at["query", "4 x 16 "[:-1]].values == base.values, (
        "the base is one arm of each"
    )
    assert {p.arm for p in points if p.family == "kv"} == {
        "4 x 16",
        "4 x 16, 2 KV",
        "4 x 16, 1 KV",
    }
    assert all(abs(p.off) < 0.005 for p in points)
    lines = nh.headline(points)
    assert any(line.startswith("split: 1 x 64 1.3800") for line in lines)
    free, narrow = at["unnormed", "4 x 16"], at["unnormed", "8 x 8"]
    assert free.change is None, (
        "the base's heads, not normed: what the others of their kind are compared with"
    )
    gap = difference(narrow.values, free.values)
    assert narrow.change == f"{gap.mean:+.4f} ± {(gap.high - gap.low) / 2:.4f}"
    assert narrow.recall == pytest.approx(sum(1 / x for x in narrow.values) / 3)
    assert narrow.repeats == pytest.approx(narrow.recall / 2)
    gap = difference([0.5 / x for x in narrow.values], [0.5 / x for x in free.values])
    assert narrow.repeats_change == f"{gap.mean:+.4f} ± {(gap.high - gap.low) / 2:.4f}"
    sharp = at["logit", "4 x 16, to 12"]
    assert (sharp.logit, at["logit", "4 x 16"].change) == (12.0, None)
    gap = difference(at["logit", "8 x 8, to 12"].values, base.values)
    assert (
        at["logit", "8 x 8, to 12"].change == f"{gap.mean:+.4f} ± {(gap.high - gap.low) / 2:.4f}"
    ), "against the base as it is"
    assert any(line.startswith("cuts: best 1 x 64, bits per byte 1.3800 ± ") for line in lines)
    assert not any(line.startswith("the best rate") for line in lines), (
        "they reached where it is not"
    )
    few = nh.summary(rows_of(dataclasses.replace(QUICK, families=("split",))))
    assert {p.family for p in few} == {"split"}, "nothing else was varied"
    assert nh.summary([]) == []


def test_arm_that_diverges_is_reported_and_drawn_as_missing(tmp_path):
    points = nh.summary(
        rows_of(ALL, lambda run: None if run.shape.head_dim == 64 else bits_of(run))
    )
    lost = [p for p in points if p.rank == 64]
    assert all((p.held_out, p.n) == (None, 0) for p in lost)
    assert lost
    assert not any(
        "64" in line.split(":")[1] for line in nh.headline(points) if line.startswith("split")
    )
    description = nh.figure(points)
    json.dumps(to_json(description), allow_nan=False)
    assert [panel.title.split(",")[0] for panel in description.panels] == [
        "held-out bits per byte",
        "recall in text",
    ]
    drawn = {(row.label, row.name): row for row in description.panels[0].ranges}
    assert not any("64" in name for _, name in drawn)
    narrow = next(p for p in points if (p.family, p.arm) == ("split", "8 x 8"))
    assert drawn["heads x rank", "8 x 8"].mean == narrow.gap[0] > 0
    save(description, tmp_path / "heads.png")
    json.dumps(plotly_figure(description), allow_nan=False)


BAD = [
    (["logits=6"], "logits must be above max_logit 6, got 6"),
    (
        ["families=heads"],
        "unknown family 'heads'; choices: kv, latent, logit, mla, query, scale, split, unnormed",
    ),
    (["ranks=24"], "ranks must be even and divide dim 64, got 24"),
    (["rank=1"], "ranks must be even and divide dim 64, got 1"),
    (["kv_heads=3"], "kv_heads must divide the base's 4 heads, got 3"),
    (["lrs="], "lrs must not be empty"),
    (["seeds=0"], "seeds must be at least 1, got 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_die_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        settings_of(find("nanochat_heads"), "quick", changes)
    assert str(caught.value) == message


def test_attention_that_alone_costs_more_than_the_base_is_refused():
    with pytest.raises(UsageError, match="attention alone costs more than the base"):
        arms(dataclasses.replace(QUICK, families=("query",), queries=(2048,)))


def test_command_makes_both_rounds_once_and_the_page(tmp_path):
    words = [
        "run",
        "nanochat_heads",
        "--store",
        str(tmp_path / "s"),
        "--json",
        "--set",
        "dim=16",
        "rank=8",
        "ranks=8,16",
        "kv_heads=1",
        "steps=2",
    ]
    words += ["batch_tokens=64", "length=16", "eval_tokens=256", "depth=1"]

    def made():
        done = subprocess.run(
            [sys.executable, "-m", "headwise", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first = made()
    assert (first["runs"], first["made"]) == (27, 27), (
        "in two steps no rate is too large: three arms, three rates, three more, three seeds"
    )
    again = made()
    assert again["made"] == 0
    assert again["points"] == first["points"]
    assert "learning curve" in (tmp_path / "s" / "report.html").read_text().lower()
