// Numbers with their units, and elements. All text goes through textContent: no text of a user becomes markup.

const MISSING = "–";
const SVG = "http://www.w3.org/2000/svg";

// An element: el("td", {class: "number", "data-label": "Total"}, "12 ms", child). An attribute of null is left out.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Replace the text of an element, and touch the page only if the text differs.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

// Three digits: 0.123, 1.23, 12.3, 123.
function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2);
}

export function duration(ms) {
  if (!known(ms)) return MISSING;
  if (ms >= 60_000) return `${Math.floor(ms / 60_000)} min ${Math.floor((ms % 60_000) / 1000)} s`;
  if (ms >= 1000) return `${digits(ms / 1000)} s`;
  if (ms >= 1 || ms === 0) return `${digits(ms)} ms`;
  return `${digits(ms * 1000)} µs`;
}

export function count(value) {
  if (!known(value)) return MISSING;
  if (value >= 1e9) return `${digits(value / 1e9)} G`;
  if (value >= 1e6) return `${digits(value / 1e6)} M`;
  if (value >= 1e5) return `${digits(value / 1e3)} k`;
  return Math.round(value).toLocaleString("en");
}

export function perSecond(value) {
  if (!known(value)) return MISSING;
  return `${value >= 99.95 ? count(value) : digits(value)}/s`;
}

export function bytes(value) {
  if (!known(value)) return MISSING;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function bytesPerSecond(value) {
  return known(value) ? `${bytes(value)}/s` : MISSING;
}

export function percent(share) {
  return known(share) ? `${(100 * share).toFixed(share >= 0.9995 || share === 0 ? 0 : 1)} %` : MISSING;
}

// How long ago: -0:10, -9:50.
export function ago(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  return `−${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB");
}
