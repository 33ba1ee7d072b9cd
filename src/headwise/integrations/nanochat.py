"""nanochat with free heads: its own GPT, optimiser and scripts, no file of it changed.

In its checkout, with its own arguments behind the dashes (torchrun takes `-m
headwise.integrations.nanochat` just the same):

    python -m headwise.integrations.nanochat --num-heads 4 --head-dim 448 -- -m scripts.base_train
    --depth=28

Heads, their rank, the width of their values, KV heads and the scale of the scores are free; value
embeddings, rotary positions, norms of queries and keys, windows, feed-forward and optimiser stay
nanochat's. What a checkpoint needs besides GPTConfig's own fields (`head_dim`, `v_head_dim`,
`logit_scale`) is written into its model_config, unless the sizes are nanochat's own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import UsageError, nearest
from headwise.model.attention import attend
from headwise.shape import Shape

ADDED = ("head_dim", "v_head_dim", "logit_scale")  # to GPTConfig
HEADS = ("num_heads", "head_dim", "v_head_dim", "num_kv_heads", "logit_scale", "max_logit")
SHARP = 1.2  # its factor of queries and of keys
GATE = 12  # channels that its gates of value embeddings read
COSTS = (
    "estimate_flops",
    "estimate_decode_flops",
    "estimate_prefill_flops",
    "kv_bytes_per_token",
    "kv_read_bytes",
)
_EXTRAS = {
    "value_embeds.": "value embeddings",
    "resid_lambdas": "residual scalars",
    "x0_lambdas": "residual scalars",
}
_EXTRAS |= {"smear_": "smear", "backout_lambda": "backout"}


# ---- configs and shapes


def shape_of(config: Any) -> Shape:
    """The shape of a GPTConfig, or of its fields as a mapping."""
    fields = config if isinstance(config, Mapping) else vars(config)
    return Shape.from_hf(
        {"window_pattern": "L", **fields}
    )  # its checkpoints from before windows have no pattern


def config_of(shape: Shape, sequence_len: int = 2048) -> dict[str, Any]:
    """GPTConfig's fields for a shape of nanochat's form, with those that free heads add; the
    inverse of `shape_of`."""
    kinds = {-(-sequence_len // 512) * 128 + 1: "S", 0: "L"}
    windows = [shape.window(layer) for layer in range(shape.depth)]
    if windows[-1] or set(windows) - set(kinds):
        short = max(kinds)
        raise UsageError(
            f"nanochat's windows are 0 or {short} at sequence_len {sequence_len}, 0 in the last "
            f"layer, got {tuple(windows)}"
        )
    config = {
        "sequence_len": sequence_len,
        "vocab_size": shape.vocab_size,
        "n_layer": shape.depth,
        "n_head": shape.num_heads,
        "n_kv_head": shape.num_kv_heads,
        "n_embd": shape.dim,
        "window_pattern": "".join(kinds[w] for w in windows),
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "logit_scale": _own_scale(shape.scale, shape.head_dim),
    }
    wanted, made = dataclasses.asdict(shape), dataclasses.asdict(shape_of(config))
    wanted |= {"windows": made["windows"], "max_logit": None, "logit_scale": shape.scale}
    for name, value in made.items():
        if wanted[name] != value:
            raise UsageError(
                f"{name} of a nanochat model of these sizes is {value!r}, got {wanted[name]!r}"
            )
    return _plain(config)


def _own_scale(scale: float | None, head_dim: int) -> float | None:
    """None for the scale that nanochat has itself."""
    return (
        None
        if scale is None or math.isclose(scale, SHARP**2 * head_dim**-0.5, rel_tol=1e-12)
        else scale
    )


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without added fields where its sizes are nanochat's own, so that nanochat reads it
    by itself."""
    width, stock = config.get("head_dim"), config["n_embd"] / config["n_head"]
    own = (
        width in (None, stock)
        and config.get("v_head_dim") in (None, stock)
        and config.get("logit_scale") is None
    )
    return {name: value for name, value in config.items() if not (own and name in ADDED)}


def _with_heads(base: Shape, heads: Mapping[str, Any]) -> Shape:
    """A shape with other heads; what is not given stays, but ranks follow the number of heads as in
    `Shape`."""
    count = heads.get("num_heads", base.num_heads)
    fields: dict[str, Any] = {
        "dim": base.dim,
        "depth": base.depth,
        "num_heads": count,
        "qk_norm": "free",
    }
    fields |= {"head_dim": None if "num_heads" in heads else base.head_dim}
    fields |= {"num_kv_heads": None if base.num_kv_heads == base.num_heads else base.num_kv_heads}
    shape = Shape.of({**fields, **heads})
    return shape.replace(qk_rope_head_dim=shape.head_dim)


