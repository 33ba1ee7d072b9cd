"""Bad files of configs, rows, tokenizers and nanochat's checkpoints."""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
from typing import Any

import torch
from support.tokenizer import trained_tokenizer

from tests.fuzz.cases import Case, File, special, spoiled_file
from tests.fuzz.options import QUICKLY
from tests.fuzz.values import document_text, text_of

SIZES = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 5, "n_routed_experts": None, "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": None,
             "vocab_size": 101, "activation_function": "gelu_new", "scale_attn_weights": True},
    "llama": {**SIZES, "head_dim": 6, "hidden_act": "silu", "attention_bias": False,
              "mlp_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "mistral": {**SIZES, "sliding_window": 7},
    "qwen2": {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
              "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {**SIZES, "head_dim": 8, "attention_bias": True},
    "gemma": {**SIZES, "head_dim": 6, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {**SIZES, "head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 9},
    "gemma3_text": {**SIZES, "head_dim": 6, "sliding_window_pattern": 2, "sliding_window": 9},
    "gemma3": {"text_config": {**SIZES, "head_dim": 6}},
    "phi": {**SIZES, "hidden_size": 32, "num_key_value_heads": 4, "hidden_act": "gelu",
            "partial_rotary_factor": 0.5},
    "phi3": {**SIZES, "partial_rotary_factor": 1.0, "sliding_window": None},
    "deepseek_v2": {**SIZES, **LATENT}, "deepseek_v3": {**SIZES, **LATENT},
    "bert": {**SIZES, "num_key_value_heads": None, "type_vocab_size": 2, "hidden_act": "gelu"},
    "vit": {"hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_channels": 3},
    "nanochat": {**SIZES},
}  # fmt: skip
OWN_NANOCHAT = {
    "sequence_len": 160, "vocab_size": 101, "n_layer": 2, "n_head": 4, "n_kv_head": 2,
    "n_embd": 40, "window_pattern": "SL",
}  # fmt: skip


def configs(rng: random.Random) -> Case:
    """A config.json, of Hugging Face or nanochat, for the commands that take one."""
    family = rng.choice((*FAMILIES, ""))
    document = {**FAMILIES[family], "model_type": family} if family else OWN_NANOCHAT
    content: File = document_text(rng, document)
    if rng.random() < 0.05:
        content = special(rng, "config.json")
    if rng.random() < 0.1:
        document = {**document, "auto_map": {"AutoModel": "RAN.py"}, "architectures": ["RAN"]}
        content = text_of(document)
    command = rng.choice(("cost",) * 5 + ("policies", "explain", "infer", "pretrain"))
    name = rng.choice(("config.json", "config.json", ".", "config.txt"))
    words = [command, name]
    if command == "infer":
        words += ["--tokens", "8", "--steps", "3", "--batch", "1"]
    if command == "pretrain":
        words += ["--steps", "1", "--batch-tokens", "8", "--length", "4", "--text", "book.txt"]
        words += ["--evals", "1", "--eval-tokens", "8"]
    file = "config.json" if name == "." else name
    return Case(tuple(words), {file: content, "book.txt": b"some words\n" * 30})


# ---- rows


def row_of(seed: int) -> dict[str, Any]:
    """A row as fig1 has it."""
    return {
        "id": f"{seed:016x}", "status": "done", "task": "farthest", "dim": 4, "depth": 1,
        "num_heads": 1, "head_dim": 4, "ffn_dim": 8, "average": 1, "protocol": "stream",
        "steps": 4, "epoch": 2, "seed": seed, "params": 100, "flops": 1000, "points": 4,
        "zero_error": 1.0, "held_out": 0.5, "train_best": 0.4, "curve": [0.6, 0.4],
        "held_out_curve": [[1, 0.6], [2, 0.5]], "seconds": 0.1, "device": "cpu", "lr": 0.01,
        "commit": "abc", "finished": "2026-01-01T00:00:00Z", "num_kv_heads": 1, "v_head_dim": 4,
        "kv_lora_rank": 0, "causal": False, "schedule": "published", "precision": "fp32",
        "kappa_start": 10.0, "kappa_end": 5.0, "batch": 4, "windows": [0],
    }  # fmt: skip


SHOWN = ("fig1", "map", "leaner") * 4 + (
    "removable", "regression", "length", "learned", "theory", "pretrain", "conditioning",
    "features", "positions", "nanochat_heads", "thin_keys",
)  # fmt: skip


def rows(rng: random.Random) -> Case:
    """Files of rows for `draw` and `run --rows`."""
    good = [row_of(seed) for seed in range(rng.randint(1, 4))]
    lines = [text_of(row) for row in good]
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(lines))
        lines[i] = document_text(rng, good[i])
    end = rng.choice((b"\n", b"\n", b"\r\n", b"\n\n", b"", b","))
    content: File = end.join(lines) + end
    if rng.random() < 0.08:
        content = special(rng, "rows.jsonl")
    if rng.random() < 0.06:
        content = spoiled_file(rng, "rows.jsonl", b"\n".join(lines))
    if rng.random() < 0.7:
        words = ["draw", rng.choice(SHOWN), "rows.jsonl", "--output", "out.svg"]
        if rng.random() < 0.2:
            words += ["--view", rng.choice(("depth", "layers", "summary", "examples", "none"))]
    else:
        words = ["run", rng.choice(SHOWN), *QUICKLY, "--no-train", "--store", "store",
                 "--rows", "rows.jsonl"]  # fmt: skip
    return Case(tuple(words), {"rows.jsonl": content}, store=rng.random() < 0.3)


# ---- tokenizers


@functools.cache
def tokenizer_text() -> bytes:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return Path(trained_tokenizer(Path(folder) / "tokenizer.json")).read_bytes()


def tokenizers(rng: random.Random) -> Case:
    """A tokenizer's JSON file for `pretrain`."""
    data = tokenizer_text()
    if rng.random() < 0.6:
        document = json.loads(data)
        document["model"]["vocab"] = dict(list(document["model"]["vocab"].items())[:280])
        document["model"]["merges"] = []
        data = document_text(rng, document)
    content = spoiled_file(rng, "t.json", data) if rng.random() < 0.5 else data
    words = ["pretrain", "--tokenizer", "t.json", "--text", "book.txt", "--steps", "1"]
    words += ["--batch-tokens", "8", "--length", "4", "--evals", "1", "--eval-tokens", "8"]
    words += ["--device", "cpu", "--set", "dim=8", "depth=1", "num_heads=1"]
    return Case(tuple(words), {"t.json": content, "book.txt": b"some words\n" * 30})


# ---- nanochat's checkpoints, read in Python


def nanochat_state(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights by nanochat's names, of zeros."""
    dim, heads, kv = config["n_embd"], config["n_head"], config["n_kv_head"]
    width, vocab = dim // heads, -(-config["vocab_size"] // 64) * 64
    state = {
        "transformer.wte.weight": torch.zeros(vocab, dim),
        "lm_head.weight": torch.zeros(vocab, dim),
    }
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}"
        state |= {
            f"{block}.attn.c_q.weight": torch.zeros(heads * width, dim),
            f"{block}.attn.c_k.weight": torch.zeros(kv * width, dim),
            f"{block}.attn.c_v.weight": torch.zeros(kv * width, dim),
            f"{block}.attn.c_proj.weight": torch.zeros(dim, heads * width),
            f"{block}.mlp.c_fc.weight": torch.zeros(4 * dim, dim),
            f"{block}.mlp.c_proj.weight": torch.zeros(dim, 4 * dim),
        }
    return state


def nanochat_files() -> dict[str, File]:
    """A checkpoint's two files."""
    out = io.BytesIO()
    torch.save(nanochat_state(OWN_NANOCHAT), out)
    meta = text_of({"step": 10, "model_config": OWN_NANOCHAT})
    return {"model_000010.pt": out.getvalue(), "meta_000010.json": meta}


class Runs:
    """What a hostile pickle holds: reading it would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("RAN", "w")


def nanochat_checkpoints(rng: random.Random) -> Case:
    """A folder with model_*.pt and meta_*.json for `nanochat.checkpoints.read`."""
    state: Any = nanochat_state(OWN_NANOCHAT)
    how = rng.random()
    if how < 0.15:
        state["x"] = Runs()
    elif how < 0.3:
        state = rng.choice((Runs(), [], None, 3, {"a": 1}, {1: torch.zeros(2)}, torch.zeros(3)))
    elif how < 0.6:
        name = rng.choice(sorted(state))
        state[name] = rng.choice(
            (torch.zeros(3), torch.zeros(0), torch.tensor(1.0), None, 5, "x", state[name].half())
        )
    elif how < 0.7:
        del state[rng.choice(sorted(state))]
    out = io.BytesIO()
    torch.save(state, out)
    model: File = out.getvalue()
    if rng.random() < 0.1:
        model = pickle.dumps(Runs())
    if rng.random() < 0.3:
        model = spoiled_file(rng, "model_000010.pt", bytes(out.getvalue()))
    meta: File = text_of({"step": 10, "model_config": OWN_NANOCHAT})
    if rng.random() < 0.5:
        meta = document_text(rng, {"step": 10, "model_config": OWN_NANOCHAT})
    elif rng.random() < 0.1:
        meta = special(rng, "meta_000010.json")
    name = rng.choice(("model_000010.pt",) * 6 + ("model_x.pt", f"model_{'9' * 30}.pt"))
    words = rng.choice((("nanochat", "."),) * 5 + (("nanochat", ".", "10"), ("nanochat", "none")))
    return Case(words, {name: model, "meta_000010.json": meta}, command="python")
