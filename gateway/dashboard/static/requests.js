// The last requests, newest first, in a fixed number of rows. The list stands still while someone points at it.

import { clock, count, duration, el, percent, setAttribute, setText, svg } from "./format.js";
import { pathOf } from "./history.js";
import { legendItem } from "./pools.js";
import { niceTop } from "./plot.js";

const NUM_ROWS = 12;
const MAX_KEPT = 200;
const HEIGHT = 16;

export const STAGES = [
  { name: "queue", style: "queue" },
  { name: "prefill", style: "prefill" },
  { name: "transfer", style: "transfer" },
  { name: "decode", style: "decode" },
];

// The stages of a request: [{name, style, start, end}] in milliseconds since its arrival. The transfer runs beside the
// prefill: it ends transfer_exposed_ms after the prompt is computed.
export function stagesOf(request) {
  const phases = request.phases;
  if (!phases) return [{ name: "queue", style: "queue", start: 0, end: request.total_ms }];
  const queueEnd = phases.tokenize_ms + phases.router_queue_ms + phases.prefill_queue_ms;
  const prefillEnd = queueEnd + phases.prefill_ms;
  const first = request.first_token_ms || prefillEnd;
  const spans = { queue: [0, queueEnd], prefill: [queueEnd, Math.max(prefillEnd, first)], decode: [first, first + phases.decode_ms] };
  if (phases.transfer_ms > 0) {
    const end = prefillEnd + phases.transfer_exposed_ms;
    spans.transfer = [Math.max(0, end - phases.transfer_ms), end];
  }
  return STAGES.filter(({ name }) => spans[name]).map((stage) => ({ ...stage, start: spans[stage.name][0], end: spans[stage.name][1] }));
}

const COLUMNS = [
  { title: "Ended", style: "time", read: (request) => clock(request.arrived_at_unix_ms + request.total_ms) },
  { title: "Path", style: "path", read: (request) => (pathOf(request) === "failed" ? request.end.replaceAll("_", " ") : request.path) },
  { title: "Prompt", style: "number", read: (request) => `${count(request.prompt_tokens)} tok` },
  { title: "Cached", style: "number cached-share", read: (request) => percent(request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : null) },
  { title: "Output", style: "number", read: (request) => `${count(request.completion_tokens)} tok` },
  { title: "TTFT", style: "number", read: (request) => duration(request.first_token_ms || null) },
  { title: "TPOT", style: "number", read: (request) => duration(request.tpot_ms || null) },
  { title: "Total", style: "number", read: (request) => duration(request.total_ms) },
];

