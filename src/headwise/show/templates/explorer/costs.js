// What a shape costs, in whole numbers of any length (BigInt). The formulas are those of
// src/headwise/shape/parameters.py and costs.py, under the same names; a test compares them with
// Python's over 10,000 random shapes, to the last unit.
//
// A shape is an object with every field of headwise.Shape; `layers` are objects that hold what
// layers have of their own.

"use strict";

const DTYPE_BITS = { fp32: 32n, bf16: 16n, fp16: 16n, fp8: 8n, int8: 8n, int4: 4n };
const WEIGHTS_ONLY = ["int8", "int4"]; // their caches have 16 bits
const GATED = ["swiglu", "geglu"];

const sum = numbers => numbers.reduce((a, b) => a + b, 0n);
const least = (a, b) => (a < b ? a : b);
const ceilingOf = (a, b) => (a + b - 1n) / b;
const commonMultiple = (a, b) => {
  let [x, y] = [a, b];
  while (y) [x, y] = [y, x % y];
  return (a / x) * b;
};

// ---- layers: what one of them is, letters for sizes as in the papers

const layerFields = (shape, i) => {
  const own = shape.layers.length ? shape.layers[i % shape.layers.length] : {};
  const fields = { ...shape, ...own, window: shape.windows[i % shape.windows.length] };
  if (shape.num_experts && own.num_experts === 0) {
    const none = { num_experts_per_tok: 0, expert_ffn_dim: 0, shared_ffn_dim: 0 };
    Object.assign(fields, none, { shared_gate: false, router_bias: false });
  }
  return fields;
};

const layerOf = f => ({
  ...f,
  D: BigInt(f.dim), H: BigInt(f.num_heads), KV: BigInt(f.num_kv_heads), R: BigInt(f.head_dim),
  V: BigInt(f.v_head_dim), C: BigInt(f.kv_lora_rank), Q: BigInt(f.q_lora_rank),
  rope: BigInt(f.qk_rope_head_dim), window: BigInt(f.window), average: BigInt(f.average),
  O: BigInt(f.o_lora_rank), groups: BigInt(f.o_groups), F: BigInt(f.ffn_dim),
  E: BigInt(f.num_experts), used: BigInt(f.num_experts_per_tok),
  expertF: BigInt(f.expert_ffn_dim), sharedF: BigInt(f.shared_ffn_dim),
  gated: GATED.includes(f.activation), latent: f.kv_lora_rank > 0,
  reuses: Boolean(f.reuses_kv),
});

// What each of the given layers is, as one word: layers that are equal are counted once.
const wordsOfLayers = new WeakMap();
const wordOfLayer = (layers, i) => {
  if (!layers.length) return "";
  if (!wordsOfLayers.has(layers)) wordsOfLayers.set(layers, layers.map(own => JSON.stringify(own)));
  return wordsOfLayers.get(layers)[i % layers.length];
};

// Layers that differ, and how many there are of each.
const kindsOf = shape => {
  const pattern = commonMultiple(shape.windows.length, shape.layers.length || 1);
  const run = Math.min(shape.depth, pattern), kinds = new Map();
  for (let i = 0; i < run; i++) {
    const word = `${wordOfLayer(shape.layers, i)}|${shape.windows[i % shape.windows.length]}`;
    const found = kinds.get(word) ?? [layerOf(layerFields(shape, i)), 0n];
    kinds.set(word, [found[0], found[1] + BigInt(Math.ceil((shape.depth - i) / run))]);
  }
  return [...kinds.values()];
};

// ---- parameters of one layer: matrices are [inputs, outputs, whether it has a bias]

const outputMatrices = s => {
  if (!s.O) return [[s.H * s.V, s.D, false]];
  const width = s.groups * s.O;
  return [[s.H * s.V / s.groups, width, false], [width, s.D, false]];
};

