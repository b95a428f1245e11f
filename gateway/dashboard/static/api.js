// The gateway's JSON, with the key of this tab. A failure is an ApiError whose `kind` says what the page can offer.

const TIMEOUT_MS = 8000;
const KEY = "tandem-api-key";

export class ApiError extends Error {
  // kind: key, unreachable, gone, invalid, busy, version, other (gateway/dashboard/routes.py), or gateway: no answer at all.
  constructor(kind, message, failingMs = 0) {
    super(message);
    this.kind = kind;
    this.failingMs = failingMs;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  const headers = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  let response;
  let content;
  try {
    response = await fetch(`/dashboard/api/${path}${query ? `?${query}` : ""}`, { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
    content = await response.json();
  } catch {
    throw new ApiError("gateway", "no answer from the gateway");
  }
  if (response.ok) return content;
  const { kind = "other", message = `the gateway answered with status ${response.status}`, failing_s: seconds = 0 } = content.error ?? {};
  throw new ApiError(kind, message, seconds * 1000);
}
