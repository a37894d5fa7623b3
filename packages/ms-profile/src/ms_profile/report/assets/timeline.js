// The timeline: lanes on one canvas. Spans narrower than a pixel are drawn as runs of their category's
// color, and a galloping search finds the next pixel: a frame costs lanes times pixels, not spans.
const CATEGORY = ["other", "operator", "scope", "driver call", "kernel", "copy", "collective", "Python", "device scope", "overhead", "device wait", "wait for data", "garbage collection"];
const CATEGORY_COLOR = ["host", "compute", "launch", "launch", "compute", "copy", "collective", "host", "launch", "host", "synchronize", "data", "garbage"];
const LANE = 17, RULER = 26, TRACK_GAP = 7, WIDE_GUTTER = 190, NARROW_GUTTER = 84, BLOCK = 64;
let GUTTER = WIDE_GUTTER;

class Timeline {
  constructor(stage, columns, lanes) {
    Object.assign(this, { stage, columns, lanes });
    this.canvas = make("canvas", { tabindex: 0, role: "application", "aria-label": "Timeline of all ranks; w and s zoom, a and d pan, up and down scroll, Enter picks a span, Shift and arrows move on from it" });
    this.hint = make("div", { id: "hint", hidden: true });
    stage.append(this.canvas, this.hint);
    this.pen = this.canvas.getContext("2d", { alpha: false });
    this.length = summary.timeline.length;
    this.from = 0;
    this.to = this.length;
    this.scroll = 0;
    this.picked = -1;
    this.matches = null;
    this.flags = null;
    this.marked = null;
    this.onpick = () => {};
    this.onmark = () => {};
    this.placeLanes();
    listenToMouse(this);
    this.canvas.addEventListener("keydown", (event) => timelineKey(this, event));
    new ResizeObserver(() => this.resize()).observe(stage);
    this.recolor();
  }

  placeLanes() {
    let y = 0, track = -1;
    for (const lane of this.lanes) {
      if (lane.track !== track) { y += track < 0 ? 0 : TRACK_GAP; track = lane.track; summary.timeline.tracks[track].y = y; }
      lane.y = y;
      y += LANE;
      summary.timeline.tracks[track].bottom = y;
    }
    this.height = y;
  }

  recolor() {
    this.colors = CATEGORY_COLOR.map((name) => styleOf(`--${name}`));
    this.ink = styleOf("--ink"); this.soft = styleOf("--soft"); this.card = styleOf("--card");
    this.line = styleOf("--line"); this.accent = styleOf("--accent"); this.faint = styleOf("--hover");
    this.draw();
  }

