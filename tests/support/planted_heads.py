"""Heads that are planted, checkpoints that hold them in every layout, and their dense forms."""

import json
import struct

import torch
from safetensors.torch import save_file
from support.tolerance import seeded

from headwise.model.rotary import rotate


def planted(H=6, K=3, R=8, V=5, D=29, seed=1, dtype=torch.float64):
    """Queries (H, R, D), keys (K, R, D), values (K, V, D) and outputs (H, V, D)."""
    g = seeded(seed)
    sizes = ((H, R, D), (K, R, D), (K, V, D), (H, V, D))
    return tuple(torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes)


def dense(q, k):
    """Q_h^T K_g of every head, written out (H, D, D)."""
    return q.mT @ k.repeat_interleave(len(q) // len(k), 0)


def at_distance(q, k, distance, width, theta, place="last"):
    """The same with queries `distance` tokens behind their keys, rotated as `Attention` does."""

    def turned(x, start):
        rows = rotate(x.mT[..., None, :], width, theta, start, at=place)
        return rows[..., 0, :].mT

    return dense(turned(q, distance + 3), turned(k, 3))


def figures(form):
    """Ranks and condition of one dense form of rank `rank` at most, by its own SVD."""
    s = torch.linalg.svdvals(form)
    energy = s.square() / s.square().sum()
    counts = [int((energy.cumsum(0) < share - 1e-12).sum()) + 1 for share in (0.9, 0.99, 0.999)]
    entropy = -(energy[energy > 0] * energy[energy > 0].log()).sum()
    return {
        "effective": float(entropy.exp()),
        "stable": float(s.square().sum() / s[0] ** 2),
        "ranks": counts,
        "s": s,
    }


def lies(form):
    """Its symmetric share, and its angle to the identity."""
    symmetric = (form + form.T) / 2
    cosine = form.trace() / (form.norm() * len(form) ** 0.5)
    return float((symmetric.norm() / form.norm()) ** 2), float(cosine.acos().rad2deg())


# ---- layouts: (config, tensors of layer 0)


def _rows(t):
    return t.flatten(0, 1).contiguous()


def _config(q, k, **more):
    H, R, D = q.shape
    return {
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": H,
        "num_key_value_heads": len(k), "head_dim": R, "intermediate_size": 31, "vocab_size": 37,
        **more,
    }  # fmt: skip


def separate(q, k, v, o, before="model.layers.0.self_attn", **more):
    names = {"q_proj": q, "k_proj": k, "v_proj": v}
    tensors = {f"{before}.{name}.weight": _rows(t) for name, t in names.items()}
    tensors[f"{before}.o_proj.weight"] = _rows(o).T.contiguous()
    return _config(q, k, **more), tensors


def fused(q, k, v, o):
    """One after another, as in Phi-3."""
    config = _config(q, k, model_type="phi3")
    return config, {
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat([_rows(t) for t in (q, k, v)]),
        "model.layers.0.self_attn.o_proj.weight": _rows(o).T.contiguous(),
    }


def grouped(q, k, v, o):
    """Per KV head its queries, its key and its value, as in Falcon."""
    K, D = len(k), q.shape[2]
    blocks = torch.cat((q.reshape(K, -1, D), k, v), 1)
    config = {
        "model_type": "falcon", "hidden_size": D, "num_hidden_layers": 1,
        "num_attention_heads": len(q), "num_kv_heads": K, "new_decoder_architecture": True,
        "vocab_size": 37, "ffn_hidden_size": 31,
    }  # fmt: skip
    return config, {
        "transformer.h.0.self_attention.query_key_value.weight": _rows(blocks),
        "transformer.h.0.self_attention.dense.weight": _rows(o).T.contiguous(),
    }


def transposed(q, k, v, o):
    """(inputs, outputs), as in GPT-2."""
    config = {"model_type": "gpt2", "n_embd": q.shape[2], "n_layer": 1, "n_head": len(q),
              "vocab_size": 37, "n_positions": 41}  # fmt: skip
    return config, {
        "h.0.attn.c_attn.weight": torch.cat([_rows(t) for t in (q, k, v)]).T.contiguous(),
        "h.0.attn.c_attn.bias": torch.zeros(3 * q.shape[0] * q.shape[1]),
        "h.0.attn.c_proj.weight": _rows(o),
    }


def codegen(q, k, v, o):
    """Four parts, each queries, values, keys."""
    parts = [t.reshape(4, -1, q.shape[2]) for t in (q, v, k)]
    config = {"model_type": "codegen", "n_embd": q.shape[2], "n_layer": 1, "n_head": len(q),
              "vocab_size": 37, "rotary_dim": 4, "n_positions": 41}  # fmt: skip
    return config, {
        "transformer.h.0.attn.qkv_proj.weight": torch.cat(parts, 1).flatten(0, 1).contiguous(),
        "transformer.h.0.attn.out_proj.weight": _rows(o).T.contiguous(),
    }


def write(folder, config, tensors):
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


# ---- GGUF, written out by hand


def permuted(rows, heads):
    """As llama.cpp writes rows of queries and keys, so that neighbours rotate together."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf(path, about, tensors, kinds=None):
    """A GGUF file of these pairs and tensors in 32 bits; `kinds` names other types by tensor."""

    def text(s):
        return struct.pack("<Q", len(s.encode())) + s.encode()

    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(about))
    for key, value in about.items():
        if isinstance(value, str):
            out += text(key) + struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            out += text(key) + struct.pack("<IIQ", 9, 8, len(value))
            out += b"".join(text(item) for item in value)
        else:
            code = (6, "f") if isinstance(value, float) else (4, "I")
            out += text(key) + struct.pack(f"<I{code[1]}", code[0], value)
    offset, data = 0, b""
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name, 0)
        out += text(name) + struct.pack("<I", tensor.ndim)
        out += b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape))
        out += struct.pack("<IQ", kind, offset)
        raw = tensor.float().contiguous().numpy().tobytes()
        raw += bytes(-len(raw) % 32)
        data += raw
        offset += len(raw)
    path.write_bytes(out + bytes(-len(out) % 32) + data)
    return path
