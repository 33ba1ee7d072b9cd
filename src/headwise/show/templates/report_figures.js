// Figures: drawn when they come near the window, with a legend of buttons. What a figure says under
// the mouse it also says under the arrow keys.

const OPTIONS = { responsive: true, displayModeBar: false, displaylogo: false };
const KINDS = {
  mean: "mean over seeds, 95 %", seed: "single seeds", statistic: "the paper's statistic",
  published: "published",
};

const LOOKS = { mean: "solid", seed: "hollow", statistic: "dots", published: "dashed" };

// Ticks of a log axis between two powers of ten that leave room for their labels.
function logTicks([from, to], most = 7) {
  const [low, high] = [Math.min(from, to), Math.max(from, to)];
  if (!(high > low)) return null;
  const places = digits => {
    const out = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
      for (const digit of digits) {
        const place = power + Math.log10(digit);
        if (place >= low - 1e-9 && place <= high + 1e-9) out.push(digit * 10 ** power);
      }
    }
    return out;
  };
  for (const digits of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const found = places(digits);
    // Equal room for unequal steps: nine to a decade only where they spread over less than one.
    if (found.length >= 3 && found.length <= most && (digits.length < 9 || high - low < 0.6)) {
      return found;
    }
  }
  const decades = places([1]);
  if (decades.length > most) {
    const every = Math.ceil(decades.length / most);
    return decades.filter((_, i) => i % every === 0);
  }
  if (decades.length >= 2) return decades;
  // Less than a decade: round steps as on a linear axis.
  const [a, b] = [10 ** low, 10 ** high];
  for (let parts = 4; parts < 20; parts += 2) {
    const rough = (b - a) / parts, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    const first = Math.ceil(a / step), out = [];
    for (let n = first; n * step <= b * (1 + 1e-12); n++) out.push(n * step);
    if (out.length >= 3) return out;
  }
  return [a, b];
}

function tickText(value) {
  if (value >= 1e4 || value < 1e-3) {
    const power = Math.floor(Math.log10(value) + 1e-9);
    const digit = Math.round(value / 10 ** power);
    return `${digit === 1 ? "" : `${digit}×`}10<sup>${power}</sup>`.replace("-", "−");
  }
  return String(Number(value.toPrecision(6)));
}

// The y axes that are logarithms get ticks for what is seen of them.
async function setTicks(plot) {
  const changes = {};
  for (const [name, axis] of Object.entries(plot._fullLayout)) {
    if (!/^yaxis\d*$/.test(name) || axis.type !== "log") continue;
    const found = logTicks(axis.range);
    if (!found || !found.length) continue;
    changes[`${name}.tickvals`] = found;
    changes[`${name}.ticktext`] = found.map(tickText);
  }
  if (Object.keys(changes).length) {
    plot.ticking = true;
    await Plotly.relayout(plot, changes);
    plot.ticking = false;
  }
}

// What a line looks like, beside its name.
function swatch({ colour, style }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ width: 22, height: 12, "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  const add = (name, attributes) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
    svg.append(shape);
  };
  const stroke = themed(colour);
  if (["solid", "line", "dashed"].includes(style)) {
    const dash = style === "dashed" ? { "stroke-dasharray": "4 3" } : {};
    add("line", { x1: 1, x2: 21, y1: 6, y2: 6, stroke, "stroke-width": 2, ...dash });
  }
  if (style === "dots") add("path", { d: "M7 2l8 8M15 2l-8 8", stroke, "stroke-width": 2 });
  if (style === "solid") add("circle", { cx: 11, cy: 6, r: 3.5, fill: stroke });
  if (["hollow", "star", "diamond"].includes(style)) {
    const d = {
      star: "M11 0l2 4 4 .5-3 3 .8 4.5L11 10l-3.8 2 .8-4.5-3-3 4-.5z",
      diamond: "M11 1l5 5-5 5-5-5z",
      hollow: "M11 1.5a4.5 4.5 0 1 0 .01 0z",
    }[style];
    add("path", { d, fill: "none", stroke, "stroke-width": 1.5 });
  }
  return svg;
}

