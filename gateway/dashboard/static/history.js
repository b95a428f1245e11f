// What the page remembers: 10 minutes of ended requests and of worker counters, in buckets of 10 seconds.
// All times are the gateway's, so the clock of the browser does not matter. Nothing here touches the page.

export const BUCKET_MS = 10_000;
export const NUM_BUCKETS = 60;
const MAX_VALUES = 2000; // of one phase in one bucket; later requests of the bucket count without their durations
const RATE_WINDOW_MS = 5000;
const LOST_SHOWN_MS = 120_000; // a worker that the router no longer lists stays on the page this long

// Phase of a plot -> its milliseconds in a request; null for a request that did not have the phase.
export const PHASES = {
  ttft: (request) => request.first_token_ms || null,
  tpot: (request) => request.tpot_ms || null,
  queue: (request) => request.phases && request.phases.router_queue_ms + request.phases.prefill_queue_ms,
  prefill: (request) => request.phases && (request.phases.prefill_ms || null),
  transfer: (request) => request.phases && (request.phases.transfer_ms || null),
  decode: (request) => request.phases && (request.phases.decode_ms || null),
  total: (request) => request.total_ms,
};
export const PATHS = ["disaggregated", "local", "migrated", "recomputed", "failed"];

// The nearest-rank percentile of sorted values; null without values.
export function percentile(sorted, share) {
  if (sorted.length === 0) return null;
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}

export function pathOf(request) {
  if (request.end !== "stop" && request.end !== "length") return "failed";
  return PATHS.includes(request.path) ? request.path : "disaggregated";
}

class Bucket {
  constructor() {
    this.count = 0;
    this.paths = Object.fromEntries(PATHS.map((path) => [path, 0]));
    this.promptTokens = this.cachedTokens = this.outputTokens = 0;
    this.values = Object.fromEntries(Object.keys(PHASES).map((phase) => [phase, []]));
    this.prefilled = this.sampled = this.transferredBytes = this.transferSeconds = 0;
    this.watchedMs = 0; // the part of the bucket whose counters the page has seen
    this.kv = {};
    this.summary = null; // percentiles, until the next request
  }

  add(request) {
    this.count += 1;
    this.paths[pathOf(request)] += 1;
    this.promptTokens += request.prompt_tokens;
    this.cachedTokens += request.cached_tokens;
    this.outputTokens += request.completion_tokens;
    for (const [phase, read] of Object.entries(PHASES)) {
      const value = read(request);
      if (value !== null && value !== undefined && this.values[phase].length < MAX_VALUES) this.values[phase].push(value);
    }
    this.summary = null;
  }

  percentiles(phase) {
    this.summary ??= {};
    if (!this.summary[phase]) {
      const sorted = this.values[phase].sort((a, b) => a - b);
      this.summary[phase] = { p50: percentile(sorted, 0.5), p90: percentile(sorted, 0.9), p99: percentile(sorted, 0.99) };
    }
    return this.summary[phase];
  }
}

export class History {
  constructor() {
    this.buckets = new Map(); // number of the bucket -> Bucket
    this.workers = new Map(); // worker id -> {worker, samples, seenAt}
    this.now = 0;
  }

