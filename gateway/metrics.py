"""The metrics page of an HTTP server, followed by the pages of its routers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.config import TelemetryConfig
from runtime.prometheus.metrics import GATEWAY_METRICS, Metric
from runtime.prometheus.metrics_page import Metrics, Reading


class GatewayMetrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self._metrics = Metrics(TelemetryConfig(), self._read, GATEWAY_METRICS)
        self.added_before = self._metrics.buckets(Metric.GATEWAY_ADDED_BEFORE)
        self.added_per_message = self._metrics.buckets(Metric.GATEWAY_ADDED_PER_MESSAGE)
        self.num_open_streams = 0

    def _read(self) -> Iterator[Reading]:
        yield Metric.GATEWAY_OPEN_STREAMS, self.num_open_streams, {}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._metrics.record(Metric.GATEWAY_REQUESTS, 1, route=route, status=str(status))
        self._metrics.record(Metric.GATEWAY_REQUEST_DURATION, seconds, route=route)

    def count_disconnect(self) -> None:
        self._metrics.record(Metric.GATEWAY_DISCONNECTS, 1)

    def page(self, others: Sequence[tuple[str, str]] = ()) -> str:
        """The page in Prometheus' text format. `others`: (address, page) of routers, appended."""
        return self._metrics.text() + joined(others)


def joined(pages: Sequence[tuple[str, str]]) -> str:
    """One page of several: samples of one family are in one place, with the label `router` if there are several."""
    if len(pages) <= 1:
        return "".join(page for _, page in pages)
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for address, page in pages:
        family = ""
        for line in page.split("\n"):  # a label may hold the other ends of lines
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, address))
    return "".join("\n".join([*lines, *samples.get(family, ())]) + "\n" for family, lines in heads.items())


def _labelled(line: str, address: str) -> str:
    """`name{a="b"} 1` -> `name{router="host:port",a="b"} 1`."""
    name, brace, rest = line.partition("{")
    if brace:
        return f'{name}{{router="{address}",{rest}'
    name, _, value = line.partition(" ")
    return f'{name}{{router="{address}"}} {value}'
