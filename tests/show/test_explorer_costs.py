"""The explorer's formulas in JavaScript, in a real browser: every cost of 10,000 random shapes is
Shape's to the last unit, faults are Python's sentences, and backends are those of `explain`."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page
from support.explorer_browser import Quiet, chromium
from support.random_shapes import FAMILIES

from headwise.errors import UsageError
from headwise.experiments.measured import DEFAULTS, plain
from headwise.explorer import explore
from headwise.model import backends
from headwise.planning.backends import TORCH
from headwise.planning.costs import COSTS, At
from headwise.shape import Layer, Shape
from headwise.shape.costs import DTYPE_BITS

COUNT = 10_000
OURS = {  # the page's names of costs
    **{name: name for name in COSTS if name != "activation_bytes"},
    "train_flops_per_token": "train_flops",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path: Path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    explore(output=path)
    with chromium() as browser, Quiet(browser, path) as opened:
        yield opened


# ---- costs


def shapes() -> Iterator[tuple[Shape, At]]:
    """Shapes of every family, every second one as large as models will not be soon."""
    rng = random.Random("explorer")
    for i in range(COUNT):
        shape = list(FAMILIES.values())[i % len(FAMILIES)](rng)
        if i % 2:
            shape = large(shape, rng)
        if i % 3 == 0:
            shape = rarer(shape, rng)
        if shape.causal and rng.random() < 0.1:
            shape = shape.replace(windows=(rng.randint(1, 50), 0)[: shape.depth], chunked=True)
        if rng.random() < 0.1:
            shape = shape.replace(extras=(("rest", rng.randint(0, 2**40)),))
        context = rng.choice((1, 7, 64, 131_071, 1_048_576))
        dtype = rng.choice(list(DTYPE_BITS))
        yield shape, At(context=context, batch=rng.choice((1, 3, 1009)), dtype=dtype)


def large(shape: Shape, rng: random.Random) -> Shape:
    """The same with its sizes multiplied, layers that differ among them."""
    by = rng.choice((101, 1009, 10_007))
    fields = shape.spec() | {"dim": shape.dim * by, "depth": shape.depth * 11}
    fields |= {"ffn_dim": shape.ffn_dim * by, "vocab_size": shape.vocab_size * by}
    fields |= {"kv_lora_rank": shape.kv_lora_rank * by, "expert_ffn_dim": shape.expert_ffn_dim * by}
    return Shape.of(fields)


def rarer(shape: Shape, rng: random.Random) -> Shape:
    """The same with experts in some layers or all, sinks, layers that reuse keys and values, two
    caches of one projection, no head: what costs know and no family has."""
    fields = shape.spec() | {"sinks": rng.random() < 0.5}
    if shape.vocab_size and not shape.output_dim:
        fields["lm_head"] = rng.random() < 0.5
    if any(shape.layer(i).shared_kv for i in range(shape.depth)):
        fields["split_kv_cache"] = rng.random() < 0.5
    if shape.layers:
        return Shape.of(fields)
    chosen = rng.choice(("experts", "some experts", "reused"))
    if chosen == "reused" and not shape.latent:
        fields["layers"] = (Layer(), Layer(reuses_kv=True))[: shape.depth]
    elif chosen != "reused":
        fields |= {"num_experts": rng.choice((3, 61)), "num_experts_per_tok": rng.choice((1, 2))}
        fields |= {"expert_ffn_dim": rng.choice((5, 7919)), "router_bias": rng.random() < 0.5}
        fields |= rng.choice(
            ({}, {"shared_ffn_dim": 13}, {"shared_ffn_dim": 3, "shared_gate": True})
        )
        if chosen == "some experts" and shape.depth > 1:
            fields["layers"] = (Layer(num_experts=0), Layer())[: shape.depth]
    return Shape.of(fields)


def counted(shape: Shape, at: At) -> dict[str, Any]:
    """What Python counts, as text: JSON has no whole numbers of that length."""
    costs = {
        ours: None if cost.causal and not shape.causal else str(total_of(name, shape, at))
        for name, ours in OURS.items()
        for cost in [COSTS[name]]
    }
    table = {name: str(count) for name, count in shape.param_table().items()}
    return {**costs, "table": table}


def total_of(name: str, shape: Shape, at: At) -> int:
    if name == "weight_bytes":
        return shape.weight_bytes(at.dtype)
    return COSTS[name].total(shape, at)


IN_PAGE = """cases => cases.map(([fields, at]) => {
  const { table, ...costs } = costsOf({ ...PAGE.defaults, ...fields }, at);
  const text = value => (value === null ? null : String(value));
  const named = pairs => Object.fromEntries(pairs.map(([name, value]) => [name, text(value)]));
  const parts = Object.entries(table).filter(([, count]) => count > 0n);
  return { ...named(Object.entries(costs)), table: named(parts) };
})"""


def in_page(page: Page, cases: list[tuple[Shape, At]]) -> list[dict[str, Any]]:
    given = [
        [plain(shape), {"context": at.context, "batch": at.batch, "dtype": at.dtype}]
        for shape, at in cases
    ]
    return page.evaluate(IN_PAGE, given)


def test_costs_of_the_page_are_those_of_shape_to_the_last_unit(page: Page) -> None:
    cases = list(shapes())
    found = [one for i in range(0, COUNT, 2000) for one in in_page(page, cases[i : i + 2000])]
    assert len(found) == COUNT
    beyond = experts = reused = 0
    for (shape, at), ours in zip(cases, found, strict=True):
        theirs = counted(shape, at)
        assert ours == theirs, (shape, at)
        beyond += int(theirs["train_flops"]) > 2**53
        experts += shape.num_experts > 0
        reused += any(layer.reuses_kv for layer in shape.layers)
    assert beyond > COUNT / 10, "many are beyond what a double counts exactly"
    assert min(experts, reused) > COUNT / 50


def test_costs_of_the_page_would_show_one_unit(page: Page) -> None:
    shape = Shape(dim=2**20, depth=3, num_heads=2**10, vocab_size=2**20, causal=True)
    odd = shape.replace(extras=(("rest", 1),))
    one, other = in_page(page, [(shape, At()), (odd, At())])
    assert int(other["params"]) - int(one["params"]) == 1
    assert int(one["params"]) > 2**44


# ---- rules


def faulty() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Fields as the controls may leave them, and which of them follow from others."""
    rng = random.Random("faults")
    sizes = (0, 1, 2, 3, 4, 6, 8, 12, 64, 2**31)
    for _ in range(3000):
        names = ("dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads")
        fields: dict[str, Any] = {name: rng.choice(sizes[1:9]) for name in names}
        fields |= {"kv_lora_rank": rng.choice((0, 0, 5)), "qk_rope_head_dim": rng.choice((0, 2, 3))}
        fields |= {"qk_norm": rng.choice(("none", "head")), "shared_kv": rng.random() < 0.1}
        fields |= {"rope_at": rng.choice(("last", "last", "first"))}
        fields |= {"vocab_size": rng.choice((0, 5, 2**31 - 1)), "causal": True}
        fields |= {"ffn_dim": rng.choice((0, 7)), "average": rng.choice((1, 1, 2))}
        if rng.random() < 0.2:
            fields[rng.choice(names)] = rng.choice(sizes)
        follows = ("head_dim", "v_head_dim", "num_kv_heads", "ffn_dim")
        yield fields, [name for name in follows if rng.random() < 0.3]


