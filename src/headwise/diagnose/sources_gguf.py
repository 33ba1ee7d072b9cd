"""GGUF files: header and tensors in 32 or 16 bits; quantised ones are refused by name.

Numbers are little-endian: magic "GGUF", version, counts, key-value pairs, then per tensor its name,
sizes (innermost first), type and offset from where the data begin.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from headwise.diagnose.sources import (
    MOST_TENSORS,
    Entry,
    Source,
    check_name,
    check_shape,
    read_bytes,
    regular_file,
)
from headwise.errors import UsageError, shown

DENSE = {0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16)}
DENSE |= {28: ("F64", torch.float64)}
MOST_TEXT = 1 << 20  # bytes of one text
MOST_ITEMS = 2_000_000  # of one list; vocabularies have up to a few hundred thousand
MOST_PAIRS = 10_000
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_TEXT, _LIST = 8, 9

# architecture -> model_type; those whose rows of queries and keys were permuted when they were
# written, so that neighbours rotate together.
MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "gpt2": "gpt2", "phi2": "phi", "phi3": "phi3", "falcon": "falcon",
    "bloom": "bloom", "mpt": "mpt", "starcoder2": "starcoder2", "olmo2": "olmo2",
    "granite": "granite", "bert": "bert", "gptneox": "gpt_neox", "command-r": "cohere",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "stablelm": "stablelm",
    "seed_oss": "seed_oss", "smollm3": "smollm3", "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3",
}  # fmt: skip
PERMUTED = ("llama", "granite", "smollm3", "olmo")


def open_gguf(path: Path) -> Source:
    """The tensors of one file."""
    size = regular_file(path).st_size
    try:
        with path.open("rb") as f:
            about, listed, begin = _header(f, path)
    except (struct.error, EOFError, UnicodeDecodeError, MemoryError, OverflowError):
        raise UsageError(f"{path} is no GGUF file, or truncated") from None
    align = about.get("general.alignment", 32)
    if not isinstance(align, int) or not 0 < align <= 1 << 20:
        raise UsageError(f"{path}: general.alignment cannot be {shown(align)}")
    data = -(-begin // align) * align
    entries: dict[str, Entry] = {}
    for name, shape, kind, offset in listed:
        check_name(name, path)
        shape = check_shape(shape[::-1], name, path)
        if name in entries:
            raise UsageError(f"{path}: {shown(name)} is there twice")
        label, bits = (
            (DENSE[kind][0], DENSE[kind][1].itemsize) if kind in DENSE else (f"type {kind}", 0)
        )
        length = math.prod(shape) * bits
        if data + offset + length > size:
            raise UsageError(f"{path}: {shown(name)} lies outside the file, or it is truncated")
        entries[name] = Entry(shape, label, path, data + offset, length)

    def read(name: str) -> Tensor:
        entry = entries[name]
        dtypes = dict(DENSE.values())
        if entry.dtype not in dtypes:
            raise UsageError(
                f"{shown(name)} in {path} is quantised ({entry.dtype}): needs F32, F16 or BF16; "
                "write the file again with --outtype f16"
            )
        if not entry.size:
            return torch.zeros(entry.shape)
        raw = read_bytes(path, entry.start, entry.size)
        return torch.frombuffer(raw, dtype=dtypes[entry.dtype]).view(entry.shape)

    return Source("GGUF", entries, read, about)


def _header(f: BinaryIO, path: Path) -> tuple[dict[str, Any], list[Any], int]:
    """Key-value pairs, (name, sizes, type, offset) of the tensors, and where the header ends."""
    magic, version, tensors, pairs = struct.unpack("<4sIQQ", _take(f, 24))
    if magic != b"GGUF" or version not in (2, 3):
        raise UsageError(f"{path} is no GGUF file of version 2 or 3")
    if tensors > MOST_TENSORS or pairs > MOST_PAIRS:
        raise UsageError(f"{path} says {tensors:,} tensors and {pairs:,} pairs")
    about: dict[str, Any] = {}
    for _ in range(pairs):
        key = _text(f)
        about[key] = _value(f, _number(f, "I"), path)
    listed = []
    for _ in range(tensors):
        name, axes = _text(f), _number(f, "I")
        if axes > 8:
            raise UsageError(f"{path}: {shown(name)} has {axes} axes")
        shape = [_number(f, "Q") for _ in range(axes)]
        listed.append((name, shape, _number(f, "I"), _number(f, "Q")))
    return about, listed, f.tell()


def _take(f: BinaryIO, size: int) -> bytes:
    data = f.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _number(f: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", _take(f, struct.calcsize(code)))[0]


def _text(f: BinaryIO) -> str:
    size = _number(f, "Q")
    if size > MOST_TEXT:
        raise EOFError
    return _take(f, size).decode("utf-8")


def _value(f: BinaryIO, kind: int, path: Path, deep: int = 0) -> Any:
    """One value; of a list its numbers where there are few, else how many there are."""
    if kind in _NUMBERS:
        return _number(f, _NUMBERS[kind])
    if kind == _TEXT:
        size = _number(f, "Q")
        if size > MOST_TEXT << 4:
            raise EOFError
        return _take(f, size).decode("utf-8", "replace")
    if kind != _LIST or deep > 2:
        raise UsageError(f"{path}: a value has an unknown type {kind}")
    inner, count = _number(f, "I"), _number(f, "Q")
    if count > MOST_ITEMS:
        raise UsageError(f"{path}: a list of {count:,} values")
    if inner in _NUMBERS:
        code = _NUMBERS[inner]
        return list(struct.unpack(f"<{count}{code}", _take(f, count * struct.calcsize(code))))
    return [_value(f, inner, path, deep + 1) for _ in range(count)]


def config_of(source: Source) -> dict[str, Any]:
    """What the header says of the model, under Hugging Face's names."""
    about = source.about
    arch = about.get("general.architecture")
    if not isinstance(arch, str):
        raise UsageError("a GGUF file must say general.architecture")
    keys = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "v_head_dim": "attention.value_length",
        "intermediate_size": "feed_forward_length",
        "rope_theta": "rope.freq_base",
        "rotary_dim": "rope.dimension_count",
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
    }
    found = {name: about.get(f"{arch}.{key}") for name, key in keys.items()}
    config = {name: value for name, value in found.items() if value is not None}
    tokens = about.get("tokenizer.ggml.tokens")
    config["vocab_size"] = len(tokens) if isinstance(tokens, list) and tokens else 1
    return {"model_type": MODEL_TYPES.get(arch, arch), "gguf": True, **config}
