"""Runs that start from another run's weights, and heads before and after fine-tuning: what is
taken, what is drawn, what is said."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data import refused
from support.experiment_rows import rows_with_losses
from support.tolerance import same

from headwise.errors import UsageError
from headwise.execute.sweep import sweep
from headwise.experiments import find
from headwise.experiments.leaner_paper import finetune
from headwise.experiments.settings import settings_of
from headwise.experiments.shapes import shape_for
from headwise.rows import MEASURED
from headwise.show.figure import to_json
from headwise.show.matplotlib_figure import save
from headwise.show.plotly_figure import plotly_figure
from headwise.store import Store
from headwise.tasks import Farthest, Masked, Sentences
from headwise.training import checkpoint
from headwise.training.checkpoint import begin
from headwise.training.engine import train
from headwise.training.run import ADDED_TO_RECIPES, Recipe, Run

pytestmark = pytest.mark.usefixtures("no_network")

MASKED, SENTENCES = Masked(16, level="byte"), Sentences(16)
RECIPE = {"steps": 4, "epoch": 2, "batch": 16, "held_out": 128, "evals": 1, "init": "normal"}


def run_of(task=SENTENCES, seed=3, dim=16, depth=2, ffn_dim=32, **recipe):
    return Run(
        shape_for(task, dim, depth, 2, dim // 2, ffn_dim), task, Recipe(**RECIPE | recipe), seed
    )


def together(runs, folder, **options):
    return train(runs, device="cpu", advance=lambda n: None, folder=folder, **options)


def after(run, **recipe):
    return run_of(init=f"run:{run.id}", **recipe)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A pre-trained run, and the folder that has its weights."""
    folder, run = tmp_path_factory.mktemp("runs"), run_of(MASKED, seed=1)
    together([run], folder, keep_weights=True)
    return folder, run


