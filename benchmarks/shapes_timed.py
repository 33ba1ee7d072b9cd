"""How benchmarks/shapes.py measures one case: every way warmed up, on a GPU in a CUDA graph, timed
in turns, its numbers compared with float64.

Each function returns the measured part of a row. A way that cannot run leaves its error there, in
one line; the others are measured all the same. Times are milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.shapes_cases import DTYPES, AttentionCase, EnsembleCase
from headwise import attend
from headwise.device import numerics
from headwise.model.backends import Call, choose_backend
from headwise.model.reference import mask_of, plain
from headwise.model.transformer import build
from headwise.shape import Shape
from headwise.training.checkpoint import begin
from headwise.training.ensemble import Ensemble, most_models
from headwise.training.loss_scale import base_scale
from headwise.training.run import Run
from headwise.training.step import autocast

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MOST_SCORES = 8 << 30  # bytes that PyTorch's math writes; with more it is not tried
MOST_EXACT = 3 << 30  # bytes of scores in float64 that a comparison may make
ROUNDS = 5
Work = Callable[[], object]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- time


def in_graph(step: Work, device: torch.device, times: int = 1) -> Work:
    """The step `times` times in a CUDA graph, warmed up on a stream of its own; itself on a CPU."""
    if device.type != "cuda":
        step()
        return lambda: [step() for _ in range(times)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            step()

    def replay() -> object:
        graph.replay()
        return step  # which owns what the graph reads

    return replay


def stretch(work: Work, calls: int, device: torch.device) -> float:
    """Milliseconds of one call, over so many."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began) * 1e3 / calls
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    for _ in range(calls):
        work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / calls


def in_turns(works: dict[str, Work], seconds: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, the median of stretches made in turns: what the machine does meanwhile
    falls on all alike. No stretch is shorter than one call."""
    calls = {}
    for name, work in works.items():
        stretch(work, 1, device)
        once = stretch(work, 1, device)
        calls[name] = max(1, min(200, round(seconds * 1e3 / ROUNDS / max(once, 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(ROUNDS):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            times[name].append(stretch(works[name], calls[name], device))
    return {name: sorted(found)[ROUNDS // 2] for name, found in times.items()}


def one_line(error: BaseException) -> str:
    """An error as a row keeps it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@contextlib.contextmanager
def caught(errors: dict[str, str], name: str) -> Iterator[None]:
    """A way's error goes into the row instead of ending the case."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why PyTorch's kernels refuse, many times over
            yield
    except Exception as error:
        errors[name] = one_line(error)
        del error
        clean()


def clean() -> None:
    """Give back what a case held; after a fault on the card that fails, too."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def relative_error(got: Tensor, exact: Tensor) -> float:
    """The norm of the difference, of the exact tensor's."""
    norm = exact.double().norm()
    return float((got.double() - exact.double()).norm() / norm.clamp(min=1e-30))


# ---- attention


def timed_attention(case: AttentionCase, device: torch.device, seconds: float) -> dict[str, Any]:
    """Forward and backward: ours, PyTorch's kernels, and ours at the nearest round sizes."""
    given, grad = _operands(case, device)
    errors: dict[str, str] = {}
    works: dict[str, Work] = {}
    accuracy: dict[str, list[float]] = {}
    exact = _exact(case, given, grad)
    ways: dict[str, Attention] = {"ours": _ours(case), **_stock(case, device)}
    times = _calls_in_graph(case, device)
    with numerics("tf32" if case.dtype != "fp32" else "fp32", device):
        for name, way in ways.items():
            with caught(errors, name):
                accuracy[name] = _errors(way, given, grad, exact, case)
                works[name] = in_graph(_both_passes(way, given, grad), device, times)
        near = case.rounded()
        if near != case and "ours" in works:
            with caught(errors, "rounded"):
                others, its_grad = _operands(near, device)
                passes = _both_passes(_ours(near), others, its_grad)
                works["rounded"] = in_graph(passes, device, times)
        taken = {name: ms / times for name, ms in in_turns(works, seconds, device).items()}
    ours, rounded = taken.pop("ours", None), taken.pop("rounded", None)
    row: dict[str, Any] = {"backend": _backend(case, device), "errors": errors}
    row |= {"ours_ms": ours, "pytorch_ms": taken, "accuracy": accuracy}
    row["tflops"] = case.flops / ours / 1e9 if ours else None
    if rounded:
        row["rounded"] = near.name
        row["rounded_tflops"] = near.flops / rounded / 1e9
    return row | compared(ours, taken)


def compared(ours: float | None, others: dict[str, float]) -> dict[str, Any]:
    """The best of the others, and how many times faster ours is."""
    if not others:
        return {"best": None, "best_ms": None, "ratio": None}
    best = min(others, key=lambda name: others[name])
    ratio = others[best] / ours if ours else None
    return {"best": best, "best_ms": others[best], "ratio": ratio}


def _calls_in_graph(case: AttentionCase, device: torch.device) -> int:
    """As many as take about a millisecond at 100 TFLOP/s, so that replaying a graph is no part of
    what is timed."""
    return max(1, min(20, round(1e11 / case.flops))) if device.type == "cuda" else 1


def _operands(case: AttentionCase, device: torch.device) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, tokens: int, width: int) -> Tensor:
        x = torch.randn(case.batch, heads, tokens, width, generator=generator, device=device)
        return x.to(DTYPES[case.dtype])

    given = [
        drawn(case.heads, case.queries, case.rank),
        drawn(case.kv_heads, case.keys, case.rank),
        drawn(case.kv_heads, case.keys, case.width),
    ]
    grad = drawn(case.heads, case.queries, case.width)
    return [t.requires_grad_() for t in given], grad


