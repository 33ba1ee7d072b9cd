// Which backend computes the attention of a shape, by the rules of src/headwise/model/backends.py;
// a test compares the two over random calls. `reason` says why in short: `headwise explain` says
// all of it.

"use strict";

const FEW_TILES = 2048, BLOCK_BYTES = 2 ** 28;
// The largest head width of cuDNN's attention is that of the GPU.
const MACHINES = [
  { name: "a CPU", device: "cpu", cudnn: 0 },
  { name: "an H100 or H200", device: "cuda", cudnn: 256 },
  { name: "another NVIDIA GPU", device: "cuda", cudnn: 128 },
];
const REASONS = {
  short: "few keys: elementwise over batch and heads",
  heads: "few tokens: whole heads in one program",
  cudnn: "fused, the fastest on Hopper",
  flash: "fused, scores never written out",
  efficient: "fused, scores never written out",
  wide: "beyond width 256: scores written out, one launch per product",
  plain: "matrix products, scores written out",
  blocked: "blocks of queries, scores of each written out",
};

const callOf = (shape, at, machine) => {
  const s = layerFields(shape, 0);
  // Weights of 8 and 4 bits are computed with in 16.
  const dtype = ["fp32", "bf16", "fp16"].includes(at.dtype) ? at.dtype : "bf16";
  return {
    device: machine.device, cudnn: machine.cudnn, half: dtype !== "fp32", batch: at.batch,
    heads: s.num_heads, keys: at.context, rank: s.head_dim, width: s.v_head_dim,
    causal: s.causal, masked: s.window > 0 && s.window < at.context,
  };
};

const upTo = (width, multiple) => Math.ceil(width / multiple) * multiple;

// Whether the work takes less time than the launches of several kernels.
const isFew = c => {
  if (c.device !== "cuda") return false;
  const tiles = c.batch * c.heads * Math.ceil(c.keys / 64) ** 2;
  return tiles * Math.max(64, c.rank, c.width) / 64 * (c.causal ? 0.5 : 1) <= FEW_TILES;
};

const scoreBytes = c => c.batch * c.heads * c.keys * c.keys * 4;

// Each takes the call, and answers with what is padded; or null, and the next is asked.
const TAKES = {
  short: c => {
    if (c.device !== "cpu" || c.masked || c.causal) return null;
    return (c.keys <= 8 && c.rank <= 8) || (c.keys <= 32 && c.rank <= 2) ? [0, 0] : null;
  },
  heads: c => {
    if (c.device !== "cuda" || c.masked || c.causal || isFew(c) || c.rank !== c.width) return null;
    const fits = c.keys <= (c.half ? 64 : 256) && c.rank <= 64;
    return fits && !(c.keys > 128 && c.rank > 16) ? [0, 0] : null;
  },
  cudnn: c => {
    const rank = upTo(c.rank, 8), width = upTo(c.width, 8);
    if (c.device !== "cuda" || !c.half || Math.max(rank, width) > c.cudnn) return null;
    return c.keys === 1 || c.masked ? null : [rank - c.rank, width - c.width];
  },
  flash: c => {
    const widest = Math.max(c.rank, c.width), pad = [widest - c.rank, widest - c.width];
    if (c.device === "cpu") return pad;
    if (!c.half || widest > 256 || c.masked) return null;
    return widest > 2 * Math.min(c.rank, c.width) ? null : pad;
  },
  plain_short: c => {
    const large = c.keys > 64 || scoreBytes(c) > 16 * BLOCK_BYTES;
    return isFew(c) || large ? null : [0, 0];
  },
  wide: c => (Math.max(c.rank, c.width) <= 256 || isFew(c) ? null : [0, 0]),
  efficient: c => {
    if (c.device !== "cuda" || (Math.max(c.rank, c.width) > 256 && !isFew(c))) return null;
    const step = c.half ? 8 : 4;
    return [upTo(c.rank, step) - c.rank, upTo(c.width, step) - c.width];
  },
  plain: c => (scoreBytes(c) > BLOCK_BYTES ? null : [0, 0]),
  blocked: () => [0, 0],
};

const orderOf = c => {
  const last = ["efficient", "plain", "blocked"];
  if (c.device === "cpu") {
    return c.half ? ["cudnn", "flash", "short", ...last] : ["short", "cudnn", "flash", ...last];
  }
  const first = c.half ? ["cudnn", "flash", "plain_short"] : ["plain_short", "cudnn", "flash"];
  return ["heads", ...first, "wide", ...last];
};

const backendOf = c => {
  for (const name of orderOf(c)) {
    const pad = TAKES[name](c);
    if (!pad) continue;
    const backend = name === "plain_short" ? "plain" : name;
    return { backend, pad, reason: REASONS[backend] };
  }
  throw new Error("blocked takes every call");
};