  #bucket(at) {
    const number = Math.floor(at / BUCKET_MS);
    if (!this.buckets.has(number)) this.buckets.set(number, new Bucket());
    return this.buckets.get(number);
  }

  addRequests(requests) {
    for (const request of requests) {
      const endedAt = Math.min(this.now || Infinity, request.arrived_at_unix_ms + request.total_ms);
      if (endedAt > this.now - NUM_BUCKETS * BUCKET_MS) this.#bucket(endedAt).add(request);
    }
  }

  addFleet(fleet) {
    const before = this.now;
    const now = (this.now = Math.max(before, fleet.now_unix_ms));
    if (before) this.#bucket(now).watchedMs += now - before;
    for (const worker of fleet.workers) this.#addWorker(worker, now);
    for (const [id, known] of this.workers) {
      if (known.seenAt < now) known.worker = { ...known.worker, state: "lost", report_age_ms: now - known.reportedAt };
      if (now - known.seenAt > LOST_SHOWN_MS) this.workers.delete(id);
    }
    const kv = this.#bucket(now).kv;
    for (const role of ["prefill", "decode"]) kv[role] = kvUse(fleet.workers.filter((worker) => worker.role === role));
    const oldest = Math.floor(now / BUCKET_MS) - NUM_BUCKETS;
    for (const number of this.buckets.keys()) if (number < oldest) this.buckets.delete(number);
  }

  #addWorker(worker, now) {
    const known = this.workers.get(worker.id) ?? { samples: [], seenAt: 0, worker, reportedAt: now };
    this.workers.set(worker.id, known);
    known.worker = worker;
    known.seenAt = now;
    known.reportedAt = now - worker.report_age_ms;
    if (worker.state === "lost" || worker.state === "starting") return;
    const last = known.samples.at(-1);
    if (last && now <= last.at) return;
    if (last && worker.num_sampled_tokens >= last.sampled && worker.num_prefilled_tokens >= last.prefilled) {
      const bucket = this.#bucket(now);
      bucket.prefilled += worker.num_prefilled_tokens - last.prefilled;
      bucket.sampled += worker.num_sampled_tokens - last.sampled;
      bucket.transferredBytes += Math.max(0, worker.transferred_bytes - last.bytes);
      bucket.transferSeconds += Math.max(0, worker.transfer_seconds - last.seconds);
    } else {
      known.samples.length = 0;
    }
    known.samples.push({
      at: now, prefilled: worker.num_prefilled_tokens, sampled: worker.num_sampled_tokens,
      bytes: worker.transferred_bytes, seconds: worker.transfer_seconds,
    });
    while (known.samples.length > 2 && known.samples[1].at <= now - RATE_WINDOW_MS) known.samples.shift();
  }

  // Tokens per second of a worker over the last 5 s; null before the second report.
  rates(id) {
    const known = this.workers.get(id);
    if (!known || known.samples.length < 2 || known.worker.state === "lost") return { prefilled: null, sampled: null };
    const [first, last] = [known.samples[0], known.samples.at(-1)];
    const seconds = (last.at - first.at) / 1000;
    return { prefilled: (last.prefilled - first.prefilled) / seconds, sampled: (last.sampled - first.sampled) / seconds };
  }

  // The newest `num` buckets, oldest first: {ageMs of the end, bucket or null}.
  points(num = NUM_BUCKETS) {
    const newest = Math.floor(this.now / BUCKET_MS);
    return Array.from({ length: num }, (_, index) => {
      const number = newest - num + 1 + index;
      return { ageMs: this.now - (number + 1) * BUCKET_MS, bucket: this.buckets.get(number) ?? null };
    });
  }

  // How many buckets to draw: 2, 5 or 10 minutes, the least that shows all.
  span() {
    const needed = Math.floor(this.now / BUCKET_MS) - Math.min(...this.buckets.keys()) + 1;
    return [12, 30].find((num) => num >= needed) ?? NUM_BUCKETS;
  }

  // The sums of the last `num` buckets, the unfinished one included.
  recent(num) {
    const sum = { count: 0, promptTokens: 0, cachedTokens: 0, outputTokens: 0, ttft: [], seconds: 0 };
    for (const { bucket, ageMs } of this.points(num)) {
      sum.seconds += BUCKET_MS / 1000 - Math.max(0, -ageMs / 1000);
      if (!bucket) continue;
      for (const field of ["count", "promptTokens", "cachedTokens", "outputTokens"]) sum[field] += bucket[field];
      sum.ttft.push(...bucket.values.ttft);
    }
    sum.ttft.sort((a, b) => a - b);
    return sum;
  }
}

// The share of KV blocks that hold something in use: all but free and cached. null without blocks.
export function kvUse(workers) {
  let used = 0;
  let all = 0;
  for (const { blocks } of workers) {
    used += blocks.held + blocks.leased + blocks.incoming;
    all += blocks.free + blocks.cached + blocks.held + blocks.leased + blocks.incoming;
  }
  return all ? used / all : null;
}