def _both_passes(way: Attention, given: list[Tensor], grad: Tensor) -> Work:
    return lambda: torch.autograd.grad(way(*given), given, grad)


def _ours(case: AttentionCase) -> Attention:
    return lambda q, k, v: attend(
        q, k, v, causal=case.causal, window=case.window, graphed=q.device.type == "cuda"
    )


def _backend(case: AttentionCase, device: torch.device) -> str:
    sizes = case.batch, case.heads, case.kv_heads, case.queries, case.keys, case.rank, case.width
    rest = case.causal, case.window
    graphed = device.type == "cuda"
    call = Call(device.type, DTYPES[case.dtype], *sizes, *rest, graphed=graphed)
    return choose_backend(call).backend


def _stock(case: AttentionCase, device: torch.device) -> dict[str, Attention]:
    """PyTorch's attention by each of its kernels that may take the case."""
    scores = case.batch * case.heads * case.queries * case.keys * 4
    mask = None
    if case.window or (case.causal and case.queries != case.keys and device.type == "cpu"):
        mask = mask_of(case.queries, case.keys, case.causal, case.window, device)
    named = {"math": KERNELS["math"], "flash": KERNELS["flash"]}
    chosen = KERNELS if device.type == "cuda" else named
    return {
        name: _by(kernel, case, mask)
        for name, kernel in chosen.items()
        if name != "math" or scores <= MOST_SCORES
    }


def _by(kernel: SDPBackend, case: AttentionCase, mask: Tensor | None) -> Attention:
    shifted = case.causal and case.queries != case.keys and mask is None
    bias = causal_lower_right(case.queries, case.keys) if shifted else mask
    groups = case.heads // case.kv_heads
    # The memory-efficient kernel takes no groups: who wants it repeats keys and values.
    repeated = groups > 1 and kernel is SDPBackend.EFFICIENT_ATTENTION

    def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeated:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(
                q, k, v, bias,
                is_causal=case.causal and bias is None,
                enable_gqa=groups > 1 and not repeated,
            )  # fmt: skip

    return way


Exact = tuple[Tensor, ...]  # output and gradients of q, k and v


def _exact(case: AttentionCase, given: list[Tensor], grad: Tensor) -> Exact | None:
    """The first sequence's first KV head and its query heads, in float64; none where that would
    take too much memory."""
    groups = case.heads // case.kv_heads
    if groups * case.queries * case.keys * 8 > MOST_EXACT:
        return None
    q, k, v = (t.detach()[:1, :n].double().requires_grad_() for t, n in _part(given, groups))
    mask = None
    if case.causal or case.window:
        mask = mask_of(case.queries, case.keys, case.causal, case.window, q.device)
    out = plain(q, k, v, case.rank**-0.5, mask)
    return out, *torch.autograd.grad(out, (q, k, v), grad[:1, :groups].double())


def _part(given: list[Tensor], groups: int) -> list[tuple[Tensor, int]]:
    return list(zip(given, (groups, 1, 1), strict=True))


def _errors(
    way: Attention, given: list[Tensor], grad: Tensor, exact: Exact | None, case: AttentionCase
) -> list[float]:
    """Relative errors of output and gradients; the call is made also where nothing is compared."""
    out = way(*given)
    made = (out, *torch.autograd.grad(out, given, grad))
    if exact is None:
        return []
    groups = case.heads // case.kv_heads
    parts = zip(made, (groups, groups, 1, 1), strict=True)
    return [relative_error(t.detach()[:1, :n], x) for (t, n), x in zip(parts, exact, strict=True)]


# ---- ensembles and decoders


