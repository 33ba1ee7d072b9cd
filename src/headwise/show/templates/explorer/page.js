// The page: one state, shown in one pass. Whatever is moved changes the state and asks for that
// pass, once per frame.

"use strict";

const get = id => document.getElementById(id);
const state = { shape: null, follows: new Set(), at: PAGE.at, budget: "params", tab: 0, task: 0 };
let reference = null; // the costs that ratios are to

// ---- numbers for people

const UNITS = {
  count: [1000, ["", "k", "M", "B", "T", "Q"]],
  flops: [1000, ["", "k", "M", "G", "T", "P", "E"]],
  bytes: [1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]],
};
const short = (value, kind) => {
  const [base, names] = UNITS[kind];
  let number = Number(value), place = 0;
  while (number >= base * 0.99995 && place < names.length - 1) { number /= base; place++; }
  const digits = number >= 100 ? 1 : 2;
  const text = Number.isInteger(number) ? `${number}` : number.toFixed(digits);
  return kind === "bytes" ? `${text} ${names[place]}` : text + names[place];
};
const exact = value => value.toLocaleString("en");
const ratioText = ratio => {
  if (ratio === 1) return "=";
  return `${ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2)}×`;
};
// Less than half a percent is no difference to point at.
const ratioClass = ratio => (ratio < 0.995 ? "better" : ratio > 1.005 ? "worse" : "");

// A total over some tokens: whole where it is whole.
const perToken = (total, tokens) => {
  const whole = total / tokens, rest = total % tokens;
  if (!rest) return exact(whole);
  return `${exact(whole)}.${String(rest * 100n / tokens).padStart(2, "0")}…`;
};

const TILES = [
  { cost: "params", label: "Parameters", kind: "count" },
  { cost: "active_params", label: "Used by one token", kind: "count", experts: true },
  { cost: "weight_bytes", label: "Weights", kind: "bytes", dtype: true },
  { cost: "kv_bytes_per_token", label: "KV cache per token", kind: "bytes" },
  { cost: "kv_bytes_at_context", label: "KV cache at the context", kind: "bytes" },
  { cost: "train_flops", label: "Training FLOPs per token", kind: "flops", over: true },
  { cost: "prefill_flops", label: "Prefill FLOPs of the context", kind: "flops", each: true },
  { cost: "decode_flops", label: "Decode FLOPs per token", kind: "flops" },
];
const COLOURS = {
  embedding: "table", head: "table", positions: "table", "read-in": "table", "read-out": "table",
  attention: "attention", gates: "gate", sinks: "gate", norms: "other", router: "gate",
  "feed-forward": "feed", experts: "feed", "shared experts": "feed",
};
const colourOf = part => `var(--${COLOURS[part] ?? "other"})`;

// ---- changing the state

const commit = (shape, follows = state.follows) => {
  state.shape = settled(shape, follows);
  state.follows = follows;
  ask();
};

const move = (name, value) => {
  if (name in state.at) {
    state.at = { ...state.at, [name]: value };
    return ask();
  }
  const { shape } = state, follows = new Set(state.follows);
  follows.delete(name);
  if (name === "window" || name === "pattern") {
    const window = name === "window" ? value : Math.max(...shape.windows);
    const pattern = name === "pattern" ? value : patternOf(shape);
    return commit(changed(shape, { windows: windowsOf(window, pattern) }), follows);
  }
  const changes = { [name]: value };
  if (name === "kv_lora_rank" && value) follows.add("num_kv_heads");
  const own = !follows.has("num_kv_heads");
  if (name === "num_heads" && own && value >= 1 && value % shape.num_kv_heads) {
    changes.num_kv_heads = nearestDivisor(value, shape.num_kv_heads);
  }
  const rope = shape.qk_rope_head_dim;
  if (name === "head_dim" && !follows.has("qk_rope_head_dim") && rope > value && value >= 1) {
    changes.qk_rope_head_dim = value - value % 2;
  }
  commit(changed(shape, changes), follows);
};

const link = (name, isLinked) => {
  const follows = new Set(state.follows);
  if (isLinked) follows.add(name); else follows.delete(name);
  commit(isLinked ? changed(state.shape, { [name]: state.shape[name] }) : state.shape, follows);
};

// What follows from others in a shape that was given whole.
const linksOf = shape => {
  if (shape.layers.length) return new Set();
  const found = [];
  if (shape.v_head_dim === shape.head_dim) found.push("v_head_dim");
  if (shape.num_kv_heads === shape.num_heads) found.push("num_kv_heads");
  if (shape.ffn_dim === 4 * shape.dim) found.push("ffn_dim");
  if (shape.qk_rope_head_dim === shape.head_dim) found.push("qk_rope_head_dim");
  return new Set(found);
};