def named(run, state):
    """Parameters by name, one after the other as the flat row has them."""
    from headwise.model.transformer import build

    out, at = {}, 0
    for name, p in build(run.shape).named_parameters():
        out[name] = state.weights[at : at + p.numel()].view(p.shape)
        at += -(-p.numel() // 16) * 16
    return out


# ---- what is taken


def test_parameters_of_the_same_name_and_size_are_taken_and_the_rest_drawn(kept):
    folder, parent = kept
    child = after(parent)
    old, new = (
        load_file(folder / parent.id / "weights.safetensors"),
        named(child, checkpoint.load(folder, child)),
    )
    drawn = named(child, begin(run_of()))
    own = {name for name in new if name not in old or old[name].shape != new[name].shape}
    assert own == {"read_out.weight", "read_out.bias"}
    assert any(name.startswith("blocks.1.") for name in new)
    for name, value in new.items():
        same(value, drawn[name] if name in own else old[name])
    assert not torch.equal(new["embedding"], drawn["embedding"])


def test_blocks_are_taken_as_far_as_they_go(kept):
    folder, parent = kept
    deeper = after(parent, depth=3)
    old, new = (
        load_file(folder / parent.id / "weights.safetensors"),
        named(deeper, checkpoint.load(folder, deeper)),
    )
    drawn = named(deeper, begin(run_of(depth=3)))
    for name, value in new.items():
        same(value, drawn[name] if name.startswith(("blocks.2.", "read_out")) else old[name])


def test_run_starts_where_the_other_ended(kept):
    """With the same task, the loss of its first step is that of the kept weights, not that of a
    start."""
    folder, parent = kept
    long = dataclasses.replace(parent, recipe=dataclasses.replace(parent.recipe, steps=40, lr=0.01))
    (row,) = together([long], folder, keep_weights=True)
    still = Run(
        parent.shape,
        parent.task,
        dataclasses.replace(parent.recipe, lr=0.0, init=f"run:{long.id}"),
        1,
    )
    (again,) = together([still], folder)
    assert again["held_out"] == row["held_out"], "at rate 0 nothing moves"
    assert again["init"] == f"run:{long.id}"
    assert (
        abs(
            row["held_out"]
            - together([dataclasses.replace(still, recipe=parent.recipe)], folder)[0]["held_out"]
        )
        > 0.1
    )


def test_runs_from_several_starts_form_an_ensemble_bit_by_bit_and_resume_after_a_kill(
    kept, tmp_path
):
    folder, parent = kept
    runs = [after(parent), after(parent, lr=0.003), run_of(), run_of(init="library")]
    rows = together(runs, folder)
    assert {row["models"] for row in rows} == {4}

    def bits(row):
        return json.dumps({k: v for k, v in row.items() if k not in MEASURED})

    assert len({row["held_out"] for row in rows}) == 4
    for run, row in zip(runs, rows, strict=True):
        assert bits(together([run], folder)[0]) == bits(row)

    class Killed(BaseException):
        pass

    def kill(n, left=[3]):  # noqa: B006
        left[0] -= 1
        if not left[0]:
            raise Killed

    longer = after(parent, steps=8)
    whole = together([longer], folder)[0]
    with pytest.raises(Killed):
        train([longer], device="cpu", advance=kill, folder=folder, checkpoint_every=0)
    assert (folder / longer.id / "checkpoint.safetensors").exists()
    weights = folder / parent.id / "weights.safetensors"
    weights.rename(tmp_path / "elsewhere")
    try:
        (resumed,) = together([longer], folder)
    finally:
        (tmp_path / "elsewhere").rename(weights)
    assert resumed["resumed"] == 1, "a checkpoint needs no start"
    assert bits(resumed) == bits(whole)


def test_ids_of_other_runs_are_what_they_were():
    run = Run(shape_for(Farthest(8, 4), 8, 1, 2, 4, 16), Farthest(8, 4), Recipe(steps=100), 0)
    assert run.id == "f6d823b393db656f"
    fields = {f.name for f in dataclasses.fields(Recipe)}
    assert set(run.spec()["recipe"]) == fields - set(ADDED_TO_RECIPES)
    assert Run.of(json.loads(json.dumps(after(run).spec()))) == after(run)
    assert (after(run).recipe.parent, run.recipe.parent) == (run.id, "")


# ---- what is refused


@pytest.mark.parametrize(
    "bad",
    ["run:", "run:12", "run:" + "g" * 16, "run:" + "A" * 16, "run:" + "0" * 17, "run:../../../etc"],
)
def test_id_that_is_none_is_refused(bad):
    assert (
        refused(run_of, init=bad)
        == f"init run: must be followed by a run's id, 16 digits and letters a to f, got {bad!r}"
    )


def test_inits_of_other_names_are_refused_as_before():
    assert refused(run_of, init="norml").startswith("unknown init 'norml'; did you mean normal?")
    assert refused(run_of, init=None).startswith("unknown init None; ")


def test_run_without_weights_is_one_line_that_says_what_to_do(tmp_path):
    gone = "0123456789abcdef"
    path = tmp_path / gone / "weights.safetensors"
    message = (
        f"init run:{gone} needs {path}, which is not there: train that run with --keep-weights "
        "first"
    )
    assert refused(together, [run_of(init=f"run:{gone}")], tmp_path) == message
    path.parent.mkdir()
    assert (
        refused(together, [run_of(init=f"run:{gone}")], tmp_path)
        == f"{message}; its row is there already, so remove that folder before"
    )
    assert refused(together, [run_of(init=f"run:{gone}")], None) == (
        f"init run:{gone} takes that run's weights from a store, so it needs one; got no folder"
    )
    path.write_bytes(b"no weights")
    message = refused(together, [run_of(init=f"run:{gone}")], tmp_path)
    assert message.startswith(f"init run:{gone} needs {path}, which cannot be read (")
    assert message.endswith("remove its folder and train that run again")
    path.write_bytes(b"")
    assert refused(together, [run_of(init=f"run:{gone}")], tmp_path).startswith(
        f"init run:{gone} needs {path}, which cannot be read ("
    )


def test_weights_of_another_shape_are_refused(kept, tmp_path):
    folder, parent = kept
    message = (
        f"none of the blocks of run {parent.id} fits a model of width 32, 2 heads of rank 16, "
        "feed-forward 64; "
    )
    assert (
        refused(together, [after(parent, dim=32, ffn_dim=64)], folder)
        == message + f"init run:{parent.id} needs a run of the same sizes"
    )
    (tmp_path / parent.id).mkdir()
    save_file({"embedding": torch.zeros(272, 16)}, tmp_path / parent.id / "weights.safetensors")
    assert refused(together, [after(parent)], tmp_path).startswith("none of the blocks of run ")


def test_sweep_in_processes_says_the_same(tmp_path):
    gone = "0" * 16
    runs = [run_of(init=f"run:{gone}", seed=seed) for seed in range(4)]
    with pytest.raises(UsageError) as caught:
        sweep(runs, Store(tmp_path / "s"), device="cpu", workers=2)
    assert str(caught.value).startswith(f"init run:{gone} needs {tmp_path / 's' / 'runs' / gone}")
    assert "\n" not in str(caught.value)


# ---- the experiment


QUICK = finetune.PRESETS["quick"]


@pytest.mark.parametrize("settings", finetune.PRESETS.values(), ids=list(finetune.PRESETS))
def test_cuts_have_the_same_parameters_and_only_the_read_out_differs_after(settings):
    before = finetune.shapes(settings, Masked(settings.length, level="byte"))
    later = finetune.shapes(settings, Sentences(settings.length))
    assert [shape.num_heads for shape in before] == list(settings.heads)
    for shapes in (before, later):
        assert len({shape.params for shape in shapes}) == 1
        assert {shape.num_heads * shape.head_dim for shape in shapes} == {settings.dim}
    for a, b in zip(before, later, strict=True):
        assert a.replace(output_dim=2) == b


def test_second_round_starts_from_each_seed_and_has_its_control():
    first = finetune.runs(QUICK)
    runs = finetune.then(QUICK, rows_with_losses(first, lambda run: 1.0))
    by_id = {run.id: run for run in first}
    tuned = [run for run in runs if run.recipe.parent]
    scratch = [run for run in runs if not run.recipe.parent]
    assert len(first) == len(tuned) == len(scratch) == len(QUICK.heads) * QUICK.seeds
    for run in tuned:
        parent = by_id[run.recipe.parent]
        assert (parent.shape.num_heads, parent.seed) == (run.shape.num_heads, run.seed)
        assert run.recipe.lr == QUICK.tune_lr
    assert {run.recipe.init for run in scratch} == {"normal"}
    assert {run.recipe.steps for run in runs} == {QUICK.tune_steps}
    lost = first[0].id
    fewer = finetune.then(
        QUICK, rows_with_losses(first, lambda run: None if run.id == lost else 1.0)
    )
    assert {run.id for run in runs} - {run.id for run in fewer} == {
        run.id for run in tuned if run.recipe.parent == lost
    }


def points_of(before, later):
    first = finetune.runs(QUICK)
    rows = rows_with_losses(first, before)
    return finetune.summary(rows + rows_with_losses(finetune.then(QUICK, rows), later))


def loss_before(run):
    return {1: 0.9, 2: 0.5, 4: 0.6, 8: 2.0}[run.shape.num_heads] + 0.01 * run.seed


def loss_later(run):
    """Half of the pre-training's, 4 heads best; from scratch all alike."""
    return (
        {1: 0.5, 2: 0.3, 4: 0.2, 8: 0.6}[run.shape.num_heads] + 0.01 * run.seed
        if run.recipe.parent
        else 0.6 + 0.01 * run.seed
    )


def test_points_carry_both_losses_and_the_headline_says_what_stays_best():
    points = points_of(loss_before, loss_later)
    assert [(p.start, p.heads) for p in points] == [
        (start, h) for start in (finetune.PRETRAINED, finetune.SCRATCH) for h in QUICK.heads
    ]
    two = points[1]
    assert two.pre == pytest.approx(0.51)
    assert two.held_out == pytest.approx(0.31)
    assert two.gain.startswith("-0.3000 ± ")
    assert two.change.startswith("-0.2000 ± ")
    assert points[3].gain.startswith("none found (+0.0000 ± ")
    assert points[0].change is None
    scratch = points[5]
    assert (scratch.pre, scratch.gain) == (None, None)
    assert scratch.change.startswith("none found (+0.0000 ± ")
    lines = finetune.headline(points)
    best = "loss {} ± 0.0248 (3 seeds); told apart from all 3 others".format
    assert lines[:4] == [
        "pre-training: best 2 x 16, " + best("0.5100"),
        "after fine-tuning: best 4 x 8, " + best("0.2100"),
        "the best in pre-training, 2 x 16, is not the best after fine-tuning, 4 x 8",
        "from scratch: no best: none of the 4 cuts can be told apart at n=3; smallest: 1 x 32, "
        "loss 0.6100 ± 0.0248 (3 seeds)",
    ]
    assert lines[4].startswith("loss against scratch: 1 x 32 -0.1000 ± ")
    assert lines[5].startswith(
        "rank correlation of a model's loss in pre-training with its loss after fine-tuning: +0."
    )
    assert lines[5].endswith("12 models")
    agreed = finetune.headline(points_of(loss_before, loss_before))
    assert agreed[2] == "the best in pre-training, 2 x 16, is the best after fine-tuning"
    near = finetune.headline(points_of(lambda run: loss_before(run) + 0.2 * run.seed, loss_before))
    assert near[2] == (
        "the best in pre-training, 2 x 16, is the best after fine-tuning; not told apart from all "
        "others before"
    )


def test_rows_without_their_pre_training_still_make_points(tmp_path):
    rows = rows_with_losses(
        finetune.then(QUICK, rows_with_losses(finetune.runs(QUICK), loss_before)), loss_later
    )
    points = finetune.summary(rows)
    assert all(p.pre is None for p in points)
    assert finetune.headline(points)[0].startswith("after fine-tuning: ")
    save(finetune.figure(points), tmp_path / "a.png")


def test_figure_has_both_trainings(tmp_path):
    points = points_of(loss_before, loss_later)
    description = finetune.figure(points)
    json.dumps(to_json(description), allow_nan=False)
    first, second = description.panels
    assert list(first.lines[0].y) == [p.pre for p in points[:4]]
    assert [line.label for line in second.lines] == [finetune.PRETRAINED, finetune.SCRATCH]
    save(description, tmp_path / "finetune.png")
    json.dumps(plotly_figure(description), allow_nan=False)


BAD = [
    (["heads=3"], "heads must cut dim into even ranks, got heads 3, dim 32"),
    (["heads=32"], "heads must cut dim into even ranks, got heads 32, dim 32"),
    (["heads=1,1"], "heads must differ from each other, got 1, 1"),
    (["tune_lr=x"], "tune_lr must be a number, got 'x'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_die_in_one_line(changes, message):
    with pytest.raises(UsageError) as caught:
        settings_of(find("finetune"), "quick", changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "/nowhere"}, "there is no folder of sentences at /nowhere; "),
        ({"text": "/nowhere"}, "there is no text at /nowhere; "),
        ({"tune_steps": 150}, "steps must be a multiple of epoch, got steps 150, epoch 100"),
        ({"scratch_lr": -1.0}, "lr must be a number from 0 to 3e+38, got -1.0"),
    ],
)
def test_second_round_says_what_it_lacks_before_the_first(changes, message):
    assert refused(finetune.runs, dataclasses.replace(QUICK, **changes)).startswith(message)


