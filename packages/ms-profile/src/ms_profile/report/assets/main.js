// Tabs, theme and keys; the timeline is built when it is first shown.
const redraws = [];
// Sections of metrics that the run did not select are hidden; see `ms-profile run --metrics`.
const ALWAYS = ["overview", "timeline", "advice"];
const parts = Object.fromEntries(Object.entries({ overview, timeline: null, operators, communication, waiting, data: dataWaits, idle: idleTime, memory, advice })
  .filter(([name]) => ALWAYS.includes(name) || summary.shown.includes(name)));
const sections = {};
let line = null;
let opening = null;

function openTimeline(section) {
  opening = opening || (async () => {
    if (!summary.timeline.shown) { section.append(make("p", {}, "The traces have no spans to draw.")); return null; }
    const columns = await readColumns();
    columns.begin = new Float64Array(columns.start.length);
    const lanes = layOut(columns);
    const box = make("input", { type: "search", id: "search", placeholder: "Search names ( / )", "aria-label": "Search the timeline" });
    const found = make("span", { class: "soft", role: "status" });
    const stage = make("div", { id: "stage" });
    const picked = make("p", { id: "picked", role: "status" });
    section.append(make("div", { class: "row" }, box,
      make("button", { type: "button", on: { click: () => line.next(-1) } }, "Previous"), make("button", { type: "button", on: { click: () => line.next(1) } }, "Next"),
      make("button", { type: "button", on: { click: () => line.show(0, line.length) } }, "All"), found,
      legend([["compute", "", "operators, kernels"], ["collective", "", "collectives"], ["copy", "", "copies"], ["launch", "", "scopes, driver calls"], ["synchronize", "", "device waits"], ["data", "", "waits for data"], ["garbage", "", "garbage collection"]])), stage, picked);
    line = new Timeline(stage, columns, lanes);
    line.onpick = (row) => { picked.textContent = row < 0 ? "" : line.describe(row); };
    line.onmark = (text) => { picked.textContent = text; };
    box.addEventListener("input", () => { const hits = line.search(box.value); found.textContent = box.value.trim() ? `${count(hits)} spans` : ""; });
    box.addEventListener("keydown", (event) => { if (event.key === "Enter") line.next(event.shiftKey ? -1 : 1); });
    const { shown, total: all } = summary.timeline;
    if (shown < all) section.append(make("p", { class: "soft" }, `The ${count(shown)} longest of ${count(all)} spans are shown.`));
    redraws.push(() => line.recolor());
    line.resize();
    window.timeline = line;
    return line;
  })();
  return opening;
}

function go(name, then) {
  for (const [other, { tab, section }] of Object.entries(sections)) {
    const chosen = other === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    section.hidden = !chosen;
  }
  const { section } = sections[name];
  if (name === "timeline") openTimeline(section).then((made) => { if (made) { made.resize(); if (then) then(made); made.canvas.focus({ preventScroll: true }); } });
  else if (!section.childElementCount) section.append(...parts[name](go));
  window.scrollTo(0, 0);
  history.replaceState(null, "", `#${name}`);
}

// Command and start time of the run, and the steps on this page.
function describeRun() {
  const { run } = summary, lines = document.getElementById("run");
  if (!run) return;
  const say = (label, text) => lines.append(make("div", {}, make("dt", {}, label), make("dd", {}, text)));
  if (run.command) say("command", run.command);
  if (run.started_wall_ns) say("started", `${new Date(run.started_wall_ns / 1e6).toISOString().slice(0, 19).replace("T", " ")} UTC`);
  const numbers = summary.ranks.flatMap((rank) => rank.steps.map((step) => step.number)).filter((number) => number !== null);
  const steps = numbers.length ? `steps ${count(Math.min(...numbers))} to ${count(Math.max(...numbers))}${run.steps ? ` of ${count(run.steps)}` : ""}` : "";
  if (run.windows > 1) say("shown", `window ${run.window} of ${run.windows} only${run.window === run.windows ? ", the last" : ""}${steps ? `: ${steps}` : ""}; ms-profile report --window N shows another`);
  else if (steps) say("shown", steps);
  if (summary.metrics.length) say("metrics", summary.metrics.join(", "));
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  if (versions) say("versions", versions);
}

function build() {
  document.getElementById("title").textContent = summary.title;
  const read = sum(summary.ranks.map((rank) => rank.file_bytes));
  const spans = sum(summary.ranks.map((rank) => rank.spans));
  document.getElementById("subtitle").textContent = `${summary.ranks.length} rank${summary.ranks.length === 1 ? "" : "s"} · ${count(spans)} spans${read ? ` · ${size(read)} of traces` : ""}`;
  describeRun();
  document.getElementById("last-part").textContent = `${Object.keys(parts).length}`;
  const tabs = document.getElementById("tabs"), panels = document.getElementById("panels");
  for (const name of Object.keys(parts)) {
    const label = name[0].toUpperCase() + name.slice(1);
    const tab = make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, on: { click: () => go(name) } }, label, name === "advice" && summary.advice.length ? ` (${summary.advice.length})` : null);
    const section = make("section", { id: `panel-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}`, hidden: true });
    sections[name] = { tab, section };
    tabs.append(tab);
    panels.append(section);
  }
  tabs.addEventListener("keydown", (event) => {
    const names = Object.keys(parts), now = names.findIndex((name) => sections[name].tab === document.activeElement);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || now < 0) return;
    const next = names[(now + move + names.length) % names.length];
    go(next);
    sections[next].tab.focus();
  });
}

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  const names = Object.keys(parts);
  const name = names[event.key - 1];
  if (name) { go(name); if (name !== "timeline") sections[name].tab.focus(); }
  else if (event.key === "t") document.getElementById("theme").click();
  else if (event.key === "/") { event.preventDefault(); const shown = Object.values(sections).find(({ section }) => !section.hidden).section; const box = shown.querySelector("input[type=search]"); if (box) box.focus(); }
});
followTheme(() => { for (const redraw of redraws) redraw(); });
build();
const asked = location.hash.slice(1);
go(asked in parts ? asked : "overview");
document.documentElement.dataset.ready = "yes";
