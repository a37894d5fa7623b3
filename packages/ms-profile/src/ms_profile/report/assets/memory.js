// The page of `ms-profile memory`: categories over time, the peak as a treemap and tables, fragmentation.
const SHADE = { weights: "compute", gradients: "garbage", moments: "data", activations: "collective", buffers: "copy", other: "synchronize", unknown: "host" };
const names = Object.keys(summary.descriptions);
const redraws = [];
const deviceName = (device) => (device.device < 0 ? "host" : `device ${device.device}`);

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, tall = canvas.clientHeight;
  if (!width) return null;
  canvas.width = width * scale; canvas.height = tall * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  return { pen, width, tall };
}

// Categories stacked over the events of the allocator, with the reserved memory as a line.
function stackedAreas(canvas, device) {
  const drawing = prepare(canvas);
  if (!drawing) return;
  const { pen, width, tall } = drawing, { at_s, reserved, categories } = device.timeline;
  const left = width < 500 ? 58 : 72, right = width - 12, bottom = tall - 24, top = 10, points = at_s.length;
  const most = Math.max(device.totals.peak, ...reserved, 1) * 1.04;
  const x = (i) => left + (points > 1 ? i / (points - 1) : 0) * (right - left);
  const y = (bytes) => bottom - (bytes / most) * (bottom - top);
  const level = 2 ** Math.ceil(Math.log2(most / 5));
  for (let bytes = 0; bytes <= most; bytes += level) {
    pen.fillStyle = styleOf("--line"); pen.fillRect(left, Math.round(y(bytes)), right - left, 1);
    pen.fillStyle = styleOf("--soft"); pen.textAlign = "right"; pen.fillText(size(bytes), left - 6, y(bytes));
  }
  pen.textAlign = "center"; pen.fillStyle = styleOf("--soft");
  const marks = Math.max(2, Math.min(6, Math.floor(width / 130)));
  for (let k = 0; k <= marks; k++) {
    const i = Math.round((k / marks) * (points - 1));
    pen.textAlign = k === 0 ? "left" : k === marks ? "right" : "center";
    pen.fillText(time(at_s[i] * 1e9), x(i), bottom + 13);
  }
  const base = new Float64Array(points);
  for (const name of names) {
    const curve = categories[name];
    if (!curve) continue;
    pen.fillStyle = styleOf(`--${SHADE[name]}`);
    pen.beginPath();
    for (let i = 0; i < points; i++) pen.lineTo(x(i), y(base[i] + curve[i]));
    for (let i = points - 1; i >= 0; i--) pen.lineTo(x(i), y(base[i]));
    pen.fill();
    for (let i = 0; i < points; i++) base[i] += curve[i];
  }
  if (Math.max(...reserved)) {
    pen.strokeStyle = styleOf("--ink"); pen.lineWidth = 1.2; pen.setLineDash([5, 3]); pen.beginPath();
    reserved.forEach((bytes, i) => { if (i) pen.lineTo(x(i), y(reserved[i - 1])); pen.lineTo(x(i), y(bytes)); });
    pen.stroke(); pen.setLineDash([]);
  }
  const peak = base.indexOf(Math.max(...base));
  pen.fillStyle = styleOf("--ink"); pen.fillRect(x(peak) - 0.5, top, 1, bottom - top);
  pen.textAlign = x(peak) > width / 2 ? "right" : "left";
  pen.fillText(`peak ${size(device.totals.peak)}`, x(peak) + (x(peak) > width / 2 ? -5 : 5), top + 6);
}

