// Stacked bars, heat maps and the memory lines.
function legend(entries) {
  return make("div", { class: "legend" }, entries.map(([name, text, label]) => make("span", { title: text || null }, make("i", { style: `background: var(--${name})` }), label || name)));
}

// rows: [label, {phase: ns}, total ns]
function stackedBars(rows, phases) {
  const most = Math.max(...rows.map(([, , total]) => total), 1);
  return make("div", { class: "bars" }, rows.flatMap(([label, parts, total]) => [
    make("span", {}, label),
    make("div", { class: "bar", role: "img", "aria-label": `${label}: ${phases.map((p) => `${p} ${share(parts[p], total)}`).join(", ")}` },
      phases.map((phase) => make("i", { style: `width: ${(100 * (parts[phase] ?? 0)) / most}%; background: var(--${phase})`, title: `${phase}: ${time(parts[phase])}, ${share(parts[phase], total)}` }))),
    make("span", { class: "n" }, time(total)),
  ]));
}

// Pale within a few percent of the best value, fully colored at eight times worse.
function heatAgainstBest(cells, lowIsBad) {
  const values = cells.flat().filter((value) => value !== null && value > 0);
  const best = lowIsBad ? Math.max(...values) : Math.min(...values);
  return (value) => (value > 0 ? Math.min(Math.abs(Math.log2(value / best)) / 3, 1) : 0);
}
function heatAgainstMost(cells) {
  const most = Math.max(...cells.flat().filter((value) => value !== null), 0);
  return (value) => (most ? Math.sqrt(value / most) : 0);
}

// cells: value or null by [row][column]
function heatMap(ranks, cells, { text, caption, rowTitle, columnTitle, heatOf, none }) {
  const small = ranks.length > 16;
  const table = make("table", { class: small ? "heat small" : "heat", "aria-label": caption });
  table.append(make("tr", {}, make("th", {}, `${rowTitle} \\ ${columnTitle}`), ranks.map((rank) => make("th", { scope: "col" }, `${rank}`))));
  ranks.forEach((rank, i) => {
    table.append(make("tr", {}, make("th", { scope: "row" }, `${rank}`), ranks.map((other, j) => {
      const value = cells[i][j];
      if (value === null) return make("td", { class: "soft", title: i === j ? null : `${rowTitle} ${rank}, ${columnTitle} ${other}: ${none}` }, i === j ? "–" : small ? "·" : none);
      const heat = heatOf(value);
      const style = `background: color-mix(in oklab, var(--heat-high) ${Math.round(heat * 100)}%, var(--heat-low))`;
      return make("td", { style, class: heat > 0.8 ? "hot warm" : heat > 0.5 ? "warm" : null, title: `${rowTitle} ${rank}, ${columnTitle} ${other}: ${text(value)}` }, small ? "" : text(value));
    })));
  });
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption }, table);
}

// series: [{name, at: ns[], low: bytes[], high: bytes[]}]
function memoryChart(canvas, series) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, tall = canvas.clientHeight;
  if (!width) return;
  canvas.width = width * scale; canvas.height = tall * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const left = 70, bottom = tall - 22, top = 10;
  const longest = Math.max(...series.map((line) => line.at[line.at.length - 1] || 1));
  const most = Math.max(...series.map((line) => line.peak), 1) * 1.05;
  const x = (at) => left + (at / longest) * (width - left - 12);
  const y = (bytes) => bottom - (bytes / most) * (bottom - top);
  const level = 2 ** Math.ceil(Math.log2(most / 5)), moment = roundStep(longest / 6);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  for (let bytes = 0; bytes <= most; bytes += level) {
    pen.fillStyle = styleOf("--line"); pen.fillRect(left, Math.round(y(bytes)), width - left - 12, 1);
    pen.fillStyle = styleOf("--soft"); pen.textAlign = "right"; pen.fillText(size(bytes), left - 8, y(bytes));
  }
  pen.textAlign = "center";
  for (let at = 0; at <= longest; at += moment) pen.fillText(time(at), Math.min(x(at), width - 24), bottom + 12);
  const colors = ["--compute", "--collective", "--copy", "--data"].map(styleOf);
  series.forEach((line, number) => {
    pen.fillStyle = colors[number % colors.length]; pen.globalAlpha = 0.18;
    pen.beginPath(); pen.moveTo(x(line.at[0]), bottom);
    line.at.forEach((at, i) => { if (i) pen.lineTo(x(at), y(line.high[i - 1])); pen.lineTo(x(at), y(line.high[i])); });
    pen.lineTo(x(line.at[line.at.length - 1]), bottom); pen.fill();
    pen.globalAlpha = 1; pen.strokeStyle = colors[number % colors.length]; pen.lineWidth = 1.5; pen.beginPath();
    line.at.forEach((at, i) => { if (i) pen.lineTo(x(at), y(line.low[i - 1])); pen.lineTo(x(at), y(line.high[i])); pen.lineTo(x(at), y(line.low[i])); });
    pen.stroke();
  });
}