class RequestRow {
  constructor(open) {
    this.request = null;
    this.button = el("button", { type: "button", class: "link", tabindex: "-1" });
    this.cells = COLUMNS.map(({ title, style }) => el("td", { role: "cell", class: style, "data-label": title }));
    this.bars = STAGES.map(({ style }) => svg("rect", { class: `part ${style}`, height: HEIGHT, x: 0, y: 0, width: 0 }));
    this.drawing = svg("svg", { class: "waterfall", viewBox: `0 0 1000 ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...this.bars);
    this.numbers = el("span", { class: "numbers" });
    this.element = el("tr", { role: "row", class: "request vacant" }, el("th", { role: "rowheader", scope: "row" }, this.button),
      ...this.cells, el("td", { role: "cell", class: "stages" }, this.drawing, this.numbers));
    this.element.addEventListener("click", () => this.request && open(this.request, this.button));
  }

  update(request, top) {
    this.request = request;
    this.element.classList.toggle("vacant", !request);
    if (!request) return;
    setText(this.button, request.choice ? `${request.id}#${request.choice}` : request.id);
    setAttribute(this.button, "title", request.id);
    COLUMNS.forEach(({ read }, index) => setText(this.cells[index], read(request)));
    this.cells[1].classList.toggle("warning", pathOf(request) === "failed");
    const stages = stagesOf(request);
    STAGES.forEach(({ name }, index) => {
      const stage = stages.find((found) => found.name === name) ?? { start: 0, end: 0 };
      const thin = name === "transfer"; // drawn over the prefill that it hides behind
      setAttribute(this.bars[index], "x", ((1000 * stage.start) / top).toFixed(1));
      setAttribute(this.bars[index], "width", ((1000 * (stage.end - stage.start)) / top).toFixed(1));
      setAttribute(this.bars[index], "y", thin ? "9" : "0");
      setAttribute(this.bars[index], "height", thin ? "7" : String(HEIGHT));
    });
    const said = stages.map(({ name, start, end }) => `${name} ${duration(end - start)}`).join(" · ");
    setText(this.numbers, said);
    setAttribute(this.drawing, "aria-label", said);
  }
}

export class RequestList {
  // open(request, button) shows one request.
  constructor(open) {
    this.kept = []; // newest first
    this.shown = [];
    this.held = false;
    this.note = document.getElementById("requests-note");
    this.rows = Array.from({ length: NUM_ROWS }, () => new RequestRow(open));
    this.rows[0].button.tabIndex = 0;
    const header = COLUMNS.map(({ title, style }) => el("th", { role: "columnheader", scope: "col", class: style }, title));
    this.scale = el("span", { class: "scale" });
    this.body = el("tbody", { role: "rowgroup" }, ...this.rows.map((row) => row.element));
    this.table = el("table", { role: "table", class: "requests", "aria-labelledby": "requests-title" }, el("thead", { role: "rowgroup" },
      el("tr", { role: "row" }, el("th", { role: "columnheader", scope: "col" }, "Request"), ...header,
        el("th", { role: "columnheader", scope: "col", class: "stages" }, el("span", {}, "Arrival"), this.scale))), this.body);
    document.getElementById("requests").append(this.table);
    document.getElementById("phase-legend").append(...STAGES.map(({ style, name }) => legendItem(style, name)));
    const toggle = document.getElementById("requests-table");
    toggle.addEventListener("click", () => {
      toggle.setAttribute("aria-pressed", String(this.table.classList.toggle("as-numbers")));
    });
    this.#holdWhilePointed();
    this.body.addEventListener("keydown", (event) => this.#move(event));
  }

  add(requests) {
    this.kept = [...requests].reverse().concat(this.kept).slice(0, MAX_KEPT);
    this.update();
  }

  update() {
    if (!this.held) this.shown = this.kept.slice(0, NUM_ROWS);
    const top = niceTop(Math.max(...this.shown.map((request) => request.total_ms)));
    setText(this.scale, this.shown.length ? duration(top) : "");
    this.rows.forEach((row, index) => row.update(this.shown[index] ?? null, top));
    const newer = this.held ? this.kept.indexOf(this.shown[0]) : 0;
    const still = newer < 0 ? `more than ${MAX_KEPT} newer` : `${newer} newer`;
    setText(this.note, this.held ? `Paused while you look · ${still}` : this.kept.length ? "Choose one for its spans and the router’s reasons" : "None has ended yet");
  }

  #holdWhilePointed() {
    const held = () => {
      this.held = this.shown.length > 0 && (this.body.matches(":hover") || this.body.contains(document.activeElement));
      this.update();
    };
    for (const name of ["pointerenter", "pointerleave", "focusin"]) this.body.addEventListener(name, held);
    this.body.addEventListener("focusout", () => queueMicrotask(held));
  }

  // One row takes part in the tab order; the arrow keys go from row to row.
  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -NUM_ROWS, End: NUM_ROWS }[event.key];
    const from = this.rows.findIndex((row) => row.button === document.activeElement);
    if (!step || from < 0) return;
    event.preventDefault();
    const to = Math.min(this.shown.length - 1, Math.max(0, from + step));
    this.rows[from].button.tabIndex = -1;
    this.rows[to].button.tabIndex = 0;
    this.rows[to].button.focus();
  }
}
