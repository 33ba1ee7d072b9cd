"""A checkpoint of any format: its tensors, what its config says, and which tensors are whose.

    checkpoint = open_checkpoint("path/to/folder")
    checkpoint.heads(0)                       # the first layer's, in float64

Opening reads headers; tensors are read when a layer is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.configs import read_config
from headwise.configs.families import text_of
from headwise.configs.values import is_nanochat
from headwise.diagnose import names, sources, sources_gguf, sources_torch
from headwise.diagnose.config_layouts import family_of, layouts_of
from headwise.diagnose.layouts import Heads, Layout, heads_of
from headwise.diagnose.names import Mapped, Named
from headwise.diagnose.sources import Source, read_table, regular_file, shards_of
from headwise.errors import UsageError, one_line, shown
from headwise.files import read_json
from headwise.shape import Shape

WANTED = (
    "a Hugging Face folder, model.safetensors or its index, a PyTorch state dict, nanochat's "
    "folder, a .gguf, a TensorFlow.js model.json, or the folder of a run of headwise"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The attention layers of a model on disk."""

    path: Path
    source: Source
    family: str  # the config's model_type, "headwise", or "mapped"
    config: Mapping[str, Any] | None
    shape: Shape | None  # where its config says one; of hybrids the attention layers
    layers: tuple[Named, ...]
    layouts: tuple[Layout, ...]  # one per layer
    notes: tuple[str, ...]

    @property
    def depth(self) -> int:
        return len(self.layers)

    def parts(self, i: int) -> dict[str, Tensor]:
        """The tensors of one layer's attention, as they are stored."""
        return {part: self.source.read(name) for part, name in self.layers[i].parts.items()}

    def heads(self, i: int) -> Heads:
        """One layer's heads."""
        return heads_of(self.parts(i), self.layouts[i], f"layer {self.layers[i].index}: ")

    def bytes(self) -> int:
        """Of all its files' tensors."""
        return sum(entry.size for entry in self.source.entries.values())


def open_checkpoint(
    path: str | Path,
    *,
    mapping: str | Path | None = None,
    config: str | Path | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    prefix: str | None = None,
) -> Checkpoint:
    """Open a checkpoint by reading its headers.

    `mapping` names the tensors of a code base that is not known here (see `names.read_mapping`),
    `config` is a config.json that lies elsewhere, `num_heads` stands in where there is none, and
    `prefix` picks one of several stacks.
    """
    place = Path(path)
    source, beside = _open(place)
    if mapping is not None:
        return _mapped(place, source, names.read_mapping(mapping))
    found, shape, notes = _config(source, beside if config is None else Path(config))
    layers, others = _named(source, shape, prefix)
    if others:
        notes.append(f"stacks that are left out: {', '.join(sorted(others)[:5])}")
    if not layers:
        few = ", ".join(sorted(source.entries)[:3])
        raise UsageError(
            f"no attention is recognised in {str(path)!r} among {len(source.entries):,} tensors "
            f"({few} ...); --mapping FILE names its tensors"
        )
    family = family_of(found, shape)
    layers, layouts, more = layouts_of(
        layers, family, found, shape, num_heads, num_kv_heads, source.kind
    )
    notes += more + _unused(source, layers)
    return Checkpoint(
        path=place, source=source, family=family, config=found, shape=shape, layers=tuple(layers),
        layouts=tuple(layouts), notes=tuple(notes),
    )  # fmt: skip


# ---- which file


def _open(path: Path) -> tuple[Source, Path | None]:
    """The tensors at a path, and the config that lies with them."""
    if path.is_dir():
        path = _in_folder(path)
    if (match := re.fullmatch(r"model_(\d+)\.pt", path.name)) is not None:
        return sources_torch.open_torch([path]), path.with_name(f"meta_{match[1]}.json")
    beside = path.parent / "config.json"
    config = beside if beside.is_file() else None
    regular_file(path)
    if path.suffix == ".json":
        if sources.is_json_with(path, "weightsManifest"):
            return sources.open_tfjs(path), config
        if not sources.is_json_with(path, "weight_map"):
            raise UsageError(f"{str(path)!r} is no index of weights; a checkpoint is {WANTED}")
        shards = shards_of(path)
        if all(shard.suffix == ".safetensors" for shard in shards):
            return sources.open_safetensors(shards), config
        return sources_torch.open_torch(shards), config
    with path.open("rb") as f:
        start = f.read(16)
    if start[:4] == b"GGUF":
        return sources_gguf.open_gguf(path), None
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return sources.open_safetensors([path]), config
    return sources_torch.open_torch([path]), config


