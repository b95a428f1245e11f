// The page: one poll a second, the status line, the plots, and the two dialogs.

import { ApiError, apiKey, get, setApiKey } from "./api.js";
import { bytesPerSecond, count, duration, el, percent, perSecond, setAttribute, setText } from "./format.js";
import { BUCKET_MS, History, PATHS, PHASES, kvUse, percentile } from "./history.js";
import { LinePlot } from "./plot.js";
import { Pool, Routers } from "./pools.js";
import { RequestList } from "./requests.js";
import { traceBody } from "./trace.js";

const POLL_MS = 1000;
const $ = (id) => document.getElementById(id);

const PERCENTILES = [
  { key: "p50", label: "p50", style: "first" }, { key: "p90", label: "p90", style: "second" }, { key: "p99", label: "p99", style: "third" },
];
const PHASE_TITLES = {
  ttft: ["TTFT", "to the first token"], tpot: ["TPOT", "each later token"], queue: ["Queue", "router and worker"],
  prefill: ["Prefill", "computing the prompt"], transfer: ["Transfer", "KV between pools"],
  decode: ["Decode", "first to last token"], total: ["Total", "arrival to end"],
};
const watched = (value, bucket) => (bucket.watchedMs ? value / (bucket.watchedMs / 1000) : null);

// The plots: their shape, and how to read a bucket of which so many milliseconds have passed.
// `settled`: few requests say little, so the newest bucket is drawn from its middle on.
const PLOTS = [
  ...Object.keys(PHASES).map((phase) => ({
    id: `plot-${phase}`, title: PHASE_TITLES[phase][0], note: PHASE_TITLES[phase][1], series: PERCENTILES, format: duration,
    read: (bucket) => bucket.percentiles(phase), settled: true,
  })),
  {
    id: "plot-tokens", title: "Tokens", note: "all workers", format: perSecond,
    series: [{ key: "prefilled", label: "prefilled", style: "first" }, { key: "sampled", label: "sampled", style: "third" }],
    read: (bucket) => ({ prefilled: watched(bucket.prefilled, bucket), sampled: watched(bucket.sampled, bucket) }),
  },
  {
    id: "plot-hits", title: "Hit ratio", note: "cached share of prompt tokens", format: percent, top: 1,
    series: [{ key: "hits", label: "cached", style: "first" }],
    read: (bucket) => ({ hits: bucket.promptTokens ? bucket.cachedTokens / bucket.promptTokens : null }),
    settled: true,
  },
  {
    id: "plot-bandwidth", title: "Transfer speed", note: "while a read runs", format: bytesPerSecond,
    series: [{ key: "speed", label: "speed", style: "first" }],
    read: (bucket) => ({ speed: bucket.transferSeconds > 0 ? bucket.transferredBytes / bucket.transferSeconds : null }),
  },
  {
    id: "plot-paths", title: "Paths", note: "requests that ended", format: perSecond,
    series: PATHS.map((path, index) => ({ key: path, label: path, style: ["first", "second", "fifth", "third", "fourth"][index] })),
    read: (bucket, ms) => Object.fromEntries(PATHS.map((path) => [path, bucket.paths[path] / (Math.max(ms, 1000) / 1000)])),
    settled: true,
  },
  {
    id: "plot-kv", title: "KV in use", note: "held, leased and incoming", format: percent, top: 1,
    series: [{ key: "prefill", label: "prefill", style: "first" }, { key: "decode", label: "decode", style: "third" }],
    read: (bucket) => ({ prefill: bucket.kv.prefill ?? null, decode: bucket.kv.decode ?? null }),
  },
];
const TILES = ["Requests", "Output tokens", "TTFT p50", "TTFT p99", "In flight", "Queued", "KV in use", "Hit ratio"];

class Page {
  constructor() {
    this.model = "";
    this.plots = PLOTS.map((plot) => [new LinePlot(plot), plot.read, plot.settled]);
    $("plots").append(...this.plots.map(([plot]) => plot.element));
    this.pools = [new Pool("prefill", "Prefill pool"), new Pool("decode", "Decode pool")];
    $("pools").append(...this.pools.map((pool) => pool.element));
    this.routers = new Routers();
    $("routers").append(this.routers.element);
    this.tiles = TILES.map(() => el("dd"));
    $("tiles").append(...TILES.map((title, index) => el("div", { class: "card tile" }, el("dt", {}, title), this.tiles[index])));
    this.list = new RequestList((request) => this.openTrace(request.id));
    this.failingSince = null;
    this.kind = "";
    this.keyRefused = false;
    this.#forget();
  }