const goTo = (shape, follows = linksOf(shape)) => {
  commit(shape, follows);
  get("sentence").scrollIntoView({ block: "nearest" });
};

// ---- showing it

const showForm = formOf(get("controls"), move, link);

const tiles = TILES.map(tile => {
  const [title, number, ratio, digits] = ["span", "b", "span", "div"].map(tag => element(tag));
  ratio.className = "ratio";
  digits.className = "exact";
  const box = element("div", { className: "tile" }, title, number, ratio, digits);
  get("tiles").append(box);
  return { ...tile, box, title, number, ratio, digits };
});

const showTiles = costs => {
  for (const tile of tiles) {
    const value = costs[tile.cost], { at } = state;
    tile.box.hidden = value === null || (tile.experts && !state.shape.num_experts);
    if (tile.box.hidden) continue;
    const over = tile.over ? BigInt(at.context) : 1n;
    const shown = tile.over ? Number(value) / Number(over) : value;
    tile.title.textContent = tile.dtype ? `${tile.label} in ${at.dtype}` : tile.label;
    tile.number.textContent = short(shown, tile.kind);
    tile.digits.textContent = perToken(value, over);
    const each = Number(value) / at.context;
    if (tile.each) tile.digits.textContent += `, ${short(each, "flops")} per token`;
    const before = reference[tile.cost];
    const ratio = before ? Number(value) / Number(before)
      / (tile.over ? at.context / reference.context : 1) : null;
    tile.ratio.textContent = ratio === null || ratio === 1 ? "" : ratioText(ratio);
    tile.ratio.className = `ratio ${ratio === null ? "" : ratioClass(ratio)}`;
  }
  const strip = ["params", "kv_bytes_per_token", "train_flops"].map(name => {
    const tile = tiles.find(t => t.cost === name);
    if (tile.box.hidden) return "";
    return element("span", {}, { params: "parameters", kv_bytes_per_token: "KV per token",
      train_flops: "training FLOPs" }[name], element("b", {}, tile.number.textContent));
  });
  get("strip").replaceChildren(...strip.filter(Boolean));
};

const showParts = ({ table, params }) => {
  const parts = Object.entries(table).filter(([, count]) => count > 0n);
  parts.sort(([, a], [, b]) => (a < b ? 1 : a > b ? -1 : 0));
  get("stack").replaceChildren(...parts.map(([name, count]) => {
    const piece = element("i", { title: `${name}: ${exact(count)}` });
    piece.style.width = `${100 * ratioOf(count, params)}%`;
    piece.style.background = colourOf(name);
    return piece;
  }));
  get("parts").replaceChildren(...parts.map(([name, count]) => {
    const dot = element("i");
    dot.style.background = colourOf(name);
    const share = (100 * ratioOf(count, params)).toFixed(1);
    return element("li", {}, dot, `${name} ${share} % `,
      element("span", { className: "soft exact" }, exact(count)));
  }));
};

// Bars as wide as the numbers that one token has at each place of a layer.
const showLayer = shape => {
  const f = layerFields(shape, 0), feed = f.num_experts ? f.expert_ffn_dim : f.ffn_dim;
  const bars = [["model", f.dim, 0, "other"],
    ["queries", f.num_heads * f.head_dim, f.num_heads, "attention"]];
  if (f.kv_lora_rank) {
    bars.push(["kept: latent", f.kv_lora_rank + f.qk_rope_head_dim, 0, "table"]);
  } else {
    bars.push(["kept: keys", f.num_kv_heads * f.head_dim, f.num_kv_heads, "table"]);
    if (!f.shared_kv) {
      bars.push(["kept: values", f.num_kv_heads * f.v_head_dim, f.num_kv_heads, "table"]);
    }
  }
  bars.push(["heads' outputs", f.num_heads * f.v_head_dim, f.num_heads, "attention"]);
  if (feed) bars.push([f.num_experts ? "an expert" : "feed-forward", feed, 0, "feed"]);
  const widest = Math.max(...bars.map(([, width]) => width));
  get("layer").replaceChildren(...bars.map(([name, width, heads, colour]) => {
    const bar = element("i"), share = width / widest;
    bar.style.width = `calc((100% - var(--label)) * ${share.toFixed(5)})`;
    bar.style.backgroundColor = `var(--${colour})`;
    if (heads > 1 && heads <= 64) {
      bar.className = "cut";
      bar.style.setProperty("--step", `${100 / heads}%`);
    }
    const cut = heads ? `${heads} x ${width / heads}` : exact(width);
    return element("div", { className: "bar" }, name,
      element("span", { className: "track" }, bar, element("small", {}, cut)));
  }));
  const inner = shape.num_heads * shape.head_dim / shape.dim;
  const kinds = kindsOf(shape).length;
  get("layer-note").textContent = `Heads times rank is ${inner.toFixed(2)} of the width.`
    + (kinds > 1 ? ` Layers are of ${kinds} kinds; this is the first.` : "");
};