function press(button, on) { button.setAttribute("aria-pressed", String(on)); }

function makeFigure(plot) {
  const section = page.sections[plot.dataset.section];
  const figure = section.figures[plot.dataset.figure];
  const box = plot.closest("figure");
  const [legend, tools, said] = [".legend", ".tools", ".said"].map(one => box.querySelector(one));
  const hidden = new Set(); // numbers of series
  const off = new Set(["seed"]); // kinds
  let drawn = false;

  const visible = trace => {
    const { series, kind } = trace.meta ?? {};
    return !hidden.has(series) && !off.has(kind);
  };

  // A seed says under the mouse which run it is, and its settings.
  function seedTexts(trace) {
    const [columns, values] = [section.runs.columns, section.runs.values];
    section.rowOf ??= new Map((values[columns.indexOf("id")] ?? []).map((id, i) => [id, i]));
    return trace.customdata.map(([id], i) => {
      const row = section.rowOf.get(id);
      const value = shownNumber(trace.y[i]);
      return row === undefined ? value : `<b>${value}</b><br>${aboutRun(section, row)}`;
    });
  }

  function traces() {
    return figure.data.map(trace => {
      const shown = visible(trace);
      const text = shown && trace.meta?.kind === "seed" ? { text: seedTexts(trace),
        hovertemplate: "%{text}<extra></extra>" } : {};
      const { customdata, ...rest } = trace;
      return { ...themed(rest), customdata, ...text, visible: shown };
    });
  }

  async function draw() {
    drawn = true;
    const layout = themed(narrow.matches && !printing ? figure.narrow : figure.layout);
    await Plotly.react(plot, traces(), structuredClone(layout), OPTIONS);
    if (!plot.listened) listen();
    await setTicks(plot);
    plot.dataset.drawn = "yes";
  }

  function listen() {
    plot.listened = true;
    plot.on("plotly_relayout", change => {
      if (!plot.ticking && Object.keys(change).some(key => key.includes("axis"))) setTicks(plot);
    });
    plot.on("plotly_click", event => showRuns(event.points[0].customdata));
  }

  function showRuns(ids) {
    const [columns, values] = [section.runs.columns, section.runs.values];
    const known = values[columns.indexOf("id")];
    const table = tables.get(`${plot.dataset.section}/runs`);
    if (!known || !table || !Array.isArray(ids)) return;
    const wanted = new Set(ids);
    const rows = known.flatMap((id, i) => wanted.has(id) ? [i] : []);
    if (rows.length) table.only(rows, `${rows.length} of the point; empty the filter for all`);
  }

  function fillLegend() {
    legend.replaceChildren();
    for (const one of figure.legend.series) {
      const button = element("button", { type: "button" }, swatch(one), plainText(one.label));
      press(button, !hidden.has(one.number));
      button.addEventListener("click", () => {
        if (!hidden.delete(one.number)) hidden.add(one.number);
        press(button, !hidden.has(one.number));
        draw();
      });
      legend.append(button);
    }
    const kinds = figure.legend.kinds.filter(kind => KINDS[kind]);
    if (kinds.length > 1) {
      for (const kind of Object.keys(KINDS).filter(one => kinds.includes(one))) {
        const look = swatch({ colour: "#6b727d", style: LOOKS[kind] });
        const button = element("button", { type: "button", "data-kind": kind }, look, KINDS[kind]);
        press(button, !off.has(kind));
        button.addEventListener("click", () => {
          if (!off.delete(kind)) off.add(kind);
          press(button, !off.has(kind));
          draw();
        });
        legend.append(button);
      }
    }
    if (figure.hollow) {
      legend.append(element("span", { class: "note" },
        swatch({ colour: "#6b727d", style: "hollow" }), "hollow: one seed"));
    }
    legend.hidden = !legend.children.length;
  }

  // The figure's numbers, a line per point.
  function numbers() {
    const rows = [];
    for (const trace of figure.data) {
      const name = plainWords(trace.name ?? "");
      const panel = (trace.xaxis ?? "x").slice(1) || "1";
      if (trace.type === "heatmap") {
        trace.z.forEach((line, y) => line.forEach((z, x) => rows.push([panel, name, "cell",
          figure.layout[`xaxis${panel === "1" ? "" : panel}`].ticktext[x],
          figure.layout[`yaxis${panel === "1" ? "" : panel}`].ticktext[y], z])));
        continue;
      }
      trace.x.forEach((x, i) => rows.push([panel, name, trace.meta?.kind ?? "", x, trace.y[i],
        trace.error_y?.array[i] ?? trace.error_x?.array[i] ?? ""]));
    }
    return csv(["panel", "line", "kind", "x", "y", "value or upper half-width"], rows);
  }

  async function image(format) {
    const size = { width: Math.max(plot.clientWidth, 640), height: plot.clientHeight };
    const url = await Plotly.toImage(plot, { format, scale: format === "png" ? 2 : 1, ...size });
    const link = element("a", { href: url, download: `${plot.id.replace("plot-", "")}.${format}` });
    document.body.append(link);
    link.click();
    link.remove();
  }

  const tool = (name, act) => {
    tools.append(element("button", { type: "button", onclick: act }, name));
  };
  tool("SVG", () => image("svg"));
  tool("PNG", () => image("png"));
  tool("CSV", () => download(`${plot.id.replace("plot-", "")}.csv`, numbers(), "text/csv"));
  tool("Reset zoom", () => draw());

  // ---- the keyboard: arrows go from point to point, Escape leaves

  let at = -1;
  function points() {
    const out = [];
    traces().forEach((trace, curve) => {
      if (!trace.visible || trace.hoverinfo === "skip") return;
      if (trace.type === "heatmap") {
        trace.z.forEach((line, y) => line.forEach((z, x) => {
          if (z != null) out.push({ curve, text: trace.customdata[y][x] });
        }));
      } else {
        trace.x.forEach((x, i) => {
          if (trace.y[i] == null || trace.text?.[i] === undefined) return;
          out.push({ curve, i, subplot: `${trace.xaxis}${trace.yaxis}`,
            text: `${trace.name}: ${trace.text[i]}` });
        });
      }
    });
    return out;
  }
  plot.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { at = -1; Plotly.Fx.unhover(plot); said.textContent = ""; }
    if (!step || !drawn) return;
    event.preventDefault();
    const all = points();
    if (!all.length) return;
    at = (at + step + all.length) % all.length;
    const one = all[at];
    said.textContent = plainWords(one.text.replaceAll("<br>", ", "));
    if (one.i !== undefined) {
      Plotly.Fx.hover(plot, [{ curveNumber: one.curve, pointNumber: one.i }], one.subplot);
    }
  });

  fillLegend();
  redrawn.push(() => { fillLegend(); if (drawn) draw(); });
  return { draw, needed: () => !drawn };
}

// Names of lines are written for Plotly: escaped, with <sup> and <br>.
function plainWords(markup) {
  return markup.replace(/<sup>/g, "^").replace(/<br>/g, " ").replace(/<[^>]*>/g, "")
    .replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
}
function plainText(markup) {
  return element("span", {}, ...raised(plainWords(markup)));
}

const near = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    near.unobserve(entry.target);
    if (entry.target.figure.needed()) entry.target.figure.draw();
  }
}, { rootMargin: "500px" });
const plots = [...document.querySelectorAll(".plot[data-figure]")];
for (const plot of plots) {
  // Room for the figure before it is drawn, so that nothing jumps.
  const figure = page.sections[plot.dataset.section].figures[plot.dataset.figure];
  plot.style.minHeight = `${(narrow.matches ? figure.narrow : figure.layout).height}px`;
  redrawn.push(() => {
    plot.style.minHeight = `${(narrow.matches ? figure.narrow : figure.layout).height}px`;
  });
  plot.figure = makeFigure(plot);
  near.observe(plot);
}
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("figcaption details")) one.open = true;
  for (const plot of plots) if (plot.figure.needed()) plot.figure.draw();
});
