// One function per section of the report, which returns its elements.
const phaseNames = Object.keys(summary.phases);
// Phases that a rank's trace cannot show are null, as are sums of only such phases.
const known = (values) => { const own = values.filter((value) => value !== null); return own.length ? sum(own) : null; };
const total = (rank, phase) => known(rank.steps.map((step) => step.phases[phase]));
const wall = (rank) => sum(rank.steps.map((step) => step.wall));

function tile(value, text) {
  const none = value === NOT_MEASURABLE;
  return make("div", { class: "tile" }, make("b", { class: none ? "none" : null }, value), make("span", {}, text));
}

function overview(go) {
  const ranks = summary.ranks, all = sum(ranks.map(wall));
  const hidden = sum(ranks.flatMap((rank) => rank.steps.map((step) => step.hidden)));
  const communication = sum(ranks.flatMap((rank) => rank.steps.map((step) => step.communication)));
  const suspect = summary.ledger.suspect;
  const phases = (phase) => share(known(ranks.map((rank) => total(rank, phase))), all);
  const named = ranks.every((rank) => rank.steps.every((step) => step.number !== null));
  const asked = (part) => summary.shown.includes(part);
  const peak = Math.max(0, ...summary.memory.flatMap((rank) => rank.series.map((line) => line.peak)));
  const tiles = make("div", { class: "tiles" },
    tile(named ? time(median(ranks.flatMap((rank) => rank.steps.map((step) => step.wall)))) : NOT_MEASURABLE, named ? "median step" : "median step: the trace has no step marks"),
    asked("operators") && tile(phases("compute"), "of the time computes"),
    asked("communication") && tile(summary.communication.seen ? phases("collective") : NOT_MEASURABLE, summary.communication.seen ? "in exposed communication" : "communication: the traces have no collectives"),
    asked("communication") && tile(communication ? share(hidden, communication) : NOT_MEASURABLE, "of communication hidden by compute"),
    asked("data") && tile(phases("data"), "waiting for data"),
    asked("idle") && tile(share(sum(summary.idle.ranks.map((rank) => rank[2])), all), "idle: nothing computes, communicates or copies"),
    asked("memory") && tile(peak ? size(peak) : NOT_MEASURABLE, "peak memory allocated on one device"),
    asked("waiting") && tile(suspect ? (suspect.confidence < 0.9 ? "no slow rank" : `rank ${suspect.rank}`) : NOT_MEASURABLE, suspect && suspect.confidence < 0.9 ? `stands out: rank ${suspect.rank} in ${suspect.phase} leads, but with a confidence of only ${share(suspect.confidence, 1)}` : suspect ? `causes most waiting: ${share(suspect.share, 1)} of it, in ${suspect.phase}, confidence ${share(suspect.confidence, 1)}` : "slow rank: needs traces of two ranks with shared collectives"));
  const rows = ranks.map((rank) => [`rank ${rank.rank}`, Object.fromEntries(phaseNames.map((phase) => [phase, total(rank, phase)])), wall(rank)]);
  const advice = summary.advice.slice(0, 3).map((one) => make("p", {}, make("span", { class: "gain" }, `up to ${share(one.gain_share, 1)}`), one.title));
  return [
    ...summary.warnings.map((text) => make("p", { class: "warning", role: "status" }, text)),
    tiles,
    make("div", { class: "card" }, make("h2", {}, "Where each rank's time goes"), stackedBars(rows, phaseNames), legend(Object.entries(summary.phases)),
      make("p", { class: "soft" }, "Each moment counts once, in the first phase that applies; the phases sum to the steps' wall time.")),
    make("div", { class: "card" }, make("h2", {}, "What to do first"), advice.length ? advice : make("p", {}, "No rule fired."), advice.length ? make("button", { type: "button", on: { click: () => go("advice") } }, "All advice") : null),
    make("div", { class: "card" }, make("h2", {}, "Steps"), stepTable()),
    make("div", { class: "card" }, make("h2", {}, "Clocks"), clockTable()),
  ];
}