const attentionMatrices = s => {
  const found = s.Q
    ? [[s.D, s.Q, s.qkv_bias], [s.Q, s.H * s.R, false]]
    : [[s.D, s.H * s.R, s.qkv_bias && !s.latent]];
  if (s.latent) {
    found.push([s.D, s.C + s.rope, s.qkv_bias], [s.C, s.H * (s.R - s.rope + s.V), false]);
  } else if (!s.reuses) {
    const widths = s.shared_kv ? [s.KV * s.R] : [s.KV * s.R, s.KV * s.V];
    found.push(...widths.map(width => [s.D, width, s.qkv_bias]));
  }
  return [...found, ...outputMatrices(s)];
};

const gateMatrices = s => {
  const gates = { none: 0n, head: s.H, value: s.H * s.V }[s.attn_gate];
  const found = gates ? [[s.D, gates, s.qkv_bias]] : [];
  return s.shared_gate ? [...found, [s.D, 1n, false]] : found;
};

const numbersIn = matrices => sum(matrices.map(([a, b, bias]) => a * b + (bias ? b : 0n)));

const attentionParams = s => {
  const bias = s.out_bias ? s.average * s.D : 0n;
  const [query, key] = s.qk_norm === "head" ? [1n, 1n] : [s.H, s.KV];
  const gains = ["head", "all"].includes(s.qk_norm) ? s.R * (query + (s.reuses ? 0n : key)) : 0n;
  return numbersIn(attentionMatrices(s)) + bias + s.C + s.Q + gains;
};

const feedForward = (s, width) => {
  const hidden = width * (s.gated ? 2n : 1n);
  return s.D * (hidden + width) + (s.ffn_bias && width ? hidden + s.D : 0n);
};

const normParams = s =>
  ({ layer: 2n * s.D, "layer-nobias": s.D, rms: s.D, scalar: 1n })[s.norm] ?? 0n;

const normsPerLayer = s => {
  if (s.norm_at === "parallel") return 1n;
  const count = s.norm_at === "sandwich" ? 4n : 2n;
  return s.F || s.E ? count : count / 2n;
};

const layerParams = (s, active) => {
  const counts = {
    attention: attentionParams(s),
    gates: numbersIn(gateMatrices(s)),
    sinks: s.sinks ? s.H : 0n,
    norms: normsPerLayer(s) * normParams(s),
  };
  if (!s.E) return { ...counts, "feed-forward": feedForward(s, s.F) };
  return {
    ...counts,
    router: s.E * (s.D + (s.router_bias ? 1n : 0n)),
    experts: (active ? s.used : s.E) * feedForward(s, s.expertF),
    "shared experts": feedForward(s, s.sharedF),
  };
};

const positionRows = shape =>
  ({ none: 0, room: 1, alibi: 0 })[shape.positions] ?? shape.num_positions;

// Parameters by part; with `active` those that one token uses.
const paramTable = (shape, active = false, kinds = kindsOf(shape)) => {
  const D = BigInt(shape.dim), vocabulary = BigInt(shape.vocab_size);
  const input = BigInt(shape.input_dim), output = BigInt(shape.output_dim);
  const own = D - BigInt(shape.position_dim);
  const counts = {
    embedding: vocabulary * D,
    "read-in": input ? (input + 1n) * own : 0n,
    positions: BigInt(positionRows(shape)) * BigInt(shape.position_dim || shape.dim),
    attention: 0n, gates: 0n, sinks: 0n, "feed-forward": 0n,
    router: 0n, experts: 0n, "shared experts": 0n, norms: 0n,
  };
  for (const [layer, times] of kinds) {
    for (const [name, count] of Object.entries(layerParams(layer, active))) {
      counts[name] += times * count;
    }
  }
  if (shape.norm_at !== "post") counts.norms += normParams({ ...shape, D });
  counts.head = shape.lm_head && !shape.tied && !shape.output_dim ? vocabulary * D : 0n;
  counts["read-out"] = (D + 1n) * output;
  for (const [name, count] of shape.extras) counts[name] = (counts[name] ?? 0n) + BigInt(count);
  return counts;
};

// ---- operations: (query, key) pairs of one head, then everything that a token meets

