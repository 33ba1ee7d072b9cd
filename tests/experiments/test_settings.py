"""What a user sets has the effect that its name says, or is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
from support.commands import TINY, refused, run_words, sets

from headwise.cli import main
from headwise.errors import UsageError
from headwise.experiments import find, settings
from headwise.experiments.base import Settings
from headwise.experiments.leaner_paper import budget_map
from headwise.rows import Row
from headwise.shape import Shape

SHORT = ["steps=4", "epoch=2", "batch=4", "held_out=8", "evals=1"]


@pytest.mark.parametrize("name", ["map", "leaner", "removable", "finetune"])
@pytest.mark.parametrize("value", ["replay", "stream,replay", "rubbish"])
def test_experiments_on_fresh_data_take_no_other_protocol(name, value, capsys):
    words = refused(["run", name, "--set", f"protocols={value}"], capsys)
    assert words == (
        f"protocols must be stream here: every step has fresh data, got {value.replace(',', ', ')}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "fig1", "--set", "schedule=constant"],
            "schedule constant has no warm-up: warmup must be 0, got 0.3",
        ),
        (
            ["run", "learned", "--set", "ranks=4"],
            "heads of full rank at one depth: ranks must be dim, 16, got ranks 4 and depths 1",
        ),
        (
            ["run", "learned", "--set", "depths=1,2"],
            "heads of full rank at one depth: ranks must be dim, 16, got ranks 16 and depths 1, 2",
        ),
        (
            ["run", "map", "--set", "base=1,1,1,1"],
            (
                "no shape of heads, ranks and depths meets the base's budget with a feed-forward "
                "of "
                "8; base 1,1,1,1"
            ),
        ),
        (
            ["run", "features", "--keep-weights"],
            "--keep-weights goes with experiments that train; features computes its rows",
        ),
        (
            ["run", "features", "--workers", "7"],
            (
                "--workers goes with runs that are trained in ensembles; features makes its rows "
                "one "
                "after another"
            ),
        ),
        (
            ["run", "nanochat_heads", "--workers", "7"],
            (
                "--workers goes with runs that are trained in ensembles; nanochat_heads makes its "
                "rows "
                "one after another"
            ),
        ),
        (
            ["run", "map", "--set", "ffn_dim=77"],
            "ffn_dim has no effect here: it follows from base and budget",
        ),
        (
            ["run", "map", "--set", "pairs=5"],
            "pairs has no effect here: it goes with recall, tasks is farthest",
        ),
        (
            ["run", "removable", "--set", "init=orthogonal"],
            "init has no effect here: starts says how weights begin",
        ),
        (
            ["run", "nanochat_heads", "--set", "latents=16"],
            "latents has no effect here: it goes with latent and mla, families is split, kv",
        ),
        (
            ["run", "nanochat_heads", "--set", "rank=0"],
            "ranks must be even and divide dim 64, got 0",
        ),
        (
            ["run", "regression", "--set", "shapes=16x1x1,016x1x1"],
            "shapes must differ from each other, got 16x1x1, 016x1x1",
        ),
        (
            ["run", "positions", "--set", "arms=published", "encodings=additive"],
            (
                "published arms are told apart by what they stand beside: encodings must hold "
                "none, got "
                "additive"
            ),
        ),
        (
            ["run", "positions", "--set", "width=6"],
            "equal arms with concatenated positions or room need a width in fours, got 6",
        ),
        (
            ["run", "fig1", "--set", "steps=10000000000"],
            "steps must be at most 2,147,483,647 (32 bits), got 10000000000",
        ),
        (
            ["pretrain", "--schedule", "cosine", "--warmdown", "0.9"],
            "a cosine has no warm-down; warmdown is for schedule trapezoid, got 0.9",
        ),
    ],
)
def test_setting_that_would_be_ignored_is_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(words, capsys) == message
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            [
                "cost",
                "--set",
                "dim=64",
                "depth=1",
                "num_heads=6",
                "head_dim=128",
                "--set",
                "v_head_dim=32",
            ],
            (6, 128, 32),
        ),
        (["cost", "--set", "dim=64", "--set", "depth=1", "--set", "num_heads=2"], (2, 32, 32)),
    ],
)
def test_second_set_adds_to_the_first(words, wanted, capsys):
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        answer["params"]
        == Shape(
            dim=64, depth=1, num_heads=wanted[0], head_dim=wanted[1], v_head_dim=wanted[2]
        ).params
    )


def test_second_policy_and_second_group_of_checks_add_to_the_first(capsys):
    base = ["policies", "--set", "dim=64", "depth=2", "num_heads=4", "--to", "2"]
    assert main([*base, "--policy", "split", "--policy", "widen"]) == 0
    out = capsys.readouterr().out
    assert "split" in out
    assert "widen" in out
    assert main(["theory", "--only", "degrees", "--only", "growth", "--no-report"]) == 0
    out = capsys.readouterr().out
    assert "Theorem 2, degrees" in out
    assert "Theorem 2, growth" in out


def rows_of(store: Path) -> Path:
    """All rows of a store in one file."""
    file = store.with_suffix(".jsonl")
    file.write_text("".join(path.read_text() for path in sorted(store.rglob("rows.jsonl"))))
    return file


@pytest.mark.parametrize(("key", "value"), [("warmup", "0.9"), ("init", "normal"), ("epoch", "4")])
def test_models_that_differ_are_no_seeds_of_one_point(key, value, tmp_path, capsys):
    files = []
    for i, change in enumerate(([], [f"{key}={value}"])):
        assert main(run_words(tmp_path / f"s{i}", "--no-report", changes=[*TINY, *change])) == 0
        files.append(str(rows_of(tmp_path / f"s{i}")))
    words = refused(["draw", "fig1", *files, "--output", str(tmp_path / "x.png")], capsys)
    assert words.startswith(
        f"runs of one point may differ in their seeds only, these differ in {key}: "
    )


def test_models_that_differ_are_no_seeds_of_one_cell_though_rates_may_differ():
    rows: list[Row] = [
        {
            "id": str(i),
            "status": "done",
            "task": "farthest",
            "task_points": 4,
            "dim": 8,
            "depth": 1,
            "num_heads": 1,
            "head_dim": 8,
            "ffn_dim": 16,
            "params": 9,
            "flops": 9,
            "seed": seed,
            "lr": lr,
            "held_out": 0.5 + i / 100,
        }
        for i, (seed, lr) in enumerate([(0, 0.1), (0, 0.2), (1, 0.1), (2, 0.1)])
    ]
    (cell,) = budget_map.summary(rows)
    assert (cell.n, cell.lr) == (2, 0.1)
    with pytest.raises(UsageError, match=r"these differ in ffn_dim: 16, 17$"):
        budget_map.summary([*rows[:3], {**rows[3], "ffn_dim": 17}])
    with pytest.raises(UsageError, match=r"these differ in task_points: 4, 5$"):
        budget_map.summary([*rows[:3], {**rows[3], "task_points": 5}])


@pytest.mark.parametrize("arms", ["published", "equal"])
@pytest.mark.parametrize("encodings", ["additive,concatenated", "none,additive,concatenated"])
def test_arms_with_positions_are_named_as_they_were_set(arms, encodings, tmp_path, capsys):
    changes = [
        f"arms={arms}",
        f"encodings={encodings}",
        "ranks=4",
        "depths=1",
        "protocols=stream",
        "dim=8",
        "width=4",
        *SHORT,
    ]
    words = [
        "run",
        "positions",
        "--seeds",
        "1",
        "--device",
        "cpu",
        "--workers",
        "1",
        "--store",
        str(tmp_path / "s"),
        "--no-report",
    ]
    assert main([*words, *sets(changes)]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    named = {
        line[0]
        for line in table
        if "stream" in line and ("additive" in line or "concatenated" in line)
    }
    assert named == {arms}


def test_settings_of_an_own_experiment_may_be_yes_or_no_or_nothing_yet():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(Settings):
        deep: bool = True
        words: tuple[str, ...] = ()
        source: str | None = None

    own = dataclasses.replace(find("fig1"), name="own", presets={"quick": Own()})
    changed = settings.settings_of(own, "quick", ["deep=false", "words=a,b", "source=c"])
    assert changed == Own(deep=False, words=("a", "b"), source="c")
    assert settings.settings_of(own, "quick", ["deep=True"]).deep is True
    with pytest.raises(UsageError, match=r"^deep must be true or false, got '0'$"):
        settings.settings_of(own, "quick", ["deep=0"])


def test_decoders_of_an_experiment_are_kept_when_asked_for(tmp_path):
    changes = [
        "lrs=0.01",
        "steps=2",
        "length=16",
        "batch_tokens=64",
        "eval_tokens=64",
        "depth=1",
        "families=kv",
        "kv_heads=1",
    ]
    words = [
        "run",
        "nanochat_heads",
        "--seeds",
        "1",
        "--device",
        "cpu",
        "--store",
        str(tmp_path / "s"),
        "--no-report",
        "--keep-weights",
    ]
    assert main([*words, *sets(changes)]) == 0
    runs = [path for path in (tmp_path / "s" / "runs").iterdir() if path.is_dir()]
    assert runs
    assert all((path / "weights.safetensors").stat().st_size > 10_000 for path in runs)


def test_seeds_of_the_original_data_are_said_to_be_alike(tmp_path, capsys):
    changes = [*TINY, "protocols=original", "init=original"]
    assert main(run_words(tmp_path / "s", "--no-report", "--seeds", "2", changes=changes)) == 0
    assert (
        "original data: seeds next to each other share six of seven batches"
        in capsys.readouterr().out
    )
    file = rows_of(tmp_path / "s")
    assert (
        main(["draw", "fig1", str(file), "--view", "depth", "--output", str(tmp_path / "x.png")])
        == 0
    )
    assert (tmp_path / "x.png").stat().st_size > 10_000
