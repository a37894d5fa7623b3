// The live page: a list of runs, or one run's charts, timeline and samples, polled three times a second.
const POLL_MS = 300, TIMELINE_MS = 1000, LIST_MS = 2000;
const PANELS = [
  ["Loss", /^(loss|held_out_loss|value_loss|eval_loss)$/, "step|evaluate"], ["Reward", /^(reward|shaped_reward|reward_std|reward\.)/, ""],
  ["Throughput", /rate_tokens_per_s|tokens_per_s|samples_per_s/, ""], ["MFU", /^mfu$/, ""], ["Memory", /bytes$/, ""],
  ["Waiting", /wait/, ""], ["Queue depth", /queue|staleness|buffer_size/, ""], ["Step time", /^(step_time_s|.*_time_s)$/, ""], ["Durations", /^seconds$/, ""],
  ["Weight updates", /weight_version|weight_update/, ""], ["KL and sampling", /kl|sampler|ratio|clip/, ""], ["Gradient norm and rate", /^(grad_norm|learning_rate)$/, ""],
  ["Responses", /response|truncated|stopped|generated/, ""],
];
const LINE_COLORS = ["--compute", "--collective", "--copy", "--data", "--garbage", "--synchronize", "--launch", "--link"];
const LANE_COLORS = { step: "compute", evaluate: "synchronize", checkpoint: "launch", generate: "collective", reward: "data", learn: "compute", update_weights: "copy" };
const state = { name: new URLSearchParams(location.search).get("run"), events: -1, data: null, lanes: [], charts: new Map(), offset: 0, rank: "all" };
const panels = document.getElementById("panels");
const shortNumber = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : Number(value.toPrecision(5)).toString());
const shown = (field, value) => (/bytes$/.test(field) ? size(value) : /_s$|^seconds$/.test(field) ? (value === null ? "–" : /per_s$/.test(field) ? `${count(Math.round(value))}/s` : time(value * 1e9)) : /^mfu$/.test(field) ? share(value, 1) : shortNumber(value));
const ago = (seconds) => (seconds < 2 ? "now" : seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`);

async function ask(path, fields) {
  const answer = await fetch(`${path}?${new URLSearchParams(fields)}`, { cache: "no-store" });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, tall = canvas.clientHeight;
  if (!width) return null;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(tall * scale); }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  return { pen, width, tall };
}

// One chart: a band from the lowest to the highest value of each bucket, and a line of means.
function drawChart(chart) {
  const drawing = prepare(chart.canvas);
  if (!drawing) return;
  const { pen, width, tall } = drawing, { lines } = chart, left = 62, right = width - 10, top = 8, bottom = tall - 20;
  const known = lines.flatMap((line) => [...line.low, ...line.high]).filter((value) => value !== null);
  let low = Math.min(...known), high = Math.max(...known);
  if (!known.length) { low = 0; high = 1; }
  if (low > 0 && low < 0.4 * high) low = 0;
  if (high - low < 1e-12) { high += Math.abs(high) * 0.05 || 1; low -= Math.abs(low) * 0.05; }
  const first = Math.min(...lines.map((line) => line.step[0])), last = Math.max(...lines.map((line) => line.last[0]), first + 1);
  const x = (step) => left + ((step - first) / (last - first)) * (right - left), y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const gap = roundStep((high - low) / 4);
  for (let value = Math.ceil(low / gap) * gap; value <= high; value += gap) {
    pen.fillStyle = styleOf("--line"); pen.fillRect(left, Math.round(y(value)), right - left, 1);
    pen.fillStyle = styleOf("--soft"); pen.textAlign = "right"; pen.fillText(shown(lines[0].field, value), left - 6, y(value));
  }
  pen.fillStyle = styleOf("--soft");
  pen.textAlign = "left"; pen.fillText(count(Math.round(first)), left, bottom + 12);
  pen.textAlign = "right"; pen.fillText(`step ${count(Math.round(last))}`, right, bottom + 12);
  lines.forEach((line, number) => {
    const color = styleOf(LINE_COLORS[number % LINE_COLORS.length]), points = line.step.map((step, i) => i).filter((i) => line.mean[i] !== null);
    pen.fillStyle = color; pen.globalAlpha = 0.2; pen.beginPath();
    for (const i of points) pen.lineTo(x(line.step[i]), y(line.high[i]));
    for (const i of [...points].reverse()) pen.lineTo(x(line.step[i]), y(line.low[i]));
    pen.fill(); pen.globalAlpha = 1;
    pen.strokeStyle = color; pen.lineWidth = 1.4; pen.beginPath();
    for (const i of points) pen.lineTo(x(line.step[i]), y(line.mean[i]));
    pen.stroke();
    if (points.length === 1) pen.fillRect(x(line.step[points[0]]) - 2, y(line.mean[points[0]]) - 2, 4, 4);
  });
  if (chart.pointer !== null && chart.pointer > left && chart.pointer < right) {
    const at = first + ((chart.pointer - left) / (right - left)) * (last - first);
    pen.fillStyle = styleOf("--ink"); pen.fillRect(chart.pointer, top, 1, bottom - top);
    chart.values.replaceChildren(...lines.map((line, number) => {
      let i = line.step.findIndex((step) => step > at);
      i = Math.max((i < 0 ? line.step.length : i) - 1, 0);
      const range = line.low[i] === line.high[i] ? "" : ` (${shown(line.field, line.low[i])} to ${shown(line.field, line.high[i])})`;
      return make("span", {}, make("i", { style: `background: var(${LINE_COLORS[number % LINE_COLORS.length]})` }), `${line.label} at ${count(Math.round(line.step[i]))}: ${shown(line.field, line.mean[i])}${range}`);
    }));
  } else {
    chart.values.replaceChildren(...lines.map((line, number) => make("span", {}, make("i", { style: `background: var(${LINE_COLORS[number % LINE_COLORS.length]})` }), `${line.label}: ${shown(line.field, line.last[1])}`)));
  }
}

// Groups of series by panel; fields with very different scales get charts of their own.
function groupSeries(series) {
  // Samples and the numbers of generators and rollouts are shown elsewhere.
  const left = series.filter((line) => (state.rank === "all" || line.rank === state.rank) && line.kind !== "sample" && line.field !== line.kind && line.field !== "generator" && line.field !== "ended_ago_s"), groups = [];
  const several = new Set(left.map((line) => line.rank)).size > 1;
  const label = (line, fields) => [line.field === "seconds" ? line.kind : fields > 1 || line.kind === "evaluate" ? line.field : "", several ? `rank ${line.rank}` : ""].filter(Boolean).join(", ") || line.field;
  const take = (title, lines) => {
    const byUnit = Map.groupBy ? Map.groupBy(lines, unitOf) : lines.reduce((map, line) => map.set(unitOf(line), [...(map.get(unitOf(line)) || []), line]), new Map());
    for (const [unit, same] of byUnit) {
      const fields = new Set(same.map((line) => line.field)).size;
      groups.push({ key: `${title}/${unit}`, title: byUnit.size > 1 ? `${title}: ${[...new Set(same.map((line) => line.field))].slice(0, 3).join(", ")}` : title, lines: same.slice(0, 8).map((line) => ({ ...line, label: label(line, fields) })), hidden: Math.max(same.length - 8, 0) });
    }
  };
  for (const [title, pattern, kinds] of PANELS) {
    const lines = left.filter((line) => pattern.test(line.field) && !line.taken && (!kinds || new RegExp(`^(${kinds})$`).test(line.kind)));
    for (const line of lines) line.taken = true;
    if (lines.length) take(title, lines);
  }
  const others = left.filter((line) => !line.taken && !/^(begin|end|run_start|run_end|resume)$/.test(line.kind));
    const more = groups.length;
  const names = [...new Set(others.map((line) => `${line.kind}: ${line.field}`))];
  for (const name of names.slice(0, 24)) {
    const same = others.filter((line) => `${line.kind}: ${line.field}` === name);
    groups.push({ key: `other/${name}`, title: name, lines: same.slice(0, 8).map((line) => ({ ...line, label: several ? `rank ${line.rank}` : line.field })), hidden: Math.max(same.length - 8, 0) });
  }
  return { groups, more, omitted: Math.max(names.length - 24, 0) };
}
function unitOf(line) {
  if (/bytes$|_s$|^seconds$|loss|^reward|^mfu$/.test(line.field)) return /per_s$/.test(line.field) ? "rate" : /_s$|^seconds$/.test(line.field) ? "time" : /bytes$/.test(line.field) ? "bytes" : /std$/.test(line.field) ? line.field : "value";
  return line.field;
}

function chartFor(group) {
  let chart = state.charts.get(group.key);
  if (!chart) {
    const canvas = make("canvas", { class: "chart", role: "img", tabindex: 0 });
    const values = make("div", { class: "legend" }), title = make("h2", {}), note = make("p", { class: "soft" });
    chart = { canvas, values, title, note, card: make("div", { class: "card" }, title, canvas, values, note), pointer: null, lines: [] };
    canvas.addEventListener("pointermove", (event) => { chart.pointer = event.offsetX; drawChart(chart); });
    canvas.addEventListener("pointerleave", () => { chart.pointer = null; drawChart(chart); });
    state.charts.set(group.key, chart);
  }
  chart.lines = group.lines;
  chart.title.textContent = group.title;
  chart.note.textContent = group.hidden ? `${group.hidden} more series; choose a rank.` : "";
  chart.canvas.setAttribute("aria-label", `${group.title}: ${group.lines.map((line) => `${line.label} ${shown(line.field, line.last[1])}`).join(", ")}`);
  return chart;
}

function drawLanes(canvas, lanes, seconds) {
  canvas.style.height = `${lanes.length * 22 + 26}px`;
  const drawing = prepare(canvas);
  if (!drawing) return;
  const { pen, width, tall } = drawing, left = width < 500 ? 92 : 140, right = width - 10;
  const x = (at) => left + (1 + at / seconds) * (right - left);
  lanes.forEach((lane, row) => {
    pen.fillStyle = styleOf("--soft"); pen.textAlign = "right"; pen.fillText(lane.name, left - 8, row * 22 + 13, left - 12);
    pen.fillStyle = styleOf("--hover"); pen.fillRect(left, row * 22 + 4, right - left, 17);
    for (const [start, length, color] of lane.spans) {
      const from = Math.max(x(start), left), to = Math.min(x(start + length), right);
      if (to < left || from > right) continue;
      pen.fillStyle = styleOf(`--${color}`); pen.fillRect(from, row * 22 + 4, Math.max(to - from - (to - from > 3 ? 1 : 0), 0.7), 17);
    }
  });
  pen.fillStyle = styleOf("--soft"); pen.textAlign = "left"; pen.fillText(`−${time(seconds * 1e9, 2)}`, left, tall - 9);
  pen.textAlign = "right"; pen.fillText("newest", right, tall - 9);
}

function eventLanes() {
  const lanes = state.data.lanes, newest = Math.max(...lanes.flatMap((lane) => lane.spans.map(([start, length]) => start + length)), 0);
  const seconds = Math.min(Math.max(newest - Math.min(...lanes.map((lane) => lane.spans[0][0])), 1), 60);
  const several = new Set(lanes.map((lane) => lane.rank)).size > 1;
  return { seconds, lanes: lanes.map((lane) => {
    const color = LANE_COLORS[lane.name.split(" ")[0]] || "launch";
    return { name: several ? `${lane.name}, rank ${lane.rank}` : lane.name, spans: lane.spans.flatMap(([start, length, wait]) => [[start - newest, length, color], ...(wait ? [[start - newest, Math.min(wait, length), "data"]] : [])]) };
  }) };
}

function timelineCards() {
  const cards = [];
  if (state.ranks && state.ranks.length) {
    const lanes = state.ranks.map((lane) => ({ name: `rank ${lane.rank}`, spans: lane.spans }));
    cards.push(["ranks", "Ranks, last 10 s", lanes, 10, [["compute", "", "forward, backward"], ["copy", "", "optimizer"], ["collective", "", "collective"], ["data", "", "waits for data"], ["garbage", "", "garbage collection"], ["host", "", "between steps"]]]);
  }
  if (state.data.lanes.length) {
    const { seconds, lanes } = eventLanes();
    cards.push(["events", "Steps and other work", lanes, seconds, [["compute", "", "step, learn"], ["collective", "", "generate"], ["data", "", "reward, waits for data"], ["copy", "", "weight updates"], ["launch", "", "checkpoint, other"]]]);
  }
  return cards.map(([key, title, lanes, seconds, colors]) => {
    let card = state.charts.get(`lanes/${key}`);
    if (!card) {
      const canvas = make("canvas", { class: "chart", role: "img", "aria-label": title });
      card = { canvas, card: make("div", { class: "card" }, make("h2", {}, title), canvas, make("div", { class: "legend" }, colors.map(([name, , text]) => make("span", {}, make("i", { style: `background: var(--${name})` }), text)))) };
      state.charts.set(`lanes/${key}`, card);
    }
    card.draw = () => drawLanes(card.canvas, lanes, seconds);
    return card;
  });
}

function tiles(series) {
  const last = (field, kind) => { const line = series.find((one) => one.field === field && (!kind || one.kind === kind)); return line ? line.last[1] : null; };
  const facts = [["loss", "loss"], ["reward", "reward"], ["rate_tokens_per_s", "tokens per second"], ["mfu", "MFU"], ["step_time_s", "per step"], ["memory_bytes", "memory"], ["learner_wait_s", "learner waits"], ["queue_depth", "queue depth"]];
  const steps = Math.max(...series.filter((line) => line.kind === "step" || line.kind === "rollout").map((line) => line.last[0]), -1);
  const tile = (value, text) => make("div", { class: "tile" }, make("b", {}, value), make("span", {}, text));
  return make("div", { class: "tiles" }, steps >= 0 ? tile(count(steps), "last step") : null, facts.map(([field, text]) => { const fact = last(field); return fact === null ? null : tile(shown(field, fact), text); }));
}

function sampleCard(samples) {
  return make("div", { class: "card" }, make("h2", {}, `Samples (${samples.length} newest)`), make("div", { class: "samples" }, samples.map(({ wall_s, fields }) => {
    const { prompt, response, reward, ...others } = fields;
    return make("article", {}, make("p", { class: "soft" }, `${new Date(wall_s * 1000).toISOString().slice(11, 19)} UTC${reward === undefined ? "" : ` · reward ${shortNumber(reward)}`}`),
      prompt !== undefined ? make("p", { class: "prompt" }, `${prompt}`) : null, response !== undefined ? make("p", {}, `${response}`) : null,
      prompt === undefined ? make("p", {}, Object.entries(others).map(([name, value]) => `${name}: ${value}`).join(", ")) : null);
  })));
}

function runStatus() {
  const { status, last_wall_s, now_s } = state.data, ended = status.end || status.run_end, begun = status.resume || status.begin || status.run_start;
  if (ended && (!begun || ended.wall_s >= begun.wall_s)) return "ended";
  return now_s - last_wall_s < 30 ? "running" : "no events for a while";
}

function showRun() {
  const { data } = state, series = data.series.map((line) => ({ ...line }));
  const subtitle = [runStatus(), `${count(data.events)} events`, `last one ${ago(Date.now() / 1000 + state.offset - data.last_wall_s)}`];
  if (data.progress < 1) subtitle.push(`reading the log: ${Math.floor(data.progress * 100)}%${data.preview ? ", a sample of it is shown" : ""}`);
  document.getElementById("subtitle").textContent = subtitle.join(" · ");
  const { groups, more, omitted } = groupSeries(series), charts = groups.map(chartFor), cards = timelineCards();
  const ranks = [...new Set(data.series.map((line) => line.rank))].sort((a, b) => a - b);
  if (!state.body) {
    state.body = { tiles: make("div"), ranks: make("select", { "aria-label": "Rank", on: { change: (event) => { state.rank = event.target.value === "all" ? "all" : Number(event.target.value); showRun(); } } }), lanes: make("div"), main: make("div", { class: "charts" }), title: make("h2", {}, "More"), others: make("div", { class: "charts" }), samples: make("div") };
    panels.replaceChildren(state.body.tiles, make("div", { class: "row" }, state.body.ranks), state.body.main, state.body.lanes, state.body.samples, state.body.title, state.body.others);
  }
  const { body } = state;
  body.tiles.replaceChildren(tiles(series));
  if (body.ranks.options.length !== ranks.length + 1) body.ranks.replaceChildren(make("option", { value: "all" }, "all ranks"), ...ranks.map((rank) => make("option", { value: rank, selected: rank === state.rank }, `rank ${rank}`)));
  body.ranks.hidden = ranks.length < 2;
  const place = (element, wanted) => { if (wanted.length !== element.children.length || wanted.some((card, i) => element.children[i] !== card)) element.replaceChildren(...wanted); };
  place(body.main, charts.slice(0, more).map((chart) => chart.card));
  place(body.lanes, cards.map((card) => card.card));
  place(body.others, charts.slice(more).map((chart) => chart.card));
  body.title.hidden = charts.length === more;
  body.title.textContent = omitted + data.omitted_series ? `More (${omitted + data.omitted_series} further series are not shown)` : "More";
  const newest = data.samples.length ? `${data.samples.length}/${data.samples[0].wall_s}` : "";
  if (newest && state.newest !== newest) body.samples.replaceChildren(sampleCard(data.samples));
  state.newest = newest;
  state.draw = () => { for (const chart of charts) drawChart(chart); for (const card of cards) card.draw(); };
  state.draw();
}

function notice(text) {
  const line = document.getElementById("notice");
  line.textContent = text; line.hidden = !text;
}

async function followRun() {
  try {
    const points = Math.max(80, Math.min(400, Math.round(window.innerWidth / 4)));
    const data = await ask("/api/run", { name: state.name, points, events: state.points === points ? state.events : -1 });
    state.offset = data.now_s - Date.now() / 1000;
    state.points = points;
    if (data.series) { state.data = data; state.events = data.progress < 1 ? -1 : data.events; showRun(); }
    else if (state.data) { state.data.now_s = data.now_s; if (!document.hidden) showSubtitle(); }
    notice("");
    document.documentElement.dataset.ready = "yes";
  } catch (error) { notice(`No answer from ms-profile serve (${error.message}); trying again.`); }
  setTimeout(followRun, document.hidden ? 5 * POLL_MS : POLL_MS);
}
function showSubtitle() {
  document.getElementById("subtitle").textContent = [runStatus(), `${count(state.data.events)} events`, `last one ${ago(state.data.now_s - state.data.last_wall_s)}`].join(" · ");
}
async function followRanks() {
  try {
    state.ranks = (await ask("/api/timeline", { name: state.name })).ranks;
    if (state.data && state.ranks.length) showRun();
  } catch { /* the run's own poll reports that the server is gone */ }
  setTimeout(followRanks, document.hidden || !state.ranks || !state.ranks.length ? 5 * TIMELINE_MS : TIMELINE_MS);
}

// The list of runs, with a search by name.
async function followList(box, list) {
  try {
    const { runs, now_s } = await ask("/api/runs", {});
    const words = box.value.trim().toLowerCase().split(/\s+/), kept = runs.filter((run) => words.every((word) => run.name.toLowerCase().includes(word)));
    document.getElementById("subtitle").textContent = `${count(runs.length)} run${runs.length === 1 ? "" : "s"}, ${count(runs.filter((run) => run.active).length)} running${kept.length < runs.length ? ` · ${count(kept.length)} match` : ""}`;
    const columns = [
      { title: "run", value: (run) => run.name, text: (run) => make("a", { href: `?run=${encodeURIComponent(run.name)}` }, run.name === "." ? "this folder" : run.name), class: "name" },
      { title: "state", value: (run) => (run.active ? 0 : 1), text: (run) => make("span", { class: run.active ? "active" : "soft" }, run.active ? "running" : "idle") },
      { title: "updated", value: (run) => run.updated_s, text: (run) => ago(now_s - run.updated_s), number: true },
      { title: "log", value: (run) => run.size_bytes, text: (run) => size(run.size_bytes), number: true },
    ];
    list.replaceChildren(runs.length ? sortedTable(kept, columns, { sort: 2, caption: "Runs" }).element : make("p", {}, "No run has written events here yet; this page looks again every two seconds."));
    notice("");
    if (runs.length === 1 && !state.listed) { location.replace(`?run=${encodeURIComponent(runs[0].name)}`); return; }
    state.listed = true;
    document.documentElement.dataset.ready = "yes";
  } catch (error) { notice(`No answer from ms-profile serve (${error.message}); trying again.`); }
  clearTimeout(state.timer);
  state.timer = setTimeout(() => followList(box, list), LIST_MS);
}

document.getElementById("tabs").hidden = true;
document.querySelector("footer").textContent = `ms-profile ${summary.version}`;
panels.before(make("p", { class: "warning", id: "notice", role: "status", hidden: true }));
followTheme(() => { if (state.draw) state.draw(); });
window.addEventListener("resize", () => { if (state.draw) state.draw(); });
if (state.name) {
  document.title = `${state.name} · ms-profile`;
  document.getElementById("title").replaceChildren(make("a", { href: "/" }, "Runs"), ` / ${state.name}`);
  followRun();
  followRanks();
} else {
  document.getElementById("title").textContent = summary.title;
  const list = make("div", { class: "card" }), box = make("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", on: { input: () => followList(box, list) } });
  panels.replaceChildren(make("div", { class: "row" }, box), list);
  followList(box, list);
}
