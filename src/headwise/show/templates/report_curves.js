// Learning curves of the runs that the table's filter leaves, many at once, coloured by a column.

const MOST_CURVES = 100; // drawn at once

// Colours of values in order; of no other thing on the page.
function scale(place, of) {
  const share = of > 1 ? place / (of - 1) : 0.5;
  return `hsl(${Math.round(200 + 250 * share) % 360}, ${isDark() ? "75%, 68%" : "80%, 34%"})`;
}

// Every k-th of many, spread evenly.
function spread(list, most) {
  if (list.length <= most) return list;
  return Array.from({ length: most }, (_, i) => list[Math.floor(i * list.length / most)]);
}

function makeCurves(host) {
  const section = page.sections[host.dataset.section];
  const { columns, values, settings } = section.runs;
  const curves = section.curves.runs;
  const byRow = new Map(curves.map((curve, i) => [curve.row, i]));
  const choices = settings.filter(name => name !== "id" && name !== "seed");
  const name = `curves-${host.dataset.section}`;
  const by = element("select", { id: name }, element("option", { value: "" }, "nothing"),
    ...choices.map(one => element("option", { value: one }, one)));
  by.value = ["head_dim", "num_heads", "depth", "lr"].find(one => choices.includes(one))
    ?? choices[0] ?? "";
  const held = element("input", { type: "checkbox", checked: true });
  const train = element("input", { type: "checkbox", checked: true });
  const said = element("output", { class: "soft", "aria-live": "polite" });
  const legend = element("div", { class: "legend", role: "group", "aria-label": "Colours" });
  const plot = element("div", { class: "plot", id: `curve-${section.anchor}` });
  host.append(element("div", { class: "bar screen" },
    element("label", { for: name }, "Learning curves coloured by"), by,
    element("label", {}, held, "held out"), element("label", {}, train, "training"), said),
  plot, legend);
  let rows = curves.map(curve => curve.row);

  function shown() {
    return spread(rows.filter(row => byRow.has(row)), MOST_CURVES);
  }

  function colours(list) {
    const column = values[columns.indexOf(by.value)];
    const found = column ? [...new Set(list.map(row => column[row]))] : [];
    found.sort((a, b) => typeof a === "number" && typeof b === "number" ? a - b
      : String(a).localeCompare(String(b)));
    return { of: new Map(found.map((value, i) => [value, scale(i, found.length)])), column };
  }

  async function draw() {
    const list = shown();
    const { of, column } = colours(list);
    const grey = isDark() ? "#949aa3" : "#6b727d";
    const data = [];
    for (const row of list) {
      const curve = curves[byRow.get(row)];
      const color = column ? of.get(column[row]) : grey;
      const about = aboutRun(section, row);
      const line = (x, y, what, look) => data.push({
        x, y, type: "scatter", mode: "lines", line: { color, ...look }, meta: { row },
        opacity: list.length > 20 ? 0.6 : 0.9,
        hovertemplate: `<b>%{y:.4g}</b> ${what}, step %{x:,}<br>${about}<extra></extra>`,
      });
      if (train.checked) {
        line(curve.train.map((_, i) => curve.first + i * curve.every), curve.train, "training",
          { width: 1, dash: held.checked ? "dot" : "solid" });
      }
      if (held.checked) line(curve.at, curve.held_out, "held out", { width: 1.8 });
    }
    const losses = data.flatMap(one => one.y).filter(y => y > 0);
    const low = losses.reduce((a, b) => Math.min(a, b), Infinity);
    const high = losses.reduce((a, b) => Math.max(a, b), 0);
    const [ink, grid, ground] = themed(["#1d2430", "#e6e9ed", "#ffffff"]);
    const axis = { gridcolor: grid, zeroline: false, linecolor: grey };
    const layout = {
      height: narrow.matches ? 300 : 380, showlegend: false, hovermode: "closest",
      dragmode: narrow.matches ? false : "zoom",
      paper_bgcolor: ground, plot_bgcolor: ground, margin: { l: 60, r: 10, t: 10, b: 46 },
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      hoverlabel: { align: "left", namelength: -1 },
      xaxis: { ...axis, title: { text: "step", standoff: 6 }, rangemode: "tozero" },
      yaxis: { ...axis, title: { text: section.curves.loss, standoff: 8 }, automargin: true,
        type: high > 3 * low ? "log" : "linear" },
    };
    await Plotly.react(plot, data, layout, OPTIONS);
    if (!plot.listened) {
      plot.listened = true;
      plot.on("plotly_relayout", change => {
        if (!plot.ticking && Object.keys(change).some(key => key.includes("axis"))) setTicks(plot);
      });
    }
    await setTicks(plot);
    legend.replaceChildren(...[...of].slice(0, 24).map(([value, colour]) =>
      element("span", { class: "note" }, swatch({ colour, style: "line" }),
        `${by.value} ${shownNumber(value)}`)));
    if (of.size > 24) legend.append(element("span", { class: "note" }, `and ${of.size - 24} more`));
    const there = rows.filter(row => byRow.has(row)).length;
    const all = `${there.toLocaleString("en-US")} curves`;
    said.textContent = there > list.length
      ? `${list.length} of ${all}, evenly chosen: filter for others` : all;
    plot.dataset.drawn = "yes";
  }

  let waiting = 0, seen = false;
  const soon = () => {
    clearTimeout(waiting);
    if (seen) waiting = setTimeout(draw, 150);
  };
  for (const one of [by, held, train]) one.addEventListener("change", soon);
  section.filtered = found => { rows = [...found].sort((a, b) => a - b); soon(); };
  redrawn.push(() => { if (seen) draw(); });
  plot.style.minHeight = "300px";
  new IntersectionObserver((entries, watcher) => {
    if (!entries.some(entry => entry.isIntersecting)) return;
    watcher.disconnect();
    seen = true;
    draw();
  }, { rootMargin: "300px" }).observe(plot);
}

for (const host of document.querySelectorAll(".curves")) makeCurves(host);
