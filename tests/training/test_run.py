"""Runs and recipes as values: ids, what is refused, and that they run wherever torch does."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.small_runs import (
    SHAPES,
    make,
    together,
)

from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.shape import Layer, Shape
from headwise.tasks import BiasedNearest, Farthest, Nearest, Recall
from headwise.training.engine import train
from headwise.training.run import PRECISIONS, Recipe, Run

# ---- values


def test_id_of_a_run_is_what_it_was() -> None:
    """A literal: results on disk are found by it, so a change of hashing must be on purpose."""
    assert make(3, rank=4).id == "568a7f64f11d4dcd"


def test_id_is_stable_across_processes_and_json() -> None:
    runs = [
        make(3, rank=4),
        Run(
            SHAPES["layer norm, window"], BiasedNearest(16, 7, bias=0.5), Recipe(steps=100), 10**12
        ),
    ]
    for run in runs:
        again = Run.of(json.loads(json.dumps(run.spec())))
        assert again == run
        assert again.id == run.id
    code = (
        "import json, sys; from headwise import Run; print(*(Run.of(s).id for s in "
        "json.load(sys.stdin)))"
    )
    specs = json.dumps([run.spec() for run in runs])
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=specs,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [run.id for run in runs]


OTHER_SHAPE: dict[str, Any] = {
    "dim": None,
    "depth": 3,
    "num_heads": 8,
    "head_dim": 4,
    "v_head_dim": 5,
    "num_kv_heads": 2,
    "kv_lora_rank": 3,
    "q_lora_rank": None,
    "qk_rope_head_dim": 2,
    "rope_theta": 500.0,
    "average": 2,
    "ffn_dim": 5,
    "activation": "gelu",
    "causal": True,
    "windows": (2,),
    "norm": "layer",
    "norm_at": "post",
    "qk_norm": "free",
    "logit_scale": 0.3,
    "max_logit": None,
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "vocab_size": None,
    "tied": False,
    "input_dim": 12,
    "output_dim": 12,
    "positions": None,
    "num_positions": 9,
    "position_dim": None,
    "extras": (("pooler", 3),),
    "layers": (Layer(), Layer(ffn_dim=7)),
    "shared_kv": True,
    "o_lora_rank": 3,
    "o_groups": None,
    "attn_gate": "head",
    "sinks": None,
    "rope_at": "first",
    "rope_interleaved": True,
    "num_experts": None,
    "num_experts_per_tok": None,
    "expert_ffn_dim": None,
    "shared_ffn_dim": None,
    "shared_gate": None,
    "router_bias": None,
    "split_kv_cache": None,
    "chunked": None,
    "lm_head": None,
}
OTHER_RECIPE: dict[str, Any] = {
    "steps": 36,
    "batch": 17,
    "lr": 0.02,
    "schedule": "constant",
    "warmup": 0.1,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-7,
    "protocol": "replay",
    "epoch": 2,
    "init": "normal",
    "precision": "bf16",
    "held_out": 33,
    "evals": 4,
    "evaluated_on": "validation",
}


def test_id_changes_with_every_field() -> None:
    shape, task, recipe = (
        Shape(dim=12, depth=2, num_heads=4, head_dim=6),
        BiasedNearest(12, 5),
        Recipe(steps=18, epoch=3),
    )
    base = Run(shape, task, recipe, 0)
    assert set(OTHER_SHAPE) == {f.name for f in dataclasses.fields(Shape)}
    assert set(OTHER_RECIPE) == {f.name for f in dataclasses.fields(Recipe)}
    others = [
        Run(shape.replace(**{k: v}), task, recipe, 0)
        for k, v in OTHER_SHAPE.items()
        if v is not None
    ]
    others += [
        Run(shape, task, dataclasses.replace(recipe, **{k: v}), 0) for k, v in OTHER_RECIPE.items()
    ]
    others += [  # fields that only change with others
        Run(shape.replace(dim=13), BiasedNearest(13, 5), recipe, 0),
        Run(shape.replace(dim=13), BiasedNearest(13, 6), recipe, 0),
        Run(shape.replace(kv_lora_rank=3, q_lora_rank=2), task, recipe, 0),
        Run(shape.replace(q_lora_rank=2), task, recipe, 0),
        Run(shape.replace(o_lora_rank=3, o_groups=2), task, recipe, 0),
        Run(shape.replace(layers=(Layer(), Layer(ffn_dim=8))), task, recipe, 0),
        Run(shape.replace(qk_norm="free", max_logit=2.0), task, recipe, 0),
        Run(shape.replace(positions="additive", num_positions=6), task, recipe, 0),
        Run(
            shape.replace(dim=15, positions="concatenated", num_positions=6, position_dim=3),
            task,
            recipe,
            0,
        ),
        Run(
            shape.replace(dim=16, positions="concatenated", num_positions=6, position_dim=4),
            task,
            recipe,
            0,
        ),
        Run(shape, BiasedNearest(12, 6), recipe, 0),
        Run(shape, BiasedNearest(12, 5, law="orthogonal"), recipe, 0),
        Run(shape, BiasedNearest(12, 5, bias=0.1), recipe, 0),
        Run(shape, Nearest(12, 5), recipe, 0),
        Run(shape, Farthest(12, 5), recipe, 0),
        *(
            Run(shape.replace(vocab_size=v, output_dim=o), Recall(2, 3, 4), recipe, 0)
            for v, o in ((7, 0), (8, 0), (7, 4))
        ),
        Run(shape.replace(vocab_size=8, lm_head=False), Recall(2, 3, 4), recipe, 0),
        Run(shape.replace(vocab_size=8), Recall(2, 4, 4), recipe, 0),
        Run(shape.replace(vocab_size=8), Recall(2, 3, 5), recipe, 0),
        Run(shape.replace(vocab_size=8), Recall(3, 3, 4), recipe, 0),
        Run(shape.replace(vocab_size=8), Recall(3, 3, 4, queries=1), recipe, 0),
        Run(shape, task, recipe, 1),
        Run(shape, task, recipe, -1),
    ]
    ids = [base.id, *(run.id for run in others)]
    assert len(set(ids)) == len(ids)
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in ids)


def test_equal_runs_have_equal_ids() -> None:
    assert make(lr=1, warmup=0, beta1=0) == make(lr=1.0, warmup=0.0, beta1=0.0)
    assert make(lr=1, warmup=0, beta1=0).id == make(lr=1.0, warmup=0.0, beta1=0.0).id


BAD: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
    ({"steps": 10.0}, "steps must be a whole number of at least 1, got 10.0"),
    ({"batch": True}, "batch must be a whole number of at least 1, got True"),
    ({"evals": -1}, "evals must be a whole number of at least 1, got -1"),
    ({"lr": -0.1}, "lr must be a number from 0 to 3e+38, got -0.1"),
    ({"lr": math.nan}, "lr must be a number from 0 to 3e+38, got nan"),
    ({"lr": math.inf}, "lr must be a number from 0 to 3e+38, got inf"),
    ({"lr": "0.1"}, "lr must be a number from 0 to 3e+38, got '0.1'"),
    ({"warmup": 1.5}, "warmup must be a number from 0 to 1, got 1.5"),
    ({"beta2": 1.5}, "beta2 must be a number from 0 to 1, got 1.5"),
    (
        {"schedule": "cosin"},
        "unknown schedule 'cosin'; did you mean cosine? choices: constant, cosine, published",
    ),
    (
        {"protocol": "repeet"},
        "unknown protocol 'repeet'; did you mean replay? choices: original, replay, stream",
    ),
    (
        {"init": None},
        "unknown init None; choices: library, normal, original, orthogonal, published, spectral",
    ),
    (
        {"precision": "fp8"},
        "unknown precision 'fp8'; did you mean fp32 or fp16? choices: bf16, fp16, fp32, tf32",
    ),
    ({"steps": 10, "epoch": 4}, "steps must be a multiple of epoch, got steps 10, epoch 4"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_recipe_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe(**{"steps": 100, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_moment_that_never_moves_is_refused(beta: str) -> None:
    with pytest.raises(UsageError, match=f"{beta} must be"):
        Recipe(steps=100, **{beta: 1.0})  # type: ignore[arg-type]


def test_run_whose_parts_do_not_fit_is_refused_in_one_line() -> None:
    recipe = Recipe(steps=100)
    with pytest.raises(
        UsageError,
        match=(
            r"^a shape's dim must be its task's in_dim, got "
            r"dim 8, in_dim 12: input_dim=12 takes them$"
        ),
    ):
        Run(paper_shape(dim=8, rank=8, ffn_dim=8), Farthest(12, 5), recipe)
    with pytest.raises(
        UsageError,
        match=(
            r"^a shape's dim must be its task's in_dim beside 64 of positions, got dim 76, "
            r"in_dim 13: input_dim=13 takes them$"
        ),
    ):
        Run(
            paper_shape(dim=12, rank=4, positions="concatenated", points=5), Farthest(13, 5), recipe
        )
    with pytest.raises(
        UsageError, match=r"^num_positions must be at least the task's 6 tokens, got 5$"
    ):
        Run(paper_shape(dim=12, rank=4, positions="additive", points=5), Farthest(12, 6), recipe)
    for seed in (1.0, "1", True, None):
        with pytest.raises(UsageError, match=r"^seed must be a whole number, got "):
            Run(paper_shape(dim=12, rank=4), Farthest(12, 5), recipe, seed)  # type: ignore[arg-type]


def test_device_that_is_not_there_is_refused_in_one_line() -> None:
    for name in ("gpu", "cuda:x", "cpu0", ""):
        with pytest.raises(UsageError, match=r"^unknown device "):
            train([make()], device=name)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"^device cuda is not there: "):
            train([make()], device="cuda")


def test_training_leaves_the_callers_torch_settings_alone() -> None:
    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    together([make(), make(precision="bf16", steps=3)])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32) == (threads, tf32)
    assert (torch.tensor(1e-40) * 1.0).item() != 0, "denormals are still flushed"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_all_train(precision: str) -> None:
    (row,) = together([make(precision=precision)])
    (exact,) = together([make()])
    assert row["status"] == "done"
    assert row["held_out"] == pytest.approx(exact["held_out"], rel=0.02)


def test_train_of_no_runs_gives_no_rows() -> None:
    assert together([]) == []


# ---- it runs wherever torch does

EXTRAS = [
    "duckdb",
    "pandas",
    "pyarrow",
    "matplotlib",
    "plotly",
    "jinja2",
    "rich",
    "tyro",
    "transformers",
    "playwright",
    "hypothesis",
    "triton",
]
LEAN = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"{name} is an extra", name=name)

sys.meta_path.insert(0, Refuse())
import torch, numpy, safetensors.torch
before = set(sys.modules)
import headwise
from headwise import Farthest, Recipe, Run, Shape
recipe = Recipe(steps=2, epoch=1, batch=16, held_out=16)
run = Run(Shape(dim=4, depth=1, num_heads=2), Farthest(4, 3), recipe)
import pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    kept = dict(folder=pathlib.Path(folder), checkpoint_every=0, keep_weights=True)
    rows = headwise.train([run], device="cpu", advance=lambda n: None, **kept)
assert rows[0]["status"] == "done"
found = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(found - set(sys.stdlib_module_names)))
"""


def test_training_needs_the_standard_library_torch_numpy_and_safetensors_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN % (EXTRAS,)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"headwise", "torch", "numpy", "safetensors"}