def _heads_of(shape: Shape) -> dict[str, Any]:
    """The part of a shape that the hook takes; what nanochat cannot have is refused."""
    fixed = {
        "kv_lora_rank": 0,
        "average": 1,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "ffn_dim": 4 * shape.dim,
    }
    for name, value in fixed.items():
        if getattr(shape, name) != value:
            raise UsageError(
                f"{name} of a nanochat model must be {value}, got {getattr(shape, name)}"
            )
    return {name: getattr(shape, name) for name in HEADS if getattr(shape, name) is not None}


# ---- the hook


@contextlib.contextmanager
def use(shape: Shape | None = None, **heads: Any) -> Iterator[None]:
    """While this is on, nanochat builds its GPT with other heads: `use(num_heads=4, head_dim=448)`
    or `use(shape)`.

    Of a shape its heads count, and its dim and depth must be the model's. The first GPT that is
    built gets the heads, as does every other one of its depth and width; the rest keep nanochat's,
    base_train's reference of depth 12 among them. A config that names its own head_dim, as one from
    a checkpoint does, is built as it says. `logit_scale` is the factor of the normed queries' and
    keys' products and `max_logit` the largest score; left out, nanochat's 1.44 head_dim ** -0.5.
    """
    for name in heads:
        if name not in HEADS:
            raise UsageError(f"unknown size {name!r} of heads; {nearest(name, HEADS)}")
    if shape is not None and heads:
        raise UsageError(
            f"give a shape or sizes of heads, not both, got a shape and {', '.join(heads)}"
        )
    hook = _Hook(_gpt(), shape, {name: value for name, value in heads.items() if value is not None})
    pairs = hook.pairs()
    _swap(pairs)
    try:
        yield
        hook.done()
    finally:
        _swap([(new, old) for old, new in pairs])


def _gpt() -> ModuleType:
    try:
        gpt = importlib.import_module("nanochat.gpt")
    except ImportError as error:
        raise UsageError(
            "nanochat must be importable: run this in its checkout or put that on PYTHONPATH, "
            f"got: {error}"
        ) from None
    if hasattr(gpt.GPT, "headwise"):
        raise UsageError("nanochat already has other heads: leave the first `use` before the next")
    try:
        _compare(gpt)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            "this nanochat's attention is not the one this hook knows, that of its commit "
            f"92d63d4, got: {said}"
        ) from error
    return gpt


