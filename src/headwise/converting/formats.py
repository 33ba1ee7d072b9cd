"""Where a converted checkpoint goes: a Hugging Face folder, or a run of headwise.

A plan says every tensor of the result before anything is computed: which are copied, and which are
parts of a layer's new heads.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.configs.values import rope_setting
from headwise.converting.latent import InputNorm, LatentMaps
from headwise.converting.maps import HeadMaps
from headwise.converting.parts import raw_heads, stored_parts
from headwise.converting.writing import NAMES, Piece, copied, made, write_model, write_pieces
from headwise.diagnose.checkpoints import Checkpoint
from headwise.diagnose.config_layouts import OURS
from headwise.diagnose.layouts import Heads
from headwise.errors import UsageError
from headwise.rows import WEIGHTS_FILE
from headwise.shape import Shape

FORMATS = ("same", "headwise", "hf")
# Families whose classes in transformers are tested here: scores are scaled as their config says,
# and those but gpt2 read head_dim.
WITH_HEAD_DIM = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "mixtral")
FAMILIES = (*WITH_HEAD_DIM, "gpt2")
ELEMENTWISE = ("default", "linear", "llama3")  # kinds of rope scaling that see a frequency alone
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")  # small files that come along
MOST_BESIDE = 64 << 20


@dataclass(frozen=True, kw_only=True)
class NewHeads:
    """What one layer's heads become."""

    maps: HeadMaps
    latent: LatentMaps | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """A format that a target fits: its scale of the scores, and how it is written."""

    name: str
    shape: Shape  # as it is read back
    write: Callable[[Path, Callable[[int], NewHeads]], None]


def output_of(checkpoint: Checkpoint, target: Shape, name: str, power: float) -> Output:
    """How a target is written; refused where a format cannot say it.

    `power` is that of the base of rotary positions.
    """
    ours = checkpoint.family == OURS
    if not ours and checkpoint.source.kind not in ("safetensors", "PyTorch"):
        raise UsageError(f"a {checkpoint.source.kind} file is read and not written; give a Hugging "
                         "Face folder or a run of headwise")  # fmt: skip
    if ours and name in ("same", "headwise"):
        return _run(checkpoint, target)
    if name == "headwise":
        from headwise.converting.runs import run_of_public

        return run_of_public(checkpoint, target)
    if ours:
        from headwise.converting.public_names import public_of_run

        return public_of_run(checkpoint, target)
    return _public(checkpoint, target, power)


# ---- runs of headwise


def _run(checkpoint: Checkpoint, target: Shape) -> Output:
    run = json.loads(checkpoint.source.about["run"]) | {"shape": target.spec()}

    def write(folder: Path, new: Callable[[int], NewHeads]) -> None:
        pieces = list(pieces_of_run(checkpoint, target, new))
        write_pieces(folder / WEIGHTS_FILE, pieces, {"run": json.dumps(run)})

    return Output(name="headwise", shape=target, write=write)


def pieces_of_run(
    checkpoint: Checkpoint, target: Shape, new: Callable[[int], NewHeads]
) -> Iterator[Piece]:
    """Every parameter of a run at another shape."""
    from headwise.model.transformer import build

    assert checkpoint.shape is not None
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in build(target).named_parameters()}
    stored = {name.removeprefix("weights."): name for name in checkpoint.source.entries}
    scale = checkpoint.shape.scale / target.scale
    layers = Layers(checkpoint, new, scale)
    for name, shape in wanted.items():
        words = name.split(".")
        inside = words[2:3] == ["attention"] and words[3] != "out_bias"
        norm = target.latent and words[2:] == ["norm1", "bias"]
        if not (words[0] == "blocks" and (inside or norm)):
            if name not in stored:
                raise UsageError(f"the run has no weights {name}")
            yield copied(checkpoint.source, stored[name], name)
            continue
        i, rest = int(words[1]), ".".join(words[2:]).removeprefix("attention.")
        yield made(name, _dtype(checkpoint, i), shape, layers.getter(i, rest))


