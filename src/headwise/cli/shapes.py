"""Commands about a shape: what it costs, what else the budget buys, what runs it and how fast; each
returns what --json prints."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from headwise.cli.output import print_table
from headwise.errors import UsageError, nearest
from headwise.shape import Shape


def shape_of(changes: Sequence[str], config: str | None = None) -> Shape:
    fields = dataclasses.asdict(Shape.from_hf(config)) if config else {}
    kinds = {f.name: str(f.type) for f in dataclasses.fields(Shape)}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, got {change!r}")
        if key not in kinds:
            raise UsageError(f"unknown shape key {key!r}; {nearest(key, kinds)}")
        fields[key] = _field(key, text, kinds[key])
    for name in ("dim", "depth", "num_heads"):
        if name not in fields:
            raise UsageError(
                f"a shape needs {name}: give a config.json or --set dim=... depth=... num_heads=..."
            )
    return Shape.of(fields)


def _field(key: str, text: str, kind: str) -> Any:
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
        wants = {"int": "a whole number", "bool": "true or false"}.get(
            kind, "a number" if "float" in kind else "whole numbers with commas"
        )
        raise UsageError(f"{key} must be {wants}, got {text!r}") from None
    return text


def _tokens(shape: Shape, asked: int | None, most: int = 2048) -> int:
    n = asked or min(most, shape.num_positions or most)
    if shape.num_positions and n > shape.num_positions:
        raise UsageError(
            f"tokens must not exceed the model's {shape.num_positions} positions, got {n}"
        )
    return n


def cost(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    shape = shape_of(args.changes, args.config)
    n = _tokens(shape, args.tokens)
    answer = {
        "params": shape.params,
        "param_table": shape.param_table(),
        "flops_forward": shape.flops(n),
        "flops_training": shape.flops(n, training=True),
        "kv_bytes_per_token": shape.kv_bytes(1),
        "kv_bytes": shape.kv_bytes(n),
        "input_bytes_per_token": shape.kv_bytes(1, inputs=True),
        "activation_bytes": shape.activation_bytes(n, bytes_per=2),
    }
    heads = (
        f"{shape.num_heads} heads of rank {shape.head_dim} (values {shape.v_head_dim}, "
        f"{shape.num_kv_heads} KV heads"
    )
    heads += f", latent {shape.kv_lora_rank})" if shape.latent else ")"
    cache = (
        ("KV cache a token, 16-bit", f"{answer['kv_bytes_per_token']:,} B"),
        (f"KV cache, {n} tokens", f"{answer['kv_bytes']:,} B"),
        *(
            [("  inputs kept instead, a token", f"{answer['input_bytes_per_token']:,} B")]
            if shape.kv_width(True) < shape.kv_width()
            else []
        ),
    )
    kind = "causal" if shape.causal else "not causal"
    print(
        f"{kind}, {shape.depth} layers, dim {shape.dim}, {heads}, feed-forward {shape.ffn_dim} "
        f"{shape.activation}"
    )
    print_table(
        [
            ("parameters", f"{shape.params:,}"),
            *((f"  {name}", f"{count:,}") for name, count in shape.param_table().items()),
            (f"forward FLOPs, {n} tokens", f"{answer['flops_forward']:.4g}"),
            ("training FLOPs", f"{answer['flops_training']:.4g}"),
            *(cache if shape.causal else ()),
            ("kept for backward, 16-bit", f"{answer['activation_bytes']:,} B"),
        ]
    )
    return answer


def _arm_cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (str(row[name]) for name in ("to", "num_heads", "head_dim", "depth", "ffn_dim"))
    off = (f"{row['residual']:+,}", f"{row['off']:+.3%}") if row["residual"] else ("0", "0%")
    return (
        row["policy"],
        *sizes,
        f"{row['params']:,}",
        f"{row['flops_forward']:.4g}",
        f"{row['target']:,}",
        *off,
    )


def policies(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.policies import TOLERANCE, family

    base = shape_of(args.changes, args.config)
    n = _tokens(base, args.tokens)
    asked = {
        "budget": args.budget,
        "target": args.target,
        "within": args.within,
        "exact": args.exact,
        "multiple": args.multiple,
    }
    arms = [
        arm for policy in args.policy for arm in family(base, policy, args.to, tokens=n, **asked)
    ]
    sizes = ("num_heads", "head_dim", "v_head_dim", "num_kv_heads", "depth", "ffn_dim", "params")
    rows = [
        {
            "policy": arm.policy,
            "to": arm.heads,
            **{name: getattr(arm.shape, name) for name in sizes},
            "flops_forward": arm.shape.flops(n),
        }
        | {"target": arm.budget.target, "residual": arm.residual, "off": arm.off}
        for arm in arms
    ]
    allowed = f"{args.budget} allowed"
    head = (
        "policy",
        "to",
        "heads",
        "rank",
        "layers",
        "feed-forward",
        "parameters",
        f"FLOPs, {n} tokens",
        allowed,
        "off by",
        "share",
    )
    print(
        f"base: {base.depth} layers, dim {base.dim}, {base.num_heads} heads of rank "
        f"{base.head_dim}, feed-forward {base.ffn_dim}"
    )
    print_table([head, *map(_arm_cells, rows)])
    far = sum(not arm.met for arm in arms)
    print(
        f"{far or 'none'} of {len(arms)} {'is' if far == 1 else 'are'} more than {TOLERANCE:.1%} "
        "off the budget"
    )
    return {"budget": args.budget, "tokens": n, "base": dataclasses.asdict(base), "arms": rows}


def _dtype(name: str) -> Any:
    import torch

    kinds = ("float32", "bfloat16", "float16", "float64")
    if name not in kinds:
        raise UsageError(f"unknown dtype {name!r}; {nearest(name, kinds)}")
    return getattr(torch, name)


def explain(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    import torch

    from headwise.model.backends import explain

    dtype = _dtype(args.dtype)
    if args.device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"unknown device {args.device!r}; {nearest(args.device, ('auto', 'cpu', 'cuda'))}"
        )
    shape = shape_of(args.changes, args.config)
    choice = explain(shape, args.tokens, batch=args.batch, device=args.device, dtype=dtype)
    print(choice)
    told: dict[str, Any] = {
        "backend": choice.backend,
        "why": choice.why,
        "refused": dict(choice.refused),
    }
    if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()):
        from headwise.training import fused_decoder, fused_encoder

        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
        told["step"], told["blocks"] = (
            kind.refusal(shape, args.tokens, args.batch, precision)
            for kind in (fused_encoder, fused_decoder)
        )
        if not told["step"]:
            call = (shape, args.tokens, args.batch, precision)
            told["chain"] = fused_encoder.cuda_attention_refusal(*call)
            told["feed"] = told["chain"] or fused_encoder.cuda_mlp_refusal(*call)
            how, feeds = (_how(told[part], "one kernel each way") for part in ("chain", "feed"))
            print(
                f"a training step in {precision}: fused, from data to optimiser; its attention "
                f"part {how}"
            )
            if not told["chain"]:
                print(f"its feed-forward, of several models, {feeds}")
        elif not told["blocks"]:
            told["decoder"] = fused_decoder.cuda_refusal(shape, args.tokens, precision)
            print(
                f"a training step in {precision}: fused blocks, modules around them; each "
                f"{_how(told['decoder'], 'in three kernels')}"
            )
        else:
            why = f"The fused step {told['step']}. Fused blocks: {told['blocks']}."
            print(f"a training step in {precision}: plain modules. {why}")
    return told


def _how(refused: str, whole: str) -> str:
    """What runs a part of the step, by why our kernels in CUDA C++ cannot."""
    return (
        f"in Triton; the kernel in CUDA C++ {refused}"
        if refused
        else f"{whole} on an H100 or H200, else in Triton"
    )


def infer(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    from headwise.device import pick_device
    from headwise.model.infer_bench import bandwidth, measure

    shape, dtype, device = (
        shape_of(args.changes, args.config),
        _dtype(args.dtype),
        pick_device(args.device),
    )
    n = _tokens(shape, args.tokens, 512)
    rate = bandwidth(device)
    rows = [
        row
        for batch in args.batch
        for row in measure(shape, batch, n, args.steps, device, dtype, rate)
    ]
    graphs = ("graph tokens/s",) if device.type == "cuda" else ()
    speed = f"a copy at {rate / 1e9:.1f} GB/s"
    print(
        f"{shape.params:,} parameters in {args.dtype} on {device}, {speed}; {args.steps} tokens "
        f"behind {n - args.steps}"
    )
    head = (
        "batch",
        "kept",
        "bytes a token",
        "cache bytes",
        "prefill tokens/s",
        "decode tokens/s",
        *graphs,
        "bandwidth",
        "times recomputing",
    )
    print_table([head, *(_infer_cells(row, bool(graphs)) for row in rows)])
    about = {
        "params": shape.params,
        "device": str(device),
        "dtype": args.dtype,
        "tokens": n,
        "steps": args.steps,
        "bandwidth": rate,
    }
    return {**about, "rows": rows}


def _infer_cells(row: dict[str, Any], graphs: bool) -> tuple[str, ...]:
    filled = f"{row['prefill_tokens_per_s']:,.0f}" if row["cache_bytes"] else "-"
    graph = (
        (f"{row['batch'] / row['graph_step_s']:,.0f}" if "graph_step_s" in row else "-",)
        if graphs
        else ()
    )
    rates = (
        filled,
        f"{row['decode_tokens_per_s']:,.0f}",
        *graph,
        f"{row['bandwidth_share']:.0%}",
        f"{row['faster']:.1f}",
    )
    return (
        str(row["batch"]),
        row["keeps"],
        f"{row['bytes_per_token']:,}",
        f"{row['cache_bytes']:,}",
        *rates,
    )
