"""The path of a token beside a model that takes no time from Python: `make bench-dataplane`.

    worker      tokens out of a decode worker, whose router is the load client; the time between its steps
    router      one router, all it can: over gRPC beside a bare grpc.aio server, over gRPC and HTTP beside Dynamo
    ages        a token from sampled to the client: over gRPC beside a bare server, over HTTP beside gRPC
    requests    requests of one token
    decisions   a decision of the router among many workers (benchmarks/dataplane/decisions.py)

Real processes, real gRPC and real HTTP; only the model is replaced by a sleep. The measured process has one core; the
other processes and the load client share the other core. All figures are medians of the repeats. In each repeat the
peers take turns: the rows of a part differ in the server alone, or in the protocol. Dynamo's frontend runs where `make
bench-peers` has installed it.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from benchmarks.dataplane import dynamo, load
from benchmarks.dataplane.counting_clients import Connection, Refused
from benchmarks.dataplane.decisions import decisions
from benchmarks.dataplane.dynamo import ANSWER_TOKENS, event_clients
from benchmarks.dataplane.load import Counter, Measured
from benchmarks.report import Line, Report, parser_of, percentile, run_parts
from tests.support.service_process import MODEL, Role, ServiceProcess, config_with, cores, pinned_to, running

STREAMS, FEW_STREAMS = 256, 32
WARM_UP_S, MEASURE_S = 1.5, 4.0
FASTEST_STEP_S = 0.002  # offers more tokens than one core can take
STEP_S = 0.005
OWN_STEP_S = 0.0165  # offers 15.5 thousand tokens/s with 256 streams, so a message has one token
CALM_STEP_S = 0.02  # of few streams, for the age of a token
ONE_TOKEN_S = 5.0
ONE_TOKEN_CALLS = 64  # at once
PORT = 18_421
BARE, DYNAMO = "bare grpc.aio", f"Dynamo {dynamo.VERSION}"


@contextmanager
def one_router(step_s: float) -> Iterator[ServiceProcess]:
    """A router with gRPC and HTTP, with one decode worker on the other core, where this process runs, too."""
    measured, other = cores()
    roles = Role("decode", other, step_s=step_s), Role("router", measured, config=config_with(gateway={"port": PORT}))
    with running(*roles) as [worker, router], pinned_to(other):
        router.follow([worker])
        yield router


def out_of_a_worker(step_s: float | None, num_streams: int = STREAMS) -> tuple[Measured, float]:
    """Tokens out of one decode worker, and the time between its steps as a share of its steps."""
    measured, other = cores()
    core = None if step_s is None else measured  # a model computes on a core of its own
    with running(Role("decode", core, step_s=step_s)) as [worker], pinned_to(other):
        counter = Counter(load.tokens_of_step)
        connections = load.start_decode_calls(worker.address, num_streams, load.ENDLESS, counter)
        before = worker.call("step_times")
        found = load.measure(connections, counter, MEASURE_S, worker)
        after = worker.call("step_times")
        load.close(connections)
    return found, (after["idle_s"] - before["idle_s"]) / (after["step_s"] - before["step_s"])


def streams_of(server: ServiceProcess, num_streams: int, max_tokens: int = load.ENDLESS) -> Measured:
    counter = Counter(load.tokens_of_response)
    request = load.generate_request(max_tokens)
    connections = load.start_streams(server.address, num_streams, request, counter, WARM_UP_S)
    found = load.measure(connections, counter, MEASURE_S, server)
    load.close(connections)
    return found


def over_grpc(step_s: float) -> Measured:
    with one_router(step_s) as router:
        return streams_of(router, STREAMS)


def over_http() -> Measured:
    with one_router(FASTEST_STEP_S) as router:
        spread = random.Random(0)
        first_lengths = [spread.randint(1, ANSWER_TOKENS) for _ in range(STREAMS)]
        return dynamo.measure(event_clients(PORT, MODEL, first_lengths), router.cpu_s, WARM_UP_S, 2 * MEASURE_S)


def bare_grpc(step_s: float = 0.0, num_streams: int = STREAMS) -> Measured:
    """A server that sends the messages of a router with one token each."""
    measured, other = cores()
    with running(Role("bare", measured, step_s=step_s)) as [server], pinned_to(other):
        return streams_of(server, num_streams, max_tokens=10_000_000)


def one_token_requests() -> tuple[float, float]:
    """Requests of one token, a fixed number of them at once: requests/s, and the CPU seconds of the router for each."""
    with one_router(0.0) as router:
        request = load.generate_request(1)
        connections = [Connection(router.address, lambda *_: None) for _ in range(load.NUM_CONNECTIONS)]
        for index in range(ONE_TOKEN_CALLS):
            connections[index % len(connections)].call(load.GENERATE, request)
        load.repeat_ended_calls(connections, request, WARM_UP_S)
        before = router.cpu_s()
        num_ended, elapsed = load.repeat_ended_calls(connections, request, ONE_TOKEN_S)
        cpu_s = (router.cpu_s() - before) / num_ended
        load.close(connections)
    return num_ended / elapsed, cpu_s


# ---- parts


def worker(report: Report, repeats: int) -> None:
    runs = [(out_of_a_worker(FASTEST_STEP_S), out_of_a_worker(STEP_S)) for _ in range(repeats)]
    fastest = [run[0][0] for run in runs]
    report.add(Line(f"out of a decode worker, {STREAMS} streams", rate(fastest), "tokens/s", least=40_000))
    report.add(Line("out of a decode worker: CPU", cpu_us(fastest), "us a token"))
    idle_percent = 100 * statistics.median(run[1][1] for run in runs)
    report.add(Line(f"between steps of 5 ms, {STREAMS} streams", idle_percent, "% of the steps", most=5.0))
    idle_percent = 100 * statistics.median(out_of_a_worker(None, FEW_STREAMS)[1] for _ in range(repeats))
    report.add(
        Line(f"between steps of the CPU engine, {FEW_STREAMS} streams", idle_percent, "% of the steps", most=1.0)
    )


def router(report: Report, repeats: int) -> None:
    variants: dict[str, Callable[[], Measured]] = {
        "own": partial(over_grpc, OWN_STEP_S),
        "bare": bare_grpc,
        "gRPC": partial(over_grpc, FASTEST_STEP_S),
        "HTTP": over_http,
        "dynamo": partial(dynamo.through_frontend, STREAMS, WARM_UP_S, 2 * MEASURE_S),
    }
    if not dynamo.is_installed():
        del variants["dynamo"]
        report.say("Dynamo is not installed and left out; `make bench-peers` installs it")
    found: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(repeats):
        for name, take in variants.items():
            try:
                found[name].append(take())
            except Refused as error:
                report.say(f"{name} is left out of this repeat: {error}")
    own, bare, theirs = found["own"], found["bare"], found["dynamo"]
    words = f"gRPC through one router, {STREAMS} streams, a message each"
    report.add(Line(words, rate(own), "tokens/s", BARE, rate(bare), least=15_000))
    report.add(Line(f"{words}: tokens in a message", per_message(own), "", most=1.05))
    report.add(Line(f"{words}: CPU", cpu_us(own), "us a token", BARE, cpu_us(bare)))
    for name, most in (("gRPC", 20.0), ("HTTP", None)):
        words, ours = f"{name} through one router, {STREAMS} streams, all it can", found[name]
        their_rate, their_us = (rate(theirs), cpu_us(theirs)) if theirs else (None, None)
        report.add(Line(words, rate(ours), "tokens/s", DYNAMO, their_rate, least_ratio=1.0))
        report.add(Line(f"{words}: tokens in a message", per_message(ours), ""))
        report.add(Line(f"{words}: CPU", cpu_us(ours), "us a token", DYNAMO, their_us, most=most or their_us))


def ages(report: Report, repeats: int) -> None:
    """A bare server has one hop where the worker and the router have two, and sends the tokens of a step one by one."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(repeats):
        with one_router(CALM_STEP_S) as router:
            found["gRPC"].append(streams_of(router, FEW_STREAMS).ages_s)
            found["HTTP"].append(load.http_ages(PORT, MODEL, router.address, FEW_STREAMS, MEASURE_S))
        found[BARE].append(bare_grpc(CALM_STEP_S, FEW_STREAMS).ages_s)
    for name, share, most in (("p50", 0.50, 1.0), ("p99", 0.99, 5.0)):
        ms = {way: 1e3 * statistics.median(percentile(run, share) for run in runs) for way, runs in found.items()}
        words = f"a token from sampled to the client, {FEW_STREAMS} streams, {name}"
        report.add(Line(words, ms["gRPC"], "ms", BARE, ms[BARE], most=most))
        report.add(Line(f"{words}, over HTTP", ms["HTTP"], "ms", "gRPC", ms["gRPC"], most=ms["gRPC"] + 0.5))


def requests(report: Report, repeats: int) -> None:
    found = [one_token_requests() for _ in range(repeats)]
    per_s, cpu_s = (statistics.median(values) for values in zip(*found, strict=True))
    report.add(Line(f"requests of one token, {ONE_TOKEN_CALLS} at once", per_s, "requests/s"))
    report.add(Line("a request of one token: CPU of the router", cpu_s * 1e6, "us"))


# ---- figures of several runs


def rate(runs: Sequence[Measured]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)


def per_message(runs: Sequence[Measured]) -> float:
    return statistics.median(run.tokens_per_message for run in runs)


def cpu_us(runs: Sequence[Measured]) -> float:
    return 1e6 * statistics.median(run.cpu_s_per_token for run in runs)


PARTS: dict[str, Callable[[Report, int], None]] = {
    "worker": worker, "router": router, "ages": ages, "requests": requests, "decisions": decisions,
}  # fmt: skip


def main() -> None:
    arguments = parser_of(__doc__, tuple(PARTS), repeats=5).parse_args()
    report = Report("dataplane")
    run_parts(report, {name: partial(part, report, arguments.repeats) for name, part in PARTS.items()}, arguments.parts)


if __name__ == "__main__":
    main()