def _dtype(checkpoint: Checkpoint, i: int) -> str:
    """Of a layer's projection, as safetensors names it."""
    parts = checkpoint.layers[i].parts
    entry = checkpoint.source.entries[parts.get("qkv") or parts["q"]]
    return entry.dtype if checkpoint.source.kind == "safetensors" else _torch_name(entry.dtype)


def _torch_name(dtype: str) -> str:
    return NAMES[getattr(torch, dtype)]


class Layers:
    """New parts layer by layer, the last layer's kept: its tensors follow each other."""

    def __init__(
        self, checkpoint: Checkpoint, new: Callable[[int], NewHeads], scale: float
    ) -> None:
        self.checkpoint, self.new, self.scale = checkpoint, new, scale
        self.found: tuple[int, dict[str, Tensor]] = -1, {}

    def heads(self, i: int) -> tuple[Heads, dict[str, Tensor], NewHeads]:
        """One layer's new heads before a latent, and its old parts."""
        parts = self.checkpoint.parts(i)
        where = f"layer {self.checkpoint.layers[i].index}: "
        shape = self.checkpoint.shape
        heads = raw_heads(parts, self.checkpoint.layouts[i], shape, where)
        new = self.new(i)
        return new.maps.weights(heads, self.scale), parts, new

    def parts(self, i: int) -> dict[str, Tensor]:
        """New tensors of one layer by what stands behind its attention's name (ours), or by part
        (public ones)."""
        if self.found[0] != i:
            heads, parts, new = self.heads(i)
            if new.latent is not None:
                made_parts = new.latent.parts(heads, self._norm(i))
            else:
                made_parts = stored_parts(heads, parts, self.checkpoint.layouts[i])
            if self.checkpoint.family == OURS and new.latent is None:
                ours = {"qkv": "qkv.weight", "qkv_bias": "qkv.bias", "o": "out.weight"}
                ours |= {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight"}
                made_parts = {ours.get(part, part): t for part, t in made_parts.items()}
            if new.latent is not None and "norm1.bias" not in made_parts:
                norm = self._norm(i)
                made_parts |= {} if norm is None else {"norm1.bias": norm.bias}
            self.found = i, made_parts
        return self.found[1]

    def getter(self, i: int, part: str) -> Callable[[], Tensor]:
        """One tensor, when its turn comes."""
        return lambda: self.parts(i)[part]

    def _norm(self, i: int) -> InputNorm | None:
        """The layer norm that attention alone reads from."""
        shape = self.checkpoint.shape
        if self.checkpoint.family != OURS or shape is None:
            return None
        if shape.norm != "layer" or shape.norm_at not in ("pre", "parallel-2"):
            return None
        stored = {n.removeprefix("weights."): n for n in self.checkpoint.source.entries}
        gain, bias = (
            self.checkpoint.source.read(stored[f"blocks.{i}.norm1.{n}"]).double()
            for n in ("weight", "bias")
        )
        return InputNorm(gain, bias)


# ---- Hugging Face folders


def _public(checkpoint: Checkpoint, target: Shape, power: float) -> Output:
    family, config = checkpoint.family, checkpoint.config
    if not checkpoint.path.is_dir():
        raise UsageError(f"give the folder of a Hugging Face model, got {str(checkpoint.path)!r}")
    if family not in FAMILIES or config is None:
        raise UsageError(f"convert writes {', '.join(FAMILIES)} and runs of headwise; this model "
                         f"is {family}")  # fmt: skip
    new = new_config(dict(config), family, checkpoint.shape, target, power)
    shape = Shape.from_hf(new)
    differing = [f.name for f in dataclasses.fields(shape)
                 if getattr(shape, f.name) != getattr(target, f.name)]  # fmt: skip
    if differing:
        says = ", ".join(f"{n} {getattr(target, n)} (it would be read as {getattr(shape, n)})"
                         for n in differing)  # fmt: skip
        none = "" if family in WITH_HEAD_DIM else f"; {family} has no head_dim of its own"
        raise UsageError(f"{family}'s config.json cannot say {says}{none}")
    scale = checkpoint.shape.scale / shape.scale  # type: ignore[union-attr]

    def write(folder: Path, heads: Callable[[int], NewHeads]) -> None:
        write_model(folder, list(pieces_of_public(checkpoint, target, heads, scale)),
                    {"format": "pt"})  # fmt: skip
        (folder / "config.json").write_text(json.dumps(new, indent=2) + "\n")
        _bring(checkpoint.path, folder)

    return Output(name="hf", shape=shape, write=write)


def new_config(
    config: dict[str, Any], family: str, old: Shape | None, target: Shape, power: float
) -> dict[str, Any]:
    """The config of a model at other sizes, everything else as it was."""
    assert old is not None
    config["n_head" if family == "gpt2" else "num_attention_heads"] = target.num_heads
    if family in WITH_HEAD_DIM:
        config["num_key_value_heads"] = target.num_kv_heads
        if target.head_dim != old.head_dim or "head_dim" in config:
            config["head_dim"] = target.head_dim
    if target.qk_rope_head_dim == old.qk_rope_head_dim:
        return config
    for table in _rope_tables(config):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ELEMENTWISE:
            raise UsageError(f"rotary positions of kind {kind!r} change with head_dim; convert "
                             f"knows {', '.join(ELEMENTWISE)}")  # fmt: skip
    if power != 1.0:
        found = False
        for table in (config, *_rope_tables(config)):
            if type(table.get("rope_theta")) in (int, float):
                table["rope_theta"] = float(table["rope_theta"]) ** power
                found = True
        if not found:
            config["rope_theta"] = rope_setting(config, "rope_theta", old.rope_theta) ** power
    return config


def _rope_tables(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings of rotary positions: of the model, or by kind of layer. They are copied first."""
    for key in ("rope_scaling", "rope_parameters"):
        table = config.get(key)
        if not isinstance(table, Mapping):
            continue
        config[key] = table = dict(table)
        inner = [name for name, value in table.items() if isinstance(value, Mapping)]
        for name in inner:
            table[name] = dict(table[name])
            yield table[name]
        if not inner:
            yield table


def pieces_of_public(
    checkpoint: Checkpoint, target: Shape, new: Callable[[int], NewHeads], scale: float
) -> Iterator[Piece]:
    """Every tensor of a Hugging Face model at another shape."""
    layers = Layers(checkpoint, new, scale)
    of_heads: dict[str, tuple[int, str]] = {}
    for i, layer in enumerate(checkpoint.layers):
        of_heads |= {name: (i, part) for part, name in layer.parts.items()}
    for name, entry in checkpoint.source.entries.items():
        if name not in of_heads:
            yield copied(checkpoint.source, name)
            continue
        i, part = of_heads[name]
        stored = entry.dtype
        dtype = stored if checkpoint.source.kind == "safetensors" else _torch_name(stored)
        shape = _new_shape(checkpoint, i, part, entry.shape, target)
        yield made(name, dtype, shape, layers.getter(i, part))


def _new_shape(
    checkpoint: Checkpoint, i: int, part: str, old: tuple[int, ...], target: Shape
) -> tuple[int, ...]:
    """A part's sizes to come."""
    H, K = target.num_heads, target.num_kv_heads
    R, V = target.head_dim, target.v_head_dim
    rows = {"q": H * R, "k": K * R, "v": K * V, "qkv": H * R + K * (R + V)}
    width = target.dim
    turned = bool(checkpoint.layouts[i].transposed)
    if part in rows:
        return (width, rows[part]) if turned else (rows[part], width)
    if part == "o":
        return (H * V, width) if turned else (width, H * V)
    kind, _, bias = part.partition("_")
    return (rows[kind],) if bias == "bias" and kind in rows else old


def _bring(source: Path, folder: Path) -> None:
    """Tokenizers and other small files."""
    for pattern in BESIDE:
        for path in sorted(source.glob(pattern)):
            index = path.name.endswith(".index.json")
            if path.name == "config.json" or index or (folder / path.name).exists():
                continue
            if path.is_file() and path.stat().st_size <= MOST_BESIDE:
                shutil.copyfile(path, folder / path.name)