// Squarified treemap (Bruls, Huizing, van Wijk 2000): rows whose cells are as square as possible.
function squarify(items, box) {
  const cells = [];
  let { x, y, w, h } = box, rest = items, area = sum(items.map((item) => item.value));
  while (rest.length && area > 0 && w > 0 && h > 0) {
    const scale = (w * h) / area, side = Math.min(w, h);
    let taken = 0, total = 0, worst = Infinity;
    while (taken < rest.length) {
      const next = total + rest[taken].value, thick = (next * scale) / side;
      const ratio = Math.max(...[rest[0], rest[taken]].map((item) => { const long = (item.value * scale) / thick; return Math.max(thick / long, long / thick); }));
      if (ratio > worst) break;
      worst = ratio; total = next; taken++;
    }
    const thick = (total * scale) / side;
    let at = 0;
    for (const item of rest.slice(0, taken)) {
      const long = (item.value * scale) / thick;
      cells.push(w >= h ? { item, x, y: y + at, w: thick, h: long } : { item, x: x + at, y, w: long, h: thick });
      at += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    area -= total; rest = rest.slice(taken);
  }
  return cells;
}

function treemap(stage, device) {
  const width = stage.clientWidth, tall = stage.clientHeight;
  if (!width) return;
  const shown = sum(device.live.map((row) => row.size_bytes)), hidden = device.totals.peak - shown;
  const groups = names.map((name) => ({ name, rows: device.live.filter((row) => row.category === name) }))
    .map((group) => ({ ...group, value: sum(group.rows.map((row) => row.size_bytes)) })).filter((group) => group.value)
    .sort((a, b) => b.value - a.value);
  if (hidden > 0) groups.push({ name: "unknown", rows: [{ category: "other stacks", module: "", line: "smaller stacks", size_bytes: hidden, count: 0 }], value: hidden });
  const cells = squarify(groups, { x: 0, y: 0, w: width, h: tall })
    .flatMap((cell) => squarify(cell.item.rows.map((row) => ({ row, value: row.size_bytes, name: cell.item.name })), cell));
  stage.replaceChildren(...cells.map(({ item, x, y, w, h }) => {
    const { row, name } = item, text = `${row.category}: ${size(row.size_bytes)} (${share(row.size_bytes, device.totals.peak)}), ${row.line}, ${row.module}`;
    return make("div", { class: "cell", title: text, style: `left: ${x}px; top: ${y}px; width: ${w}px; height: ${h}px; background: var(--${SHADE[name]})` },
      w > 46 && h > 18 ? make("b", {}, size(row.size_bytes)) : null, w > 90 && h > 36 ? make("span", {}, row.line) : null);
  }));
}

function tile(value, text) {
  return make("div", { class: "tile" }, make("b", { class: value === NOT_MEASURABLE ? "none" : null }, value), make("span", {}, text));
}

function categoryTable(device) {
  const rows = names.map((name) => ({ name, bytes: device.categories[name], highest: device.highest[name], predicted: device.predicted ? device.predicted[name] ?? null : null })).filter((row) => row.highest || row.predicted);
  if (device.predicted) rows.push({ name: "total", bytes: device.totals.peak, highest: device.totals.peak, predicted: sum(Object.values(device.predicted)) });
  const columns = [
    { title: "category", value: (r) => r.name, text: (r) => make("span", { title: summary.descriptions[r.name] || null }, make("i", { class: "key", style: `background: var(--${SHADE[r.name] || "ink"})` }), r.name), class: "name" },
    { title: "at the peak", value: (r) => r.bytes, text: (r) => size(r.bytes), number: true },
    { title: "share", value: (r) => r.bytes, text: (r) => share(r.bytes, device.totals.peak), number: true, hidden: Boolean(device.predicted) },
    { title: "highest", value: (r) => r.highest, text: (r) => size(r.highest), number: true },
    { title: "predicted", value: (r) => r.predicted, text: (r) => (r.predicted === null ? "–" : size(r.predicted)), number: true, hidden: !device.predicted },
    { title: "difference", value: (r) => (r.predicted ? r.highest / r.predicted - 1 : null), text: (r) => (r.predicted ? `${r.highest >= r.predicted ? "+" : "−"}${Math.abs(100 * (r.highest / r.predicted - 1)).toFixed(1)}%` : "–"), number: true, hidden: !device.predicted },
  ];
  return sortedTable(rows, columns, { sort: 1, caption: "Memory by category at the peak" }).element;
}

function sizeTable(rows, title, device) {
  const columns = [
    { title, value: (r) => r[0], text: (r) => r[0], class: "name" },
    { title: "at the peak", value: (r) => r[1], text: (r) => size(r[1]), number: true },
    { title: "share", value: (r) => r[1], text: (r) => share(r[1], device.totals.peak), number: true },
  ];
  return sortedTable(rows, columns, { sort: 1, caption: `Memory by ${title}` }).element;
}

function liveTable(device) {
  const columns = [
    { title: "size", value: (r) => r.size_bytes, text: (r) => size(r.size_bytes), number: true },
    { title: "count", value: (r) => r.count, text: (r) => count(r.count), number: true },
    { title: "category", value: (r) => r.category, text: (r) => r.category },
    { title: "call stack", value: (r) => r.line, class: "name", text: (r) => (r.stack.length > 1 ? make("details", {}, make("summary", {}, r.line), r.stack.map((frame) => make("div", { class: "soft" }, frame))) : r.line) },
    { title: "module", value: (r) => r.module, text: (r) => r.module, class: "name" },
  ];
  const note = device.live_stacks > device.live.length ? make("p", { class: "soft" }, `The largest ${device.live.length} of ${count(device.live_stacks)} call stacks are listed.`) : null;
  return make("div", {}, filtered("Filter by line, module or category", sortedTable(device.live, columns, { caption: "Allocations at the peak" })), note);
}

function fragmentation(device) {
  const facts = device.fragmentation;
  if (!facts) return make("p", { class: "soft" }, "Not measurable: a trace does not list the allocator's segments. Write a snapshot with torch.cuda.memory._dump_snapshot.");
  const inUse = facts.reserved - facts.free, stuck = facts.free - facts.releasable;
  const rows = [["reserved from the device", facts.reserved], ["in use", inUse], ["of it, rounding of sizes", facts.rounding], ["free in wholly free segments (empty_cache returns it)", facts.releasable], ["free between blocks in use", Math.max(stuck, 0)], ["largest free block", facts.largest_free], ...Object.entries(facts.pools).map(([pool, bytes]) => [`reserved by ${pool} segments`, bytes])];
  return make("div", {}, make("p", {}, `${count(facts.segments)} segments when the snapshot was written.`),
    sortedTable(rows, [{ title: "memory", value: (r) => r[0], text: (r) => r[0], class: "name" }, { title: "size", value: (r) => r[1], text: (r) => size(r[1]), number: true }, { title: "of reserved", value: (r) => r[1], text: (r) => share(r[1], facts.reserved), number: true }], { sort: 1, caption: "Fragmentation" }).element);
}

function outOfMemory(device) {
  return device.out_of_memory.map((failure) => make("div", { class: "card finding" }, make("h2", {}, `Out of memory: an allocation of ${size(failure.size_bytes)} failed`),
    make("p", {}, `The device had ${size(failure.device_free_bytes)} free.`), failure.stack.slice(0, 12).map((frame) => make("div", { class: "soft" }, frame))));
}

function show(device) {
  const areas = make("canvas", { class: "chart areas", role: "img", "aria-label": `Memory over time by category; peak ${size(device.totals.peak)}` });
  const map = make("div", { id: "treemap", role: "img", "aria-label": "Allocations that are live at the peak, by size" });
  const { totals } = device, used = names.filter((name) => device.timeline.categories[name]);
  document.getElementById("panels").replaceChildren(
    ...device.notes.map((text) => make("p", { class: "warning", role: "status" }, text)),
    ...(summary.devices.length > 1 ? [make("div", { class: "row" }, summary.devices.map((other) => make("button", { type: "button", "aria-pressed": String(other === device), on: { click: () => show(other) } }, deviceName(other))))] : []),
    make("div", { class: "tiles" }, tile(size(totals.peak), `peak allocated on ${deviceName(device)}`), tile(totals.peak_reserved ? size(totals.peak_reserved) : NOT_MEASURABLE, "peak reserved"),
      tile(totals.reserved_at_peak ? share(totals.reserved_at_peak - totals.peak, totals.reserved_at_peak) : NOT_MEASURABLE, "of reserved memory not in use at the peak"), tile(size(totals.at_end), "allocated at the end")),
    make("div", { class: "card" }, make("h2", {}, "Memory over time"), areas,
      make("div", { class: "legend" }, used.map((name) => make("span", { title: summary.descriptions[name] }, make("i", { style: `background: var(--${SHADE[name]})` }), name)), totals.peak_reserved ? make("span", {}, "- - reserved") : null)),
    ...outOfMemory(device),
    make("div", { class: "card" }, make("h2", {}, device.predicted ? "Measured and predicted" : "By category"), categoryTable(device)),
    make("div", { class: "card" }, make("h2", {}, "What is live at the peak"), map, make("p", { class: "soft" }, "Area is size, color is category; the table lists the call stacks.")),
    make("div", { class: "pair" }, make("div", { class: "card" }, make("h2", {}, "By line"), sizeTable(device.lines, "line", device)), make("div", { class: "card" }, make("h2", {}, "By module"), sizeTable(device.modules, "module", device))),
    make("div", { class: "card" }, make("h2", {}, "Allocations at the peak"), liveTable(device)),
    make("div", { class: "card" }, make("h2", {}, "Fragmentation"), fragmentation(device)));
  redraws.length = 0;
  redraws.push(() => stackedAreas(areas, device), () => treemap(map, device));
  for (const redraw of redraws) redraw();
}

const events = sum(summary.devices.map((device) => device.events)), blocks = sum(summary.devices.map((device) => device.allocations));
document.getElementById("title").textContent = summary.title;
document.getElementById("subtitle").textContent = `${count(events)} events of the allocator · ${count(blocks)} allocations · ${summary.devices.map(deviceName).join(", ")}`;
document.getElementById("tabs").hidden = true;
document.querySelector("footer").hidden = true;
const redrawAll = () => { for (const redraw of redraws) redraw(); };
show(summary.devices.reduce((most, device) => (device.totals.peak > most.totals.peak ? device : most)));
followTheme(redrawAll);
window.addEventListener("resize", redrawAll);
document.documentElement.dataset.ready = "yes";