def test_faults_of_the_page_are_the_sentences_of_shape(page: Page) -> None:
    cases = list(faulty())
    found = page.evaluate(
        """cases => cases.map(([fields, follows]) => {
          const shape = settled({ ...PAGE.defaults, ...fields }, follows);
          return faultOf(shape, follows)?.text ?? "";
        })""",
        cases,
    )
    kinds = set()
    for (fields, follows), ours in zip(cases, found, strict=True):
        theirs = ""
        try:
            Shape.of({name: value for name, value in fields.items() if name not in follows})
        except UsageError as error:
            theirs = str(error)
        assert ours == theirs, (fields, follows)
        kinds.add(theirs.partition(" must")[0].partition(", got")[0])
    assert len(kinds) >= 12, sorted(kinds)


def test_faults_of_the_page_are_mended_by_what_it_offers(page: Page) -> None:
    left = page.evaluate(
        """cases => cases.map(([fields]) => {
          let shape = { ...PAGE.defaults, ...fields }, found;
          for (let i = 0; i < 8 && (found = faultOf(shape)) && found.fix; i++) {
            shape = changed(shape, found.fix);
          }
          return found?.text ?? "";
        })""",
        [case for case in faulty() if max(v for v in case[0].values() if type(v) is int) < 2**20],
    )
    assert set(left) == {""}


# ---- backends


@pytest.mark.parametrize("machine", [0, 1, 2], ids=["cpu", "hopper", "other"])
def test_backends_of_the_page_are_those_of_explain(
    page: Page, machine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"backends {machine}")
    limit = {1: 256, 2: 128}.get(machine, 0)
    monkeypatch.setattr(backends, "_cudnn_limit", lambda *_: (limit, "there"))
    cases = []
    for _ in range(1500):
        rank = rng.choice((1, 2, 7, 8, 16, 20, 64, 65, 128, 136, 256, 264, 448))
        shape = Shape(
            dim=64,
            depth=1,
            num_heads=rng.choice((1, 8, 64)),
            head_dim=rank,
            v_head_dim=rng.choice((rank, rank, 2 * rank + 1, 8)),
            causal=rng.random() < 0.5,
            windows=(rng.choice((0, 0, 5, 4096)),),
        )
        context = rng.choice((1, 5, 8, 30, 64, 65, 128, 200, 256, 257, 2048, 65_536))
        dtype = rng.choice(("fp32", "bf16", "fp16", "int8"))
        cases.append((shape, At(context=context, batch=rng.choice((1, 64, 4096)), dtype=dtype)))
    given = [
        [plain(shape), {"context": at.context, "batch": at.batch, "dtype": at.dtype}]
        for shape, at in cases
    ]
    found = page.evaluate(
        """([cases, machine]) => cases.map(([fields, at]) => {
          const shape = { ...PAGE.defaults, ...fields };
          const { backend, pad } = backendOf(callOf(shape, at, MACHINES[machine]));
          return [backend, pad];
        })""",
        [given, machine],
    )
    device = "cuda" if machine else "cpu"
    seen = set()
    for (shape, at), (backend, pad) in zip(cases, found, strict=True):
        dtype = getattr(torch, TORCH.get(at.dtype, "bfloat16"))
        choice = backends.explain(shape, at.context, batch=at.batch, device=device, dtype=dtype)
        assert (backend, tuple(pad)) == (choice.backend, choice.pad), (shape, at)
        seen.add(backend)
    assert len(seen) >= (2 if machine == 0 else 6), seen


def test_defaults_of_the_page_are_those_of_shape() -> None:
    shape = Shape(dim=6, depth=2, num_heads=3)
    assert Shape.of(DEFAULTS | plain(shape)) == shape