const sizesInWords = s => {
  const values = s.v_head_dim === s.head_dim ? "" : `/${s.v_head_dim}`;
  const keys = s.kv_lora_rank ? `latent ${s.kv_lora_rank}` : `${s.num_kv_heads} KV`;
  const feed = s.num_experts ? `experts of ${exact(s.expert_ffn_dim)}`
    : `feed-forward ${exact(s.ffn_dim)}`;
  const windows = s.windows.some(Boolean) ? `, window ${exact(Math.max(...s.windows))}` : "";
  return `${s.num_heads} x ${s.head_dim}${values}, ${keys}, ${s.depth} layers, ${feed}${windows}`;
};

const percentText = ratio => (ratio === 1 ? "="
  : `${ratio > 1 ? "+" : "−"}${(100 * Math.abs(ratio - 1)).toFixed(2)} %`);
const NEAR_HEADINGS = [
  ["params", "parameters", ""], ["kv_bytes_at_context", "KV cache", ""],
  ["train_flops", "training", "wide"], ["decode_flops", "decode", "wide"],
];
const showNeighbours = () => {
  const found = neighboursOf(state.shape, state.at, state.budget);
  const head = element("tr", {}, element("th", { scope: "col" }, "move"),
    ...NEAR_HEADINGS.map(([, text, className]) =>
      element("th", { scope: "col", className }, text)));
  const rows = found.map(({ name, about, shape, ratios }) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => goTo(shape));
    const cells = NEAR_HEADINGS.map(([cost, , className]) => {
      const ratio = ratios[cost], near = cost === state.budget;
      const text = ratio === null ? "-" : near ? percentText(ratio) : ratioText(ratio);
      const colour = ratio === null || near ? "" : ratioClass(ratio);
      return element("td", { className: `${className} ${colour}` }, text);
    });
    return element("tr", {}, element("td", {}, button,
      element("small", {}, about), element("small", {}, sizesInWords(shape))), ...cells);
  });
  get("near").replaceChildren(found.length
    ? element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))
    : element("p", {}, "No neighbour meets this budget: the feed-forward has no room for one."));
};

const showBackends = () => {
  get("backends").replaceChildren(...MACHINES.map(machine => {
    const { backend, pad, reason } = backendOf(callOf(state.shape, state.at, machine));
    const wide = state.shape.head_dim + state.shape.v_head_dim, added = pad[0] + pad[1];
    const share = (100 * added / wide).toFixed(0);
    const padded = added ? `; widths padded by ${pad[0]} and ${pad[1]}, ${share} % more` : "";
    return element("tr", {}, element("td", {}, machine.name),
      element("td", {}, element("b", {}, backend), `: ${reason}${padded}`));
  }));
};

const sentenceOf = costs => {
  const s = state.shape, layers = s.depth === 1 ? "layer" : "layers";
  const heads = s.num_heads === 1 ? "head" : "heads";
  const cache = costs.kv_bytes_per_token === null ? []
    : [" and ", element("b", {}, short(costs.kv_bytes_per_token, "bytes")),
      " of KV cache per token"];
  return [`${s.depth} ${layers} of ${s.num_heads} ${heads} of rank ${s.head_dim}, width `
    + `${exact(s.dim)}: `, element("b", {}, `${short(costs.params, "count")} parameters`),
  ...cache, "."];
};

// ---- the measured map

let drawnMap = null;
const showMap = () => {
  if (!PAGE.tasks.length) return;
  const task = PAGE.tasks[state.task];
  if (drawnMap?.task !== task) {
    drawnMap = { task, ...drawMap(task, cell => goTo({ ...PAGE.defaults, ...cell.shape })) };
    get("map").replaceChildren(drawnMap.panels);
    get("map-note").textContent = `Held-out loss, heads across and rank up; the stronger `
      + `the colour, the better. ${task.note} Click a cell to take its shape.`;
  }
  showPlace(drawnMap, placeOf(state.shape, task.cells), state.shape, get("here"));
};

// ---- copying