function stepTable() {
  const rows = summary.ranks.flatMap((rank) => rank.steps.map((step) => ({ rank: rank.rank, ...step })));
  const columns = [
    { title: "rank", value: (r) => r.rank, text: (r) => `${r.rank}`, number: true },
    { title: "step", value: (r) => r.number, text: (r) => (r.number === null ? "whole trace" : `${r.number}`), number: true },
    { title: "wall", value: (r) => r.wall, text: (r) => time(r.wall), number: true },
    ...phaseNames.map((phase) => ({ title: phase, value: (r) => r.phases[phase], text: (r) => share(r.phases[phase], r.wall), number: true })),
    { title: "hidden", value: (r) => (r.communication ? r.hidden / r.communication : null), text: (r) => (r.communication ? share(r.hidden, r.communication) : NOT_MEASURABLE), number: true },
  ];
  return sortedTable(rows, columns, { sort: 2, caption: "Steps by rank" }).element;
}

function clockTable() {
  const columns = [
    { title: "rank", value: (r) => r.rank, text: (r) => `${r.rank}`, number: true },
    { title: "host", value: (r) => r.host, text: (r) => r.host || "not said" },
    { title: "offset", value: (r) => r.clock && r.clock.offset_ns, text: (r) => (r.clock ? time(r.clock.offset_ns) : NOT_MEASURABLE), number: true },
    { title: "drift", value: (r) => r.clock && r.clock.drift, text: (r) => (r.clock ? `${(r.clock.drift * 1e6).toFixed(1)} ppm` : NOT_MEASURABLE), number: true },
    { title: "error (99%)", value: (r) => r.clock && r.clock.error_ns, text: (r) => (!r.clock ? NOT_MEASURABLE : r.clock.error_ns === null ? (r.clock.bound_ns === null ? NOT_MEASURABLE : `≤ ${time(r.clock.bound_ns)}, proved`) : r.clock.error_ns ? `± ${time(r.clock.error_ns)}` : "the same clock"), number: true },
    { title: "collectives", value: (r) => r.clock && r.clock.samples, text: (r) => (r.clock ? count(r.clock.samples) : "0"), number: true },
    { title: "spans", value: (r) => r.spans, text: (r) => count(r.spans), number: true },
    { title: "trace", value: (r) => r.file_bytes, text: (r) => size(r.file_bytes), number: true },
  ];
  return sortedTable(summary.ranks, columns, { sort: 0, down: false, caption: "Clocks by rank" }).element;
}

function operators() {
  const { rows, device, self_ns: all } = summary.operators;
  const columns = [
    { title: "operator", value: (r) => r[0], text: (r) => r[0], class: "name" },
    numeric("self", 5, time),
    { title: "self share", value: (r) => r[5], text: (r) => share(r[5], all), number: true },
    numeric("total", 4, time),
    { title: "a call", value: (r) => r[4] / r[3], text: (r) => time(r[4] / r[3]), number: true },
    numeric("calls", 3, count),
    { title: "device", value: (r) => (device ? r[6] : null), text: (r) => (device ? time(r[6]) : NOT_MEASURABLE), number: true },
    { title: "kind", value: (r) => CATEGORY[r[1]], text: (r) => CATEGORY[r[1]] },
    { title: "input shapes", value: (r) => r[2], text: (r) => r[2] || "not recorded", class: "shape", hidden: !summary.shown.includes("shapes") },
  ];
  const left = summary.operators.left_out;
  const parts = [make("div", { class: "card" }, make("h2", {}, "Operators on the host, all ranks and threads"), filtered("Filter operators", sortedTable(rows, columns, { sort: 1, caption: "Operators" })),
    left ? make("p", { class: "soft" }, `${count(left)} more rows with ${share(summary.operators.left_out_ns, all)} of the self time are not on this page.`) : null)];
  const kernels = [
    { title: "kernel", value: (r) => r[0], text: (r) => r[0], class: "name" },
    numeric("total", 3, time),
    numeric("runs", 2, count),
    { title: "mean", value: (r) => r[3] / r[2], text: (r) => time(r[3] / r[2]), number: true },
    numeric("shortest", 4, time),
    numeric("longest", 5, time),
    { title: "kind", value: (r) => CATEGORY[r[1]], text: (r) => CATEGORY[r[1]] },
  ];
  parts.push(make("div", { class: "card" }, make("h2", {}, "Kernels on devices"), summary.kernels.length ? filtered("Filter kernels", sortedTable(summary.kernels, kernels, { sort: 1, caption: "Kernels" })) : make("p", { class: "soft" }, "Not measurable: the traces have no device.")));
  return parts;
}

