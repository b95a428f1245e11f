"""Measures the latency that the HTTP gateway adds to a token, and its tokens per second: `make bench-gateway`.

Real processes, real gRPC and real HTTP; only the model is replaced by a sleep. The gateway has one core; the worker,
the router and the load client share the other one. In each repeat the peers take turns.

    added      64 streams at a calm pace, through the gateway and by direct gRPC calls of the same router
    rate       256 streams, as many tokens as go through, beside Dynamo's frontend with its mocker
    processes  the same with a part of a core for each gateway process: one process, and two on one port
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.dataplane import dynamo
from benchmarks.dataplane.cpu_limits import can_limit, limited, pinned_to
from benchmarks.dataplane.dynamo import ANSWER_TOKENS, EventClient, receive
from benchmarks.dataplane.load import Measured
from benchmarks.dataplane.processes import MeasuredProcess, cores, running
from benchmarks.dataplane.program import CONFIG, Role
from benchmarks.gateway.latency import first_tokens_s, grpc_ages, http_ages, shared_ages
from benchmarks.gateway.process import PORT, cpu_s, gateway
from benchmarks.report import Line, Report

FEW_STREAMS, MANY_STREAMS = 64, 256
CALM_STEP_S, BRISK_STEP_S, FASTEST_STEP_S = 0.04, 0.02, 0.002
WARM_UP_S, MEASURE_S = 2.0, 8.0
NUM_FIRST_TOKENS = 200
PART_OF_A_CORE = 0.25
MODEL = CONFIG.engine.model


@contextlib.contextmanager
def router(step_s: float) -> Iterator[MeasuredProcess]:
    """A router with one decode worker, away from the gateway's core."""
    _, other = cores()
    with running(Role("worker", other, step_s=step_s), Role("router", other)) as [worker, routing]:
        routing.follow([worker])
        with pinned_to(other):
            yield routing


def added(report: Report, repeats: int, seconds: float) -> None:
    """The added time per token and to the first token."""
    measured, _ = cores()
    through, direct, shared, first_through, first_direct = [], [], [], [], []
    with router(CALM_STEP_S) as routing, gateway(routing.address, [measured]):
        for _ in range(repeats):
            through.append(statistics.median(http_ages(PORT, MODEL, routing.address, FEW_STREAMS, seconds)))
            direct.append(statistics.median(grpc_ages(routing.address, FEW_STREAMS, seconds)))
            shared.append(statistics.median(shared_ages(routing.address, FEW_STREAMS, seconds)))
    with router(BRISK_STEP_S) as routing, gateway(routing.address, [measured]):
        number = max(5, int(NUM_FIRST_TOKENS * seconds / MEASURE_S))
        for _ in range(repeats):
            with_gateway, without = first_tokens_s(PORT, MODEL, routing.address, FEW_STREAMS, number, BRISK_STEP_S)
            first_through.append(with_gateway)
            first_direct.append(without)
    streams = f"{FEW_STREAMS} streams, p50"
    for what, with_it, without_it, most in (
        ("a token from sampled to the client", through, direct, 1.0),
        ("the first token", first_through, first_direct, 3.0),
    ):
        value, other = 1e3 * statistics.median(with_it), 1e3 * statistics.median(without_it)
        report.add(Line(f"{what} through the gateway, {streams}", value, "ms", "direct gRPC", other))
        report.add(Line(f"{what}: added by the gateway, {streams}", value - other, "ms", most=most))
    value = 1e3 * (statistics.median(through) - statistics.median(shared))
    report.add(Line(f"a token: added by the gateway to a direct shared stream, {streams}", value, "ms"))


def through_gateway(num_processes: int, seconds: float, share: float = 0.0) -> Measured:
    """`share`: the part of a core that each gateway process may use; 0 = all."""
    measured, _ = cores()
    with router(FASTEST_STEP_S) as routing, gateway(routing.address, [measured] * num_processes) as processes:
        with limited([process.pid for process in processes], share):
            spread = random.Random(0)
            clients = [EventClient(PORT, MODEL, spread.randint(1, ANSWER_TOKENS)) for _ in range(MANY_STREAMS)]
            receive(clients, WARM_UP_S)
            ended = sum(client.num_ended for client in clients)
            before, router_before, start = cpu_s(processes), routing.cpu_s(), time.perf_counter()
            num_events = receive(clients, seconds)
            elapsed = time.perf_counter() - start
            num_tokens = (sum(client.num_ended for client in clients) - ended) * ANSWER_TOKENS
            used, router_used = cpu_s(processes) - before, routing.cpu_s() - router_before
            for client in clients:
                client.socket.close()
    return Measured(
        tokens_per_s=num_tokens / elapsed,
        messages_per_s=num_events / elapsed,
        cpu_s_per_token={"gateway": used / max(1, num_tokens), "router": router_used / max(1, num_tokens)},
        share_of_core={"gateway": used / elapsed, "router": router_used / elapsed},
    )


def rate(report: Report, repeats: int, seconds: float) -> None:
    """Tokens/s and CPU of one gateway process, beside Dynamo's frontend."""
    with_dynamo = dynamo.is_installed()
    if not with_dynamo:
        report.say("Dynamo is not installed and left out; `make bench-peers` installs it")
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(through_gateway(1, seconds))
        if with_dynamo:
            theirs.append(dynamo.through_frontend(MANY_STREAMS, WARM_UP_S, seconds))
    through, peer = f"through one gateway process, {MANY_STREAMS} streams", f"Dynamo {dynamo.VERSION}"

    def median(runs: list[Measured], value: Callable[[Measured], float]) -> float | None:
        return statistics.median(map(value, runs)) if runs else None

    def cpu_us(run: Measured) -> float:
        return 1e6 * sum(run.cpu_s_per_token.values())

    def gateway_us(run: Measured) -> float:
        return 1e6 * run.cpu_s_per_token["gateway"]

    for measure, unit, value, other in (
        (through, "tokens/s", lambda run: run.tokens_per_s, lambda run: run.tokens_per_s),
        (f"{through}: tokens in an event", "", lambda run: run.tokens_per_message, None),
        (f"{through}: CPU of the gateway", "us a token", gateway_us, None),
        (f"{through}: CPU of gateway and router, beside the frontend", "us a token", cpu_us, cpu_us),
    ):
        beside = median(theirs, other) if other is not None else None
        report.add(Line(measure, median(ours, value) or 0.0, unit, peer if other is not None else "", beside))


def processes(report: Report, repeats: int, seconds: float) -> None:
    if not can_limit():
        report.say("this machine lets nobody limit the CPU of a process: one process beside two is not measured")
        return
    one, two = [], []
    for _ in range(repeats):
        one.append(through_gateway(1, seconds, PART_OF_A_CORE).tokens_per_s)
        two.append(through_gateway(2, seconds, PART_OF_A_CORE).tokens_per_s)
    report.add(
        Line(f"two gateway processes with {PART_OF_A_CORE:g} of a core each", statistics.median(two), "tokens/s",
             "one process", statistics.median(one), least_ratio=1.6)
    )  # fmt: skip


PARTS: dict[str, Callable[[Report, int, float], None]] = {"added": added, "rate": rate, "processes": processes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=MEASURE_S, help="of each measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure only these")
    arguments = parser.parse_args()
    report = Report("gateway")
    for name in arguments.parts:
        PARTS[name](report, arguments.repeats, arguments.seconds)
    report.write()


if __name__ == "__main__":
    main()
