"""Commands about a shape: what it costs, what else the budget buys, what runs it and how fast; each
returns what --json prints."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.cli.output import print_prose, print_table, width_for
from headwise.configs import read_config, text_of
from headwise.errors import UsageError, nearest, shown
from headwise.shape import BY_LAYER, Shape, field_of, not_built

if TYPE_CHECKING:
    from headwise.model.cards import Card


def shape_of(changes: Sequence[str], config: str | None = None, part: str | None = None) -> Shape:
    """The shape of a config, or of a part of it, with changes, each key=value."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(Shape)}
    typed: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {shown(change)}")
        name = field_of(key, 0)
        if name not in kinds:
            raise UsageError(f"unknown shape key {shown(key)}; {nearest(key, kinds)}")
        typed[key] = _field(key, text, kinds[name], name in BY_LAYER)
    if config:
        return _of_config(config, part).replace(**typed)
    if part is not None:
        raise UsageError(f"--part takes a part of a config.json, got --part {shown(part)} alone")
    given = {field_of(key, 0) for key in typed}
    for name in ("dim", "depth", "num_heads"):
        if name not in given:
            raise UsageError(
                f"a shape needs {name}: give a config.json or --set dim=... depth=... num_heads=..."
            )
    return Shape.of(typed)


def _of_config(config: str, part: str | None) -> Shape:
    """The shape of a config.json. Of a model around a text model it is that of the text model, and
    a line says so."""
    found = read_config(config)
    note = text_of(found) if part is None else None
    if note:
        print_prose(note, width_for(False))
        part = "text"
    return Shape.from_hf(found, part=part)


def _field(key: str, text: str, kind: str, by_layer: bool = False) -> Any:
    """A field's value from the command line, by its type; with commas one for each layer."""
    if by_layer and "," in text:
        return tuple(_field(key, part, kind) for part in text.split(","))
    try:
        if kind == "int":
            return int(text.replace("_", ""))
        if "float" in kind:
            return float(text)
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind.startswith("tuple[int"):
            return tuple(int(part) for part in text.split(","))
    except (ValueError, KeyError):
        wanted = "whole numbers with commas"
        if kind == "int":
            wanted = "a whole number"
        elif kind == "bool":
            wanted = "true or false"
        elif "float" in kind:
            wanted = "a number"
        raise UsageError(f"{key} must be {wanted}, got {shown(text)}") from None
    return text


def _tokens(shape: Shape, asked: int | None, most: int = 2048) -> int:
    """How many tokens to count with: what was asked for, or as many as the model takes."""
    n = asked or min(most, shape.num_positions or most)
    if shape.num_positions and n > shape.num_positions:
        raise UsageError(
            f"tokens must not exceed the model's {shape.num_positions} positions, got {n}"
        )
    return n


