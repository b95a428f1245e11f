// Both pools, row by row, and the routers. A worker that vanished stays for two minutes, marked as lost.

import { count, duration, el, percent, perSecond, setAttribute, setText, svg } from "./format.js";
import { kvUse } from "./history.js";
import { StackedBar } from "./plot.js";

export const KV_PARTS = [
  { name: "held", style: "held", text: "held by sequences" },
  { name: "leased", style: "leased", text: "leased to a reader" },
  { name: "incoming", style: "incoming", text: "incoming from a transfer" },
  { name: "cached", style: "cached", text: "cached, can be evicted" },
  { name: "free", style: "free", text: "free" },
];
const STALE_REPORT_MS = 3000; // router.report_stale_s: the router then sends the worker nothing

const COLUMNS = [
  { title: "Running", read: ({ worker }) => count(worker.num_running) },
  { title: "Waiting", read: ({ worker }) => count(worker.num_waiting + worker.num_pulls_waiting) },
  { title: "Queue", hint: "Tokens to compute until every sequence is in decode", read: ({ worker }) => `${count(worker.num_queued_tokens)} tok` },
  { title: "Prefilled", hint: "Prompt tokens a second, over 5 s", read: ({ rates }) => `${perSecond(rates.prefilled)}` },
  { title: "Sampled", hint: "Output tokens a second, over 5 s", read: ({ rates }) => `${perSecond(rates.sampled)}` },
  { title: "Step", hint: "Predicted time of the next step of decode", read: ({ worker }) => duration(worker.step_ms) },
  { title: "Report", hint: "Age of the newest report", read: ({ worker }) => duration(worker.report_age_ms) },
];

export function legendItem(style, text) {
  return el("li", {}, svg("svg", { class: "swatch", viewBox: "0 0 16 8", "aria-hidden": "true" },
    svg("rect", { class: `part ${style}`, x: 1, y: 0, width: 14, height: 8 })), el("span", {}, text));
}

class WorkerRow {
  constructor() {
    this.id = el("b");
    this.address = el("small");
    this.state = el("span", { class: "state" });
    this.bar = new StackedBar(KV_PARTS);
    this.use = el("span", { class: "use" });
    this.cells = COLUMNS.map(({ title }) => el("td", { role: "cell", class: "number", "data-label": title }));
    this.element = el(
      "tr", { role: "row", class: "worker" },
      el("th", { role: "rowheader", scope: "row" }, this.id, this.address),
      el("td", { role: "cell", "data-label": "State" }, this.state),
      el("td", { role: "cell", class: "kv" }, this.bar.element, this.use),
      ...this.cells,
    );
    this.numbers = KV_PARTS.map(() => el("td", { class: "number" }));
    this.name = el("th", { scope: "row" });
    this.numbersRow = el("tr", {}, this.name, ...this.numbers);
  }

  update(worker, rates) {
    setText(this.id, worker.id);
    setAttribute(this.id, "title", worker.id);
    setText(this.address, worker.address);
    setText(this.state, worker.state);
    setAttribute(this.state, "data-state", worker.state);
    const use = kvUse([worker]);
    this.bar.update(worker.blocks, `KV blocks: ${KV_PARTS.map(({ name }) => `${worker.blocks[name]} ${name}`).join(", ")}`);
    setText(this.use, use === null ? "no blocks" : percent(use));
    COLUMNS.forEach(({ read }, index) => setText(this.cells[index], read({ worker, rates })));
    this.cells.at(-1).classList.toggle("warning", worker.report_age_ms > STALE_REPORT_MS);
    setText(this.name, worker.id);
    KV_PARTS.forEach(({ name }, index) => setText(this.numbers[index], count(worker.blocks[name])));
  }
}