const pairsOf = (s, tokens) => {
  if (s.chunked && s.window) {
    const chunks = tokens / s.window, rest = tokens % s.window;
    return (chunks * s.window * (s.window + 1n) + rest * (rest + 1n)) / 2n;
  }
  const window = s.window || tokens, full = least(tokens, window);
  if (s.causal) return full * (full + 1n) / 2n + (tokens - full) * full;
  const reach = full - 1n; // an encoder's window is symmetric
  return tokens + 2n * (reach * tokens - reach * (reach + 1n) / 2n);
};

const layerWeights = s => {
  const width = s.E ? s.used * s.expertF + s.sharedF : s.F;
  const fed = s.D * width * (s.gated ? 3n : 2n) + (s.E ? s.D * s.E : 0n);
  const matrices = [...attentionMatrices(s), ...gateMatrices(s)];
  return sum(matrices.map(([a, b]) => a * b)) + fed;
};

const inputWeights = shape => BigInt(shape.input_dim) * BigInt(shape.dim - shape.position_dim);
const outputWeights = shape =>
  BigInt(shape.output_dim || (shape.lm_head ? shape.vocab_size : 0)) * BigInt(shape.dim);

const forwardFlops = (shape, tokens, kinds = kindsOf(shape)) => {
  const ends = tokens * (inputWeights(shape) + outputWeights(shape));
  const inside = kinds.map(([s, layers]) => {
    const scores = s.H * (s.R + s.V) * pairsOf(s, tokens);
    return layers * (tokens * layerWeights(s) + scores);
  });
  return 2n * (ends + sum(inside));
};

const prefillFlops = (shape, context, kinds = kindsOf(shape)) =>
  forwardFlops(shape, context, kinds) - 2n * (context - 1n) * outputWeights(shape);

// One more token, the last of `context`; latents are absorbed into queries and outputs.
const decodeFlops = (shape, context, kinds = kindsOf(shape)) => {
  const inside = kinds.map(([s, layers]) => {
    const seen = least(context, s.window || context);
    const keys = s.chunked && s.window ? (context - 1n) % s.window + 1n : seen;
    const width = s.latent ? s.H * (2n * s.C + s.rope) : s.H * (s.R + s.V);
    return layers * (layerWeights(s) + width * keys);
  });
  return 2n * (inputWeights(shape) + outputWeights(shape) + sum(inside));
};

// ---- bytes

const cacheWidth = s => {
  if (s.reuses) return 0n;
  if (s.latent) return s.C + s.rope;
  return s.KV * (s.R + (s.shared_kv && !s.split_kv_cache ? 0n : s.V));
};

const cacheNumbers = (shape, tokens, kinds = kindsOf(shape)) => sum(
  kinds.map(([s, layers]) => layers * least(tokens, s.window || tokens) * cacheWidth(s)));

const keptBytes = dtype => (WEIGHTS_ONLY.includes(dtype) ? 2n : DTYPE_BITS[dtype] / 8n);

// Every cost, as headwise.planning.costs names them. `train_flops` is of the whole context: per
// token it may be a fraction. What only a causal shape has is null for others.
const costsOf = (shape, at) => {
  const kinds = kindsOf(shape), context = BigInt(at.context), batch = BigInt(at.batch);
  const table = paramTable(shape, false, kinds);
  const params = sum(Object.values(table));
  const bytes = keptBytes(at.dtype), forward = forwardFlops(shape, context, kinds);
  const ifCausal = count => (shape.causal ? count() : null);
  return {
    table,
    params,
    active_params: sum(Object.values(paramTable(shape, true, kinds))),
    train_flops: 3n * forward,
    prefill_flops: forward - 2n * (context - 1n) * outputWeights(shape),
    decode_flops: ifCausal(() => decodeFlops(shape, context, kinds)),
    kv_bytes_per_token: ifCausal(() => cacheNumbers(shape, 1n, kinds) * bytes),
    kv_bytes_at_context: ifCausal(() => batch * cacheNumbers(shape, context, kinds) * bytes),
    weight_bytes: ceilingOf(params * DTYPE_BITS[at.dtype], 8n),
  };
};
