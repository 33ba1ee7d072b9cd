// Neighbours of a shape at equal budget: one move each, after which the feed-forward is made wider
// or narrower until the budget is met again.

"use strict";

const BUDGETS = { params: "parameters", train_flops: "training FLOPs" };
const COMPARED = ["params", "kv_bytes_at_context", "train_flops", "decode_flops"];

const half = n => (n % 2 === 0 && n > 1 ? n / 2 : null);
const rotary = (s, rank) => Math.min(s.qk_rope_head_dim, rank - rank % 2);
const isSplit = s => s.v_head_dim % 2 === 0 && s.head_dim % 4 === 0;

const MOVES = [
  {
    name: "Half the KV heads", about: "two query heads share what one had",
    make: s => (s.kv_lora_rank || !half(s.num_kv_heads) ? null
      : { num_kv_heads: s.num_kv_heads / 2 }),
  },
  {
    name: "A latent of half the cache", about: "keys and values grow from one narrow vector (MLA)",
    make: s => {
      if (s.kv_lora_rank || s.shared_kv || !["none", "free"].includes(s.qk_norm)) return null;
      if (s.rope_at === "first") return null;
      const rope = Math.min(64, rotary(s, s.head_dim));
      const width = Math.floor(s.num_kv_heads * (s.head_dim + s.v_head_dim) / 2) - rope;
      if (width < 1) return null;
      return { kv_lora_rank: width, num_kv_heads: s.num_heads, qk_rope_head_dim: rope };
    },
  },
  {
    name: "Half the latent", about: "keys and values grow from a narrower vector",
    make: s => (half(s.kv_lora_rank) ? { kv_lora_rank: s.kv_lora_rank / 2 } : null),
  },
  {
    name: "Twice the heads, half the rank", about: "the same width, cut finer",
    make: s => (!isSplit(s) ? null : {
      num_heads: 2 * s.num_heads, num_kv_heads: 2 * s.num_kv_heads, head_dim: s.head_dim / 2,
      v_head_dim: s.v_head_dim / 2, qk_rope_head_dim: rotary(s, s.head_dim / 2),
    }),
  },
  {
    name: "Half the heads, twice the rank", about: "the same width, cut coarser",
    make: s => {
      if (!half(s.num_heads) || (!half(s.num_kv_heads) && s.num_kv_heads > 1)) return null;
      const whole = s.qk_rope_head_dim === s.head_dim;
      return {
        num_heads: s.num_heads / 2, num_kv_heads: Math.max(1, Math.floor(s.num_kv_heads / 2)),
        head_dim: 2 * s.head_dim, v_head_dim: 2 * s.v_head_dim,
        qk_rope_head_dim: whole ? 2 * s.head_dim : s.qk_rope_head_dim,
      };
    },
  },
  {
    name: "One head of full rank", about: "what the rank paper advises",
    make: s => (s.num_heads === 1 || s.kv_lora_rank || s.dim % 2 ? null : {
      num_heads: 1, num_kv_heads: 1, head_dim: s.dim, v_head_dim: s.dim,
      qk_rope_head_dim: s.qk_rope_head_dim === s.head_dim ? s.dim : s.qk_rope_head_dim,
    }),
  },
  {
    name: "Half the layers, twice the heads", about: "what the leaner paper advises",
    make: s => (!half(s.depth) ? null : {
      depth: s.depth / 2, num_heads: 2 * s.num_heads, num_kv_heads: 2 * s.num_kv_heads,
    }),
  },
  {
    name: "A quarter of the query-key rank", about: "thin keys, values as wide as before",
    make: s => (s.head_dim % 8 || s.shared_kv ? null : {
      head_dim: s.head_dim / 4, v_head_dim: s.v_head_dim,
      qk_rope_head_dim: rotary(s, s.head_dim / 4),
    }),
  },
  {
    name: "A window in 3 of 4 layers", about: "a quarter of the context; the fourth layer sees all",
    make: (s, at) => {
      const window = Math.floor(at.context / 4);
      if (s.depth < 4 || window < 1 || s.windows.some(Boolean)) return null;
      return { windows: [window, window, window, 0] };
    },
  },
  {
    name: "A quarter fewer layers", about: "wider feed-forwards instead",
    make: s => (s.depth % 4 ? null : { depth: s.depth * 3 / 4 }),
  },
  {
    name: "A quarter more layers", about: "narrower feed-forwards pay",
    make: s => (s.depth % 4 ? null : { depth: s.depth * 5 / 4 }),
  },
];

// A changed shape; a size that is changed is then that of all layers.
const changed = (shape, changes) => {
  const layers = shape.layers.map(own => Object.fromEntries(
    Object.entries(own).filter(([name]) => !(name in changes))));
  const differ = layers.some(own => Object.keys(own).length);
  const next = { ...shape, ...changes, layers: differ ? layers : [] };
  if (next.layers.length > next.depth) next.layers = next.layers.slice(0, next.depth);
  if (next.windows.length > next.depth) next.windows = next.windows.slice(0, next.depth);
  return next;
};

// The largest power of two, up to 64, that divides the feed-forward: it stays a multiple of that.
const multipleOf = width => {
  let found = 64;
  while (width % found) found /= 2;
  return found;
};

// The same shape with the feed-forward that meets the target best; null: there is none.
const solved = (shape, at, budget, target) => {
  const name = shape.num_experts ? "expert_ffn_dim" : "ffn_dim", width = shape[name];
  if (!width) return null;
  const step = multipleOf(width);
  const costAt = value => costsOf({ ...shape, [name]: value }, at)[budget];
  const low = costAt(step), slope = costAt(2 * step) - low;
  if (slope <= 0n) return null;
  const steps = 1 + Math.round(Number((target - low) * 1000n / slope) / 1000);
  if (steps < 1 || steps * step > MOST_SIZE) return null;
  return { ...shape, [name]: steps * step };
};

const neighboursOf = (shape, at, budget) => {
  const own = costsOf(shape, at);
  return MOVES.flatMap(({ name, about, make }) => {
    const changes = make(shape, at);
    if (!changes) return [];
    const moved = changed(shape, changes);
    if (faultOf(moved)) return [];
    const met = solved(moved, at, budget, own[budget]);
    if (!met || faultOf(met)) return [];
    const costs = costsOf(met, at);
    const ratios = Object.fromEntries(COMPARED.map(cost => [
      cost, costs[cost] === null || !own[cost] ? null : ratioOf(costs[cost], own[cost]),
    ]));
    return [{ name, about, shape: met, ratios }];
  });
};

const ratioOf = (a, b) => Number(a * 1000000n / b) / 1000000;