  #forget() {
    this.history = new History();
    this.router = "";
    this.newest = 0;
    this.list.kept = [];
  }

  choose(model) {
    this.model = model;
    this.#forget();
  }

  async poll() {
    const { model } = this;
    const asked = model ? { model } : {};
    try {
      const fleet = await get("fleet", asked);
      const found = await get("requests", { ...asked, router: this.router, after: String(this.newest) });
      if (model !== this.model) return;
      this.#take(fleet, found);
      this.#say("live", `Live · ${fleet.router || "a router"} answers`);
      this.failingSince = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#sayFailure(error);
    }
  }

  #take(fleet, found) {
    this.history.addFleet(fleet);
    const counted = found.router === this.router ? this.newest : 0; // another router counts its requests from 1
    this.newest = found.requests.reduce((newest, { number }) => Math.max(newest, number), counted);
    this.router = found.router;
    this.history.addRequests(found.requests);
    if (found.requests.length) this.list.add(found.requests);
    this.#showModels(fleet);
    this.#draw(fleet);
    $("main").hidden = false;
  }

  #draw(fleet) {
    for (const pool of this.pools) pool.update(this.history, fleet.wanted[pool.role]);
    this.routers.update(fleet);
    const points = this.history.points(this.history.span());
    for (const [plot, read, settled] of this.plots) {
      const youngest = points.slice(0, -1).some(({ bucket }) => bucket) ? -BUCKET_MS / 2 : -BUCKET_MS;
      const missing = Object.fromEntries(plot.series.map(({ key }) => [key, null]));
      plot.update(points.map(({ ageMs, bucket }) => ({ ageMs, values: bucket && (ageMs >= youngest || !settled) ? read(bucket, Math.min(BUCKET_MS, BUCKET_MS + ageMs)) : missing })));
    }
    this.list.update();
    this.#drawTiles(fleet);
    setText($("time-note"), `Last ${(points.length * BUCKET_MS) / 60_000} of at most 10 minutes, a point for each 10 s, from ${count(this.history.recent(60).count)} requests`);
  }

  #drawTiles(fleet) {
    const last = this.history.recent(7); // at least a minute
    const all = this.history.recent(60);
    const rates = [...this.history.workers.keys()].map((id) => this.history.rates(id).sampled).filter((rate) => rate !== null);
    const texts = [
      perSecond(last.count / last.seconds), perSecond(rates.length ? rates.reduce((a, b) => a + b) : null),
      duration(percentile(last.ttft, 0.5)), duration(percentile(last.ttft, 0.99)),
      count(fleet.num_in_flight), count(fleet.num_queued), percent(kvUse(fleet.workers)),
      percent(all.promptTokens ? all.cachedTokens / all.promptTokens : null),
    ];
    texts.forEach((text, index) => setText(this.tiles[index], text));
  }

  #showModels(fleet) {
    const models = fleet.models ?? [];
    const select = $("models");
    if (select.children.length !== models.length) select.replaceChildren(...models.map((name) => el("option", { value: name }, name)));
    $("model-choice").hidden = models.length < 2;
    $("model").hidden = models.length > 1;
    setText($("model"), models[0] ?? "");
  }

  #sayFailure(error) {
    this.failingSince ??= Date.now();
    const since = duration(Math.floor(Math.max(error.failingMs, Date.now() - this.failingSince) / 1000) * 1000).replace(/\.\d+/, "");
    const sentences = {
      gateway: `This page cannot reach the gateway since ${since}. Trying again.`,
      unreachable: `The gateway cannot reach a router since ${since}. Trying again.`,
      key: "This fleet wants an API key of an operator.",
      busy: "The router limits this key. Trying again.",
    };
    this.#say(error.kind, sentences[error.kind] ?? `The gateway answers: ${error.message}. Trying again.`);
    if (error.kind === "key" && !this.keyRefused) {
      this.keyRefused = true;
      this.askForKey(apiKey() ? "The fleet refused this key. It wants an API key of an operator." : "This fleet wants an API key of an operator.");
    }
  }

  // The line shows every second; a screen reader hears only a change of the kind.
  #say(kind, sentence) {
    setText($("status-text"), sentence);
    setAttribute($("status"), "data-kind", kind);
    if (kind !== this.kind) setText($("announcement"), sentence);
    this.kind = kind;
    $("main").classList.toggle("stale", kind !== "live");
  }

  askForKey(reason) {
    setText($("key-reason"), reason);
    $("key-field").value = apiKey();
    if (!$("key").open) $("key").showModal();
  }

  async openTrace(id) {
    setText($("trace-title"), `Request ${id}`);
    const body = $("trace-body");
    body.replaceChildren(el("p", { class: "empty" }, "Asking the router."));
    if (!$("trace").open) $("trace").showModal();
    history.replaceState(null, "", `#request/${encodeURIComponent(id)}`);
    try {
      const trace = await get(`trace/${encodeURIComponent(id)}`, this.model ? { model: this.model } : {});
      body.replaceChildren(...traceBody(trace));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const gone = "The router does not keep this request any more: it keeps the last 512 that ended.";
      body.replaceChildren(el("p", { class: "empty", role: "alert" }, error.kind === "gone" ? gone : `No answer: ${error.message}.`));
    }
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("tandem-theme", theme);
  $("theme").value = theme;
}

function connectControls(page) {
  setTheme(localStorage.getItem("tandem-theme") ?? "auto");
  $("theme").addEventListener("change", (event) => setTheme(event.target.value));
  $("models").addEventListener("change", (event) => page.choose(event.target.value));
  $("key-button").addEventListener("click", () => page.askForKey("With API keys, the dashboard needs the key of an operator."));
  $("key-cancel").addEventListener("click", () => $("key").close());
  $("key-form").addEventListener("submit", () => {
    setApiKey($("key-field").value.trim());
    page.keyRefused = false;
  });
  $("trace-close").addEventListener("click", () => $("trace").close());
  $("trace").addEventListener("close", () => history.replaceState(null, "", location.pathname));
  const opened = /^#request\/(.+)$/.exec(location.hash);
  if (opened) page.openTrace(decodeURIComponent(opened[1]));
}

async function run() {
  const page = new Page();
  connectControls(page);
  for (;;) {
    const next = new Promise((resolve) => setTimeout(resolve, POLL_MS));
    await page.poll();
    await next;
  }
}

run();