def timed_ensemble(
    case: EnsembleCase, device: torch.device, seconds: float, compiled: bool
) -> dict[str, Any]:
    """A training step per model: ours, data included; one model alone; the stacked module. The last
    two are compiled, in a CUDA graph, with data that are there already."""
    errors: dict[str, str] = {}
    works: dict[str, Work] = {}
    steps: dict[str, int] = {}  # of all models together, in one call
    accuracy: dict[str, float] = {}
    made: dict[str, float] = {}  # seconds until a way was ready
    run, models = case.run, case.models
    if device.type == "cuda":
        models = min(models, most_models(run, device))
    row: dict[str, Any] = {"models": models, "step": None, "errors": errors}
    states = [begin(Run(run.shape, run.task, run.recipe, seed)) for seed in range(models)]
    with numerics(run.recipe.precision, device):
        ensemble = None
        with caught(errors, "ours"):
            began = time.perf_counter()
            ensemble = Ensemble(states, device)
            ensemble._draw(0)
            row["step"] = type(ensemble.kernels).__name__
        if ensemble is None or ensemble.block is None:
            return row | {"ours_ms": None, "others_ms": {}, "made_s": {}} | compared(None, {})
        inputs, targets = (t[0].clone() for t in ensemble.block)
        weights = {n: p.detach().clone() for n, p in ensemble.model.named_parameters()}
        exact = _exact_gradient(run, weights, inputs, targets)
        with caught(errors, "ours"):
            accuracy["ours"] = _our_error(ensemble, inputs, targets, exact)
            blocks = iter(range(run.recipe.steps // ensemble.steps))
            works["ours"] = lambda: ensemble.run_block(next(blocks))
            steps["ours"] = ensemble.steps * models
            works["ours"]()  # captures
            made["ours"] = time.perf_counter() - began
        torch.compiler.reset()
        for name, count in (("single", None), ("stacked", models)):
            with caught(errors, name):
                began = time.perf_counter()
                data = (inputs, targets) if count else (inputs[0], targets[0])
                module = _module(run.shape, weights, count, device)
                step, gradients = _torch_step(case.run, module, *data, compiled)
                firsts = [g[0] if count else g for g in gradients()]
                accuracy[name] = relative_error(torch.cat([g.flatten() for g in firsts]), exact)
                times = 4 if device.type == "cuda" else 1
                works[name] = in_graph(step, device, times)
                steps[name] = times * (count or 1)
                made[name] = time.perf_counter() - began
        taken = in_turns(works, seconds, device)
    taken = {name: ms / steps[name] for name, ms in taken.items()}
    ours, single = taken.pop("ours", None), taken.get("single")
    row |= {"ours_ms": ours, "others_ms": taken, "accuracy": accuracy, "made_s": made}
    row |= compared(ours, taken)
    row["ratio_single"] = single / ours if single and ours else None
    flops = run.shape.flops(run.task.tokens, batch=run.recipe.batch, training=True)
    row["tflops"] = flops / ours / 1e9 if ours else None
    return row


def _module(
    shape: Shape, weights: dict[str, Tensor], models: int | None, device: torch.device
) -> torch.nn.Module:
    """Headwise's module of one model, or of all, with the ensemble's weights."""
    module = build(shape, models=models).to(device)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name] if models else weights[name][0])
    return module


def _torch_step(
    run: Run, module: torch.nn.Module, inputs: Tensor, targets: Tensor, compiled: bool
) -> tuple[Work, Callable[[], list[Tensor]]]:
    """A whole step by PyTorch, and the gradients alone."""
    recipe, device = run.recipe, inputs.device
    scale = base_scale(recipe.batch * run.task.tokens, recipe.precision)
    params = list(module.parameters())
    options: dict[str, Any] = {}
    if device.type == "cuda":
        options = {"fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(params, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, **options)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        with autocast(recipe.precision, device):
            outputs, _ = module(x)
        return run.task.loss(outputs.float(), target).sum() * scale

    loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> None:
        loss(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def gradients() -> list[Tensor]:
        return [g.double() / scale for g in torch.autograd.grad(loss(inputs, targets), params)]

    return step, gradients


def _exact_gradient(
    run: Run, weights: dict[str, Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """The first model's gradients in float64, as one vector."""
    module = build(run.shape).to(inputs.device).double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name][0].double())
    x, target = inputs[0], targets[0]
    x, target = (t.double() if t.is_floating_point() else t for t in (x, target))
    outputs, _ = module(x)
    grads = torch.autograd.grad(run.task.loss(outputs, target), list(module.parameters()))
    return torch.cat([g.flatten() for g in grads])


def _our_error(ensemble: Ensemble, inputs: Tensor, targets: Tensor, exact: Tensor) -> float:
    """Of the first model's gradients, as the ensemble's kernels make them."""
    group = ensemble.kernels.groups[0]
    ones = torch.ones_like(ensemble.scales.scale[group.models])
    losses = torch.zeros_like(ensemble.losses[0, group.models])
    models = group.models
    with ensemble.kernels.around_block(0):
        rows = ensemble.kernels.gradient(group, inputs[models], targets[models], losses, ones)
    spans = ensemble.rows.layout.spans.values()
    return relative_error(torch.cat([rows[0, at : at + size] for at, size in spans]), exact)