def headwise(*words):
    return subprocess.run(
        [sys.executable, "-m", "headwise", *words], capture_output=True, text=True, check=False
    )


def test_command_keeps_the_first_rounds_weights_and_starts_from_them(tmp_path):
    store = tmp_path / "s"
    words = [
        "run",
        "finetune",
        "--store",
        str(store),
        "--workers",
        "1",
        "--seeds",
        "2",
        "--json",
        "--set",
        "heads=1,2",
        "dim=16",
        "depth=1",
    ]
    words += [
        "ffn_dim=16",
        "length=16",
        "steps=4",
        "tune_steps=4",
        "epoch=2",
        "batch=16",
        "held_out=128",
        "examples=100",
    ]
    first = headwise(*words)
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout.splitlines()[-1])
    assert (answer["runs"], answer["made"]) == (12, 12)
    assert [p["n"] for p in answer["points"]] == [2] * 4
    rows = Store(store).rows()
    with_weights = {path.parent.name for path in store.glob("runs/*/weights.safetensors")}
    assert with_weights == {row["id"] for row in rows if row["task"] == "masked"}
    assert {row["init"] for row in rows if row["task"] == "sentences"} == {"normal"} | {
        f"run:{one}" for one in with_weights
    }
    again = json.loads(headwise(*words).stdout.splitlines()[-1])
    assert again["made"] == 0
    assert again["points"] == answer["points"]
    lost = sorted(with_weights)[0]
    (store / "runs" / lost / "weights.safetensors").unlink()
    bad = headwise(*words, "tune_lr=0.5")
    assert (
        bad.returncode,
        bad.stderr.splitlines()[-1].startswith(f"headwise: error: init run:{lost} needs "),
    ) == (2, True), bad.stderr
    assert "Traceback" not in bad.stderr
    assert all(math.isfinite(row["held_out"]) for row in rows)
