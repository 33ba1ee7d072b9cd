"""`use`: while it is on, nanochat builds its GPT with other heads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from headwise.errors import UsageError, nearest
from headwise.integrations.nanochat.configs import (
    ADDED,
    HEADS,
    heads_of,
    shape_of,
    unless_stock,
    with_heads,
    without_stock_sizes,
)
from headwise.integrations.nanochat.layers import (
    attention_class,
    cache_class,
    check_same_attention,
    model_class,
)
from headwise.shape import Shape


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
    hook = _Hook(
        _import_gpt(), shape, {name: value for name, value in heads.items() if value is not None}
    )
    pairs = hook.pairs()
    _replace(pairs)
    try:
        yield
        hook.check_built()
    finally:
        _replace([(new, old) for old, new in pairs])


def _import_gpt() -> ModuleType:
    try:
        gpt = importlib.import_module("nanochat.gpt")
    except ImportError as error:
        raise UsageError(
            "nanochat must be importable: run this in its checkout or put that on PYTHONPATH, "
            f"got: {error}"
        ) from None
    if gpt.GPT.__module__.startswith("headwise."):
        raise UsageError("nanochat already has other heads: leave the first `use` before the next")
    try:
        check_same_attention(gpt)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            "this nanochat's attention is not the one this hook knows, that of its commit "
            f"92d63d4, got: {said}"
        ) from error
    return gpt


def _replace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Put the second of each pair where nanochat and its scripts hold the first."""
    for path, module in list(sys.modules.items()):
        if module is None or path.split(".")[0] not in ("nanochat", "scripts", "__main__"):
            continue
        for name, value in list(vars(module).items()):
            for old, new in pairs:
                if value is old:
                    setattr(module, name, new)


class _Hook:
    """What is asked for, what it is for, and the classes that do it."""

    def __init__(self, gpt: ModuleType, shape: Shape | None, heads: dict[str, Any]) -> None:
        self.gpt = gpt
        self.shape = shape
        self.heads = heads if shape is None else heads_of(shape)
        # depth and dim of the model that gets the heads; without a shape those of the first model
        self.target = None if shape is None else (shape.depth, shape.dim)
        self.added: dict[tuple[int, ...], dict[str, Any]] = {}  # added fields by GPTConfig's own
        self.built = False  # whether a model got the heads
        self.config_class = self._config_class()

    def pairs(self) -> list[tuple[Any, Any]]:
        """(nanochat's, ours). Modules of nanochat's that lack a package here are left out, since
        nothing can import them."""
        gpt = self.gpt
        found: list[tuple[Any, Any]] = [
            (gpt.GPTConfig, self.config_class),
            (gpt.GPT, model_class(gpt.GPT, self.config_class)),
            (gpt.CausalSelfAttention, attention_class(gpt)),
        ]
        with contextlib.suppress(ImportError):
            save = importlib.import_module("nanochat.checkpoint_manager").save_checkpoint
            found.append((save, self._with_added_fields(save)))
            cache = importlib.import_module("nanochat.engine").KVCache
            found.append((cache, cache_class(cache)))
        return found

    def check_built(self) -> None:
        """Refuse heads that no model got."""
        if not self.heads or self.built:
            return
        which = ""
        if self.target is not None:
            which = f" of depth {self.target[0]} and dim {self.target[1]}"
        raise UsageError(f"no GPT{which} was built, so none got {self._heads_in_words()}")

    def _heads_in_words(self) -> str:
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
        asked = self._is_asked_for(config)
        named = any(getattr(config, name) is not None for name in ADDED)
        shape, scale = shape_of(config), config.logit_scale
        if asked and named:
            self._check_agreement(shape)
        elif asked:
            shape = with_heads(shape, self.heads)
            scale_is_given = "logit_scale" in self.heads or "max_logit" in self.heads
            scale = shape.scale if scale_is_given else None
        config.n_head, config.n_kv_head = shape.num_heads, shape.num_kv_heads
        config.head_dim, config.v_head_dim = shape.head_dim, shape.v_head_dim
        config.logit_scale = unless_stock(scale, shape.head_dim)
        self.added[_key(vars(config))] = {name: getattr(config, name) for name in ADDED}

    def _is_asked_for(self, config: Any) -> bool:
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

    def _check_agreement(self, shape: Shape) -> None:
        """A config that names its heads must name those that were asked for."""
        there = {name: getattr(shape, name) for name in HEADS} | {
            "logit_scale": shape.scale,
            "max_logit": shape.scale * shape.head_dim,
        }
        for name, value in self.heads.items():
            if not math.isclose(there[name], value, rel_tol=1e-9):
                raise UsageError(f"{name} of the config is {there[name]}, asked for was {value}")

    def _with_added_fields(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Its save_checkpoint; a script that lists the config's fields itself gets the added ones
        too."""
        signature = inspect.signature(save)

        @functools.wraps(save)
        def saving(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            meta = call.arguments["meta_data"]
            if isinstance(meta.get("model_config"), Mapping):
                config = {**meta["model_config"], **self.added.get(_key(meta["model_config"]), {})}
                call.arguments["meta_data"] = {**meta, "model_config": without_stock_sizes(config)}
            return save(*call.args, **call.kwargs)

        return saving


def _key(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The sizes of GPTConfig that a script may list itself."""
    return tuple(config[name] for name in ("n_layer", "n_embd", "n_head", "n_kv_head"))
