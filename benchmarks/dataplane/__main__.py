"""Measures the path of a token beside a model that takes no time from Python: `make bench-dataplane`.

Real processes and real gRPC; only the model is replaced by a sleep. The measured process has one core; the other
processes and the load client share the other core. All figures are medians of the repeats. In each repeat the peers
take turns with Tandem: a bare grpc.aio server that sends the same messages, and Dynamo's frontend where `make
bench-peers` has installed it.

    out of a worker      the load client is the router: one token stream, 256 calls
    through a router     clients of Generate; the steps of the worker offer more or fewer tokens than one core can send

The rows of one step time differ in the server alone: streams, load client and cores are the same. Dynamo's frontend
speaks HTTP, so its client counts events in place of messages.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.dataplane import costs, dynamo, load
from benchmarks.dataplane.cpu_limits import pinned_to
from benchmarks.dataplane.http2_load import Connection
from benchmarks.dataplane.http_load import Refused
from benchmarks.dataplane.load import Counter, Measured
from benchmarks.report import Line, Report, parser_of, percentile, run_parts
from benchmarks.service import MeasuredProcess, Role, cores, running

STREAMS = 256
FEW_STREAMS = 32
WARM_UP_S = 1.5
MEASURE_S = 4.0
FASTEST_STEP_S = 0.002  # offers more tokens than one core can take
JOINED_STEP_S = 0.005  # offers up to 51 thousand tokens/s with 256 streams
OWN_STEP_S = 0.0165  # offers 15.5 thousand tokens/s with 256 streams
CALM_STEP_S = 0.02  # of few streams, for the age of a token
INTERVAL_MS = 50  # of clients that ask for joined messages
ONE_TOKEN_S = 5.0
ONE_TOKEN_CALLS = 64  # at once
MEMORY_TIMEOUT_S = 3600.0
BARE = "bare grpc.aio"


def out_of_a_worker(step_s: float | None, num_streams: int = STREAMS) -> tuple[Measured, float]:
    """Tokens out of one decode worker, and the time between its steps as a share of its steps."""
    measured, other = cores()
    core = None if step_s is None else measured  # a model computes on a core of its own
    with running(Role("decode", core, step_s=step_s)) as [worker], pinned_to(other):
        counter = Counter(load.tokens_of_step)
        connections = load.start_decode_calls(worker.address, num_streams, load.ENDLESS, counter)
        before = worker.step_times()
        found = load.measure(connections, counter, MEASURE_S, [worker])
        after = worker.step_times()
        load.close(connections)
    return found, (after["idle_s"] - before["idle_s"]) / (after["step_s"] - before["step_s"])


def through_router(step_s: float, num_streams: int = STREAMS, min_interval_ms: int = 0) -> Measured:
    """Clients of a router with one decode worker."""
    measured, other = cores()
    with running(Role("decode", other, step_s=step_s), Role("router", measured)) as [worker, router], pinned_to(other):
        router.follow([worker])
        return streams_of(router, num_streams, load.generate_request(load.ENDLESS, min_interval_ms))


def streams_of(server: MeasuredProcess, num_streams: int, request: bytes) -> Measured:
    counter = Counter(load.tokens_of_response)
    connections = load.start_streams(server.address, num_streams, request, counter, WARM_UP_S)
    found = load.measure(connections, counter, MEASURE_S, [server])
    load.close(connections)
    return found


def bare_grpc(tokens_per_message: int, step_s: float = 0.0, num_streams: int = STREAMS) -> Measured:
    measured, other = cores()
    role = Role("bare", measured, step_s=step_s, tokens_per_message=tokens_per_message)
    with running(role) as [server], pinned_to(other):
        return streams_of(server, num_streams, load.generate_request(10_000_000))


def one_token_requests(num_requests: Sequence[int] = ()) -> tuple[float, float, list[float]]:
    """Requests of one token, a fixed number of them at once.

    Returns the requests/s, the CPU seconds of the router for each, and its resident size in MB after each number of
    `num_requests`.
    """
    measured, other = cores()
    with running(Role("decode", other), Role("router", measured)) as [worker, router], pinned_to(other):
        router.follow([worker])
        request = load.generate_request(1)
        connections = [Connection(router.address, lambda *_: None) for _ in range(load.NUM_CONNECTIONS)]
        for index in range(ONE_TOKEN_CALLS):
            connections[index % len(connections)].call(load.GENERATE, request)
        load.repeat_ended_calls(connections, request, WARM_UP_S)
        before = router.cpu_s()
        num_ended, elapsed = load.repeat_ended_calls(connections, request, ONE_TOKEN_S)
        cpu_s = (router.cpu_s() - before) / num_ended
        sizes, num_before = [], 0
        for number in num_requests:
            load.repeat_ended_calls(connections, request, MEMORY_TIMEOUT_S, number - num_before)
            sizes.append(router.resident_mb())
            num_before = number
        load.close(connections)
    return num_ended / elapsed, cpu_s, sizes


# ---- lines


def worker(report: Report, repeats: int) -> None:
    runs = [(out_of_a_worker(FASTEST_STEP_S), out_of_a_worker(JOINED_STEP_S)) for _ in range(repeats)]
    fastest = [run[0][0] for run in runs]
    report.add(Line(f"out of a decode worker, {STREAMS} streams", rate(fastest), "tokens/s", least=40_000))
    report.add(Line("out of a decode worker: CPU", cpu_us(fastest, "decode"), "us a token"))
    idle_percent = 100 * statistics.median(run[1][1] for run in runs)
    report.add(Line(f"between steps of 5 ms, {STREAMS} streams", idle_percent, "% of the steps", most=5.0))
    idle_percent = 100 * statistics.median(out_of_a_worker(None, FEW_STREAMS)[1] for _ in range(repeats))
    report.add(
        Line(f"between steps of the CPU engine, {FEW_STREAMS} streams", idle_percent, "% of the steps", most=1.0)
    )


def router(report: Report, repeats: int) -> None:
    variants: dict[str, Callable[[], Measured]] = {
        "own": lambda: through_router(OWN_STEP_S),
        "joined": lambda: through_router(JOINED_STEP_S),
        "fastest": lambda: through_router(FASTEST_STEP_S),
        "interval": lambda: through_router(JOINED_STEP_S, min_interval_ms=INTERVAL_MS),
    }
    if dynamo.is_installed():
        variants["dynamo"] = lambda: dynamo.through_frontend(STREAMS, WARM_UP_S, MEASURE_S)
    else:
        report.say("Dynamo is not installed and left out; `make bench-peers` installs it")
    found: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(repeats):
        for name, take in variants.items():
            try:
                found[name].append(take())
            except Refused as error:
                report.say(f"Dynamo is left out of this repeat: {error}")
        found["bare own"].append(bare_grpc(1))
        found["bare joined"].append(bare_grpc(max(1, round(per_message(found["joined"][-1:])))))
    through = f"through one router, {STREAMS} streams"
    bare = rate(found["bare own"])
    own = found["own"]
    report.add(Line(f"{through}, a message each", rate(own), "tokens/s", BARE, bare, least=15_000))
    report.add(Line(f"{through}, a message each: tokens in a message", per_message(own), "", most=1.05))
    report.add(Line(f"{through}, a message each: CPU", cpu_us(own, "router"), "us a token", BARE,
                    cpu_us(found["bare own"], "bare")))  # fmt: skip
    for name, words, least, most in (
        ("joined", "steps of 5 ms", None, None),
        ("fastest", "joined, all it can", 50_000.0, 20.0),
        ("interval", f"joined for {INTERVAL_MS} ms", None, None),
    ):
        measured = found[name]
        peer, peer_value = (BARE, rate(found["bare joined"])) if name == "joined" else ("", None)
        report.add(Line(f"{through}, {words}", rate(measured), "tokens/s", peer, peer_value, least=least))
        report.add(Line(f"{through}, {words}: tokens in a message", per_message(measured), ""))
        report.add(Line(f"{through}, {words}: CPU", cpu_us(measured, "router"), "us a token", most=most))
    if found["dynamo"]:
        peer = f"Dynamo {dynamo.VERSION}"
        best, theirs = rate(found["fastest"]), rate(found["dynamo"])
        report.add(Line(f"{through}, joined, beside Dynamo", best, "tokens/s", peer, theirs, least_ratio=1.0))
        ours_us, theirs_us = cpu_us(found["fastest"], "router"), cpu_us(found["dynamo"], "frontend")
        report.add(Line(f"{through}, joined, beside Dynamo: CPU", ours_us, "us a token", peer, theirs_us))


def ages(report: Report, repeats: int) -> None:
    """A bare server has one hop where the worker and the router have two, and sends the tokens of a step one by one."""
    runs = [(through_router(CALM_STEP_S, FEW_STREAMS), bare_grpc(1, CALM_STEP_S, FEW_STREAMS)) for _ in range(repeats)]
    for name, share, most in (("p50", 0.50, 1.0), ("p99", 0.99, 5.0)):
        own, bare = (
            1e3 * statistics.median(percentile(run.ages_s, share) for run in side) for side in zip(*runs, strict=True)
        )
        words = f"a token from sampled to the client, {FEW_STREAMS} streams, {name}"
        report.add(Line(words, own, "ms", BARE, bare, most=most))


def requests(report: Report, repeats: int) -> None:
    found = [one_token_requests()[:2] for _ in range(repeats)]
    per_s, cpu_s = (statistics.median(values) for values in zip(*found, strict=True))
    report.add(Line(f"requests of one token, {ONE_TOKEN_CALLS} at once", per_s, "requests/s"))
    report.add(Line("a request of one token: CPU of the router", cpu_s * 1e6, "us"))


def memory(report: Report, num_requests: int) -> None:
    _, _, (early, late) = one_token_requests((num_requests // 10, num_requests))
    report.add(Line(f"resident size of a router after {num_requests // 10:,} requests", early, "MB"))
    report.add(Line(f"resident size of a router after {num_requests:,} requests", late, "MB", most=1.05 * early))


# ---- figures of several runs


def rate(runs: Sequence[Measured]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)


def per_message(runs: Sequence[Measured]) -> float:
    return statistics.median(run.tokens_per_message for run in runs)


def cpu_us(runs: Sequence[Measured], process: str) -> float:
    return 1e6 * statistics.median(run.cpu_s_per_token[process] for run in runs)


PARTS: dict[str, Callable[[Report, int], None]] = {
    "worker": worker,
    "router": router,
    "ages": ages,
    "requests": requests,
    "steps": costs.steps,
    "decisions": costs.decisions,
}


def main() -> None:
    parser = parser_of(__doc__, tuple(PARTS), repeats=5)
    parser.add_argument("--memory", type=int, default=0, help="measure only a router's memory, over so many requests")
    arguments = parser.parse_args()
    report = Report("dataplane-memory" if arguments.memory else "dataplane")
    parts = {name: partial(measure, report, arguments.repeats) for name, measure in PARTS.items()}
    parts["memory"] = partial(memory, report, arguments.memory)
    run_parts(report, parts, ["memory"] if arguments.memory else arguments.parts)


if __name__ == "__main__":
    main()