def _swap(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Put the second of each pair where nanochat and its scripts hold the first."""
    modules = [
        m
        for name, m in list(sys.modules.items())
        if name.split(".")[0] in ("nanochat", "scripts", "__main__") and m
    ]
    for module in modules:
        for name, value in list(vars(module).items()):
            for old, new in pairs:
                if value is old:
                    setattr(module, name, new)


class _Hook:
    """What is asked for, what it is for, and the classes that do it."""

    def __init__(self, gpt: ModuleType, shape: Shape | None, heads: dict[str, Any]) -> None:
        self.gpt, self.shape = gpt, shape
        self.heads = heads if shape is None else _heads_of(shape)
        self.target = None if shape is None else (shape.depth, shape.dim)
        self.made: dict[tuple[int, ...], dict[str, Any]] = {}
        self.built = False
        self.config_class = self._config_class()

    def pairs(self) -> list[tuple[Any, Any]]:
        """(nanochat's, ours); its modules that this Python lacks packages for are left out, as
        nothing can import them."""
        gpt = self.gpt
        found: list[tuple[Any, Any]] = [
            (gpt.GPTConfig, self.config_class),
            (gpt.GPT, _model_class(gpt.GPT, self.config_class)),
        ]
        found.append((gpt.CausalSelfAttention, _attention_class(gpt)))
        with contextlib.suppress(ImportError):
            save = importlib.import_module("nanochat.checkpoint_manager").save_checkpoint
            found.append((save, self._saving(save)))
            cache = importlib.import_module("nanochat.engine").KVCache
            found.append((cache, _cache_class(cache)))
        return found

    def done(self) -> None:
        if self.heads and not self.built:
            wanted = (
                ""
                if self.target is None
                else f" of depth {self.target[0]} and dim {self.target[1]}"
            )
            raise UsageError(f"no GPT{wanted} was built, so none got {self._said()}")

    def _said(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.heads.items())

    def _config_class(self) -> type:
        fields = [(name, Any, dataclasses.field(default=None)) for name in ADDED]
        return dataclasses.make_dataclass(
            "GPTConfig",
            fields,
            bases=(self.gpt.GPTConfig,),
            namespace={"__post_init__": lambda config: self.fill(config)},
        )

    def fill(self, config: Any) -> None:
        """Give a new config its heads."""
        named, asked = any(getattr(config, name) is not None for name in ADDED), self._asked(config)
        shape, scale = shape_of(config), config.logit_scale
        if asked and named:
            self._agree(shape)
        elif asked:
            shape = _with_heads(shape, self.heads)
            scale = shape.scale if {"logit_scale", "max_logit"} & set(self.heads) else None
        config.n_head, config.n_kv_head = shape.num_heads, shape.num_kv_heads
        config.head_dim, config.v_head_dim, config.logit_scale = (
            shape.head_dim,
            shape.v_head_dim,
            _own_scale(scale, shape.head_dim),
        )
        self.made[_key(vars(config))] = {name: getattr(config, name) for name in ADDED}

    def _asked(self, config: Any) -> bool:
        """Whether the heads were asked for this config."""
        here = (config.n_layer, config.n_embd)
        if self.shape is not None and here[0] == self.shape.depth and here[1] != self.shape.dim:
            raise UsageError(
                f"nanochat builds depth {here[0]} with dim {here[1]}, the shape has dim "
                f"{self.shape.dim}"
            )
        self.target = self.target or here
        asked = bool(self.heads) and here == self.target
        self.built = self.built or asked
        return asked

    def _agree(self, shape: Shape) -> None:
        """A config that names its heads must name those that were asked for."""
        there = {name: getattr(shape, name) for name in HEADS} | {
            "logit_scale": shape.scale,
            "max_logit": shape.scale * shape.head_dim,
        }
        for name, value in self.heads.items():
            if not math.isclose(there[name], value, rel_tol=1e-9):
                raise UsageError(f"{name} of the config is {there[name]}, asked for was {value}")

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Its save_checkpoint; a script that lists the config's fields itself gets the added ones
        too."""
        signature = inspect.signature(save)

        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            meta = call.arguments["meta_data"]
            if isinstance(meta.get("model_config"), Mapping):
                config = {**meta["model_config"], **self.made.get(_key(meta["model_config"]), {})}
                call.arguments["meta_data"] = {**meta, "model_config": _plain(config)}
            return save(*call.args, **call.kwargs)

        return saving


def _key(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(config[name] for name in ("n_layer", "n_embd", "n_head", "n_kv_head"))


# ---- its classes with free sizes


def _model_class(base: type, config_class: type) -> type:
    class GPT(base):  # type: ignore[misc, valid-type]
        """nanochat's GPT; value embeddings, rotary tables and costs follow the heads."""

        headwise = True

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            config = config if isinstance(config, config_class) else config_class(**vars(config))
            super().__init__(config, *args, **kwargs)
            width = config.n_kv_head * config.v_head_dim
            for name, table in self.value_embeds.items():
                if table.embedding_dim != width:
                    self.value_embeds[name] = nn.Embedding(table.num_embeddings, width)

        def _precompute_rotary_embeddings(
            self, seq_len: int, head_dim: int, *args: Any, **kwargs: Any
        ) -> Any:
            return super()._precompute_rotary_embeddings(
                seq_len, self.config.head_dim, *args, **kwargs
            )

    for name in COSTS:
        if hasattr(base, name):
            setattr(GPT, name, _between(getattr(base, name)))
    return GPT


def _between(cost: Callable[..., int]) -> Callable[..., int]:
    """A cost that nanochat takes as linear in one width of queries, keys and values: the mean of
    what each width gives."""

    @functools.wraps(cost)
    def mean(self: Any, *args: Any, **kwargs: Any) -> int:
        config, total = self.config, 0
        try:
            for width in (config.head_dim, config.v_head_dim):
                self.config = SimpleNamespace(**{**vars(config), "n_embd": config.n_head * width})
                total += cost(self, *args, **kwargs)
        finally:
            self.config = config
        return total // 2

    return mean


def _attention_class(gpt: Any) -> type:
    class CausalSelfAttention(nn.Module):
        """Causal attention of free sizes between nanochat's projections: values and their gated
        embedding, rotation, norms, window."""

        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__()
            H, KV, R, V, D = (
                config.n_head,
                config.n_kv_head,
                config.head_dim,
                config.v_head_dim,
                config.n_embd,
            )
            self.layer_idx, self.n_head, self.n_kv_head, self.head_dim, self.v_head_dim = (
                layer_idx,
                H,
                KV,
                R,
                V,
            )
            self.scale = R**-0.5 if config.logit_scale is None else config.logit_scale / SHARP**2
            self.c_q, self.c_k = gpt.Linear(D, H * R, bias=False), gpt.Linear(D, KV * R, bias=False)
            self.c_v, self.c_proj = (
                gpt.Linear(D, KV * V, bias=False),
                gpt.Linear(H * V, D, bias=False),
            )
            self.ve_gate = (
                gpt.Linear(GATE, KV, bias=False) if gpt.has_ve(layer_idx, config.n_layer) else None
            )

        def forward(
            self,
            x: Tensor,
            ve: Tensor | None,
            cos_sin: Any,
            window_size: tuple[int, int],
            kv_cache: Any,
        ) -> Tensor:
            q, k = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.c_q, self.c_k))
            v = self.c_v(x).unflatten(-1, (-1, self.v_head_dim))
            if ve is not None and self.ve_gate is not None:
                v = v + 3 * self.ve_gate(x[..., :GATE]).sigmoid().unsqueeze(-1) * ve.view(v.shape)
            q, k = (gpt.norm(gpt.apply_rotary_emb(t, *cos_sin)) * SHARP for t in (q, k))
            if kv_cache is not None:
                k, v = _remember(kv_cache, self.layer_idx, k, v)
            y = _attend(q, k, v, self.scale, window_size[0] + 1)
            return self.c_proj(y.transpose(1, 2).flatten(-2))

    return CausalSelfAttention


def _attend(q_BQHR: Tensor, k_BNKR: Tensor, v_BNKV: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention over the last `window` keys (0: all) in nanochat's order of axes, (batch,
    heads, tokens, width) out."""
    if q_BQHR.shape[1] == 1 and window:
        k_BNKR, v_BNKV = k_BNKR[:, -window:], v_BNKV[:, -window:]
    q, k, v = (t.transpose(1, 2) for t in (q_BQHR, k_BNKR, v_BNKV))
    causal = q.shape[2] > 1
    return attend(q, k, v, causal=causal, window=window if causal else 0, scale=scale)


def _remember(cache: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Put new keys and values into nanochat's cache; all of them so far. The last layer moves the
    cache's place on."""
    _fit(cache, k.shape[-1], v.shape[-1])
    start, new = cache.get_pos(), k.shape[1]
    keys, values = cache.get_layer_cache(layer)
    keys[:, start : start + new], values[:, start : start + new] = k, v
    if layer == cache.n_layers - 1:
        cache.advance(new)
    return keys[:, : start + new], values[:, : start + new]


def _fit(cache: Any, rank: int, width: int) -> None:
    """An empty cache of other widths is made anew with these."""
    for name, wanted in (("k_cache", rank), ("v_cache", width)):
        table = getattr(cache, name)
        if table.shape[-1] != wanted:
            setattr(cache, name, table.new_zeros(*table.shape[:-1], wanted))


def _cache_class(base: type) -> type:
    class KVCache(base):  # type: ignore[misc, valid-type]
        """nanochat's cache, as wide as the one that it is filled from."""

        def prefill(self, other: Any) -> None:
            _fit(self, other.k_cache.shape[-1], other.v_cache.shape[-1])
            super().prefill(other)

    return KVCache


def _compare(gpt: Any) -> None:
    """One layer of nanochat's and one of ours with the same weights: they must agree, or this is
    not the nanochat that is known here."""
    stock = gpt.GPTConfig(
        sequence_len=8, vocab_size=64, n_layer=1, n_head=6, n_kv_head=2, n_embd=60
    )
    ours_config = SimpleNamespace(**vars(stock), head_dim=10, v_head_dim=10, logit_scale=None)
    own, window = gpt.flash_attn, (3, 0)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int]
    ) -> Tensor:
        return attend(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=causal, window=window_size[0] + 1
        ).transpose(1, 2)

    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        theirs, ours = gpt.CausalSelfAttention(stock, 0), _attention_class(gpt)(ours_config, 0)
        ours.load_state_dict(theirs.state_dict())
        angle = torch.randn(1, 7, 1, 5)
        inputs = (
            torch.randn(2, 7, 60),
            torch.randn(2, 7, 20),
            (angle.cos(), angle.sin()),
            window,
            None,
        )
        gpt.flash_attn = SimpleNamespace(flash_attn_func=kernel)
        try:
            off = (theirs(*inputs) - ours(*inputs)).abs().max().item()
        finally:
            gpt.flash_attn = own
    if not off < 1e-4:
        raise ValueError(f"outputs differ by {off:.3g}")


