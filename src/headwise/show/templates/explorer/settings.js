// A shape as others take it: a command, a line of Python, a Hugging Face config.json, and the part
// of the page's address behind the #. What is left out follows from other fields or has Shape's
// own default.

"use strict";

const given = (shape, follows, defaults) => Object.entries(defaults).flatMap(([name, usual]) => {
  const value = shape[name], free = FOLLOWING.includes(name) && follows.has(name);
  return free || JSON.stringify(value) === JSON.stringify(usual) ? [] : [[name, value]];
});

// ---- the command line: what differs by layer is a list with commas

const asCommand = (shape, follows, at, defaults) => {
  if (shape.extras.length) return { refused: "parameters outside the stack have no option" };
  if (shape.layers.some(own => own.reuses_kv)) {
    return { refused: "layers that reuse keys and values have no option: copy it as Python" };
  }
  const byLayer = new Set(shape.layers.flatMap(own => Object.keys(own)));
  const words = given(shape, follows, defaults)
    .filter(([name]) => name !== "layers" && !byLayer.has(name))
    .map(([name, value]) => `${name}=${Array.isArray(value) ? value.join(",") : value}`);
  for (const name of byLayer) {
    words.push(`${name}=${shape.layers.map(own => own[name] ?? shape[name]).join(",")}`);
  }
  return { text: `headwise cost --tokens ${at.context} --set ${words.join(" ")}` };
};

// ---- Python

const asLiteral = value => {
  if (value === true || value === false) return value ? "True" : "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `(${value.map(v => `${asLiteral(v)},`).join(" ")})`;
  return typeof value === "string" ? JSON.stringify(value) : String(value);
};
const asArguments = pairs => pairs.map(([name, value]) => `${name}=${asLiteral(value)}`).join(", ");

const asPython = (shape, follows, defaults) => {
  const pairs = given(shape, follows, defaults).filter(([name]) => name !== "layers");
  const layers = shape.layers.map(own => `Layer(${asArguments(Object.entries(own))})`);
  const more = layers.length ? `, layers=(${layers.join(", ")},)` : "";
  const names = layers.length ? "Layer, Shape" : "Shape";
  return {
    text: `from headwise.shape import ${names}\n\nshape = Shape(${asArguments(pairs)}${more})`,
  };
};

// ---- config.json: the first family that can say the shape

const HF_ACTIVATIONS = { swiglu: "silu", geglu: "gelu_pytorch_tanh" };
const PLAIN_DECODER = {
  causal: true, norm: "rms", norm_at: "pre", positions: "none", average: 1, lm_head: true,
  input_dim: 0, output_dim: 0, logit_scale: null, max_logit: null, shared_kv: false,
  o_lora_rank: 0, attn_gate: "none", sinks: false, num_experts: 0, chunked: false,
  ffn_bias: false, rope_at: "last",
};

const asConfig = (shape, at) => {
  const needs = { ...PLAIN_DECODER, ...familyNeeds(shape) };
  for (const [name, value] of Object.entries(needs)) {
    if (shape[name] !== value) {
      const has = `this shape has ${JSON.stringify(shape[name])}`;
      return { refused: `a config.json from here needs ${name} ${JSON.stringify(value)}, ${has}` };
    }
  }
  if (shape.layers.length || shape.extras.length) {
    return { refused: "a config.json from here needs layers of one kind" };
  }
  const rope = shape.qk_rope_head_dim;
  if (shape.kv_lora_rank && (rope === 0 || rope === shape.head_dim)) {
    return { refused: "a config.json with a latent needs a rotary part of a head, not none or all" };
  }
  if (shape.windows.length > 1 && shape.qk_norm !== "head") {
    return { refused: 'a config.json with windows in some layers needs qk_norm "head" (Qwen3)' };
  }
  if (shape.kv_lora_rank && sliding(shape)) {
    return { refused: "a config.json with a latent has no window" };
  }
  if (!shape.vocab_size) return { refused: "a config.json needs tokens: vocab_size above 0" };
  if (!shape.ffn_dim) return { refused: "a config.json needs a feed-forward: ffn_dim above 0" };
  if (!GATED.includes(shape.activation)) {
    return { refused: `a config.json from here needs a gate, this shape has ${shape.activation}` };
  }
  return { text: JSON.stringify(configOf(shape, at), null, 2) };
};

const sliding = shape => shape.windows.some(Boolean);

const familyNeeds = s => {
  if (s.kv_lora_rank) return { qk_norm: "none", out_bias: s.qkv_bias };
  const heads = {
    v_head_dim: s.head_dim, qk_rope_head_dim: s.head_dim, q_lora_rank: 0,
    rope_interleaved: false,
  };
  if (s.qk_norm === "head") return { ...heads, out_bias: s.qkv_bias };
  return { ...heads, qk_norm: "none", out_bias: sliding(s) ? false : s.qkv_bias,
    qkv_bias: sliding(s) ? false : s.qkv_bias };
};

