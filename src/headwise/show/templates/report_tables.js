// Tables: sorted by a click on a heading, filtered by words, a page of rows at a time, so that ten
// thousand runs are as quick as ten. A filter's word is part of a cell, or a comparison:
// rank=8, held_out<0.5.

const FIRST_ROWS = 50;

function numberIn(text) {
  const found = /^-?[\d.]+(e[-+]?\d+)?(?= (±|of|\()|$)/.exec(String(text).replaceAll(",", ""));
  return found ? parseFloat(found[0]) : NaN;
}

function bare(name) { return name.toLowerCase().replace(/[^a-z0-9]/g, ""); }

// One word of a filter as a function of a row's number.
function term(word, table) {
  const parts = /^([^<>=]+)(<=|>=|=|<|>)(.+)$/.exec(word);
  const names = table.headings.map(bare);
  let at = parts ? names.indexOf(bare(parts[1])) : -1;
  if (parts && at < 0) at = names.findIndex(name => name.startsWith(bare(parts[1])));
  if (at < 0 || !bare(parts[1])) {
    const text = word.toLowerCase();
    return row => table.text(row).includes(text);
  }
  const [, , sign, wanted] = parts;
  const limit = numberIn(wanted);
  return row => {
    const value = table.value(row, at);
    const number = typeof value === "number" ? value : numberIn(value ?? "");
    if (sign === "=") {
      return String(value).toLowerCase() === wanted.toLowerCase() || number === limit;
    }
    if (Number.isNaN(number) || Number.isNaN(limit)) return false;
    if (sign === "<") return number < limit;
    if (sign === ">") return number > limit;
    return sign === "<=" ? number <= limit : number >= limit;
  };
}

function ordered(rows, value, up) {
  const keys = new Map(rows.map(row => {
    const one = value(row);
    return [row, typeof one === "number" ? one : numberIn(one ?? "")];
  }));
  const sign = up ? 1 : -1;
  // Numbers before words, in both directions words among themselves.
  return [...rows].sort((a, b) => {
    const x = keys.get(a), y = keys.get(b);
    const numbers = [!Number.isNaN(x), !Number.isNaN(y)];
    if (numbers[0] && numbers[1]) return (x - y) * sign;
    if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
    return String(value(a)).localeCompare(String(value(b))) * sign;
  });
}

// `source` has headings, the number of rows, value(row, column), shown(row, column) as nodes or
// text, text(row) to search in, which columns are prose, and which are shown at first.
function makeTable(host, source) {
  const { name, headings, count } = source;
  let rows = Array.from({ length: count }, (_, i) => i);
  let sorted = { at: -1, up: false };
  let room = FIRST_ROWS;
  let wide = false;
  const id = `filter-${host.dataset.section}-${name}`;
  const filter = element("input", {
    type: "search", id, placeholder: source.example, autocomplete: "off", spellcheck: "false",
  });
  const said = element("output", { class: "soft", "aria-live": "polite", for: id });
  const more = element("button", { type: "button", class: "screen" }, "Show more rows");
  const table = element("table", { "data-name": name });
  const body = element("tbody");
  const head = element("tr");
  table.append(
    element("caption", { class: "unseen" }, source.caption), element("thead", {}, head), body);

  const columns = () => wide ? headings.map((_, i) => i) : source.first;

  function fillHead() {
    head.replaceChildren(...columns().map(at => {
      const button = element("button", { type: "button" }, headings[at]);
      const heading = element("th", {
        scope: "col", class: source.prose[at] ? "text" : null,
        "aria-sort": sorted.at !== at ? null : sorted.up ? "ascending" : "descending",
      }, button);
      if (sorted.at === at) button.append(sorted.up ? " ↑" : " ↓");
      button.addEventListener("click", () => {
        sorted = { at, up: sorted.at === at ? !sorted.up : true };
        update();
        head.children[columns().indexOf(at)].firstChild.focus();
      });
      return heading;
    }));
  }

  function fill() {
    const shown = columns();
    body.replaceChildren(...rows.slice(0, room).map(row => {
      const line = element("tr", { "data-row": row });
      for (const at of shown) {
        const cell = element("td", { class: source.prose[at] ? "text" : null });
        cell.append(...source.shown(row, at));
        line.append(cell);
      }
      return line;
    }));
    const left = rows.length - Math.min(room, rows.length);
    more.hidden = left <= 0;
    more.textContent = `Show ${Math.min(left, 500).toLocaleString("en-US")} more rows`;
    const total = count.toLocaleString("en-US");
    said.textContent = rows.length === count ? `${total} rows`
      : `${rows.length.toLocaleString("en-US")} of ${total} rows`;
  }

  function update() {
    const tests = filter.value.trim().split(/\s+/).filter(Boolean).map(word => term(word, source));
    rows = Array.from({ length: count }, (_, i) => i)
      .filter(row => tests.every(test => test(row)));
    if (sorted.at >= 0) rows = ordered(rows, row => source.value(row, sorted.at), sorted.up);
    room = FIRST_ROWS;
    fillHead();
    fill();
    source.filtered?.(rows);
  }

  filter.addEventListener("input", update);
  more.addEventListener("click", () => { room += 500; fill(); });
  const save = element("button", { type: "button", onclick: () => {
    const lines = rows.map(row => headings.map((_, at) => source.plain(row, at)));
    download(`${source.file}.csv`, csv(headings, lines), "text/csv");
  } }, "CSV");
  const bar = element("div", { class: "bar screen" },
    element("label", { for: id, class: "unseen" }, `Filter of ${source.caption}`), filter, said,
    save);
  if (source.first.length < headings.length) {
    const all = element("input", { type: "checkbox", onchange: () => {
      wide = all.checked;
      fillHead();
      fill();
    } });
    bar.append(element("label", {}, all, `all ${headings.length} columns`));
  }
  const box = element("div", {
    class: "scroll", tabindex: "0", role: "region", "aria-label": source.caption,
  }, table);
  host.append(bar, box, more);
  fillHead();
  fill();
  return {
    filter(text) { filter.value = text; update(); },
    // Show these rows alone, whatever they have in common.
    only(chosen, label) {
      filter.value = "";
      rows = chosen;
      room = Math.max(FIRST_ROWS, chosen.length);
      fillHead();
      fill();
      said.textContent = label;
      source.filtered?.(rows);
      host.scrollIntoView({ block: "start", behavior: "auto" });
    },
  };
}

const tables = new Map(); // "section/points" -> its table

function pointsTable(host, section) {
  const { headings, cells, prose } = section.points;
  const text = [];
  return makeTable(host, {
    name: "points", file: `${section.name}-points`, headings, prose, count: cells.length,
    caption: `Every point of ${section.name}`, example: "filter, such as rank=8",
    first: headings.map((_, i) => i),
    value: (row, at) => cells[row][at],
    plain: (row, at) => cells[row][at],
    shown: (row, at) => raised(cells[row][at]),
    text: row => text[row] ??= cells[row].join(" ").toLowerCase(),
  });
}

function runsTable(host, section) {
  const { columns, values, shown } = section.runs;
  const text = [];
  const at = name => columns.indexOf(name);
  return makeTable(host, {
    name: "runs", file: `${section.name}-runs`, headings: columns,
    prose: columns.map((_, i) => values[i].every(v => v == null || typeof v === "string")),
    count: values[0]?.length ?? 0,
    caption: `Every run of ${section.name}`, example: "filter, such as seed=0 held_out<0.5",
    first: shown.map(at),
    value: (row, i) => values[i][row],
    plain: (row, i) => values[i][row],
    shown: (row, i) => [shownNumber(values[i][row])],
    text: row => text[row] ??= columns.map((_, i) => values[i][row] ?? "").join(" ").toLowerCase(),
    filtered: rows => section.filtered?.(rows),
  });
}

for (const host of document.querySelectorAll(".table")) {
  const section = page.sections[host.dataset.section];
  const made = host.dataset.table === "points" ? pointsTable : runsTable;
  tables.set(`${host.dataset.section}/${host.dataset.table}`, made(host, section));
}
