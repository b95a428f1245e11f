// One request: its spans as a waterfall, their attributes, and the candidates that the router compared.

import { bytes, count, duration, el, percent, svg } from "./format.js";
import { pathOf } from "./history.js";
import { niceTop } from "./plot.js";

const STYLES = [
  [/queue|wait|route|tokenize/, "queue"],
  [/transfer|kv|pull/, "transfer"],
  [/prefill/, "prefill"],
  [/decode|respond|sample/, "decode"],
];
const COST = "Cost = queue + prefill + transfer + room + gap × streams + evicted. A prefix is read from a peer while the prompt queues.";
const TERMS = [
  ["queue_ms", "Queue"], ["read_ms", "Read"], ["prefill_ms", "Prefill"], ["transfer_ms", "Transfer"], ["room_wait_ms", "Room"],
  ["gap_ms", "Gap"], ["num_streams", "Streams"], ["evict_ms", "Evicted"], ["first_token_ms", "First token"], ["cost_ms", "Cost"],
];

function styleOf(name) {
  const stage = name.split(".").at(-1);
  return (STYLES.find(([words]) => words.test(stage)) ?? [null, "root"])[1];
}

export function traceBody(trace) {
  return [facts(trace.requests[0]), waterfall(trace.spans), reasons(trace.candidates)].filter(Boolean);
}

function facts(request) {
  if (!request) return null;
  const cached = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : null;
  const rows = [
    ["End", request.end],
    ["Path", request.path || "none"],
    ["Prompt", `${count(request.prompt_tokens)} tokens, ${percent(cached)} cached`],
    ["Output", `${count(request.completion_tokens)} tokens`],
    ["TTFT", duration(request.first_token_ms || null)],
    ["TPOT", duration(request.tpot_ms || null)],
    ["Total", duration(request.total_ms)],
    ["Moved", bytes(request.transferred_bytes)],
    ["Prefill worker", request.prefill_worker || "none"],
    ["Decode worker", request.decode_worker || "none"],
    ["Attempts", count(request.attempts)],
    ["Tenant", request.tenant || "none"],
    ["Trace id", request.trace_id || "none"],
  ];
  return el("dl", { class: `facts ${pathOf(request)}` }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function waterfall(spans) {
  if (spans.length === 0) return el("p", { class: "empty" }, "The router kept no spans of this request.");
  const top = niceTop(Math.max(...spans.map((span) => span.start_ms + span.duration_ms)));
  const rows = spans.map((span) => spanRow(span, top));
  const table = el("div", { class: "scroll data", tabindex: "0", hidden: "" }, spanTable(spans));
  const list = el("div", { class: "spans" }, el("div", { class: "span-head", "aria-hidden": "true" },
    el("span", {}, "Span"), el("span", { class: "ticks" }, el("span", {}, "0"), el("span", {}, duration(top / 2)), el("span", {}, duration(top))),
    el("span", { class: "number" }, "Length")), ...rows);
  const button = el("button", { type: "button", "aria-pressed": "false", "aria-label": "Spans as a table" }, "Table");
  button.addEventListener("click", () => {
    table.hidden = !table.hidden;
    list.hidden = !table.hidden;
    button.setAttribute("aria-pressed", String(!table.hidden));
  });
  return el("section", { "aria-labelledby": "spans-title" },
    el("div", { class: "head" }, el("h3", { id: "spans-title" }, "Spans"), el("p", { class: "note" }, "Choose a span for its attributes"), button),
    list, table);
}

// A <details>: its summary is the bar, its content the attributes. Enter and Space open it.
function spanRow(span, top) {
  const x = (1000 * span.start_ms) / top;
  const width = Math.max(2, (1000 * span.duration_ms) / top);
  const said = `starts at ${duration(span.start_ms)}, takes ${duration(span.duration_ms)}`;
  const bar = svg("svg", { class: "waterfall", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": said },
    svg("rect", { class: `part ${styleOf(span.name)}`, x: Math.min(x, 998).toFixed(1), y: 2, width: width.toFixed(1), height: 12 }));
  const name = span.choice ? `${span.name} #${span.choice}` : span.name;
  const attributes = [["process", span.process], ["start", duration(span.start_ms)], ...Object.entries(span.attributes)];
  if (span.error) attributes.unshift(["error", span.error]);
  return el("details", { class: span.error ? "span failed" : "span" },
    el("summary", {}, el("span", { class: "name" }, span.error ? `${name} (failed)` : name), bar, el("span", { class: "number" }, duration(span.duration_ms))),
    el("dl", { class: "attributes" }, ...attributes.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)))));
}

function spanTable(spans) {
  const header = ["Span", "Process", "Start", "Length"].map((name, index) => el("th", { scope: "col", class: index > 1 ? "number" : null }, name));
  return el("table", { "aria-labelledby": "spans-title" }, el("thead", {}, el("tr", {}, ...header)), el("tbody", {}, ...spans.map((span) => el(
    "tr", {}, el("th", { scope: "row" }, span.name), el("td", {}, span.process),
    el("td", { class: "number" }, duration(span.start_ms)), el("td", { class: "number" }, duration(span.duration_ms))))));
}

// Why the router took this way.
function reasons(candidates) {
  const heading = el("div", { class: "head" }, el("h3", { id: "reasons-title" }, "The router’s reasons"));
  if (candidates.length === 0) {
    return el("section", { "aria-labelledby": "reasons-title" }, heading, el("p", { class: "empty" }, "The router never dispatched this request."));
  }
  const header = ["Way", ...["Cached"], ...TERMS.map(([, title]) => title)];
  const rows = candidates.map((candidate) => el("tr", { class: candidate.chosen ? "chosen" : null },
    el("th", { scope: "row" }, way(candidate), candidate.chosen ? el("span", { class: "badge" }, "chosen") : null),
    el("td", { class: "number" }, `${count(candidate.cached_tokens)} tok`),
    ...TERMS.map(([name]) => el("td", { class: "number" }, term(candidate, name)))));
  return el("section", { class: "reasons", "aria-labelledby": "reasons-title" }, heading, el("p", {}, sentence(candidates)),
    el("div", { class: "scroll", tabindex: "0" }, el("table", { "aria-labelledby": "reasons-title" },
      el("thead", {}, el("tr", {}, ...header.map((title, index) => el("th", { scope: "col", class: index ? "number" : null }, title)))), el("tbody", {}, ...rows))));
}

function term(candidate, name) {
  if (name === "num_streams") return `× ${candidate.num_streams}`;
  if (name === "read_ms") return candidate.source ? `${duration(candidate.read_ms)} (${count(candidate.read_tokens)} tok of ${candidate.source})` : "–";
  return duration(candidate[name]);
}

function way(candidate) {
  return candidate.prefill_worker ? `${candidate.prefill_worker} → ${candidate.decode_worker}` : `${candidate.decode_worker} alone`;
}

function sentence(candidates) {
  const chosen = candidates.find((candidate) => candidate.chosen);
  if (!chosen) return `The router compared these ways. ${COST}`;
  const others = candidates.filter((candidate) => candidate !== chosen);
  const start = `The router took ${way(chosen)} at a predicted cost of ${duration(chosen.cost_ms)}.`;
  if (others.length === 0) return `${start} No other way was open.`;
  const next = others.reduce((best, candidate) => (candidate.cost_ms < best.cost_ms ? candidate : best));
  const than = next.cost_ms >= chosen.cost_ms ? `The next best, ${way(next)}, would have cost ${duration(next.cost_ms)}.` : "Others cost nearly the same: the workers with the fewest requests won.";
  return `${start} ${than} ${COST}`;
}
