// Two drawings: lines over the last minutes, and stacked bars. Each has a fixed size, so new data moves nothing.

import { ago, el, setAttribute, setText, svg } from "./format.js";
import { BUCKET_MS } from "./history.js";

const WIDTH = 600; // in the drawing's own units
const HEIGHT = 100;

// The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `value`.
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999);
}

export class LinePlot {
  // series: [{key, label, style}]; format: a value with its unit; top: the fixed top of the axis, or null.
  constructor({ id, title, note, series, format, top = null }) {
    Object.assign(this, { title, series, format, top, points: [], cursor: null });
    const heading = el("h3", { id: `${id}-title` }, title);
    this.button = el("button", { type: "button", "aria-pressed": "false", "aria-label": `${title} as a table` }, "Table");
    this.lines = series.map(({ style }) => svg("path", { class: `line ${style}` }));
    const grid = [0.5, 50, 99.5].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.mark = svg("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.drawing = svg(
      "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...grid, ...[...this.lines].reverse(), this.mark, // the first series on top
    );
    this.axis = ["top", "middle", "bottom"].map((place) => el("span", { class: `axis ${place}`, "aria-hidden": "true" }));
    this.when = el("span", { class: "axis when", "aria-hidden": "true" }, "now");
    this.from = el("span", { class: "axis from", "aria-hidden": "true" });
    this.picture = el("div", { class: "picture" }, this.drawing, ...this.axis, this.from, this.when);
    this.rows = el("tbody");
    const header = el("tr", {}, el("th", { scope: "col" }, "Time"), ...series.map(({ label }) => el("th", { scope: "col" }, label)));
    const table = el("table", { "aria-labelledby": `${id}-title` }, el("thead", {}, header), this.rows);
    this.table = el("div", { class: "scroll data", tabindex: "0", hidden: "" }, table);
    this.values = series.map(() => el("b"));
    const legend = series.map(({ label, style }, index) =>
      el("li", {}, el("span", {}, svg("svg", { class: "swatch", viewBox: "0 0 16 8", "aria-hidden": "true" },
        svg("path", { class: `line ${style}`, d: "M1 4H15" })), label), this.values[index]));
    this.element = el(
      "section", { class: "card plot", id, "aria-labelledby": `${id}-title` },
      el("div", { class: "head" }, heading, el("p", { class: "note" }, note), this.button),
      el("div", { class: "body" }, this.picture, this.table), el("ul", { class: series.length > 3 ? "legend many" : "legend" }, ...legend),
    );
    this.button.addEventListener("click", () => this.#toggle());
    this.picture.addEventListener("pointermove", (event) => this.#point(event));
    this.picture.addEventListener("pointerleave", () => this.#unpoint());
  }

  // points: one each 10 s, {ageMs, values: {key: number or null}}, oldest first.
  update(points) {
    this.points = points;
    const all = points.flatMap(({ values }) => this.series.map(({ key }) => values[key] ?? 0));
    const top = this.top ?? niceTop(Math.max(...all));
    this.series.forEach(({ key }, index) => setAttribute(this.lines[index], "d", linePath(points, key, top)));
    const empty = this.top === null && !(Math.max(...all) > 0);
    [top, top / 2, 0].forEach((value, index) => setText(this.axis[index], empty && value ? "" : this.format(value)));
    this.minutes = (points.length * BUCKET_MS) / 60_000;
    setText(this.from, `−${this.minutes} min`);
    this.#readout();
    if (!this.table.hidden) this.#fillTable();
  }

  #readout() {
    const newest = this.points.findLast(({ values }) => this.series.some(({ key }) => values[key] !== null));
    const shown = (this.cursor === null ? newest : this.points[this.cursor]) ?? { values: {}, ageMs: 0 };
    const texts = this.series.map(({ key }) => this.format(shown.values[key]));
    texts.forEach((text, index) => setText(this.values[index], text));
    setText(this.when, this.cursor === null ? "now" : ago(shown.ageMs + BUCKET_MS / 2));
    if (this.cursor === null) {
      const said = this.series.map(({ label }, index) => `${label} ${texts[index]}`).join(", ");
      setAttribute(this.drawing, "aria-label", `${this.title} over the last ${this.minutes} minutes. Newest: ${said}.`);
    }
  }

  #point(event) {
    const { left, width } = this.drawing.getBoundingClientRect();
    const index = Math.floor(((event.clientX - left) / width) * this.points.length);
    this.cursor = Math.min(this.points.length - 1, Math.max(0, index));
    const x = String(xOf(this.cursor, this.points.length));
    for (const end of ["x1", "x2"]) this.mark.setAttribute(end, x);
    this.mark.setAttribute("visibility", "visible");
    this.#readout();
  }

  #unpoint() {
    this.cursor = null;
    this.mark.setAttribute("visibility", "hidden");
    this.#readout();
  }

  #toggle() {
    this.table.hidden = !this.table.hidden;
    this.picture.hidden = !this.table.hidden;
    this.button.setAttribute("aria-pressed", String(!this.table.hidden));
    if (!this.table.hidden) this.#fillTable();
  }

  #fillTable() {
    const rows = this.points.filter(({ values }) => this.series.some(({ key }) => values[key] !== null)).reverse();
    this.rows.replaceChildren(...rows.map(({ ageMs, values }) => el(
      "tr", {}, el("th", { scope: "row" }, ago(ageMs + BUCKET_MS)),
      ...this.series.map(({ key }) => el("td", {}, this.format(values[key]))),
    )));
  }
}

function xOf(index, num) {
  return (index + 0.5) * (WIDTH / num);
}

// A line through the values. A bucket without a value is a gap; a value alone is a dot.
function linePath(points, key, top) {
  let path = "";
  let drawing = false;
  points.forEach(({ values }, index) => {
    const value = values[key];
    if (value === null || value === undefined) {
      drawing = false;
      return;
    }
    const y = (HEIGHT - 1 - Math.min(1, value / top) * (HEIGHT - 2)).toFixed(1);
    const x = xOf(index, points.length);
    path += drawing ? `L${x} ${y}` : `M${x} ${y}h.01`;
    drawing = true;
  });
  return path;
}

// A bar of parts side by side: parts [{name, style}], all shares from the same total.
export class StackedBar {
  constructor(parts) {
    this.parts = parts;
    this.rects = parts.map(({ style }) => svg("rect", { class: `part ${style}`, y: 0, height: 16, x: 0, width: 0 }));
    this.element = svg("svg", { class: "bar", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img" }, ...this.rects);
  }

  update(values, label) {
    const total = this.parts.reduce((sum, { name }) => sum + values[name], 0);
    let x = 0;
    this.parts.forEach(({ name }, index) => {
      const width = total ? (1000 * values[name]) / total : 0;
      setAttribute(this.rects[index], "x", x.toFixed(1));
      setAttribute(this.rects[index], "width", width.toFixed(1));
      x += width;
    });
    setAttribute(this.element, "aria-label", label);
  }
}
