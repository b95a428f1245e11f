"""The processes that the benchmarks of the data plane and of the gateway measure start, and answer."""

from __future__ import annotations

import contextlib

from benchmarks.dataplane import load
from benchmarks.dataplane.http2_load import Connection, receive_for
from benchmarks.dataplane.load import Counter
from benchmarks.dataplane.processes import cores, running
from benchmarks.dataplane.program import CONFIG, Role
from benchmarks.gateway.latency import Arrivals, HttpStream, first_tokens_s
from tests.support.ports import kept_port

TIMEOUT_S = 60.0
NUM_TOKENS = 7
STEP_S = 0.05


def test_a_router_and_a_worker_that_sleeps_answer_grpc_and_http() -> None:
    measured, other = cores()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(kept_port("127.0.0.1"))
        roles = Role("worker", other, step_s=0.002), Role("router", measured, http_port=port)
        worker, router = stack.enter_context(running(*roles))
        router.follow([worker])
        counter = Counter(load.tokens_of_response)
        counter.keep = True
        connection = Connection(router.address, counter.take)
        connection.call(load.GENERATE, load.generate_request(NUM_TOKENS))
        receive_for([connection], TIMEOUT_S, lambda: bool(connection.ended))
        load.close([connection])
        assert sum(len(ids) for _, ids in counter.tokens()) == NUM_TOKENS
        arrivals = Arrivals()
        stream = stack.enter_context(contextlib.closing(HttpStream(port, CONFIG.engine.model, NUM_TOKENS, arrivals)))
        while not stream.ended:  # a busy router joins tokens to one event
            stream.receive()
        assert arrivals.times
        assert worker.step_times()["step_s"] > 0


def test_the_first_token_of_either_protocol_is_a_token_and_no_other_message() -> None:
    """A token comes at the end of a step that begins after its request."""
    measured, other = cores()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(kept_port("127.0.0.1"))
        roles = Role("worker", other, step_s=STEP_S), Role("router", measured, http_port=port)
        worker, router = stack.enter_context(running(*roles))
        router.follow([worker])
        found = first_tokens_s(port, CONFIG.engine.model, router.address, 1, 2, STEP_S)
        assert min(found) >= STEP_S
