// Fields that follow from others, and what is wrong with a shape, in the words of
// src/headwise/shape/rules.py. Only rules that the page's controls can break stand here; a test
// compares the sentences with Python's.

"use strict";

const MOST_SIZE = 2 ** 31 - 1, MOST_LAYERS = 100000, MOST_COUNT = 2n ** 63n - 1n;
const FOLLOWING = ["head_dim", "v_head_dim", "num_kv_heads", "ffn_dim"];
const NAMES_OF_FIELDS = [
  "dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads", "kv_lora_rank",
  "q_lora_rank", "qk_rope_head_dim", "average", "ffn_dim", "vocab_size",
];
const POSITIVE = [
  "dim", "depth", "num_heads", "head_dim", "v_head_dim", "num_kv_heads", "average",
];

// A whole shape of what was given: `follows` are the fields that are left to follow from others.
const settled = (given, follows) => {
  const shape = { ...given };
  const free = new Set(follows);
  if (free.has("head_dim")) shape.head_dim = Math.floor(shape.dim / shape.num_heads);
  if (free.has("v_head_dim")) shape.v_head_dim = shape.head_dim;
  if (free.has("num_kv_heads")) shape.num_kv_heads = shape.num_heads;
  if (free.has("ffn_dim")) shape.ffn_dim = 4 * shape.dim;
  if (free.has("qk_rope_head_dim")) shape.qk_rope_head_dim = shape.head_dim;
  return shape;
};

// The first fault: a sentence, and changes that mend it with a word for them; null: none.
const faultOf = (shape, follows = []) => {
  for (const rule of [derivedFault, sizeFault, layerFault, positionFault, countFault]) {
    const found = rule(shape, new Set(follows));
    if (found) return found;
  }
  return null;
};

const fault = (text, fix = null) => ({ text, fix });

const derivedFault = (s, follows) => {
  if (!follows.has("head_dim") || s.num_heads < 1 || s.dim % s.num_heads === 0) return null;
  const got = `got dim ${s.dim}, num_heads ${s.num_heads}`;
  return fault(`head_dim must be given when num_heads does not divide dim, ${got}`,
    { head_dim: Math.max(1, Math.floor(s.dim / s.num_heads)) });
};

const sizeFault = s => {
  for (const name of NAMES_OF_FIELDS) {
    const value = s[name];
    if (POSITIVE.includes(name) && value < 1) {
      return fault(`${name} must be at least 1, got ${value}`, { [name]: 1 });
    }
    if (value < 0) return fault(`${name} must not be negative, got ${value}`, { [name]: 0 });
    if (value > MOST_SIZE) {
      const most = MOST_SIZE.toLocaleString("en");
      return fault(`${name} must be at most ${most} (32 bits), got ${value}`);
    }
  }
  if (s.depth > MOST_LAYERS) {
    const most = MOST_LAYERS.toLocaleString("en");
    return fault(`depth must be at most ${most} layers, got ${s.depth}`);
  }
  if (s.vocab_size && s.input_dim) {
    const got = `got vocab_size ${s.vocab_size}, input_dim ${s.input_dim}`;
    return fault(`a shape takes tokens or vectors: vocab_size excludes input_dim, ${got}`,
      { vocab_size: 0 });
  }
  if (!s.lm_head && !s.vocab_size) {
    const got = "got lm_head False, vocab_size 0";
    return fault(`lm_head must be true where no tokens come in, ${got}`, { lm_head: true });
  }
  return null;
};

const layerFault = shape => {
  const count = shape.layers.length || 1;
  for (let i = 0; i < Math.min(count, shape.depth); i++) {
    const found = headsFault(layerFields(shape, i));
    if (!found) continue;
    return shape.layers.length ? { ...found, text: `layer ${i}: ${found.text}` } : found;
  }
  return null;
};

const headsFault = s => {
  const [H, KV, R, rope] = [s.num_heads, s.num_kv_heads, s.head_dim, s.qk_rope_head_dim];
  if (H % KV) {
    return fault(
      `num_heads must be a multiple of num_kv_heads, got num_heads ${H}, num_kv_heads ${KV}`,
      { num_kv_heads: nearestDivisor(H, KV) });
  }
  if (rope % 2) {
    const what = rope === R ? "head_dim" : "qk_rope_head_dim";
    return fault(`${what} must be even for rotary positions, got ${rope}`,
      { [what]: rope + 1 });
  }
  if (rope > R) {
    return fault(
      `qk_rope_head_dim must not exceed head_dim, got qk_rope_head_dim ${rope}, head_dim ${R}`,
      { qk_rope_head_dim: R - R % 2 });
  }
  if (H % s.average) {
    const got = `got num_heads ${H}, average ${s.average}`;
    return fault(`num_heads must be a multiple of average, ${got}`, { average: 1 });
  }
  return (s.kv_lora_rank ? latentFault(s) : null) ?? outputFault(s);
};

const latentFault = s => {
  const latent = `kv_lora_rank ${s.kv_lora_rank}`;
  if (s.num_kv_heads !== s.num_heads) {
    const rule = `num_kv_heads must equal num_heads ${s.num_heads} when a latent (${latent})`;
    return fault(`${rule} replaces grouped heads, got ${s.num_kv_heads}`,
      { num_kv_heads: s.num_heads });
  }
  if (!["none", "free"].includes(s.qk_norm)) {
    return fault(`qk_norm must be none or free with a latent (${latent}), got ${s.qk_norm}`,
      { qk_norm: "none" });
  }
  if (s.shared_kv) {
    const rule = `shared_kv must be false with a latent (${latent}), which keys and values share`;
    return fault(rule, { shared_kv: false });
  }
  if (s.rope_at === "first") {
    return fault(`rope_at must be last with a latent (${latent}), got first`,
      { rope_at: "last" });
  }
  return null;
};

const outputFault = s => {
  if (s.shared_kv && s.v_head_dim !== s.head_dim) {
    const rule = "shared_kv makes the keys the values, so v_head_dim must be head_dim";
    return fault(`${rule}, got head_dim ${s.head_dim}, v_head_dim ${s.v_head_dim}`,
      { v_head_dim: s.head_dim });
  }
  if (s.num_heads % s.o_groups) {
    const got = `got num_heads ${s.num_heads}, o_groups ${s.o_groups}`;
    return fault(`num_heads must be a multiple of o_groups, ${got}`, { o_groups: 1 });
  }
  return null;
};

const positionFault = s => {
  if (s.position_dim && s.vocab_size) {
    const rule = "concatenated positions go with vectors, not with tokens";
    return fault(`${rule}, got vocab_size ${s.vocab_size}`, { vocab_size: 0 });
  }
  if (s.position_dim >= s.dim) {
    const got = `got position_dim ${s.position_dim}, dim ${s.dim}`;
    return fault(`position_dim must be below dim, ${got}`);
  }
  return null;
};

const countFault = s => {
  const params = sum(Object.values(paramTable(s)));
  if (params <= MOST_COUNT) return null;
  const most = MOST_COUNT.toLocaleString("en");
  return fault(`a shape must have at most ${most} parameters (64 bits), got ${params}`);
};

// ---- moves that stay within the rules

const divisorsOf = n => {
  const found = [];
  for (let i = 1; i * i <= n; i++) if (n % i === 0) found.push(i, n / i);
  return [...new Set(found)].sort((a, b) => a - b);
};

const nearestDivisor = (n, wanted) =>
  divisorsOf(n).reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