  resize() {
    const scale = window.devicePixelRatio || 1;
    this.width = this.stage.clientWidth;
    this.tall = this.stage.clientHeight;
    if (!this.width) return;
    GUTTER = this.width < 560 ? NARROW_GUTTER : WIDE_GUTTER;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.tall * scale);
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.paint();
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    if (!this.width) return;
    const pen = this.pen;
    pen.fillStyle = this.card;
    pen.fillRect(0, 0, this.width, this.tall);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, RULER, this.width - GUTTER, this.tall - RULER);
    pen.clip();
    this.paintSteps();
    this.paintMarked();
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const lane of this.lanes) {
      const y = RULER + lane.y - this.scroll;
      if (y > this.tall || y + LANE < RULER) continue;
      this.paintLane(lane, y);
    }
    this.paintPicked();
    pen.restore();
    this.paintRuler();
    this.paintNames();
  }

  paintLane(lane, y) {
    const { begin, duration, category, name } = this.columns;
    const { pen, from, flags, colors } = this;
    const rows = lane.rows, total = rows.length;
    const scale = (this.width - GUTTER) / (this.to - from);
    const tall = LANE - 2;
    let i = this.firstEndingAfter(rows, from);
    let runStart = -1, runEnd = -1, runColor = "";
    const flush = () => {
      if (runStart >= 0) { pen.fillStyle = runColor; pen.fillRect(runStart, y, Math.max(runEnd - runStart, 1), tall); }
      runStart = -1;
    };
    while (i < total) {
      const row = rows[i];
      const start = begin[row];
      if (start > this.to) break;
      const left = GUTTER + (start - from) * scale;
      const wide = duration[row] * scale;
      const dim = flags !== null && !flags[name[row]];
      const color = dim ? this.faint : colors[category[row]];
      if (wide >= 2) {
        flush();
        const x = Math.max(left, GUTTER - 2), right = Math.min(left + wide, this.width + 2);
        pen.fillStyle = color;
        pen.fillRect(x, y, Math.max(right - x - 0.5, 1), tall);
        if (right - x > 34) {
          pen.fillStyle = dim ? this.soft : this.card;
          this.fit(summary.timeline.names[name[row]], x + 4, y + tall / 2 + 0.5, right - x - 8);
        }
        i++;
        continue;
      }
      const x = Math.floor(left);
      // Within one pixel, a search match is never hidden by other spans.
      let shown = color;
      // A wide span may start in the same pixel as a narrow one, so the jump ends before it.
      const next = this.firstWide(lane, i + 1, this.gallop(rows, i + 1, from + (x + 1 - GUTTER) / scale), 2 / scale);
      if (flags !== null && dim) {
        const most = Math.min(next, i + 200);
        for (let k = i + 1; k < most; k++) if (flags[name[rows[k]]]) { shown = colors[category[rows[k]]]; break; }
      }
      if (runStart >= 0 && shown === runColor && x <= runEnd + 0.5) runEnd = x + 1;
      else { flush(); runStart = x; runEnd = x + 1; runColor = shown; }
      i = Math.max(next, i + 1);
    }
    flush();
  }

  firstEndingAfter(rows, instant) {
    const place = this.lower(rows, 0, rows.length, instant);
    if (place > 0) {
      const row = rows[place - 1];
      if (this.columns.begin[row] + this.columns.duration[row] > instant) return place - 1;
    }
    return place;
  }

  lower(rows, low, high, instant) {
    const begin = this.columns.begin;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (begin[rows[middle]] < instant) low = middle + 1; else high = middle;
    }
    return low;
  }

  // The first span of a lane in [low, high) that lasts at least `least`, or `high`; blocks of spans
  // whose longest span is shorter are skipped.
  firstWide(lane, low, high, least) {
    const { duration } = this.columns, { rows } = lane;
    if (!lane.longest) {
      lane.longest = new Float64Array(Math.ceil(rows.length / BLOCK));
      for (let k = 0; k < rows.length; k++) lane.longest[(k / BLOCK) | 0] = Math.max(lane.longest[(k / BLOCK) | 0], duration[rows[k]]);
    }
    for (let k = low; k < high;) {
      if (k % BLOCK === 0 && lane.longest[k / BLOCK] < least) { k += BLOCK; continue; }
      if (duration[rows[k]] >= least) return k;
      k++;
    }
    return high;
  }

  gallop(rows, from, instant) {
    let step = 1, high = from;
    const begin = this.columns.begin;
    while (high < rows.length && begin[rows[high]] < instant) { from = high + 1; high += step; step *= 2; }
    return this.lower(rows, from, Math.min(high, rows.length), instant);
  }

  x(instant) { return GUTTER + ((instant - this.from) * (this.width - GUTTER)) / (this.to - this.from); }
  instantAt(x) { return this.from + ((x - GUTTER) * (this.to - this.from)) / (this.width - GUTTER); }

  paintSteps() {
    const pen = this.pen;
    const rank = summary.timeline.steps.length ? summary.timeline.steps[0][0] : null;
    pen.fillStyle = this.line;
    for (const [owner, , start] of summary.timeline.steps) {
      if (owner === rank) pen.fillRect(Math.round(this.x(start)), RULER, 1, this.tall);
    }
  }

  // The requested interval of one rank, whether or not a span covers it.
  paintMarked() {
    if (!this.marked) return;
    const { rank, from, to } = this.marked, x = this.x(from), wide = Math.max(this.x(to) - x, 2);
    const own = summary.timeline.tracks.filter((track) => track.rank === rank);
    if (!own.length) return;
    const top = RULER + own[0].y - this.scroll, bottom = RULER + own[own.length - 1].bottom - this.scroll;
    this.pen.fillStyle = this.accent;
    this.pen.globalAlpha = 0.16;
    this.pen.fillRect(x, top, wide, bottom - top);
    this.pen.globalAlpha = 1;
    this.pen.fillRect(x, top, 1, bottom - top);
    this.pen.fillRect(x + wide - 1, top, 1, bottom - top);
  }

  paintRuler() {
    const pen = this.pen, unit = summary.timeline.unit_ns;
    pen.fillStyle = this.card;
    pen.fillRect(0, 0, this.width, RULER);
    pen.fillStyle = this.line;
    pen.fillRect(0, RULER - 1, this.width, 1);
    const span = (this.to - this.from) * unit;
    const step = roundStep(span / Math.max((this.width - GUTTER) / 110, 1));
    pen.fillStyle = this.soft;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (let at = Math.ceil((this.from * unit) / step) * step; at <= this.to * unit; at += step) {
      const x = this.x(at / unit);
      if (x < GUTTER) continue;
      pen.fillRect(x, RULER - 7, 1, 6);
      if (x > this.width - 46) break; // its label would be cut
      pen.fillText(time(at, Math.max(3, 1 + Math.ceil(Math.log10(at / step)))), x + 4, RULER / 2 - 1);
    }
    pen.fillStyle = this.card;
    pen.fillRect(0, 0, GUTTER, RULER - 1);
    pen.fillStyle = this.soft;
    pen.fillText(`${time(span)} shown`, 8, RULER / 2 - 1);
  }

  paintNames() {
    const pen = this.pen;
    pen.save();
    pen.beginPath();
    pen.rect(0, RULER, GUTTER, this.tall);
    pen.clip();
    pen.fillStyle = this.card;
    pen.fillRect(0, RULER, GUTTER, this.tall);
    pen.fillStyle = this.line;
    pen.fillRect(GUTTER - 1, RULER, 1, this.tall);
    for (const track of summary.timeline.tracks) {
      const top = RULER + track.y - this.scroll, bottom = RULER + track.bottom - this.scroll;
      if (bottom < RULER || top > this.tall) continue;
      const y = Math.min(Math.max(top, RULER) + 8, bottom - 8);
      pen.font = "600 11px system-ui, sans-serif";
      pen.fillStyle = this.ink;
      const label = `rank ${track.rank}`;
      pen.fillText(label, 8, y);
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = this.soft;
      const below = bottom - y > 20, left = below ? 8 : 16 + pen.measureText(label).width;
      this.fit(track.name, left, below ? y + 14 : y, GUTTER - left - 6);
      pen.fillStyle = this.line;
      pen.fillRect(0, bottom + TRACK_GAP / 2, GUTTER, 1);
    }
    pen.restore();
  }

  // Truncate text to a width. A letter is about 5.6 pixels wide, so only borderline texts are measured.
  fit(text, x, y, room) {
    let shown = text.slice(0, Math.ceil(room / 3));
    if (text.length * 8 > room) while (shown && this.pen.measureText(shown === text ? shown : `${shown}…`).width > room) shown = shown.slice(0, -1);
    this.pen.fillText(shown === text ? shown : `${shown}…`, x, y);
  }

  paintPicked() {
    if (this.picked < 0) return;
    const lane = this.laneOf(this.picked);
    const x = this.x(this.columns.begin[this.picked]);
    const wide = (this.columns.duration[this.picked] * (this.width - GUTTER)) / (this.to - this.from);
    this.pen.strokeStyle = this.accent;
    this.pen.lineWidth = 2;
    this.pen.strokeRect(x - 1, RULER + lane.y - this.scroll - 1, Math.max(wide, 3) + 2, LANE);
  }

  laneOf(row) {
    return this.lanes.find((lane) => {
      const track = summary.timeline.tracks[lane.track];
      if (row < track.first || row >= track.first + track.count) return false;
      return lane.rows[this.indexIn(lane.rows, row)] === row;
    });
  }

  indexIn(rows, row) {
    let low = 0, high = rows.length;
    while (low < high) { const middle = (low + high) >> 1; if (rows[middle] < row) low = middle + 1; else high = middle; }
    return low;
  }

  rowAt(x, y) {
    if (x < GUTTER || y < RULER) return -1;
    const lane = this.lanes.find((one) => { const top = RULER + one.y - this.scroll; return y >= top && y < top + LANE; });
    if (!lane) return -1;
    const instant = this.instantAt(x);
    const slack = (1.5 * (this.to - this.from)) / this.width;
    const place = this.lower(lane.rows, 0, lane.rows.length, instant + slack) - 1;
    if (place < 0) return -1;
    const row = lane.rows[place];
    return this.columns.begin[row] + this.columns.duration[row] + slack >= instant ? row : -1;
  }

  zoom(factor, x) {
    const centre = this.instantAt(x);
    const span = Math.min(Math.max((this.to - this.from) * factor, 20), this.length * 1.02);
    const left = (centre - this.from) / (this.to - this.from);
    this.show(centre - left * span, centre + (1 - left) * span);
  }

  show(from, to) {
    const span = to - from;
    const margin = this.length * 0.01;
    this.from = Math.min(Math.max(from, -margin), Math.max(this.length + margin - span, -margin));
    this.to = this.from + span;
    this.draw();
  }

  pan(share) { const move = (this.to - this.from) * share; this.show(this.from + move, this.to + move); }
  scrollBy(pixels) {
    this.scroll = Math.min(Math.max(this.scroll + pixels, 0), Math.max(this.height - this.tall + RULER + 8, 0));
    this.draw();
  }

  pick(row, centre = false) {
    this.picked = row;
    if (row >= 0 && centre) {
      const lane = this.laneOf(row), start = this.columns.begin[row], wide = Math.max(this.columns.duration[row], 4);
      const span = Math.min(Math.max(wide * 8, 2000), this.length);
      this.show(start + wide / 2 - span / 2, start + wide / 2 + span / 2);
      const top = lane.y - this.scroll;
      if (top < 0 || top > this.tall - RULER - LANE) { this.scroll = 0; this.scrollBy(lane.y - this.tall / 3); }
    }
    this.draw();
    this.onpick(row);
  }

  search(text) {
    const wanted = text.trim().toLowerCase();
    this.matches = null;
    this.flags = wanted ? Uint8Array.from(summary.timeline.names, (name) => (name.toLowerCase().includes(wanted) ? 1 : 0)) : null;
    let found = 0;
    if (this.flags) for (const code of this.columns.name) found += this.flags[code];
    this.draw();
    return found;
  }

  next(direction) {
    if (!this.flags) return;
    if (!this.matches) {
      const { begin, name } = this.columns;
      const rows = [];
      for (let row = 0; row < name.length; row++) if (this.flags[name[row]]) rows.push(row);
      this.matches = Uint32Array.from(rows).sort((a, b) => begin[a] - begin[b]);
    }
    const { matches } = this;
    if (!matches.length) return;
    let place = this.picked < 0 ? -1 : matches.indexOf(this.picked);
    if (place < 0 && direction < 0) place = 0;
    this.pick(matches[(place + direction + matches.length) % matches.length], true);
  }

  goTo(rank, instantNs, lengthNs) {
    const unit = summary.timeline.unit_ns, origin = summary.timeline.origins[rank] ?? summary.timeline.origin_ns;
    const at = Number(BigInt(instantNs) - BigInt(origin)) / unit, wide = lengthNs / unit;
    const span = Math.max(wide * 3, 2000);
    this.marked = { rank, from: at, to: at + wide };
    this.show(at + wide / 2 - span / 2, at + wide / 2 + span / 2);
    const track = summary.timeline.tracks.find((one) => one.rank === rank);
    if (track) { this.scroll = 0; this.scrollBy(track.y); }
    const row = this.spanAt(rank, at, wide);
    this.pick(-1);
    if (row >= 0) bring(this, row);
    else this.onmark(`${time(lengthNs)} of rank ${rank}, at ${time(at * unit, 6)}: the marked interval`);
  }

  // The span of a rank that starts and ends at these ticks, or -1.
  spanAt(rank, at, wide) {
    const { begin, duration } = this.columns;
    for (const lane of this.lanes) {
      if (summary.timeline.tracks[lane.track].rank !== rank) continue;
      for (let i = this.lower(lane.rows, 0, lane.rows.length, at - 1.5); i < lane.rows.length && begin[lane.rows[i]] <= at + 1.5; i++) {
        if (Math.abs(duration[lane.rows[i]] - wide) <= 1.5) return lane.rows[i];
      }
    }
    return -1;
  }

  describe(row) {
    const { begin, duration, category, name } = this.columns;
    const unit = summary.timeline.unit_ns;
    const track = summary.timeline.tracks.find((one) => row >= one.first && row < one.first + one.count);
    return `${summary.timeline.names[name[row]]} · ${CATEGORY[category[row]]} · ${time(duration[row] * unit, 4)} · at ${time(begin[row] * unit, 6)} · rank ${track.rank}, ${track.name}`;
  }
}
