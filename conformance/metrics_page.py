"""Reads what the check needs from a page in Prometheus' text format, of whatever server. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# What is in use now: 0 when a stack is idle. Names of Tandem, vLLM, SGLang and Dynamo.
REQUESTS = (
    "tandem_router_in_flight", "tandem_router_queued", "tandem_worker_running", "tandem_worker_waiting",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs",
    "dynamo_frontend_inflight_requests", "dynamo_frontend_queued_requests",
)  # fmt: skip
BLOCKS = ("tandem_worker_kv_usage_ratio", "vllm:kv_cache_usage_perc", "sglang:token_usage")
# Counters that grow with each hand-off: (name, a label that the line must have).
HAND_OFFS = (
    ("tandem_worker_transferred_bytes_total", ""),
    ("tandem_requests_total", 'path="disaggregated"'),  # with vLLM inside, Tandem counts no bytes
    ("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'),
    ("vllm:nixl_bytes_transferred_sum", ""),
    ("vllm:verified_kv_verified_total", ""),
)
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})? +([^ ]+)")


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    for line in page.split("\n"):
        found = None if line.startswith("#") else _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield found[1], found[2] or "", value


@dataclass(frozen=True, slots=True)
class InUse:
    """The sums over all servers; None: the page has no such number."""

    requests: float | None
    blocks: float | None  # shares of the KV pools

    def __bool__(self) -> bool:
        return bool(self.requests or self.blocks)

    @property
    def known(self) -> bool:
        return self.requests is not None or self.blocks is not None

    def beyond(self, idle: InUse) -> InUse:
        """What is in use in excess of `idle`."""
        return InUse(_excess(self.requests, idle.requests), _excess(self.blocks, idle.blocks))

    def __str__(self) -> str:
        parts = [f"{self.requests:g} requests"] if self.requests is not None else []
        parts += [f"{self.blocks:.2%} of a KV pool"] if self.blocks is not None else []
        return " and ".join(parts)


def _excess(now: float | None, idle: float | None) -> float | None:
    """A page that has vanished, with its server, holds nothing."""
    return None if idle is None else max(0.0, round((now or 0.0) - idle, 6))


def in_use(page: str) -> InUse:
    samples = list(_samples(page))
    sums = []
    for names in (REQUESTS, BLOCKS):
        values = [value for name, _, value in samples if name in names]
        sums.append(sum(values) if values else None)
    return InUse(*sums)


def hand_offs(page: str) -> dict[str, float]:
    """Numbers that grow with each hand-off, by name, summed over all servers; empty: the page has none."""
    wanted, found = dict(HAND_OFFS), dict[str, float]()
    for name, labels, value in _samples(page):
        if name in wanted and wanted[name] in labels:
            found[name] = found.get(name, 0.0) + value
    return found
