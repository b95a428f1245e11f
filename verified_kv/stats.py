"""The verdicts as vLLM's metrics, beside those of the inner connector.

vLLM sends the statistics of a step from its workers to the process that logs and answers `/metrics`. That process
knows only the class `VerifiedConnector`, so the statistics carry the name of the inner one.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTS = ("offered", "verified", "wrong", "unverified", "skipped", "failed_blocks")


class VerifiedStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: the counts by name; `inner`: those of the inner connector, if it has any; `options`: which one it is."""

    def __init__(self, counts: dict[str, int], inner: KVConnectorStats | None, options: dict[str, Any]) -> None:
        super().__init__(data=dict(counts))
        self.inner, self._options = inner, options

    def to_dict(self) -> dict[str, Any]:
        inner = None if self.inner is None else self.inner.to_dict()
        return {"counts": self.data, "inner": inner, "options": self._options}

    def reset(self) -> None:
        self.data.clear()
        if self.inner is not None:
            self.inner.reset()

    def aggregate(self, other: KVConnectorStats) -> VerifiedStats:
        assert isinstance(other, VerifiedStats)
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        if self.inner is None or other.inner is None:
            self.inner = self.inner or other.inner
        else:
            self.inner = self.inner.aggregate(other.inner)
        return self

    def reduce(self) -> dict[str, int | float]:
        inner = {} if self.inner is None or self.inner.is_empty() else self.inner.reduce()
        return {**inner, **{f"Num KV {name}": count for name, count in self.data.items()}}

    def is_empty(self) -> bool:
        return not any(self.data.values()) and (self.inner is None or self.inner.is_empty())


class VerifiedPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(self, inner: KVConnectorPromMetrics | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._inner = inner
        self._counters = {}
        for name in COUNTS:
            unit = "Blocks that failed verification" if name == "failed_blocks" else f"Requests: {name}"
            counter = self._counter_cls(
                name=f"vllm:verified_kv_{name}", documentation=f"{unit}.", labelnames=self._labelnames
            )
            for engine, values in self.per_engine_labelvalues.items():
                self._counters[name, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data["counts"].items():
            self._counters[name, engine_idx].inc(count)
        if self._inner is not None and transfer_stats_data["inner"] is not None:
            self._inner.observe(transfer_stats_data["inner"], engine_idx)
