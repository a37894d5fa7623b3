// Tables that sort by any column and filter by text; only the first rows are drawn.
const MAX_ROWS = 250;

// A column of numbers at a fixed index of each row.
const numeric = (title, place, text) => ({ title, value: (row) => row[place], text: (row) => text(row[place]), number: true });

// columns: [{title, value(row), text(row), number, class}]
// A column without known values is not drawn, but listed below the table.
function sortedTable(rows, all, { filter = "", sort = 0, down = true, caption = "" } = {}) {
  const unknown = all.filter((column) => column.number && rows.length && rows.every((row) => { const known = column.value(row); return known === null || known === undefined; }));
  const columns = all.filter((column) => !unknown.includes(column) && !column.hidden);
  let by = Math.max(columns.indexOf(all[sort]), 0);
  const head = make("tr"), body = make("tbody"), note = make("p", { class: "soft" });
  const table = make("table", { "aria-label": caption }, make("thead", {}, head), body);
  const headers = columns.map((column, number) => {
    const cell = make("th", { class: column.number ? "n" : null, scope: "col" },
      make("button", { type: "button", on: { click: () => { down = by === number ? !down : Boolean(column.number); by = number; fill(); } } }, column.title));
    head.append(cell);
    return cell;
  });
  function fill() {
    headers.forEach((cell, number) => { if (number === by) cell.setAttribute("aria-sort", down ? "descending" : "ascending"); else cell.removeAttribute("aria-sort"); });
    const wanted = filter.toLowerCase();
    const { value } = columns[by];
    const kept = rows.filter((row) => !wanted || columns.some((column) => !column.number && String(column.text(row)).toLowerCase().includes(wanted)));
    kept.sort((a, b) => { const left = value(a), right = value(b); return (left === right ? 0 : left === null ? 1 : right === null ? -1 : left < right ? -1 : 1) * (down ? -1 : 1); });
    body.replaceChildren(...kept.slice(0, MAX_ROWS).map((row) => make("tr", {}, columns.map((column) => make("td", { class: column.class || (column.number ? "n" : null) }, column.text(row))))));
    note.textContent = [kept.length > MAX_ROWS ? `The first ${MAX_ROWS} of ${count(kept.length)} rows.` : "", unknown.length ? `Not measurable here: ${unknown.map((column) => column.title).join(", ")}.` : ""].join(" ").trim();
  }
  fill();
  return { element: make("div", {}, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table), note), filter: (text) => { filter = text; fill(); } };
}

function filtered(label, table) {
  const box = make("input", { type: "search", placeholder: label, "aria-label": label, on: { input: () => table.filter(box.value) } });
  return make("div", {}, make("div", { class: "row" }, box), table.element);
}
