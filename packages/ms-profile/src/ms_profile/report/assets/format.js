// Format numbers for display; unknown values are shown as unknown, never as zero.
const NOT_MEASURABLE = "not measurable";

function time(ns, digits = 3) {
  if (ns === null || ns === undefined) return NOT_MEASURABLE;
  const size = Math.abs(ns);
  const [unit, scale] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : size >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  if (ns === 0) return "0";
  const value = ns / scale;
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.max(Math.abs(value), 1))));
  return `${value.toFixed(scale === 1 ? 0 : places)} ${unit}`;
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return NOT_MEASURABLE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(bytes), unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit++; }
  return `${bytes < 0 ? "−" : ""}${value.toFixed(unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

function rate(bytes) {
  if (bytes === null || bytes === undefined) return NOT_MEASURABLE;
  const [unit, scale] = bytes >= 1e9 ? ["GB/s", 1e9] : bytes >= 1e6 ? ["MB/s", 1e6] : ["kB/s", 1e3];
  return `${(bytes / scale).toPrecision(3)} ${unit}`;
}

function share(part, whole) {
  if (part === null || part === undefined || !whole) return NOT_MEASURABLE;
  if (part === 0) return "none";
  const percent = (100 * part) / whole;
  return percent < 0.05 ? "<0.1%" : `${percent.toFixed(percent < 9.95 ? 1 : 0)}%`;
}

// Round up to 1, 2 or 5 times a power of ten.
const roundStep = (rough) => { const power = 10 ** Math.floor(Math.log10(rough)); return [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough); };
const whole = new Intl.NumberFormat("en");
const count = (number) => whole.format(number);
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length ? (sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2) : null;
};
const sum = (values) => values.reduce((total, value) => total + value, 0);

// make("td", {class: "n"}, "text" | element...): text is always set as text.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Follow the system's colors until the button is pressed; redraw canvases after each change.
function followTheme(redraw) {
  const setTheme = (theme) => { document.documentElement.dataset.theme = theme; redraw(); };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(dark.matches ? "dark" : "light");
}
