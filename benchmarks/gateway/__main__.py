"""Measures HTTP through the process of a router: `make bench-gateway`.

Real processes, real gRPC and real HTTP; only the model is replaced by a sleep. The router has one core; the worker and
the load client share the other one. In each repeat the peers take turns.

    added     64 streams at a calm pace, over HTTP and over gRPC of the same router
    stalled   the same over HTTP, beside 16 clients that send a request and read nothing
    rate      256 streams, as many tokens as go through, beside Dynamo's frontend with its mocker
    routers   the same with a part of a core for each router: one router, and two on one port

The rows of a part differ in one thing: the protocol, the clients that do not read, the server, the number of routers.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.dataplane import dynamo, load
from benchmarks.dataplane.cpu_limits import can_limit, limited, pinned_to
from benchmarks.dataplane.dynamo import ANSWER_TOKENS, event_clients
from benchmarks.dataplane.http2_load import receive_for
from benchmarks.dataplane.load import Measured
from benchmarks.gateway.latency import first_tokens_s, grpc_ages, http_ages
from benchmarks.report import Line, Report, parser_of, run_parts
from benchmarks.service import CONFIG, MeasuredProcess, Role, cores, running

FEW_STREAMS, MANY_STREAMS, STALLED = 64, 256, 16
CALM_STEP_S, BRISK_STEP_S, FASTEST_STEP_S = 0.04, 0.02, 0.002
WARM_UP_S, MEASURE_S = 2.0, 8.0
NUM_FIRST_TOKENS = 200
PART_OF_A_CORE = 0.2
PORT = 18_421
MODEL = CONFIG.engine.model


@contextlib.contextmanager
def routers(step_s: float, number: int = 1) -> Iterator[list[MeasuredProcess]]:
    """Routers on one HTTP port, with one decode worker on the other core, where this process runs, too."""
    measured, other = cores()
    roles = [Role("router", (measured, other)[index], ordinal=index, http_port=PORT) for index in range(number)]
    with running(Role("decode", other, step_s=step_s), *roles) as [worker, *found], pinned_to(other):
        for router in found:
            router.follow([worker])
        yield found


def added(report: Report, repeats: int, seconds: float) -> None:
    """The added time per token and to the first token."""
    over_http, over_grpc, first_http, first_grpc = [], [], [], []
    with routers(CALM_STEP_S) as [router]:
        for _ in range(repeats):
            over_http.append(statistics.median(http_ages(PORT, MODEL, router.address, FEW_STREAMS, seconds)))
            over_grpc.append(statistics.median(grpc_ages(router.address, FEW_STREAMS, seconds)))
    with routers(BRISK_STEP_S) as [router]:
        number = max(5, int(NUM_FIRST_TOKENS * seconds / MEASURE_S))
        for _ in range(repeats):
            http, grpc = first_tokens_s(PORT, MODEL, router.address, FEW_STREAMS, number, BRISK_STEP_S)
            first_http.append(http)
            first_grpc.append(grpc)
    streams = f"{FEW_STREAMS} streams, p50"
    for what, ours, direct, most in (
        ("a token from sampled to the client", over_http, over_grpc, 0.5),
        ("the first token", first_http, first_grpc, 1.0),
    ):
        value, other = 1e3 * statistics.median(ours), 1e3 * statistics.median(direct)
        report.add(Line(f"{what} over HTTP, {streams}", value, "ms", "gRPC", other))
        report.add(Line(f"{what}: added to gRPC, {streams}", value - other, "ms", most=most))


def stalled(report: Report, repeats: int, seconds: float) -> None:
    alone, beside = [], []
    with routers(CALM_STEP_S) as [router]:
        for _ in range(repeats):
            alone.append(statistics.median(http_ages(PORT, MODEL, router.address, FEW_STREAMS, seconds)))
            ages = http_ages(PORT, MODEL, router.address, FEW_STREAMS, seconds, num_stalled=STALLED)
            beside.append(statistics.median(ages))
    value, other = 1e3 * statistics.median(beside), 1e3 * statistics.median(alone)
    words = f"a token, {FEW_STREAMS} streams beside {STALLED} clients that do not read, p50"
    report.add(Line(words, value, "ms", "without them", other))


def through_http(number: int, seconds: float, share: float = 0.0) -> Measured:
    """`number` routers; `share`: the part of a core that each may use, 0 = all."""
    with routers(FASTEST_STEP_S, number) as found, limited([router.process_id for router in found], share):
        spread = random.Random(0)
        clients = event_clients(PORT, MODEL, [spread.randint(1, ANSWER_TOKENS) for _ in range(MANY_STREAMS)])
        receive_for(clients, WARM_UP_S)
        ended, events = sum(client.num_ended for client in clients), sum(client.num_events for client in clients)
        before = sum(router.cpu_s() for router in found)
        elapsed = receive_for(clients, seconds)
        num_tokens = (sum(client.num_ended for client in clients) - ended) * ANSWER_TOKENS
        num_events = sum(client.num_events for client in clients) - events
        used = sum(router.cpu_s() for router in found) - before
        load.close(clients)
    return Measured(
        tokens_per_s=num_tokens / elapsed,
        messages_per_s=num_events / elapsed,
        cpu_s_per_token={"router": used / max(1, num_tokens)},
        share_of_core={"router": used / elapsed},
    )


def rate(report: Report, repeats: int, seconds: float) -> None:
    """Tokens/s and CPU of one router, beside Dynamo's frontend."""
    with_dynamo = dynamo.is_installed()
    if not with_dynamo:
        report.say("Dynamo is not installed and left out; `make bench-peers` installs it")
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(through_http(1, seconds))
        if with_dynamo:
            theirs.append(dynamo.through_frontend(MANY_STREAMS, WARM_UP_S, seconds))
    words, peer = f"HTTP through one router, {MANY_STREAMS} streams", f"Dynamo {dynamo.VERSION}"

    def median(runs: list[Measured], value: Callable[[Measured], float]) -> float | None:
        return statistics.median(map(value, runs)) if runs else None

    def cpu_us(run: Measured) -> float:
        return 1e6 * sum(run.cpu_s_per_token.values())

    tokens_per_s = median(ours, lambda run: run.tokens_per_s) or 0.0
    their_cpu_us = median(theirs, cpu_us)
    report.add(
        Line(words, tokens_per_s, "tokens/s", peer, median(theirs, lambda run: run.tokens_per_s), least_ratio=1.0)
    )
    report.add(Line(f"{words}: tokens in an event", median(ours, lambda run: run.tokens_per_message) or 0.0, ""))
    report.add(Line(f"{words}: CPU", median(ours, cpu_us) or 0.0, "us a token", peer, their_cpu_us, most=their_cpu_us))


def two_routers(report: Report, repeats: int, seconds: float) -> None:
    """Two routers need two cores, and the load needs one more: each router gets a part of a core instead."""
    if not can_limit():
        report.say("this machine lets nobody limit the CPU of a process: one router beside two is not measured")
        return
    one, two = [], []
    for _ in range(repeats):
        one.append(through_http(1, seconds, PART_OF_A_CORE).tokens_per_s)
        two.append(through_http(2, seconds, PART_OF_A_CORE).tokens_per_s)
    words = f"HTTP through two routers with {PART_OF_A_CORE:g} of a core each"
    report.add(Line(words, statistics.median(two), "tokens/s", "one router", statistics.median(one), least_ratio=1.8))


PARTS: dict[str, Callable[[Report, int, float], None]] = {
    "added": added, "stalled": stalled, "rate": rate, "routers": two_routers,
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, tuple(PARTS), repeats=5)
    parser.add_argument("--seconds", type=float, default=MEASURE_S, help="of each measurement")
    arguments = parser.parse_args()
    report = Report("gateway")
    measured = (report, arguments.repeats, arguments.seconds)
    run_parts(report, {name: partial(measure, *measured) for name, measure in PARTS.items()}, arguments.parts)


if __name__ == "__main__":
    main()