function communication() {
  const { ranks, waits, kinds, fits, links, slow_link: slow } = summary.communication;
  const waited = waits && waits.map((row) => row.map((value) => (value ? value : null)));
  const matrix = waits ? heatMap(ranks, waited, { heatOf: heatAgainstMost(waited), text: time, caption: "Wait by waiting rank and causing rank", rowTitle: "waits", columnTitle: "causes", none: "no wait" }) : make("p", { class: "soft" }, "Not measurable: needs traces of two or more ranks that share collectives.");
  const parts = [make("div", { class: "card" }, make("h2", {}, "Who waits for whom"), matrix, waits ? make("p", { class: "soft" }, "The rank of each row waited for the rank of each column. A wait caused by an earlier wait is charged to the original cause.") : null)];
  const group = summary.communication.slow_group;
  if (group) parts.push(make("p", { class: "warning" }, group.everyone ? `Uneven transfers: they took ${time(group.excess_ns)} longer than if all were as fast as the fastest tenth of their size. All ranks take part in them, so no rank or link can be singled out; ms-profile link measures every link.` : `Slow transfers: those of rank${group.ranks.length > 1 ? "s" : ""} ${group.ranks.join(", ")} took ${time(group.excess_ns)} longer than usual, confidence ${share(group.confidence, 1)}.`));
  if (links) {
    const by = (index) => ranksOf(links.world).map((a) => ranksOf(links.world).map((b) => { const pair = links.pairs.find((p) => (p[0] === a && p[1] === b) || (p[0] === b && p[1] === a)); return pair ? pair[index] : null; }));
    parts.push(make("div", { class: "pair" },
      make("div", { class: "card" }, make("h2", {}, `Latency over ${links.backend}`), heatMap(ranksOf(links.world), by(2), { heatOf: heatAgainstBest(by(2), false), text: (s) => time(s * 1e9), caption: "Latency", rowTitle: "rank", columnTitle: "rank", none: NOT_MEASURABLE })),
      make("div", { class: "card" }, make("h2", {}, "Bandwidth"), heatMap(ranksOf(links.world), by(3), { heatOf: heatAgainstBest(by(3), true), text: (b) => rate(b), caption: "Bandwidth", rowTitle: "rank", columnTitle: "rank", none: NOT_MEASURABLE }))));
    parts.push(make("p", {}, slow ? `Slow link: ranks ${slow.first} and ${slow.second}, ${slow.ratio.toFixed(1)} times the median pair's time, confidence ${share(slow.confidence, 1)}.` : "No link stands out from the others."));
  } else parts.push(make("div", { class: "card" }, make("h2", {}, "Links between ranks"), make("p", { class: "soft" }, "Not measured in this run. ms-profile link --out links.json measures every pair; pass the file to ms-profile report --links.")));
  const columns = [
    { title: "collective", value: (r) => r[0], text: (r) => r[0] },
    numeric("message", 2, size),
    numeric("transfer, a rank", 5, time),
    numeric("wait, a rank", 4, time),
    numeric("times", 3, count),
    { title: "rate", value: (r) => (r[2] && r[5] ? (r[2] * r[3]) / r[5] : null), text: (r) => (r[2] && r[5] ? rate((r[2] * r[3]) / r[5] * 1e9) : NOT_MEASURABLE), number: true },
    { title: "group", value: (r) => r[1], text: (r) => r[1] || "not said" },
  ];
  parts.push(make("div", { class: "card" }, make("h2", {}, "Collectives by kind and size"), kinds.length ? sortedTable(kinds, columns, { sort: 2, caption: "Collectives" }).element : make("p", { class: "soft" }, summary.communication.seen ? `${count(summary.communication.seen)} collectives were recorded, but each by a single rank, so waits cannot be separated from transfers.` : "The traces have no collectives.")));
  if (fits.length) parts.push(make("div", { class: "card" }, make("h2", {}, "Latency and bandwidth of the collectives"), fits.map((fit) => make("p", {}, `${fit.kind}${fit.group ? ` of ${fit.group}` : ""} among ranks ${fit.ranks.length > 8 ? `${fit.ranks[0]} to ${fit.ranks[fit.ranks.length - 1]} (${fit.ranks.length})` : fit.ranks.join(", ")}: ${time(fit.latency_s * 1e9)} + size / ${fit.bandwidth_bytes_per_s === null ? NOT_MEASURABLE : rate(fit.bandwidth_bytes_per_s)} (from ${size(fit.least_bytes)} on; misfit ${share(fit.residual, 1)}, ${count(fit.samples)} samples)`))));
  return parts;
}
const ranksOf = (world) => Array.from({ length: world }, (_, rank) => rank);

