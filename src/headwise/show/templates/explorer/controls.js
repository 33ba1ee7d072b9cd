// The controls: what can be moved, in groups. A control is a slider over a list of usual values,
// a number for any value, and where Shape has a rule for it a box "as ...".

"use strict";

// 1, 1.25, 1.5 and 1.75 times the powers of two, whole numbers only.
const usual = (low, high, parts = 4) => {
  const found = new Set();
  for (let power = 1; power <= high; power *= 2) {
    for (let k = 0; k < parts; k++) found.add(power * (parts + k) / parts);
  }
  return [...found].filter(n => Number.isInteger(n) && n >= low && n <= high);
};
const upToTwelve = Array.from({ length: 12 }, (_, i) => i + 1);
const HEADS = [...new Set([...upToTwelve, ...usual(12, 256)])];
const RANKS = [1, ...usual(2, 1024).filter(n => n % 2 === 0), 1536, 2048];
const VOCABULARIES = [
  0, 80, 256, 1000, 4096, 8192, 16384, 32000, 32768, 50257, 65536, 100352, 128256, 151936, 200064,
  262144,
];

const CONTROLS = [
  { group: "Model" },
  { name: "dim", label: "width", values: usual(8, 16384) },
  { name: "depth", label: "depth", values: [...upToTwelve, ...usual(14, 160, 8)] },
  { name: "vocab_size", label: "vocabulary", values: VOCABULARIES, least: 0 },
  { name: "tied", label: "tables", check: "one for input and output" },
  { group: "Attention" },
  { name: "num_heads", label: "heads", values: HEADS },
  { name: "head_dim", label: "rank", values: RANKS, as: "as width / heads",
    about: "width of a head's queries and keys" },
  { name: "v_head_dim", label: "value width", values: RANKS, as: "as rank" },
  { name: "num_kv_heads", label: "KV heads", values: s => divisorsOf(s.num_heads), as: "as heads" },
  { name: "kv_lora_rank", label: "latent", values: [0, ...usual(8, 2048)], least: 0,
    about: "keys and values grow from one vector of this width; 0: none" },
  { name: "qk_rope_head_dim", label: "rotary part", values: [0, ...RANKS.filter(n => n % 2 === 0)],
    least: 0, as: "as rank" },
  { name: "window", label: "window", values: [0, ...usual(16, 131072, 2)], least: 0,
    about: "keys that a query sees; 0: all" },
  { name: "pattern", label: "windows in", choices: {
    1: "every layer", 2: "1 of 2 layers", 4: "3 of 4 layers", 6: "5 of 6 layers" } },
  { name: "causal", label: "causal", check: "a token sees earlier ones only" },
  { group: "Feed-forward" },
  { name: "ffn_dim", label: "width", values: [0, ...usual(16, 65536)], least: 0,
    as: "as 4 x width" },
  { name: "activation", label: "activation", choices: {
    swiglu: "SwiGLU, gated", geglu: "GeGLU, gated", gelu: "GELU", relu: "ReLU",
    relu2: "ReLU squared" } },
  { group: "Where costs are counted" },
  { name: "context", label: "context", values: usual(8, 1048576, 2), at: true },
  { name: "batch", label: "batch", values: usual(1, 1024, 2), at: true },
  { name: "dtype", label: "dtype", at: true, choices: Object.fromEntries(
    Object.keys(DTYPE_BITS).map(name => [name, name])) },
];

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
};

const nearestAt = (values, wanted) => values.reduce(
  (best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);

// One row of the form. `on(name, value)` takes what was chosen, `onLink(name, follows)` the box.
const rowOf = (control, on, onLink) => {
  const { name, label, about } = control, id = `control-${name}`;
  const row = element("div", { className: "row", title: about ?? "" });
  if (control.check) {
    const box = element("input", { type: "checkbox", id });
    box.addEventListener("change", () => on(name, box.checked));
    row.append(element("label", { htmlFor: id }, label),
      element("span", { className: "check" }, box,
        element("label", { htmlFor: id }, control.check)));
    return { row, show: value => { box.checked = value; } };
  }
  if (control.choices) {
    const list = element("select", { id });
    list.addEventListener("change", () => on(name, list.value));
    row.append(element("label", { htmlFor: id }, label), list);
    const show = value => {
      const known = String(value) in control.choices;
      const choices = known ? control.choices : { ...control.choices, [value]: String(value) };
      if (list.options.length !== Object.keys(choices).length) {
        list.replaceChildren(...Object.entries(choices).map(
          ([key, text]) => element("option", { value: key }, text)));
      }
      list.value = String(value);
    };
    return { row, show };
  }
  const slider = element("input", {
    type: "range", min: 0, step: 1, id: `${id}-slider`, "aria-label": label,
  });
  const number = element("input", { type: "number", id, min: control.least ?? 1, step: 1 });
  row.append(element("label", { htmlFor: id }, label), slider, number);
  let values = [];
  slider.addEventListener("input", () => on(name, values[Number(slider.value)]));
  number.addEventListener("input", () => {
    const value = Number(number.value);
    if (number.value !== "" && Number.isSafeInteger(value)) on(name, value);
  });
  let box = null;
  if (control.as) {
    box = element("input", { type: "checkbox" });
    box.addEventListener("change", () => onLink(name, box.checked));
    row.append(element("label", { className: "link" }, box, control.as));
  }
  const show = (value, shape, follows) => {
    values = typeof control.values === "function" ? control.values(shape) : control.values;
    slider.max = values.length - 1;
    slider.value = nearestAt(values, value);
    slider.setAttribute("aria-valuetext", String(value));
    if (document.activeElement !== number || Number(number.value) !== value) number.value = value;
    if (box) box.checked = follows;
    row.classList.toggle("follows", follows);
  };
  const disable = off => {
    for (const field of [slider, number, box]) if (field) field.disabled = off;
    row.classList.toggle("off", off);
  };
  return { row, show, disable };
};

// The whole form; returns a function that shows a state in it.
const formOf = (form, on, onLink) => {
  const rows = new Map();
  let group = form;
  for (const control of CONTROLS) {
    if (control.group) {
      group = element("fieldset", {}, element("legend", {}, control.group));
      form.append(group);
      continue;
    }
    const made = rowOf(control, on, onLink);
    group.append(made.row);
    rows.set(control.name, made);
  }
  const also = element("p", { className: "also" });
  form.append(also);
  form.addEventListener("submit", event => event.preventDefault());
  return (shape, follows, at, more) => {
    const window = Math.max(...shape.windows);
    const values = { ...shape, ...at, window, pattern: patternOf(shape) };
    for (const [name, { show }] of rows) show(values[name], shape, follows.has(name));
    rows.get("num_kv_heads").disable(shape.kv_lora_rank > 0);
    also.textContent = more ? `Also: ${more}.` : "";
  };
};

// How often the window comes: 1 in every layer, 4 in three of four; else the pattern in words.
const patternOf = shape => {
  const [first, ...others] = shape.windows, n = shape.windows.length;
  if (n === 1) return 1;
  const last = others.pop();
  const even = [2, 4, 6].includes(n) && last === 0 && others.every(w => w === first) && first > 0;
  return even ? n : `as given: ${shape.windows.join(", ")}`.slice(0, 40);
};
const windowsOf = (window, pattern) => {
  const n = Number(pattern);
  if (!window || !(n > 1)) return [window];
  return [...Array.from({ length: n - 1 }, () => window), 0];
};
