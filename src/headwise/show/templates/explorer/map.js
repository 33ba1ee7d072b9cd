// The measured map: held-out loss over heads, rank and depth, from rows; and where the shape of
// the page lies on it.

"use strict";

const lossText = loss => (loss >= 100 ? loss.toFixed(0) : loss >= 10 ? loss.toFixed(1)
  : loss >= 1 ? loss.toFixed(2) : loss.toFixed(3));

// The cell with these heads, rank and depth; else the nearest. Where the widths differ ranks are
// compared as shares of the width.
const placeOf = (shape, cells) => {
  const equal = cells.find(c => c.num_heads === shape.num_heads && c.head_dim === shape.head_dim
    && c.depth === shape.depth);
  if (equal) return { cell: equal, exact: true };
  const far = (a, b) => Math.abs(Math.log(a / b));
  const distance = c => {
    const scale = c.dim === shape.dim ? 1 : c.dim / shape.dim;
    return far(c.num_heads, shape.num_heads) + far(c.head_dim, shape.head_dim * scale)
      + far(c.depth, shape.depth);
  };
  const cell = cells.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  return { cell, exact: false };
};

// A share of the way between two colours of the style sheet, and black or white on it, whichever is
// seen better.
const channels = name => getComputedStyle(document.documentElement).getPropertyValue(name)
  .trim().slice(1).match(/../g).map(pair => parseInt(pair, 16));
const mixed = (from, to, share) => from.map((v, i) => Math.round(v + (to[i] - v) * share));
const textOn = colour => {
  const linear = v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = colour.map(v => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
};

const cellInWords = c =>
  `${c.num_heads} x ${c.head_dim} in ${c.depth} ${c.depth === 1 ? "layer" : "layers"}`;

// Panels of one task, drawn once; `choose` takes the cell that was clicked.
const drawMap = (task, choose) => {
  const known = task.cells.filter(c => c.loss !== null);
  const losses = known.map(c => c.loss), least = Math.min(...losses), most = Math.max(...losses);
  const scale = least > 0 ? Math.log : loss => loss;
  const share = c => (scale(most) - scale(c.loss)) / (scale(most) - scale(least) || 1);
  const [weak, strong] = [channels("--high"), channels("--low")];
  const colour = c => (c.loss === null ? null : mixed(weak, strong, share(c)));
  const buttons = new Map();
  const panels = element("div", { className: "panels" });
  for (const depth of [...new Set(task.cells.map(c => c.depth))].sort((a, b) => a - b)) {
    const cells = task.cells.filter(c => c.depth === depth);
    const heads = [...new Set(cells.map(c => c.num_heads))].sort((a, b) => a - b);
    const ranks = [...new Set(cells.map(c => c.head_dim))].sort((a, b) => b - a);
    const grid = element("div", { className: "grid" });
    grid.style.gridTemplateColumns = `auto repeat(${heads.length}, auto)`;
    for (const rank of ranks) {
      grid.append(element("span", { className: "axis" }, `${rank}`));
      for (const count of heads) {
        const cell = cells.find(c => c.num_heads === count && c.head_dim === rank);
        grid.append(cell ? buttonOf(cell, colour, choose, buttons) : element("span"));
      }
    }
    grid.append(element("span", { className: "axis" }));
    grid.append(...heads.map(n => element("span", { className: "axis" }, `${n}`)));
    const title = `${depth} ${depth === 1 ? "layer" : "layers"}`;
    panels.append(element("div", { className: "panel" }, element("h3", {}, title), grid));
  }
  return { panels, buttons };
};

const buttonOf = (cell, colour, choose, buttons) => {
  const button = element("button", { type: "button" });
  const text = cell.loss === null ? "failed" : lossText(cell.loss);
  button.textContent = cell.n === 1 ? `(${text})` : text;
  const spread = cell.half === null ? "" : ` ± ${lossText(cell.half)}`;
  button.title = `${cellInWords(cell)}: ${text}${spread}, ${cell.n} seeds; feed-forward `
    + `${cell.ffn_dim}, ${cell.params.toLocaleString("en")} parameters`;
  const back = colour(cell);
  if (back) {
    button.style.background = `rgb(${back.join(" ")})`;
    button.style.color = textOn(back);
  }
  button.classList.add(...(cell.mark ? [cell.mark] : []));
  button.setAttribute("aria-label", `${button.title}${cell.mark ? `, ${MARKS[cell.mark]}` : ""}`);
  button.addEventListener("click", () => choose(cell));
  buttons.set(cell, button);
  return button;
};
const MARKS = { best: "the best", alike: "cannot be told apart from the best" };

const showPlace = (drawn, place, shape, sentence) => {
  for (const [cell, button] of drawn.buttons) {
    button.classList.toggle("here", place.exact && cell === place.cell);
    button.classList.toggle("near-here", !place.exact && cell === place.cell);
  }
  const c = place.cell, words = cellInWords(c);
  const loss = c.loss === null ? "diverged" : `held-out loss ${lossText(c.loss)}`;
  const widths = c.dim === shape.dim ? "" : ` It was measured at width ${c.dim}, yours is `
    + `${shape.dim}${place.exact ? "" : ": ranks are compared as shares of the width"}.`;
  sentence.replaceChildren(
    element("b", {}, place.exact ? "You are here: " : "No cell is yours. The nearest: "),
    `${words}, ${loss}.${widths}`);
};
