// Unpack the columns: base64, raw deflate, byte planes; then arrange the spans by track and depth.
const summary = JSON.parse(document.getElementById("summary").textContent);

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unshuffle(raw, column) {
  const width = Number(column.type[1]);
  const count = column.length;
  const out = new Uint32Array(count);
  for (let plane = 0; plane < width; plane++) {
    const from = column.offset + plane * count;
    const shift = plane * 8;
    for (let i = 0; i < count; i++) out[i] |= raw[from + i] << shift;
  }
  return out;
}

async function readColumns() {
  const element = document.getElementById("columns");
  if (!summary.columns.length) return {};
  const raw = await inflate(bytesOfBase64(element.textContent.trim()));
  element.remove();
  const columns = {};
  for (const column of summary.columns) columns[column.name] = unshuffle(raw, column);
  return columns;
}

// Deepest lane of a track; deeper spans share it and are drawn over one another. Python's own
// limit of nested calls is 1000.
const DEEPEST = 1023;

// Each lane is one depth of one track: rows ordered by start that don't overlap.
function layOut(columns) {
  const lanes = [];
  for (const [number, track] of summary.timeline.tracks.entries()) {
    const last = track.first + track.count;
    const ends = [];
    const depth = new Uint8Array(track.count);
    const counts = [];
    let at = 0;
    for (let i = track.first; i < last; i++) {
      at += columns.start[i];
      columns.begin[i] = at;
      let level = 0;
      while (level < ends.length && ends[level] > at) level++;
      if (level > DEEPEST) level = DEEPEST;
      ends.length = level;
      ends.push(at + columns.duration[i]);
      depth[i - track.first] = level;
      counts[level] = (counts[level] || 0) + 1;
    }
    const own = counts.map((count) => new Uint32Array(count));
    const filled = new Uint32Array(counts.length);
    for (let i = 0; i < track.count; i++) {
      const level = depth[i];
      own[level][filled[level]++] = track.first + i;
    }
    own.forEach((rows, level) => lanes.push({ track: number, level, rows }));
  }
  return lanes;
}
