// Keyboard and mouse in the timeline; everything works with the keyboard alone.
function timelineKey(line, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const middle = GUTTER + (line.width - GUTTER) / 2;
  const walks = { ArrowLeft: () => walk(line, -1, 0), ArrowRight: () => walk(line, 1, 0), ArrowUp: () => walk(line, 0, -1), ArrowDown: () => walk(line, 0, 1) };
  const moves = {
    w: () => line.zoom(0.7, middle), s: () => line.zoom(1 / 0.7, middle), "+": () => line.zoom(0.7, middle), "-": () => line.zoom(1 / 0.7, middle),
    a: () => line.pan(-0.15), d: () => line.pan(0.15), ArrowLeft: () => line.pan(-0.15), ArrowRight: () => line.pan(0.15),
    ArrowUp: () => line.scrollBy(-3 * LANE), ArrowDown: () => line.scrollBy(3 * LANE), PageUp: () => line.scrollBy(-line.tall * 0.8), PageDown: () => line.scrollBy(line.tall * 0.8),
    0: () => line.show(0, line.length), Home: () => line.show(0, line.length), n: () => line.next(1), p: () => line.next(-1),
    Enter: () => (line.picked < 0 ? pickInView(line) : line.pick(line.picked, true)), Escape: () => { line.marked = null; line.pick(-1); },
  };
  const move = (event.shiftKey && walks[event.key]) || moves[event.key];
  if (!move) return;
  event.preventDefault();
  event.stopPropagation();
  move();
}

// The span nearest to the middle of the first lane in view.
function pickInView(line) {
  const lane = line.lanes.find((one) => one.y >= line.scroll) || line.lanes[0];
  const place = line.lower(lane.rows, 0, lane.rows.length, (line.from + line.to) / 2);
  bring(line, lane.rows[Math.max(place - 1, 0)]);
}

// Move from the picked span to its neighbor in the lane, or to the nearest in the lane above or below.
function walk(line, along, down) {
  if (line.picked < 0) { pickInView(line); return; }
  const lane = line.laneOf(line.picked), place = line.indexIn(lane.rows, line.picked);
  const other = line.lanes[line.lanes.indexOf(lane) + down];
  if (!other) return;
  const next = down ? line.lower(other.rows, 0, other.rows.length, line.columns.begin[line.picked] + (down < 0 ? 1 : 0)) - (down < 0 ? 1 : 0) : place + along;
  const row = other.rows[down ? Math.min(Math.max(next, 0), other.rows.length - 1) : next];
  if (row !== undefined) bring(line, row);
}

// Pick a span, and move the view only if it is out of sight.
function bring(line, row) {
  const begin = line.columns.begin[row], y = line.laneOf(row).y - line.scroll;
  const seen = begin < line.to && begin + line.columns.duration[row] > line.from && y >= 0 && y < line.tall - RULER - LANE;
  line.pick(row, !seen);
}

function listenToMouse(line) {
  const { canvas } = line;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.ctrlKey || event.metaKey || !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX) && !event.altKey) {
      line.zoom(Math.exp(event.deltaY * 0.0016), event.offsetX);
    } else if (event.shiftKey) line.scrollBy(event.deltaY || event.deltaX);
    else line.pan(event.deltaX / line.width);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    line.drag = { x: event.offsetX, y: event.offsetY, moved: 0 };
    canvas.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!line.drag) return pointAt(line, event);
    const dx = event.offsetX - line.drag.x, dy = event.offsetY - line.drag.y;
    line.drag = { x: event.offsetX, y: event.offsetY, moved: line.drag.moved + Math.abs(dx) + Math.abs(dy) };
    line.pan(-dx / (line.width - GUTTER));
    line.scrollBy(-dy);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (line.drag && line.drag.moved < 4) line.pick(line.rowAt(event.offsetX, event.offsetY));
    line.drag = null;
  });
  canvas.addEventListener("pointerleave", () => { line.hint.hidden = true; });
  canvas.addEventListener("dblclick", (event) => {
    const row = line.rowAt(event.offsetX, event.offsetY);
    if (row >= 0) line.pick(row, true);
  });
}

// Show the description of the span under the mouse, next to it.
function pointAt(line, event) {
  const row = line.rowAt(event.offsetX, event.offsetY);
  line.hint.hidden = row < 0;
  if (row < 0) return;
  line.hint.textContent = line.describe(row);
  line.hint.style.left = `${Math.min(event.offsetX + 12, Math.max(line.width - 300, 0))}px`;
  line.hint.style.top = `${Math.min(event.offsetY + 14, line.tall - 60)}px`;
}