const TABS = [
  ["Command", () => asCommand(state.shape, state.follows, state.at, PAGE.defaults)],
  ["Python", () => asPython(state.shape, state.follows, PAGE.defaults)],
  ["config.json", () => asConfig(state.shape, state.at)],
];
const chooseTab = i => {
  state.tab = (i + TABS.length) % TABS.length;
  showCopy();
};
const tabs = TABS.map(([name], i) => {
  const tab = element("button", { type: "button", role: "tab", id: `tab-${i}`,
    "aria-controls": "panel" }, name);
  tab.addEventListener("click", () => chooseTab(i));
  tab.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { chooseTab(i + step); tabs[state.tab].focus(); }
  });
  return tab;
});
get("tabs").append(...tabs);
const showCopy = () => {
  tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", String(i === state.tab));
    tab.tabIndex = i === state.tab ? 0 : -1;
  });
  get("panel").setAttribute("aria-labelledby", `tab-${state.tab}`);
  const { text, refused } = TABS[state.tab][1]();
  get("copied").textContent = text ?? refused;
  get("copied").classList.toggle("refused", !text);
  get("copy").hidden = !text;
};
get("copy").addEventListener("click", async () => {
  const text = get("copied").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from a file may not be allowed to: the text is selected and copied
    getSelection().selectAllChildren(get("copied"));
    document.execCommand("copy");
  }
  get("copy").textContent = "Copied";
  get("status").textContent = `${TABS[state.tab][0]} copied`;
  setTimeout(() => { get("copy").textContent = "Copy"; }, 1200);
});

// ---- one pass

const MORE = [
  "norm", "norm_at", "qk_norm", "positions", "attn_gate", "num_experts", "num_experts_per_tok",
  "expert_ffn_dim", "shared_ffn_dim", "q_lora_rank", "average", "sinks", "shared_kv",
  "o_lora_rank", "input_dim", "output_dim",
];
const moreInWords = shape => MORE.filter(name => shape[name] !== PAGE.defaults[name])
  .map(name => `${name} ${shape[name]}`)
  .concat(shape.layers.length ? ["layers that differ (a move of theirs is of all layers)"] : [])
  .join(", ");

const show = () => {
  const { shape, follows, at } = state;
  showForm(shape, follows, at, moreInWords(shape));
  const found = faultOf(shape, follows);
  get("fault").hidden = !found;
  get("costs").classList.toggle("stale", Boolean(found));
  if (found) return showFault(found);
  const costs = costsOf(shape, at);
  reference ??= { ...costs, context: at.context };
  get("sentence").replaceChildren(...sentenceOf(costs));
  showTiles(costs);
  showParts(costs);
  showLayer(shape);
  showNeighbours();
  showBackends();
  showMap();
  showCopy();
  noteAddress();
};

const showFault = ({ text, fix }) => {
  const [words, button] = get("fault").children;
  words.textContent = `${text}.`;
  button.hidden = !fix;
  if (!fix) return;
  const [[name, value]] = Object.entries(fix);
  button.textContent = `Set ${name} to ${value}`;
  button.onclick = () => {
    const follows = new Set(state.follows);
    follows.delete(name);
    commit(changed(state.shape, fix), follows);
  };
};

let waiting = false;
const ask = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; show(); });
};

let noting = 0; // browsers refuse an address that changes with every frame
let noted = location.hash.slice(1);
const framed = location.protocol === "about:"; // in a report, which has the address
get("address").hidden = framed;
const noteAddress = () => {
  if (framed) return;
  clearTimeout(noting);
  noting = setTimeout(() => {
    noted = asAddress(state.shape, state.follows, state.at, PAGE.defaults);
    if (location.hash.slice(1) !== noted) history.replaceState(null, "", `#${noted}`);
  }, 150);
};

const start = () => {
  const found = fromAddress(location.hash, PAGE.defaults);
  if (found) {
    state.at = { ...state.at, ...found.at };
    return commit(found.shape, found.follows);
  }
  commit(PAGE.shape, linksOf(PAGE.shape));
};

get("budget").append(...Object.entries(BUDGETS).map(
  ([value, text]) => element("option", { value }, text)));
get("budget").addEventListener("change", () => { state.budget = get("budget").value; ask(); });
get("pin").addEventListener("click", () => {
  if (faultOf(state.shape, state.follows)) return;
  reference = { ...costsOf(state.shape, state.at), context: state.at.context };
  get("status").textContent = "ratios are to this shape now";
  ask();
});
if (PAGE.tasks.length) {
  get("task").append(...PAGE.tasks.map((task, i) => element("option", { value: i }, task.name)));
  get("task").parentElement.hidden = PAGE.tasks.length === 1;
  get("task").addEventListener("change", () => { state.task = Number(get("task").value); ask(); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawnMap = null; // its colours are computed
  ask();
});
addEventListener("hashchange", () => { if (location.hash.slice(1) !== noted) start(); });
start();