def _in_folder(folder: Path) -> Path:
    """The file to begin with in a folder."""
    for name in (
        "model.safetensors.index.json", "model.safetensors", "weights.safetensors",
        "pytorch_model.bin.index.json", "pytorch_model.bin", "checkpoint.safetensors",
    ):  # fmt: skip
        if (folder / name).exists():
            return folder / name
    nanochat = sorted(folder.glob("model_*.pt"))
    if nanochat:
        return nanochat[-1]
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.gguf", "*.pt", "*.pth", "*.bin",
                    "model.json"):  # fmt: skip
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            some = ", ".join(one.name for one in found[:4])
            raise UsageError(
                f"{str(folder)!r} has {len(found)} files {pattern}: name one of {some}"
            )
    raise UsageError(f"no checkpoint in {str(folder)!r}; give {WANTED}")


# ---- what the config says


def _config(
    source: Source, path: Path | None
) -> tuple[Mapping[str, Any] | None, Shape | None, list[str]]:
    """The config, the shape that it says, and why not."""
    if "run" in source.about:
        try:
            return None, Shape.of(read_json(source.about["run"])["shape"]), []
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"the run in its metadata cannot be read: {one_line(error)}") from None
    if source.kind == "GGUF":
        config = sources_gguf.config_of(source)
    elif path is None:
        return None, None, []
    else:
        try:
            config = read_config(path)
        except UsageError:
            config = read_table(path, "config")
    return config, *_shape(config)


def _shape(config: Mapping[str, Any]) -> tuple[Shape | None, list[str]]:
    if config.get("model_type") is None and not is_nanochat(config):
        return None, ["the config has no model_type: sizes are read off the tensors"]
    part = "text" if text_of(config) else None
    first = ""
    for way in (part, "attention"):
        try:
            return Shape.from_hf(config, part=way), []
        except UsageError as error:
            first = first or str(error)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            first = first or f"the config cannot be read: {error}"
    return None, [f"sizes are read off the tensors, since {first[:200]}"]


def _named(
    source: Source, shape: Shape | None, prefix: str | None
) -> tuple[list[Named], list[str]]:
    """The layers; of a run of ours that is under way its weights, not its moments."""
    ours = "run" in source.about
    if ours and prefix is None and any(n.startswith("weights.blocks") for n in source.entries):
        prefix = "weights.blocks"
    layers, others = names.named_layers(source.entries, prefix, shape.depth if shape else None)
    if ours and shape is not None and shape.latent:
        renamed = {"q_norm": "q_a_norm", "kv": "kv_b"}
        layers = [
            Named(one.index, {renamed.get(p, p): n for p, n in one.parts.items()}) for one in layers
        ]
    return layers, [] if ours else others


def _unused(source: Source, layers: list[Named]) -> list[str]:
    """Tensors beside those of attention that are not taken into account, by their names."""
    used = {name for layer in layers for name in layer.parts.values()}
    places = {name.rpartition(".")[0].rpartition(".")[0] for name in used}
    left = sorted(
        {
            name[len(place) + 1 :]
            for name in source.entries
            if name not in used
            for place in (name.rpartition(".")[0].rpartition(".")[0],)
            if place in places and place.endswith(("attn", "attention", "self"))
        }
    )
    known = ("rotary_emb", "masked_bias", "bias", "inv_freq", "sinks", "attn_bias", "out_bias")
    left = [n for n in left if not n.startswith(known) and "orm" not in n.partition(".")[0][:5]]
    left = [name for name in left if "LayerNorm" not in name]
    return [f"beside the heads, not taken into account: {', '.join(left[:6])}"] if left else []


# ---- by a mapping file


def _mapped(path: Path, source: Source, mapped: Mapped) -> Checkpoint:
    layers = names.mapped_layers(mapped, source.entries)
    if not layers:
        wanted = ", ".join(list(mapped.parts.values())[:2])
        some = ", ".join(sorted(source.entries)[:3])
        raise UsageError(f"no layer has the names of the mapping ({wanted}); there: {shown(some)}")
    sizes = mapped.sizes
    layout = Layout(num_heads=sizes["num_heads"])
    known = {f.name for f in dataclasses.fields(Layout)}
    given = {name: value for name, value in sizes.items() if name in known}
    layout = dataclasses.replace(layout, **given)
    return Checkpoint(
        path=path, source=source, family="mapped", config=None, shape=None, layers=tuple(layers),
        layouts=(layout,) * len(layers), notes=(),
    )  # fmt: skip