export class Pool {
  constructor(role, title) {
    this.role = role;
    this.rows = new Map();
    const id = `pool-${role}`;
    this.note = el("p", { class: "note" });
    this.button = el("button", { type: "button", "aria-pressed": "false", "aria-label": `${title}: KV blocks as a table` }, "Table");
    const header = ["Worker", "State", "KV in use"].map((name) => el("th", { role: "columnheader", scope: "col" }, name));
    const numbers = COLUMNS.map(({ title: name, hint }) => el("th", { role: "columnheader", scope: "col", class: "number", title: hint }, name));
    this.body = el("tbody", { role: "rowgroup" });
    this.table = el("table", { role: "table", class: "workers", "aria-labelledby": id },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...header, ...numbers)), this.body);
    this.numbersBody = el("tbody");
    const columns = KV_PARTS.map(({ name }) => el("th", { scope: "col", class: "number" }, name));
    this.numbersTable = el("div", { class: "scroll data", tabindex: "0", hidden: "" }, el(
      "table", {}, el("caption", {}, "KV blocks by column"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Worker"), ...columns)), this.numbersBody,
    ));
    this.empty = el("p", { class: "empty" }, `No ${role} worker is known to this router.`);
    this.element = el(
      "section", { class: "card pool", "aria-labelledby": id },
      el("div", { class: "head" }, el("h2", { id }, title), this.note,
        el("ul", { class: "legend" }, ...KV_PARTS.map(({ style, name }) => legendItem(style, name))), this.button),
      this.table, this.empty, this.numbersTable,
    );
    this.button.addEventListener("click", () => {
      this.numbersTable.hidden = !this.numbersTable.hidden;
      this.button.setAttribute("aria-pressed", String(!this.numbersTable.hidden));
    });
  }

  update(history, wanted) {
    const workers = [...history.workers.values()].map(({ worker }) => worker).filter(({ role }) => role === this.role);
    workers.sort((a, b) => (a.id < b.id ? -1 : 1));
    const ids = new Set(workers.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.element.remove();
      row.numbersRow.remove();
      this.rows.delete(id);
    }
    workers.forEach((worker, index) => this.#row(worker.id, index).update(worker, history.rates(worker.id)));
    const serving = workers.filter(({ state }) => state === "serving").length;
    setText(this.note, wanted ? `${serving} of ${wanted} serving` : `${serving} serving`);
    this.note.classList.toggle("warning", wanted > serving || serving === 0);
    this.empty.hidden = workers.length > 0;
  }

  #row(id, index) {
    let row = this.rows.get(id);
    if (!row) this.rows.set(id, (row = new WorkerRow()));
    if (this.body.children[index] !== row.element) {
      this.body.insertBefore(row.element, this.body.children[index] ?? null);
      this.numbersBody.insertBefore(row.numbersRow, this.numbersBody.children[index] ?? null);
    }
    return row;
  }
}

export class Routers {
  constructor() {
    this.body = el("tbody");
    const header = ["Router", "Address", "State"].map((name) => el("th", { scope: "col" }, name));
    const numbers = ["Queued", "In flight"].map((name) => el("th", { scope: "col", class: "number" }, name));
    this.element = el("div", { class: "scroll" }, el("table", { "aria-labelledby": "routers-title" },
      el("thead", {}, el("tr", {}, ...header, ...numbers)), this.body));
  }

  update(fleet) {
    const rows = fleet.routers.map((router) => [
      router.id === fleet.router ? `${router.id} (answers)` : router.id, router.address, router.state,
      count(router.num_queued), count(router.num_in_flight),
    ]);
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
    rows.forEach((texts, index) => {
      const row = this.body.children[index] ?? this.body.appendChild(
        el("tr", {}, el("th", { scope: "row" }), el("td"), el("td", {}, el("span", { class: "state" })),
          el("td", { class: "number" }), el("td", { class: "number" })));
      texts.forEach((text, column) => setText(column === 2 ? row.children[2].firstChild : row.children[column], text));
      setAttribute(row.children[2].firstChild, "data-state", texts[2]);
    });
  }
}
