// Waits for batches, and idle time by cause: the sections of the metrics data_time and idle.
const CAUSES = ["garbage", "data", "synchronize", "launch", "host"];

function showButton(go, rank, start, length) {
  return make("button", { type: "button", class: "link", on: { click: () => go("timeline", (line) => line.goTo(rank, start, length)) } }, "show");
}

function dataWaits(go) {
  const { ranks, longest } = summary.data;
  if (ranks.every(([, waited]) => waited === null)) return [make("div", { class: "card" }, make("h2", {}, "Waiting for batches"), make("p", { class: "soft" }, "Not measurable: neither the traces nor a recorder have waits for batches."))];
  const wallOf = (number) => wall(summary.ranks.find((one) => one.rank === number));
  const columns = [
    numeric("rank", 0, String),
    numeric("waited for batches", 1, time),
    numeric("with nothing else running", 2, time),
    { title: "of the steps", value: (r) => r[2] && r[2] / wallOf(r[0]), text: (r) => share(r[2], wallOf(r[0])), number: true },
  ];
  const waits = [
    numeric("wait", 2, time),
    numeric("rank", 0, String),
    { title: "", value: (r) => Number(r[1]), text: (r) => showButton(go, r[0], r[1], r[2]) },
  ];
  return [
    make("div", { class: "card" }, make("h2", {}, "Waiting for batches"), sortedTable(ranks, columns, { sort: 1, caption: "Waits for batches by rank" }).element,
      make("p", { class: "soft" }, "A wait during which a device computes costs nothing; only waits with nothing else running make a step longer.")),
    make("div", { class: "card" }, make("h2", {}, "The longest waits"), longest.length ? sortedTable(longest, waits, { sort: 0, caption: "Longest waits for batches" }).element : make("p", { class: "soft" }, "No step waited for its batch.")),
  ];
}

function idleTime(go) {
  const { ranks, longest } = summary.idle;
  const shown = CAUSES.filter((cause) => ranks.some(([, , , causes]) => causes[cause] !== null));
  const rows = ranks.map(([rank, , idle, causes]) => [`rank ${rank}`, causes, idle]);
  const gaps = [
    numeric("gap", 2, time),
    { title: "cause", value: (r) => r[3], text: (r) => (r[3] === "host" ? "Python, other code, or not recorded" : summary.phases[r[3]]) },
    numeric("rank", 0, String),
    { title: "", value: (r) => Number(r[1]), text: (r) => showButton(go, r[0], r[1], r[2]) },
  ];
  return [
    make("div", { class: "card" }, make("h2", {}, "Time without compute, communication and copies"), stackedBars(rows, shown), legend(shown.map((cause) => [cause, summary.phases[cause]])),
      make("p", { class: "soft" }, ranks.map(([rank, all, idle]) => `rank ${rank} idles ${share(idle, all)} of its steps`).join(", "))),
    make("div", { class: "card" }, make("h2", {}, "The longest gaps"), longest.length ? sortedTable(longest, gaps, { sort: 0, caption: "Longest idle gaps" }).element : make("p", { class: "soft" }, "There is none.")),
  ];
}
