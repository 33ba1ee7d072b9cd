"""The rank paper's own start and its own data, against PyTorch's modules and loader."""

import itertools

import pytest
import torch
from support.tolerance import same
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from headwise.errors import UsageError
from headwise.experiments.rank_paper.shapes import paper_shape
from headwise.model.init import initialise
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.tasks import Farthest, Nearest
from headwise.training.checkpoint import begin
from headwise.training.data import draw_block
from headwise.training.engine import train
from headwise.training.run import Recipe, Run

CPU = torch.device("cpu")
SEED = 613


def started(shape: Shape) -> nn.Module:
    model = build(shape)
    initialise(model, "original", torch.Generator().manual_seed(5))
    return model


class Published(nn.TransformerEncoderLayer):
    """A layer of the library with more attention modules beside its own, as the paper describes its
    code."""

    def __init__(self, dim: int, heads: int, width: int, ffn_dim: int) -> None:
        super().__init__(dim, heads, ffn_dim, dropout=0.0, batch_first=True)
        self.widened = nn.ModuleList(
            nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(width)
        )


def published(
    dim: int,
    heads: int,
    width: int,
    ffn_dim: int,
    extra: int = 0,
    points: int = 0,
    additive: bool = False,
):
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layer = Published(dim + extra, heads, width, ffn_dim)
        table = nn.init.uniform_(torch.empty(extra, points), -1, 1) if extra else None
        if additive:
            table = nn.init.normal_(torch.empty(dim, points), -1, 1)
    return layer, table


@pytest.mark.parametrize(
    ("dim", "heads", "width", "ffn_dim", "depth"),
    [(64, 1, 1, 2048, 1), (64, 8, 8, 64, 3), (14, 7, 3, 11, 2)],
)
def test_weights_are_those_that_the_library_draws(dim, heads, width, ffn_dim, depth):
    layer, _ = published(dim, heads, width, ffn_dim)
    model = started(paper_shape(dim, depth, dim // heads, width, ffn_dim))
    for block in model.blocks:
        qkv, out = (
            block.attention.qkv.weight.view(3, width, dim, dim),
            block.attention.out.weight.view(dim, width, dim),
        )
        for m, module in enumerate(layer.widened):
            same(qkv[:, m].reshape(3 * dim, dim), module.in_proj_weight, f"module {m}")
            same(out[:, m], module.out_proj.weight, f"out {m}")
        for ours, theirs in ((block.feed.up, layer.linear1), (block.feed.down, layer.linear2)):
            same(ours.weight, theirs.weight, "feed-forward")
            same(ours.bias, theirs.bias, "its bias")
        for bias in (block.attention.qkv.bias, block.attention.out_bias):
            assert not bias.any()


@pytest.mark.parametrize("positions", ["additive", "concatenated"])
def test_positions_are_drawn_after_the_weights(positions):
    layer, table = published(
        6, 2, 2, 5, 4 if positions == "concatenated" else 0, 7, positions == "additive"
    )
    model = started(
        paper_shape(6, 2, 5 if positions == "concatenated" else 3, 2, 5, positions, 7, 4)
    )
    same(model.positions, table.mT, "positions")
    same(model.blocks[1].feed.down.bias, layer.linear2.bias, "feed-forward")


def test_seeds_and_ranks_all_start_alike():
    recipe = Recipe(steps=2, epoch=1, init="original")
    states = [
        begin(Run(paper_shape(8, 2, rank, 2, 16, points=4), Farthest(8, 4), recipe, seed))
        for rank in (8, 2)
        for seed in (0, 3)
    ]
    for state in states[1:]:
        assert torch.equal(state.weights, states[0].weights)


def test_shapes_that_the_paper_does_not_have_are_refused():
    for shape in (
        Shape(dim=16, depth=1, num_heads=2),
        paper_shape(16, 1, 8, ffn_dim=8).replace(activation="gelu"),
        paper_shape(16, 1, 8, ffn_dim=0),
        paper_shape(16, 1, 8, ffn_dim=8).replace(head_dim=5, v_head_dim=5),
    ):
        with pytest.raises(
            UsageError, match=r"^init original needs one of the rank paper's encoders"
        ):
            started(shape)


class Points(IterableDataset):
    """Sequences by a generator of the worker's own, begun anew with every epoch."""

    def __init__(self, dim: int, points: int, seed: int) -> None:
        self.dim, self.points, self.seed = dim, points, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + get_worker_info().id)
        while True:
            x = torch.randn(self.dim, self.points, generator=generator)
            x = x / x.norm(dim=0)
            yield x, x[:, (x.T @ x).argmin(dim=0)]


@pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create 7 worker:UserWarning"
)
@pytest.mark.parametrize(
    ("dim", "points", "batch", "epoch", "seed"),
    [(16, 4, 3, 10, 0), (5, 3, 2, 20, 2), (4, 4, 1, 5, 1)],
)
def test_data_are_those_that_seven_workers_draw(dim, points, batch, epoch, seed):
    loader = DataLoader(
        Points(dim, points, seed), batch_size=batch, num_workers=7, multiprocessing_context="fork"
    )
    run = Run(
        paper_shape(dim, 1, dim, 1, 8, points=points), Farthest(dim, points),
        Recipe(steps=2 * epoch, epoch=epoch, batch=batch, protocol="original"), seed,
    )  # fmt: skip
    blocks = [draw_block(run, b, CPU) for b in range(2 * epoch)]
    x, target = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    for i, (wanted, answer) in enumerate(itertools.islice(loader, epoch)):
        for step in (i, epoch + i):  # the next epoch is the same
            torch.testing.assert_close(x[step], wanted.mT, rtol=0, atol=1e-6)
            torch.testing.assert_close(target[step], answer.mT, rtol=0, atol=1e-6)


def test_run_trains_on_original_data_and_is_evaluated_on_others():
    recipe = Recipe(
        steps=40,
        epoch=20,
        batch=8,
        held_out=128,
        evals=1,
        protocol="original",
        init="original",
        lr=0.003,
    )
    rows = train(
        [
            Run(paper_shape(8, 1, 8, 1, 16, points=4), Farthest(8, 4), recipe, seed)
            for seed in (0, 1)
        ],
        device="cpu",
    )
    assert rows[0]["curve"][1] < rows[0]["curve"][0]
    assert rows[0]["curve"] != rows[1]["curve"]
    assert rows[0]["held_out"] > 0


@pytest.mark.parametrize("task", [Nearest(8, 4), Farthest(8, 4, "doubled")])
def test_original_data_exist_for_no_other_task(task):
    with pytest.raises(UsageError, match=r"^protocol original is the rank paper's own data"):
        Run(paper_shape(8, 1, 8, 1, 16), task, Recipe(steps=1, epoch=1, protocol="original"))