# ---- checkpoints


class Checkpoint(NamedTuple):
    """A checkpoint of nanochat's: what the model is, its weights by nanochat's names, and what was
    written beside them."""

    shape: Shape
    state: dict[str, Tensor]
    config: dict[str, Any]
    step: int
    meta: dict[str, Any]


def read(folder: str | Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of a folder with model_*.pt and meta_*.json, the last one unless a step is
    given; nanochat is not needed.

    Heads that the config leaves out are read off the weights. The shape counts every parameter that
    is there.
    """
    steps = sorted(
        int(m[1])
        for p in Path(folder).glob("model_*.pt")
        if (m := re.fullmatch(r"model_(\d+)\.pt", p.name))
    )
    if not steps or (step is not None and step not in steps):
        there = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise UsageError(
            f"no checkpoint{'' if step is None else f' of step {step}'} in {str(folder)!r}; "
            f"there: {there}"
        )
    step = steps[-1] if step is None else step
    model, notes = Path(folder) / f"model_{step:06d}.pt", Path(folder) / f"meta_{step:06d}.json"
    try:
        meta = json.loads(notes.read_text(encoding="utf-8"))
        config = {"window_pattern": "L", **meta["model_config"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{str(notes)!r} must be JSON with a model_config, got {type(error).__name__}: {error}"
        ) from None
    loaded = torch.load(model, map_location="cpu", weights_only=True)
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in loaded.items()}
    config = {**config, **_widths(config, state)}
    return Checkpoint(_counted(shape_of(config), state), state, _plain(config), step, meta)


def _widths(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, int]:
    """head_dim and v_head_dim as the weights have them."""
    found = {}
    for name, part in (("head_dim", "c_k"), ("v_head_dim", "c_v")):
        rows, heads = state[f"transformer.h.0.attn.{part}.weight"].shape[0], config["n_kv_head"]
        if rows % heads or config.get(name) not in (None, rows // heads):
            said = f"n_kv_head {heads}" + (f", {name} {config[name]}" if config.get(name) else "")
            raise UsageError(f"{part} must have n_kv_head x {name} rows, got {rows} rows, {said}")
        found[name] = rows // heads
    return found


def _counted(shape: Shape, state: Mapping[str, Tensor]) -> Shape:
    """The shape with the extras that the weights have, whatever version of nanochat made them."""
    extras: dict[str, int] = {}
    for name, tensor in state.items():
        known = [label for prefix, label in _EXTRAS.items() if name.startswith(prefix)]
        known += ["value gates"] if name.endswith(".attn.ve_gate.weight") else []
        if known:
            extras[known[0]] = extras.get(known[0], 0) + tensor.numel()
    order = [name for name, _ in shape.extras if name in extras]
    shape = shape.replace(extras=tuple((name, extras[name]) for name in order))
    total = sum(tensor.numel() for tensor in state.values())
    if shape.params != total:
        raise UsageError(
            f"a nanochat model of this config has {shape.params} parameters, the checkpoint has "
            f"{total}"
        )
    return shape


# ---- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headwise.integrations.nanochat",
        description="Run one of nanochat's scripts with other attention heads.",
        epilog=(
            "example: python -m headwise.integrations.nanochat --num-heads 3 --head-dim 96 -- -m "
            "scripts.base_train --depth=4"
        ),
    )
    parser.add_argument("--num-heads", type=int, help="query heads; nanochat's number unless given")
    parser.add_argument(
        "--head-dim",
        type=int,
        help="rank of a head; with --num-heads alone dim / heads, else nanochat's",
    )
    parser.add_argument(
        "--v-head-dim", type=int, help="width of a head's values; the rank unless given"
    )
    parser.add_argument(
        "--num-kv-heads", type=int, help="KV heads; as many as query heads unless given"
    )
    parser.add_argument(
        "--logit-scale",
        type=float,
        help="factor of the scores; nanochat's 1.44 / sqrt(rank) unless given",
    )
    parser.add_argument(
        "--max-logit", type=float, help="instead: the largest score, held when the rank changes"
    )
    return parser


def main(words: Sequence[str]) -> int:
    """The command line: own options, two dashes, `-m` and a module of nanochat's with its own
    options."""
    own, script = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, ())
    )
    heads = vars(_parser().parse_args(own))
    try:
        if len(script) < 2 or script[0] != "-m":
            raise UsageError(
                "behind -- comes -m and a module of nanochat's, such as scripts.base_train, got "
                f"{' '.join(script)!r}"
            )
        with use(**heads), _arguments(script[1:]):
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _arguments(words: Sequence[str]) -> Iterator[None]:
    """sys.argv of a script, for its time."""
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before


if (
    __name__ == "__main__"
):  # the script becomes __main__ in its turn, so what it compiles must live elsewhere
    sys.exit(importlib.import_module("headwise.integrations.nanochat").main(sys.argv[1:]))
