"use strict";
// What the other scripts share: the page's data, its colours, downloads, numbers as text.
// Everything that comes from a store is text: nothing here makes markup of it.

const page = JSON.parse(document.getElementById("data").textContent);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter(child => child != null));
  return made;
}

// ---- light and dark

const theme = document.getElementById("theme");
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 700px)");
const redrawn = []; // called when colours or the number of columns change
let printing = false;

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return !printing && (chosen ? chosen === "dark" : darkSystem.matches);
}

// A figure's colours are those of a light page; on a dark one each has its own counterpart.
function themed(value) {
  if (typeof value === "string") {
    if (!isDark()) return value;
    return Object.hasOwn(page.dark, value) ? page.dark[value] : value;
  }
  if (Array.isArray(value)) {
    return typeof value[0] === "number" ? value : value.map(themed);
  }
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one)]));
}

function redraw() { for (const draw of redrawn) draw(); }

function remembered(key, value) {
  try { // a page opened from a file may have no memory
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch { return null; }
  return null;
}

function choose(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  redraw();
}
theme.value = remembered("headwise-theme") || "";
if (theme.value) document.documentElement.dataset.theme = theme.value;
theme.addEventListener("change", () => {
  remembered("headwise-theme", theme.value);
  choose(theme.value);
});
darkSystem.addEventListener("change", redraw);
narrow.addEventListener("change", redraw);
addEventListener("beforeprint", () => { printing = true; redraw(); });
addEventListener("afterprint", () => { printing = false; redraw(); });

// ---- downloads

function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function csv(headings, rows) {
  const cell = value => {
    let text = value == null ? "" : String(value);
    // What begins like a formula is text for a spreadsheet too.
    const formula = /^[=+@\t\r]/.test(text) || (text[0] === "-" && Number.isNaN(Number(text)));
    if (formula) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [headings, ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

for (const command of document.querySelectorAll("pre.command")) {
  const button = element("button", { class: "screen", type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    const picked = getSelection();
    picked.selectAllChildren(command);
    try { await navigator.clipboard.writeText(command.textContent); } catch {
      document.execCommand("copy"); // a page opened from a file has no clipboard of its own
    }
    picked.removeAllRanges();
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  command.before(button);
}

// ---- values as text

function shownNumber(value) {
  if (value == null) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const four = Number(value.toPrecision(4));
  return Math.abs(four) < 1e-4 || Math.abs(four) >= 1e6 ? four.toExponential() : String(four);
}

// d^2.5 with its exponent raised, as nodes
function raised(text) {
  return text.split(/\^([\d.]*\d)/).map(
    (part, i) => i % 2 ? element("sup", {}, part) : part).filter(part => part !== "");
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// A run as lines under the mouse: its settings, its error.
function aboutRun(section, row) {
  const { columns, values, settings } = section.runs;
  const value = name => values[columns.indexOf(name)]?.[row];
  const words = settings.filter(name => name !== "id" && value(name) != null)
    .map(name => `${name} ${shownNumber(value(name))}`);
  const lines = [[]];
  for (const word of words) {
    if (lines.at(-1).join(", ").length + word.length > 44) lines.push([]);
    lines.at(-1).push(word);
  }
  return [`run ${value("id") ?? row}`, ...lines.map(line => line.join(", "))]
    .filter(Boolean).map(escaped).join("<br>");
}