def cost(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Parameters, operations and bytes of a shape."""
    shape = shape_of(args.changes, args.config, args.part)
    n = _tokens(shape, args.tokens)
    answer = {
        "params": shape.params,
        "active_params": shape.active_params,
        "param_table": shape.param_table(),
        "flops_forward": shape.flops(n),
        "flops_training": shape.flops(n, training=True),
        "kv_bytes_per_token": shape.kv_bytes(1),
        "kv_bytes": shape.kv_bytes(n),
        "input_bytes_per_token": shape.kv_bytes(1, inputs=True),
        "activation_bytes": None if not_built(shape) else shape.activation_bytes(n, bytes_per=2),
    }
    _print_layers(shape)
    table = [("parameters", f"{shape.params:,}")]
    table += [(f"  {name}", f"{count:,}") for name, count in shape.param_table().items()]
    if shape.num_experts:
        table.append(("used by one token", f"{shape.active_params:,}"))
    table += [
        (f"forward FLOPs, {n} tokens", f"{answer['flops_forward']:.4g}"),
        ("training FLOPs", f"{answer['flops_training']:.4g}"),
    ]
    if shape.causal:
        table += [
            ("KV cache per token, 16-bit", f"{answer['kv_bytes_per_token']:,} B"),
            (f"KV cache, {n} tokens", f"{answer['kv_bytes']:,} B"),
        ]
    if shape.causal and answer["input_bytes_per_token"] < answer["kv_bytes_per_token"]:
        inputs = f"{answer['input_bytes_per_token']:,} B"
        table.append(("  inputs kept instead, per token", inputs))
    if answer["activation_bytes"] is not None:
        table.append(("kept for backward, 16-bit", f"{answer['activation_bytes']:,} B"))
    print_table(table)
    return answer


def _print_layers(shape: Shape) -> None:
    """The sizes of a shape in words; a line for each kind of layer where they differ."""
    start = f"{'causal' if shape.causal else 'not causal'}, {shape.depth} layers, dim {shape.dim}"
    if shape.uniform:
        return print_prose(f"{start}, {_layer_in_words(shape)}", width_for(False))
    print_prose(f"{start}:", width_for(False))
    for layer, count in shape.distinct_layers():
        window = f", window {layer.windows[0]}" if layer.windows[0] else ""
        print_prose(f"{count} x {_layer_in_words(layer)}{window}", width_for(False), 2)


def _layer_in_words(layer: Shape) -> str:
    keys = f"{layer.num_kv_heads} KV heads"
    if layer.latent:
        keys += f", latent {layer.kv_lora_rank}"
    if layer.reuses_kv:
        keys = "KV heads of another layer"
    elif layer.shared_kv:
        keys += ", keys are values"
    feed = f"feed-forward {layer.ffn_dim} {layer.activation}"
    if layer.num_experts:
        shared = f" and a shared {layer.shared_ffn_dim}" if layer.shared_ffn_dim else ""
        feed = (
            f"{layer.num_experts_per_tok} of {layer.num_experts} experts "
            f"{layer.expert_ffn_dim}{shared} {layer.activation}"
        )
    heads = f"{layer.num_heads} heads of rank {layer.head_dim} (values {layer.v_head_dim}, {keys})"
    return f"{heads}, {feed}"


def _arm_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of policies."""
    sizes = [str(row[name]) for name in ("to", "num_heads", "head_dim", "depth", "ffn_dim")]
    costs = [f"{row['params']:,}", f"{row['flops_forward']:.4g}", f"{row['target']:,}"]
    off = ["0", "0%"]
    if row["residual"]:
        off = [f"{row['residual']:+,}", f"{row['off']:+.3%}"]
    return row["policy"], *sizes, *costs, *off


def policies(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Other numbers of heads at one budget."""
    from headwise.policies import TOLERANCE, family

    base = shape_of(args.changes, args.config, args.part)
    n = _tokens(base, args.tokens)
    budget = {
        "budget": args.budget,
        "target": args.target,
        "within": args.within,
        "exact": args.exact,
        "multiple": args.multiple,
    }
    arms = [
        arm for policy in args.policy for arm in family(base, policy, args.to, tokens=n, **budget)
    ]
    sizes = ("num_heads", "head_dim", "v_head_dim", "num_kv_heads", "depth", "ffn_dim", "params")
    rows = [
        {
            "policy": arm.policy,
            "to": arm.heads,
            **{name: getattr(arm.shape, name) for name in sizes},
            "flops_forward": arm.shape.flops(n),
            "target": arm.budget.target,
            "residual": arm.residual,
            "off": arm.off,
        }
        for arm in arms
    ]
    headings = (
        "policy",
        "to",
        "heads",
        "rank",
        "layers",
        "feed-forward",
        "parameters",
        f"FLOPs, {n} tokens",
        f"{args.budget} allowed",
        "off by",
        "share",
    )
    width = width_for(args.wide)
    print_prose(
        f"base: {base.depth} layers, dim {base.dim}, {base.num_heads} heads of rank "
        f"{base.head_dim}, feed-forward {base.ffn_dim}",
        width,
    )
    main = [headings.index(name) for name in ("policy", "heads", "rank", "layers", "share")]
    print_table([headings, *map(_arm_cells, rows)], width, main)
    far = sum(not arm.met for arm in arms)
    print(
        f"{far or 'none'} of {len(arms)} {'is' if far == 1 else 'are'} more than {TOLERANCE:.1%} "
        "off the budget"
    )
    return {"budget": args.budget, "tokens": n, "base": base.spec(), "arms": rows}


def _dtype(name: str) -> Any:
    import torch

    names = ("float32", "bfloat16", "float16", "float64")
    if name not in names:
        raise UsageError(f"unknown dtype {name!r}; {nearest(name, names)}")
    return getattr(torch, name)


def explain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Which attention kernel runs a shape, why not the others, and on a GPU which training step."""
    import torch

    from headwise.model.backends import explain
    from headwise.model.cards import card_of

    dtype = _dtype(args.dtype)
    card = card_of(args.device)
    shape = shape_of(args.changes, args.config, args.part)
    choice = explain(shape, args.tokens, batch=args.batch, device=args.device, dtype=dtype)
    for line in str(choice).splitlines():
        print_prose(line, width_for(False), 2)
    answer: dict[str, Any] = {
        "backend": choice.backend,
        "why": choice.why,
        "refused": dict(choice.refused),
    }
    if card or args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()):
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
        answer |= _explain_step(shape, args.tokens, args.batch, precision, card)
    if card:
        said = f"{card.name}: compute capability {card.version}, {card.memory_gib} GiB, "
        said += f"{card.shared >> 10} KiB of shared memory per block"
        print_prose(said, width_for(False))
        answer["card"] = {**dataclasses.asdict(card), "shared_bytes": card.shared}
    return answer


def _explain_step(
    shape: Shape, tokens: int, batch: int, precision: str, card: Card | None
) -> dict[str, Any]:
    """Which kernels run a training step on a GPU; prints it, and returns why each other one does
    not ("" for one that does)."""
    from headwise.training import fused_decoder, fused_encoder

    step, width = f"a training step in {precision}:", width_for(False)
    refusals = {
        "step": fused_encoder.refusal(shape, tokens, batch, precision),
        "blocks": fused_decoder.refusal(shape, tokens, batch, precision),
    }
    if card and not refusals["blocks"]:
        refusals["blocks"] = fused_decoder.card_refusal(shape, precision, card.shared)
    if not refusals["step"]:
        attention = fused_encoder.cuda_attention_refusal(shape, tokens, batch, precision)
        mlp = attention or fused_encoder.cuda_mlp_refusal(shape, tokens, batch, precision)
        refusals |= {"chain": attention, "feed": mlp}
        kernels = "one kernel forward and one backward"
        part = f"its attention part {_runs_in(attention, kernels, card)}"
        print_prose(f"{step} fused, from data to optimiser; {part}", width)
        if not attention:
            said = f"its feed-forward, of several models, {_runs_in(mlp, kernels, card)}"
            print_prose(said, width)
    elif not refusals["blocks"]:
        refusals["decoder"] = fused_decoder.cuda_refusal(shape, tokens, precision)
        kernels = _runs_in(refusals["decoder"], "in three kernels", card)
        print_prose(f"{step} fused blocks, modules around them; each {kernels}", width)
    else:
        why = f"The fused encoder {refusals['step']}. The fused decoder {refusals['blocks']}."
        print_prose(f"{step} plain modules. {why}", width)
    return refusals


def _runs_in(refusal: str, kernels: str, card: Card | None) -> str:
    """What runs a part of the step, given why our kernels in CUDA C++ do not."""
    if refusal:
        return f"in Triton; the kernel in CUDA C++ {refusal}"
    if card:
        here = card.capability == (9, 0)
        needs = f"needs compute capability 9.0 (H100, H200), this card has {card.version}"
        return kernels if here else f"in Triton; the kernel in CUDA C++ {needs}"
    return f"{kernels} on an H100 or H200, else in Triton"


def infer(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """How fast a shape generates, from a cache and without one."""
    from headwise.device import pick_device
    from headwise.execute.memory import check_fits
    from headwise.model.infer_bench import bandwidth, measure

    shape = shape_of(args.changes, args.config, args.part)
    dtype = _dtype(args.dtype)
    device = pick_device(args.device)
    n = _tokens(shape, args.tokens, 512)
    width = 2 * (shape.in_dim if not shape.vocab_size else 4) + shape.kv_bytes(1)
    check_fits(
        2 * shape.params + max(args.batch) * n * width,
        device,
        f"decoding {n:,} tokens",
        f"--tokens, --batch or the shape, of {shape.params:,} parameters",
    )
    rate = bandwidth(device)
    rows = [
        row
        for batch in args.batch
        for row in measure(shape, batch, n, args.steps, device, dtype, rate)
    ]
    with_graphs = device.type == "cuda"
    width = width_for(args.wide)
    print_prose(
        f"{shape.params:,} parameters in {args.dtype} on {device}, a copy at "
        f"{rate / 1e9:.1f} GB/s; {args.steps} tokens behind {n - args.steps}",
        width,
    )
    headings = (
        "batch",
        "kept",
        "bytes per token",
        "cache bytes",
        "prefill tokens/s",
        "decode tokens/s",
        *(("graph tokens/s",) if with_graphs else ()),
        "bandwidth",
        "times recomputing",
    )
    main = [headings.index(name) for name in ("batch", "kept", "decode tokens/s")]
    print_table([headings, *(_infer_cells(row, with_graphs) for row in rows)], width, main)
    about = {
        "params": shape.params,
        "device": str(device),
        "dtype": args.dtype,
        "tokens": n,
        "steps": args.steps,
        "bandwidth": rate,
    }
    return {**about, "rows": rows}


def _infer_cells(row: dict[str, Any], with_graphs: bool) -> tuple[str, ...]:
    """A line of the table of inference."""
    cells = [
        str(row["batch"]),
        row["keeps"],
        f"{row['bytes_per_token']:,}",
        f"{row['cache_bytes']:,}",
        f"{row['prefill_tokens_per_s']:,.0f}" if row["cache_bytes"] else "-",
        f"{row['decode_tokens_per_s']:,.0f}",
    ]
    if with_graphs:
        has_graph = "graph_step_s" in row
        cells.append(f"{row['batch'] / row['graph_step_s']:,.0f}" if has_graph else "-")
    return *cells, f"{row['bandwidth_share']:.0%}", f"{row['faster']:.1f}"
