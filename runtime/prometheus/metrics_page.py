"""A metrics page: what was recorded, what its process reads at each scrape, and on a router vLLM's names for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.process_collector import ProcessCollector

from core.config import TelemetryConfig
from core.errors import ConfigError
from runtime.prometheus.metric_series import Buckets, Labels, Series, Value
from runtime.prometheus.metrics import (
    ALIASES,
    METRICS,
    RECORDED,
    ROUTER_METRICS,
    TYPES,
    Alias,
    Description,
    Kind,
    Metric,
)

FAMILY_TYPES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
SCRAPED = dict[Metric, list[tuple[Labels, Value]]]

# (metric, value, labels). The value of a histogram has the bounds of its Description.
Reading = tuple[Metric, Value, Mapping[str, str]]


class Metrics:
    """Records, and calls `read` at each scrape, in the thread of the scrape. Recording takes about a microsecond."""

    def __init__(
        self,
        config: TelemetryConfig,
        read: Callable[[], Iterable[Reading]],
        table: Mapping[Metric, Description] = ROUTER_METRICS,
    ) -> None:
        """`table`: the metrics of the page. The page of a router has those of its process, too.

        Without a port, `text` is the only way to the page. Raises `ConfigError` if the port is taken.
        """
        self._read = read
        self._table = table
        self.model = ""  # name of the served model, for `ALIASES`
        self._recorded = {
            metric: Series(about.labels, about.buckets if about.kind is Kind.HISTOGRAM else None)
            for metric, about in table.items()
            if about.kind in RECORDED
        }
        self._registry = CollectorRegistry()
        self._server: Any = None
        if config.metrics_port:
            self._start(config.metrics_port)
        if table is ROUTER_METRICS:  # the HTTP server of a router shows its own page and that of the router
            ProcessCollector(registry=self._registry)
        self._registry.register(self)  # the registry calls only `collect`

    def _start(self, port: int) -> None:
        try:
            self._server, _ = start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on port {port}: {error.strerror}; choose another port") from error

    def text(self) -> str:
        """The page, in the text format of Prometheus. Call it in a thread: a large fleet takes milliseconds."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Family]:
        """Every metric. The registry calls this at each scrape."""
        found: SCRAPED = {metric: [] for metric in self._table}
        for metric, series in self._recorded.items():
            found[metric] = series.snapshot()
        for metric, value, labels in self._read():
            found[metric].append((tuple([labels[name] for name in METRICS[metric].labels]), value))
        for metric, values in found.items():
            about = METRICS[metric]
            yield _family(metric.value, about, about.labels, values)
        for name, alias in ALIASES.items():
            if alias.source in found:
                yield _alias_family(name, alias, self.model, found[alias.source])

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        """Add to a counter or a histogram."""
        series = self._recorded[metric]
        series.add(tuple([labels[name] for name in series.names]), value)

    def buckets(self, metric: Metric, **labels: str) -> Buckets:
        """A series of a histogram, for a caller that records many values."""
        return self._recorded[metric].buckets(tuple([labels[name] for name in METRICS[metric].labels]))

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class SharedPage:
    """A page for callers who come together: one is made at a time, in a thread. Each caller gets a page that was begun
    after its call. A page takes the interpreter lock for 20 ms, and there are clients without a key."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._next: asyncio.Task[str] | None = None  # that nobody has begun

    async def text(self) -> str:
        if self._next is None:
            self._next = asyncio.create_task(self._make_next())
        return await asyncio.shield(self._next)

    async def _make_next(self) -> str:
        async with self._making:
            self._next = None
            return await asyncio.to_thread(self._make)


def _family(name: str, about: Description, labels: tuple[str, ...], values: Iterable[tuple[Labels, Value]]) -> Family:
    """The series of one metric, as prometheus_client writes them."""
    made: Any = FAMILY_TYPES[TYPES[about.kind]](name, about.text, labels=labels)
    for found, value in values:
        if isinstance(value, Buckets):
            made.add_metric(list(found), value.cumulative(), value.total)
        else:
            made.add_metric(list(found), value)
    return made  # type: ignore[no-any-return]


def _alias_family(name: str, alias: Alias, model: str, values: Iterable[tuple[Labels, Value]]) -> Family:
    about = METRICS[alias.source]
    kept = [about.labels.index(label) for label in alias.labels.values()]
    wanted = [(about.labels.index(label), allowed) for label, allowed in alias.only.items()]
    sums: dict[Labels, Value] = {}
    for labels, value in values:
        if all(labels[place] in allowed for place, allowed in wanted):
            key = (model, *(labels[place] for place in kept))
            sums[key] = _plus(sums.get(key), value)
    if not sums and not alias.labels:  # as the recorded metrics without labels, an alias begins at 0
        sums[model,] = Buckets(about.buckets) if about.kind is Kind.HISTOGRAM else 0.0
    return _family(name, about, ("model_name", *alias.labels), sums.items())


def _plus(known: Value | None, value: Value) -> Value:
    if isinstance(value, Buckets):
        total = Buckets(value.bounds) if known is None else known
        assert isinstance(total, Buckets)
        total.add(value)
        return total
    assert not isinstance(known, Buckets)
    return value if known is None else known + value