function waiting(go) {
  const { charged, waited, rows, matched, suspect } = summary.ledger;
  if (!matched) return [make("div", { class: "card" }, make("h2", {}, "Waiting"), make("p", { class: "soft" }, "Not measurable: needs traces of two or more ranks that share collectives."))];
  const all = sum(charged.map((row) => row[2]));
  const most = Math.max(...charged.map((row) => row[2]), 1);
  const bars = make("div", { class: "bars" }, charged.slice(0, 24).flatMap(([rank, phase, amount]) => [
    make("span", {}, `rank ${rank}, ${phase}`), make("div", { class: "bar" }, make("i", { style: `width: ${(100 * amount) / most}%; background: var(--${phase})` })), make("span", { class: "n" }, `${time(amount)} · ${share(amount, all)}`)]));
  const columns = [
    { title: "collective", value: (r) => r[0], text: (r) => r[0] },
    numeric("message", 1, size),
    numeric("wait, all ranks", 3, time),
    numeric("transfer, all ranks", 4, time),
    { title: "last to enter", value: (r) => r[5], text: (r) => `rank ${r[5]}` },
    { title: "charged to", value: (r) => (r[6] === null ? "" : `${r[6]} ${r[7]}`), text: (r) => (r[6] === null ? "nobody" : `rank ${r[6]}, ${r[7]}`) },
    { title: "", value: (r) => r[2], text: (r) => make("button", { type: "button", class: "link", on: { click: () => go("timeline", (line) => line.goTo(r[5], r[2], (r[3] + r[4]) / summary.ranks.length)) } }, "show") },
  ];
  return [
    make("div", { class: "card" }, make("h2", {}, "Causes of the waiting"), suspect ? make("p", {}, `${suspect.confidence < 0.9 ? "No rank clearly stands out; most likely:  " : ""}rank ${suspect.rank} in its ${suspect.phase} phase caused ${time(suspect.caused_ns)} of the other ranks' waiting, confidence ${share(suspect.confidence, 1)}.`) : null, bars,
      make("p", { class: "soft" }, `${count(matched)} collectives; the ranks waited ${waited.map(([rank, ns]) => `${time(ns)} (rank ${rank})`).join(", ")}. A wait is charged to the last rank to enter, and to the phases in which that rank spent more time than the waiting one; time that it waited itself is passed on to the cause.`)),
    make("div", { class: "card" }, make("h2", {}, "Collectives with the longest waits"), sortedTable(rows, columns, { sort: 2, caption: "Waiting ledger" }).element),
  ];
}

function memory() {
  return summary.memory.map((rank) => {
    if (!rank.series.length) return make("div", { class: "card" }, make("h2", {}, `Rank ${rank.rank}`), make("p", { class: "soft" }, "Not measurable: the profiler was run without profile_memory."));
    const canvas = make("canvas", { class: "chart", role: "img", "aria-label": `Allocated memory of rank ${rank.rank}` });
    const chart = () => memoryChart(canvas, rank.series);
    redraws.push(chart);
    new ResizeObserver(chart).observe(canvas);
    const device = (line) => (line.device < 0 ? "host" : `device ${line.device}`);
    return make("div", { class: "card" }, make("h2", {}, `Rank ${rank.rank}: peak ${rank.series.map((line) => `${size(line.peak)} on ${device(line)}`).join(", ")}`), canvas,
      rank.peaks.length ? make("p", { class: "soft" }, `Operators with the largest net allocation, summed over the trace: ${rank.peaks.slice(0, 6).map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ")}.`) : null);
  });
}

function advice(go) {
  if (!summary.advice.length) return [make("div", { class: "card" }, make("p", {}, "No advice rule fired on this recording."))];
  return summary.advice.map((one) => make("div", { class: "card finding" },
    make("span", { class: "gain" }, `up to ${time(one.gain_ns)} · ${share(one.gain_share, 1)}`),
    make("h2", {}, one.title), make("p", {}, one.advice),
    make("p", { class: "soft" }, `Rule ${one.rule}. Its longest events:`),
    make("ul", {}, one.evidence.map(([rank, name, start, length]) => make("li", {}, make("button", { type: "button", class: "link", on: { click: () => go("timeline", (line) => line.goTo(rank, start, length)) } }, `${name}, ${time(length)}, rank ${rank}`))))));
}