const configOf = (s, at) => {
  const common = {
    vocab_size: s.vocab_size, hidden_size: s.dim, intermediate_size: s.ffn_dim,
    num_hidden_layers: s.depth, num_attention_heads: s.num_heads,
    num_key_value_heads: s.num_kv_heads, hidden_act: HF_ACTIVATIONS[s.activation],
    max_position_embeddings: at.context, rope_theta: s.rope_theta, tie_word_embeddings: s.tied,
    torch_dtype: "bfloat16",
  };
  const family = (model_type, architecture, more) =>
    ({ architectures: [architecture], model_type, ...common, ...more });
  if (s.kv_lora_rank) {
    return family("deepseek_v3", "DeepseekV3ForCausalLM", {
      attention_bias: s.qkv_bias, kv_lora_rank: s.kv_lora_rank,
      q_lora_rank: s.q_lora_rank || null, qk_rope_head_dim: s.qk_rope_head_dim,
      qk_nope_head_dim: s.head_dim - s.qk_rope_head_dim, v_head_dim: s.v_head_dim,
      rope_interleave: s.rope_interleaved,
      first_k_dense_replace: s.depth, // no layer has experts
    });
  }
  const own = { head_dim: s.head_dim };
  const seen = Array.from({ length: s.depth }, (_, i) => s.windows[i % s.windows.length]);
  if (s.qk_norm === "head") {
    const windows = {
      use_sliding_window: true, sliding_window: Math.max(...seen),
      layer_types: seen.map(window => (window ? "sliding_attention" : "full_attention")),
    };
    return family("qwen3", "Qwen3ForCausalLM",
      { ...own, attention_bias: s.qkv_bias, ...(sliding(s) ? windows : {}) });
  }
  if (sliding(s)) {
    return family("mistral", "MistralForCausalLM", { ...own, sliding_window: seen[0] });
  }
  return family("llama", "LlamaForCausalLM",
    { ...own, attention_bias: s.qkv_bias, mlp_bias: false });
};

// ---- the address

const HELD_IN_ADDRESS = { context: Number, batch: Number, dtype: String };

const asAddress = (shape, follows, at, defaults) => {
  const pairs = given(shape, follows, defaults).map(([name, value]) => [
    name, typeof value === "object" && value !== null ? JSON.stringify(value) : String(value),
  ]);
  if (follows.has("qk_rope_head_dim")) {
    const i = pairs.findIndex(([name]) => name === "qk_rope_head_dim");
    if (i >= 0) pairs[i][1] = "all";
  }
  const all = [...pairs, ...Object.keys(HELD_IN_ADDRESS).map(name => [name, String(at[name])])];
  return new URLSearchParams(all).toString();
};

// The shape of an address; null where it holds none that can be read.
const fromAddress = (text, defaults) => {
  const asked = new URLSearchParams(text.replace(/^#/, ""));
  if (!asked.has("dim")) return null;
  const shape = structuredClone(defaults), at = {};
  const follows = new Set(FOLLOWING.filter(name => !asked.has(name)));
  for (const [name, word] of asked) {
    if (name in HELD_IN_ADDRESS) {
      at[name] = HELD_IN_ADDRESS[name](word);
    } else if (name === "qk_rope_head_dim" && word === "all") {
      follows.add(name);
    } else if (name in defaults) {
      const value = readWord(word);
      if (value === undefined || !sameKind(name, value, defaults)) return null;
      shape[name] = value;
    } else {
      return null;
    }
  }
  const sizes = ["context", "batch"].filter(name => name in at);
  if (!sizes.every(name => Number.isInteger(at[name]) && at[name] >= 1)) return null;
  if ("dtype" in at && !(at.dtype in DTYPE_BITS)) return null;
  return { shape, follows, at };
};

const readWord = word => {
  try {
    return JSON.parse(word);
  } catch {
    return /^[a-z0-9-]+$/.test(word) ? word : undefined;
  }
};

// Sizes are whole numbers; whatever else an address says has the type of Shape's own default.
const sameKind = (name, value, defaults) => {
  const usual = defaults[name];
  if (name === "windows") return Array.isArray(value) && value.every(isSize) && value.length > 0;
  if (name === "layers" || name === "extras") return Array.isArray(value);
  if (["logit_scale", "max_logit", "rope_theta"].includes(name)) return typeof value === "number";
  if (usual === null || typeof usual === "number") return isSize(value);
  return typeof value === typeof usual;
};
const isSize = value => Number.isSafeInteger(value) && value >= 0;
