"""VllmMachine: each call ends once, whatever its router, its hand-off and its engine do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import SchedulerConfig, WorkerConfig
from core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    TandemError,
    TransferFailed,
    WorkerUnavailable,
)
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason, Stage, WorkerState
from core.machine import Tick
from core.paths import PeerJoined, PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import CallId
from core.step import SampledToken
from decode_worker.events import DecodeArrived, DecodeCancelled, DecodeDone, DecodeFailed, EmitTokens, HandoffArrived
from prefill_worker.machine import PrefillArrived, PrefillCancelled, PrefillDone, PrefillFailed
from vllm_worker.engine import EngineDied, EngineInfo, EngineOutput, EngineStep, HandshakeEnded
from vllm_worker.handshakes import MAX_PEERS, ShakeHands
from vllm_worker.machine import EARLY_HANDOFF_S, MAX_EARLY_HANDOFFS, Abort, Fail, Limits, Submit, VllmMachine
from worker.core import ConfigChanged, DrainRequested

EOS = 7
LAYOUT = KVLayout("0" * 16, "float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=2)
INFO = EngineInfo(num_blocks=100, layout=LAYOUT, eos_token_ids=frozenset({EOS}), context_length=64, max_step_tokens=32)
AGENT = AgentAddress("other", 1, b"", 0, 100, LAYOUT, 1.0)
TICKET, DEADLINE = 5, 100.0


def machine(max_calls: int = 8) -> VllmMachine:
    return VllmMachine(INFO, Limits(step_timeout_s=30.0, max_waiting=max_calls, max_running=0))


def request(name: str = "a", num_tokens: int = 6, delivered: int = 0, **sampling: object) -> Request:
    params = SamplingParams(**({"max_tokens": 10} | sampling))  # type: ignore[arg-type]
    return Request(name, tuple(range(10, 10 + num_tokens + delivered)), num_tokens, params)


def prefill(name: str = "a", **options: object) -> PrefillArrived:
    return PrefillArrived(request(name, **options), TICKET, AGENT, DEADLINE, CallId("router", 1))  # type: ignore[arg-type]


def decode(name: str = "a", ticket: int | None = None, **options: object) -> DecodeArrived:
    source = None if ticket is None else (ticket, AGENT)
    return DecodeArrived(request(name, **options), source, DEADLINE, CallId("router", 1))  # type: ignore[arg-type]


def output(name: str, *tokens: int, **fields: object) -> EngineOutput:
    return EngineOutput(name, tuple(map(SampledToken, tokens)), **fields)  # type: ignore[arg-type]


def test_a_prompt_is_submitted_and_answered_with_its_hand_off() -> None:
    worker = machine()
    (submit,) = worker.handle(prefill(), 0.0)
    assert isinstance(submit, Submit)
    assert submit.prompt.offers
    (done,) = worker.handle(
        output("a", 3, finish_reason=FinishReason.LENGTH, handoff=b"kv", num_cached_tokens=4, scheduled_at=1.0), 3.0
    )
    assert isinstance(done, PrefillDone)
    assert (done.index, done.token.token_id, done.finish_reason, done.cached_tokens) == (0, 3, None, 4)
    assert done.handoff == b"kv"
    assert done.timeline.seconds_in(Stage.QUEUE) == pytest.approx(1.0)
    assert done.timeline.seconds_in(Stage.PREFILL) == pytest.approx(2.0)
    assert worker.idle
    worker.check()


@pytest.mark.parametrize(
    ("token", "max_tokens", "reason"),
    [(EOS, 10, FinishReason.STOP), (3, 1, FinishReason.LENGTH)],
)
def test_a_first_token_that_ends_the_request_hands_nothing_over(
    token: int, max_tokens: int, reason: FinishReason
) -> None:
    worker = machine()
    worker.handle(prefill(max_tokens=max_tokens), 0.0)
    (done,) = worker.handle(output("a", token, finish_reason=FinishReason.LENGTH, handoff=b"kv"), 1.0)
    assert isinstance(done, PrefillDone)
    assert done.finish_reason is reason
    assert not done.handoff


def test_a_prompt_without_a_hand_off_fails_retryably() -> None:
    worker = machine()
    worker.handle(prefill(), 0.0)
    (failed,) = worker.handle(output("a", 3, finish_reason=FinishReason.LENGTH), 1.0)
    assert isinstance(failed, PrefillFailed)
    assert isinstance(failed.error, TransferFailed)


@pytest.mark.parametrize("handoff_first", [False, True])
def test_a_decode_call_and_its_hand_off_may_arrive_in_any_order(handoff_first: bool) -> None:
    worker = machine()
    events: list[DecodeArrived | HandoffArrived] = [decode(ticket=TICKET), HandoffArrived(TICKET, b"kv")]
    actions = [
        action for event in (reversed(events) if handoff_first else events) for action in worker.handle(event, 0.0)
    ]
    (submit,) = actions
    assert isinstance(submit, Submit)
    assert submit.prompt.handoff == b"kv"
    worker.check()


def test_tokens_are_numbered_from_the_true_prompt_on() -> None:
    worker = machine()
    worker.handle(decode(delivered=3), 0.0)
    (emit,) = worker.handle(output("a", 1, 2), 1.0)
    assert isinstance(emit, EmitTokens)
    assert [(event.index, event.token.token_id) for event in emit.tokens] == [(3, 1), (4, 2)]
    emit, done = worker.handle(output("a", 4, finish_reason=FinishReason.STOP), 2.0)
    assert isinstance(emit, EmitTokens)
    assert [event.index for event in emit.tokens] == [5]
    assert isinstance(done, DecodeDone)
    assert done.finish_reason is FinishReason.STOP
    assert worker.idle


def test_a_failed_load_is_retryable_and_a_refused_request_is_not() -> None:
    worker = machine()
    worker.handle(decode("a"), 0.0)
    worker.handle(decode("b"), 0.0)
    (load,) = worker.handle(output("a", error="it ended with 'error'"), 1.0)
    (refused,) = worker.handle(output("b", error="bad", invalid=True), 1.0)
    assert isinstance(load, DecodeFailed)
    assert isinstance(load.error, TransferFailed)
    assert load.error.retryable
    assert isinstance(refused, DecodeFailed)
    assert isinstance(refused.error, InvalidRequest)
    worker.check()


def test_a_cancelled_call_is_aborted_in_the_engine_only_if_the_engine_has_it() -> None:
    worker = machine()
    worker.handle(decode("a"), 0.0)
    worker.handle(decode("b", ticket=TICKET), 0.0)
    abort, failed = worker.handle(DecodeCancelled("a"), 1.0)
    assert abort == Abort("a")
    assert isinstance(failed, DecodeFailed)
    assert isinstance(failed.error, RequestCancelled)
    (waiting,) = worker.handle(DecodeCancelled("b"), 1.0)
    assert isinstance(waiting, DecodeFailed)
    assert worker.handle(output("a", 3), 1.0) == []  # late
    worker.check()


def test_a_deadline_ends_a_call_that_waits_for_its_hand_off() -> None:
    worker = machine()
    worker.handle(decode(ticket=TICKET), 0.0)
    assert worker.next_deadline() == DEADLINE
    (failed,) = worker.handle(Tick(), DEADLINE)
    assert isinstance(failed, DecodeFailed)
    assert isinstance(failed.error, DeadlineExceeded)


def test_an_early_hand_off_is_forgotten_and_their_number_is_bounded() -> None:
    worker = machine()
    for ticket in range(MAX_EARLY_HANDOFFS):
        worker.handle(HandoffArrived(ticket, b"kv"), 0.0)
    with pytest.raises(QueueFull):
        worker.handle(HandoffArrived(MAX_EARLY_HANDOFFS, b"kv"), 0.0)
    assert worker.next_deadline() == EARLY_HANDOFF_S
    worker.handle(Tick(), EARLY_HANDOFF_S)
    assert worker.next_deadline() is None
    assert worker.handle(decode(ticket=0), EARLY_HANDOFF_S) == []  # waits
    worker.check()


def test_the_death_of_the_engine_ends_every_call_and_the_worker() -> None:
    worker = machine()
    worker.handle(prefill("a"), 0.0)
    worker.handle(decode("b", ticket=TICKET), 0.0)
    *ended, fail = worker.handle(EngineDied("killed"), 1.0)
    assert isinstance(fail, Fail)
    assert [type(action) for action in ended] == [PrefillFailed, DecodeFailed]
    assert all(isinstance(action.error, WorkerUnavailable) for action in ended)  # type: ignore[union-attr]
    with pytest.raises(WorkerUnavailable):
        worker.handle(decode("c"), 2.0)


def test_an_engine_that_reports_no_step_hangs() -> None:
    worker = machine()
    worker.handle(decode("a"), 0.0)
    worker.handle(EngineStep(1, 0, 0.1, 1, 0), 20.0)
    assert worker.next_deadline() == 50.0
    assert worker.handle(Tick(), 49.0) == []
    failed, fail = worker.handle(Tick(), 50.0)
    assert isinstance(failed, DecodeFailed)
    assert isinstance(fail, Fail)
    assert "step_timeout_s" in fail.detail


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (decode("a"), InvalidRequest),  # is open
        (decode("b", num_tokens=60), InvalidRequest),  # over the context
        (decode("b"), QueueFull),
    ],
)
def test_a_refused_call_changes_nothing(event: DecodeArrived, error: type[TandemError]) -> None:
    worker = machine(max_calls=1 if error is QueueFull else 8)
    worker.handle(decode("a"), 0.0)
    with pytest.raises(error):
        worker.handle(event, 0.0)
    worker.check()
    assert worker.worker_load().num_calls == 1


def test_calls_beyond_a_lowered_limit_go_on_and_the_engine_keeps_its_sizes() -> None:
    worker = VllmMachine(INFO, Limits(step_timeout_s=30.0, max_waiting=8, max_running=1))
    for name in "abc":
        worker.handle(decode(name), 0.0)
    new = SchedulerConfig(max_running=64, max_batched_tokens=64, max_waiting=1, slo_itl_ms=50.0)
    assert worker.handle(ConfigChanged(new, WorkerConfig(step_timeout_s=3.0)), 0.0) == []
    worker.check()
    with pytest.raises(QueueFull, match="2 requests are open already"):
        worker.handle(decode("d"), 0.0)
    assert worker.next_deadline() == 3.0
    assert worker.worker_load().slo_itl_s == 0.05


def test_a_draining_worker_refuses_new_calls_and_finishes_its_own() -> None:
    worker = machine()
    worker.handle(decode("a"), 0.0)
    worker.handle(DrainRequested(), 0.0)
    with pytest.raises(WorkerUnavailable):
        worker.handle(prefill("b"), 0.0)
    assert worker.worker_load().state is WorkerState.DRAINING
    *_, done = worker.handle(output("a", 1, finish_reason=FinishReason.LENGTH), 1.0)
    assert isinstance(done, DecodeDone)


def test_the_load_counts_prompts_decodes_and_the_pool() -> None:
    worker = machine()
    worker.handle(decode("a", num_tokens=20), 0.0)
    worker.handle(decode("b", num_tokens=8), 0.0)
    worker.handle(EngineStep(1, 1, 0.05, 0, 12), 1.0)
    load = worker.worker_load()
    assert (load.num_waiting, load.num_queued_tokens, load.num_decoding) == (1, 16, 0)
    assert load.ledger[Column.HELD] == 5
    assert sum(load.ledger.values()) == INFO.num_blocks
    assert len(load.prompt_backlog) > 0
    worker.handle(output("a", 1), 1.0)
    load = worker.worker_load()
    assert (load.num_decoding, load.decode_context, load.num_queued_tokens) == (1, 21, 8)
    worker.handle(DecodeCancelled("a"), 2.0)
    worker.handle(DecodeCancelled("b"), 2.0)
    load = worker.worker_load()
    assert load.ledger[Column.FREE] == INFO.num_blocks  # vLLM does not tell while it is idle
    assert (load.num_decoding, load.num_calls, load.router_calls) == (0, 0, {})


def test_the_time_of_a_step_is_learned_from_the_reports_while_the_engine_has_work() -> None:
    worker = machine()
    worker.handle(decode("a", num_tokens=20), 5.0)
    worker.handle(EngineStep(1, 0, 0.1, 0, 20), 5.3)  # since the prompt came
    worker.handle(output("a", 1), 5.3)
    worker.handle(EngineStep(0, 0, 0.1, 1, 0), 5.4)  # since the step before
    assert worker.worker_load().busy_seconds == pytest.approx(0.4)
    worker.handle(output("a", 2, finish_reason=FinishReason.LENGTH), 5.4)
    worker.handle(decode("b", ticket=TICKET), 9.0)
    worker.handle(HandoffArrived(TICKET, b"kv"), 9.0)
    worker.handle(EngineStep(1, 0, 0.1, 1, 0), 9.5)  # waited for its KV: not known
    assert worker.worker_load().busy_seconds == pytest.approx(0.4)
    worker.check()


def joined(name: str, *, is_owner: bool = True) -> PeerJoined:
    return PeerJoined(replace(AGENT, name=name, metadata=f"{name}'s".encode()), is_owner)


def test_an_engine_shakes_hands_with_one_owner_at_a_time_and_once_with_each() -> None:
    worker = machine()
    assert worker.handle(joined("P"), 0.0) == [ShakeHands("P", b"P's")]
    for _ in range(2):  # of two routers
        assert worker.handle(joined("Q"), 0.0) == []
        assert worker.handle(joined("P"), 0.0) == []
    assert worker.handle(HandshakeEnded("P"), 1.0) == [ShakeHands("Q", b"Q's")]
    assert worker.handle(HandshakeEnded("Q"), 2.0) == []
    assert worker.handle(joined("P"), 3.0) == []
    assert worker.idle  # a handshake is no call
    assert worker.next_deadline() is None
    worker.check()


def test_a_reader_and_an_owner_without_an_address_need_no_handshake() -> None:
    worker = machine()
    assert worker.handle(joined("D", is_owner=False), 0.0) == []
    assert worker.handle(PeerJoined(AGENT, is_owner=True), 0.0) == []


def test_a_failed_handshake_is_repeated_at_the_next_announcement_only() -> None:
    worker = machine()
    worker.handle(joined("P"), 0.0)
    assert worker.handle(HandshakeEnded("P", "no answer"), 1.0) == []
    assert worker.handle(joined("P"), 2.0) == [ShakeHands("P", b"P's")]


def test_an_owner_that_has_left_and_a_drain_end_the_wait_for_a_handshake() -> None:
    worker = machine()
    for name in "PQR":
        worker.handle(joined(name), 0.0)
    worker.handle(PeerLeft("P"), 0.0)  # during its handshake
    worker.handle(PeerLeft("Q"), 0.0)
    assert worker.handle(HandshakeEnded("P", "no answer"), 1.0) == [ShakeHands("R", b"R's")]
    worker.handle(joined("S"), 1.0)
    worker.handle(DrainRequested(), 1.0)
    assert worker.handle(HandshakeEnded("R"), 2.0) == []
    assert worker.handle(joined("T"), 2.0) == []
    worker.check()


def test_the_number_of_remembered_owners_is_bounded() -> None:
    worker = machine()
    for number in range(2 * MAX_PEERS + 2):
        worker.handle(joined(f"P{number}"), 0.0)
        worker.check()
    num_met = 0
    current = "P0"
    while actions := worker.handle(HandshakeEnded(current), 1.0):
        (shake,) = actions
        assert isinstance(shake, ShakeHands)
        current, num_met = shake.peer, num_met + 1
        worker.check()
    assert num_met == MAX_PEERS
    assert current == f"P{2 * MAX_PEERS + 1}"  # the newest ones


ENDS = (PrefillDone, PrefillFailed, DecodeDone, DecodeFailed)
NAMES = st.sampled_from(["a", "b", "c"])
TICKETS = st.integers(0, 2)


@st.composite
def events(draw: st.DrawFn) -> object:
    name, ticket = draw(NAMES), draw(TICKETS)
    return draw(
        st.sampled_from(
            [
                prefill(name),
                decode(name),
                decode(name, ticket=ticket),
                HandoffArrived(ticket, b"kv"),
                PrefillCancelled(name),
                DecodeCancelled(name),
                output(name, 3),
                output(name, EOS, finish_reason=FinishReason.STOP, handoff=b"kv"),
                output(name, finish_reason=FinishReason.LENGTH),
                output(name, error="lost"),
                EngineStep(1, 1, 0.5, 1, 8),
                joined(name),
                PeerLeft(name),
                HandshakeEnded(name),
                HandshakeEnded(name, "no answer"),
                Tick(),
            ]
        )
    )


@given(st.lists(st.tuples(events(), st.floats(0.0, 20.0)), max_size=40), st.booleans())
def test_every_accepted_call_ends_exactly_once(steps: list[tuple[object, float]], dies: bool) -> None:
    worker, now = machine(max_calls=2), 0.0
    open_calls: set[str] = set()
    submitted: set[str] = set()
    for event, pause in [*steps, *([(EngineDied("killed"), 0.0)] * dies), (Tick(), 2 * DEADLINE)]:
        now += pause
        try:
            actions = worker.handle(event, now)  # type: ignore[arg-type]
        except TandemError:
            actions = []
        else:
            if isinstance(event, PrefillArrived | DecodeArrived):
                open_calls.add(event.request.request_id)
        for action in actions:
            if isinstance(action, Submit):
                assert action.prompt.request_id in open_calls
                submitted.add(action.prompt.request_id)
            elif isinstance(action, Abort):
                submitted.remove(action.request_id)
            elif isinstance(action, ENDS):
                open_calls.remove(action.request_id)  # a second end raises
                submitted.discard(action.request_id)
        worker.check()
    assert not open_calls
    assert worker.idle
