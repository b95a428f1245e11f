"""Drives a RouterMachine in a test. Its methods are the words of transcripts (`tests/support/transcripts.py`):

    a lost prefill worker is replaced                                    the name of a test
      fleet P1 P2 D
      arrives r   -> decode r#1 D from P1/1; prefill r#1 P1 for D/1      D reads the KV of P1 by transfer id 1
      lost P1     -> peers D left P1; cancel r#1
                  -> decode r#2 D from P2/2; prefill r#2 P2 for D/2

A number that has its usual value is not written: 60 seconds to the deadline, no cached token, one attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, assert_never

import core.errors
from core.block_hash import root_hash, sequence_hashes
from core.config import RouterConfig
from core.cost.step_cost import PRIOR, StepCost
from core.errors import QueueFull, TandemError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from core.lifecycle import FinishReason, MoveReason, ServiceRole, Stage, WorkerState
from core.machine import Tick
from core.paths import PathState, PathStatus, PeerJoined, PeerLeft
from core.request import Request, SamplingParams
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import RouterCalls, WorkerChanges, WorkerLoad
from core.step import SampledToken
from router.requests import events
from router.requests.events import RouterAction, RouterEvent
from router.requests.machine import RouterMachine
from tests.support.deadlines import deadlines_until
from tests.support.transcripts import Replay, counts, error_words, numbers_of, runs, transcripts_of

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, block_size=4, head_dim=1)
NUM_BLOCKS = 64
SERVING = WorkerLoad(state=WorkerState.SERVING, ledger={Column.FREE: NUM_BLOCKS})
EOS = 0
CONFIG = RouterConfig(
    local_prefill="never", max_attempts=3, report_stale_s=3.0, worker_lost_s=10.0, worker_wait_s=20.0, max_queued=2
)

A = TypeVar("A")


def agent(
    worker_id: str, incarnation: int = 1, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS
) -> AgentAddress:
    return AgentAddress(f"{worker_id}@{incarnation}", incarnation, b"", 0, num_blocks, layout, 20.0)


def request(
    name: str = "r", prompt: Sequence[int] = tuple(range(1, 9)), max_tokens: int = 4, **options: Any
) -> Request:
    priority, tenant, adapter = options.pop("priority", 0), options.pop("tenant", ""), options.pop("adapter", "")
    sampling = SamplingParams(max_tokens=max_tokens, **options)
    return Request(name, tuple(prompt), len(prompt), sampling, priority, tenant=tenant, adapter=adapter)


def step_tokens(*tokens: tuple[int, int, SampledToken]) -> events.StepTokens:
    """A message of a token stream with (number of the call, index in the output, token)."""
    return events.StepTokens(
        [call for call, _, _ in tokens],
        [index for _, index, _ in tokens],
        [token.token_id for _, _, token in tokens],
        {place: token for place, (_, _, token) in enumerate(tokens) if token.logprob is not None},
    )


def transcripts(text: str, setup: str = "") -> Callable[[str], None]:
    return transcripts_of(lambda: DrivenRouter(prefill=(), decode=()), text, setup)


class DrivenRouter(Replay):
    """A worker whose name begins with P computes prompts; others decode. The test sets the time."""

    def __init__(self, config: RouterConfig = CONFIG, prefill: Sequence[str] = ("P",), decode: Sequence[str] = ("D",)):
        self.now = 100.0
        self.tickets = iter(range(1, 1000))
        self.machine = RouterMachine(config, lambda: next(self.tickets), frozenset({EOS}))
        self.actions: list[RouterAction] = []
        self.sent: dict[str, set[int]] = {}  # dispatch id -> indexes that the decode worker has put on its stream
        self.fleet(*prefill, *decode)

    def seen(self, action: RouterAction) -> str:
        return seen(action)

    def check(self) -> None:
        self.machine.check()

    def post(self, event: RouterEvent) -> list[RouterAction]:
        actions = self.machine.handle(event, self.now)
        self.machine.check()
        self.actions += actions
        return actions

    def of(self, kind: type[A]) -> list[A]:
        """All actions of a kind until now."""
        return [action for action in self.actions if isinstance(action, kind)]

    # ---- workers

    def fleet(self, *names: str) -> list[RouterAction]:
        """Workers join. What they learn of each other is not shown."""
        for name in names:
            self.enter(name)
        return []

    def enter(self, name: str, incarnation: int = 1, blocks: int = NUM_BLOCKS, **options: Any) -> list[RouterAction]:
        role = ServiceRole(options.get("role", "prefill" if name.startswith("P") else "decode"))
        layout = replace(LAYOUT, **{name: options[name] for name in ("model", "block_size") if name in options})
        load = replace(
            SERVING, state=WorkerState(options.get("state", "serving")), ledger={Column.FREE: blocks},
            step_cost=_step_cost(options.get("token_s")), gives_prefixes=bool(options.get("gives_prefixes")),
            router_calls=_router_calls(options.get("routers", "")),
        )  # fmt: skip
        cached = tuple(_hashes(options.get("cached", 0), options.get("adapter", "")))
        return self.post(events.WorkerJoined(name, role, agent(name, incarnation, layout, blocks), cached, load))

    def reports(self, name: str, state: str = "serving", free: int = NUM_BLOCKS, **load: Any) -> list[RouterAction]:
        """`token_s` is the measured cost of a token of a prompt; `backlog` are seconds of prompts that wait; `routers`
        are the calls of routers, as name:last:open."""
        ledger = {Column.FREE: free, Column.HELD: NUM_BLOCKS - free}
        cost, backlog = _step_cost(load.pop("token_s", None)), (load.pop("backlog"),) if "backlog" in load else ()
        calls = _router_calls(load.pop("routers", ""))
        reported = WorkerLoad(
            WorkerState(state), ledger=ledger, step_cost=cost, prompt_backlog=backlog, router_calls=calls, **load
        )
        return self.post(events.WorkerReported(name, WorkerChanges(reported)))

    def caches(self, name: str, num_tokens: int) -> list[RouterAction]:
        """A worker has the blocks of the sequence 1, 2, 3 ... in its prefix cache."""
        return self.post(events.WorkerReported(name, WorkerChanges(blocks=((_hashes(num_tokens), True),))))

    def paths(self, name: str, *peers: str) -> list[RouterAction]:
        """A worker reports that its paths lead to these peers and to no other."""
        known, peer_names = self.machine.workers.chosen(name).paths.keys(), {agent(peer).name for peer in peers}
        changed = tuple(PathStatus(peer, PathState.FINE) for peer in sorted(peer_names - known))
        changes = WorkerChanges(paths=changed, removed_paths=tuple(known - peer_names))
        return self.post(events.WorkerReported(name, changes))

    def lost(self, name: str) -> list[RouterAction]:
        return self.post(events.WorkerLost(name, "its process has ended"))

    def stream_lost(self, name: str) -> list[RouterAction]:
        return self.post(events.TokenStreamLost(name, "reset"))

    def load(self, *names: str) -> list[str]:
        """What the router believes: seconds of prompts that wait, sequences, and blocks without a taker."""
        views = {name: self.machine.workers.chosen(name).view for name in names}
        return [
            f"{name} {sum(view.backlog) + sum(view.arriving):.6g} s, {view.num_sequences} sequences, "
            f"{view.num_free_blocks} blocks"
            for name, view in views.items()
        ]

    # ---- requests

    def arrive(self, arriving: Request) -> list[RouterAction]:
        return self.post(events.RequestArrived(arriving, self.now, self.now + 60.0))

    def arrives(self, name: str, prompt: int = 8, max_tokens: int = 4, **options: Any) -> list[RouterAction]:
        """`others` are the other choices, `following` counts those of later calls, and `resumed` are the tokens that
        another router has delivered."""
        timeout_s, resumed = options.pop("timeout_s", 60.0), numbers_of(options.pop("resumed", ""))
        names = [name, *(choice for choice in options.pop("others", "").split(",") if choice)]
        following = options.pop("following", 0)
        first, *choices = [request(each, range(1, prompt + 1), max_tokens, **options) for each in names]
        deadline = self.now + timeout_s
        return self.post(events.RequestArrived(first, self.now, deadline, tuple(choices), tuple(resumed), following))

    def prefilled(self, dispatch: str, token: int, index: int = 0, **options: Any) -> list[RouterAction]:
        reason = FinishReason(options["ends"]) if "ends" in options else None
        sampled, cached = SampledToken(token, options.get("logprob")), options.get("cached", 0)
        handoff, read = options.get("handoff", "").encode(), options.get("read_tokens")
        queue_s = options.get("queue_s", 0.0)
        result = events.PrefillResult(index, sampled, reason, cached, queue_s, 0.0, handoff=handoff, read_tokens=read)
        return self.post(events.PrefillReturned(dispatch, result))

    def tokens_from(
        self, dispatch: str, first: int, *words: int | str, logprob: float | None = None
    ) -> list[RouterAction]:
        """A message of a decode worker with tokens of one call."""
        tokens, call = [SampledToken(token, logprob) for token in numbers_of(*words)], self.call_of(dispatch)
        self.sent.setdefault(dispatch, set()).update(range(first, first + len(tokens)))
        return self.post(step_tokens(*((call, first + place, token) for place, token in enumerate(tokens))))

    def step(self, *words: str) -> list[RouterAction]:
        """A message of a decode worker, with tokens of several calls as dispatch:index:token."""
        tokens = [word.split(":") for word in words]
        return self.post(step_tokens(*((self.call_of(d), int(i), SampledToken(int(token))) for d, i, token in tokens)))

    def call_of(self, dispatch: str) -> int:
        """The number of the decode call; 0 if the dispatch never started."""
        return next((start.call for start in self.of(events.StartDecode) if start.dispatch_id == dispatch), 0)

    def ends(self, dispatch: str, reason: str = "length", num_tokens: int = 0, **result: Any) -> list[RouterAction]:
        """The decode call returns. Without `num_tokens`, all of its tokens have arrived."""
        count = num_tokens or len(self.sent.get(dispatch, ())) or 1
        returned = events.DecodeResult(FinishReason(reason), count, 0, 0.0, 0.0, 0.0, 0.0, 0)
        return self.post(events.DecodeReturned(dispatch, replace(returned, **result)))

    def decode_error(self, dispatch: str, kind: str, *words: object) -> list[RouterAction]:
        return self.post(events.DecodeReturned(dispatch, _error_of(kind, words)))

    def prefill_error(self, dispatch: str, kind: str, *words: object) -> list[RouterAction]:
        return self.post(events.PrefillReturned(dispatch, _error_of(kind, words)))

    def cancelled(self, name: str) -> list[RouterAction]:
        return self.post(events.ClientCancelled(name))

    def prefix_refused(self, dispatch: str, name: str, kind: str) -> list[RouterAction]:
        """A worker makes no offer of its prefix."""
        return self.post(events.PrefixRefused(dispatch, name, _error_of(kind, ["no offer"])))

    def stopped(self, name: str) -> list[RouterAction]:
        return self.post(events.StopMatched(name))

    # ---- moves

    def asks(self, dispatch: str, reason: str = "drain") -> list[RouterAction]:
        """The decode worker asks to move the request."""
        return self._notice(events.MoveNotice(self.call_of(dispatch), None, MoveReason(reason)))

    def hands_over(self, dispatch: str, index: int) -> list[RouterAction]:
        """A side of a move says at which index the part of the target begins."""
        return self._notice(events.MoveNotice(self.call_of(dispatch), index))

    def _notice(self, notice: events.MoveNotice) -> list[RouterAction]:
        return self.post(events.StepTokens((), (), (), {}, [notice]))

    def cannot_begin(self, dispatch: str) -> list[RouterAction]:
        return self.post(events.MoveRefused(dispatch, core.errors.TransferFailed("it has ended")))

    # ---- the router

    def time(self, seconds: float) -> list[RouterAction]:
        """Let time pass, with a Tick at each deadline."""
        end, actions = self.now + seconds, []
        for deadline in deadlines_until(end, self.machine.next_deadline):
            self.now = max(self.now, deadline)
            actions += self.post(Tick())
        self.now = end
        return actions

    def config(self, **options: Any) -> list[RouterAction]:
        return self.post(events.ConfigChanged(replace(self.machine.workers.config, **options)))

    def start_expected(self, seconds: float) -> list[RouterAction]:
        return self.post(events.StartExpected(seconds))

    def counts(self) -> list[str]:
        view = self.machine.view
        moves = [f"{move.reason.value} {move.outcome} {count}" for move, count in view.num_moves().items()]
        deadlines = f"deadlines {len(self.machine._deadlines)}"
        return [f"queued {view.num_queued}", f"in flight {view.num_in_flight}", deadlines, *moves]


def seen(action: RouterAction) -> str:
    match action:
        case events.StartDecode():
            source = [] if action.source is None else [f"from {_name(action.source[1])}/{action.source[0]}"]
            words = [action.dispatch_id, action.worker_id, *source, *_start(action), *["moves"] * action.is_move]
            return f"decode {' '.join(words)}"
        case events.StartPrefill():
            words = [action.worker_id, f"for {_name(action.reader)}/{action.transfer_id}", *_start(action)]
            return f"prefill {action.dispatch_id} {' '.join(words)}"
        case events.StartMove(dispatch_id, source_id, worker_id, ticket, reader, num_tokens):
            return f"move {source_id} {worker_id} to {dispatch_id} {_name(reader)}/{ticket} {num_tokens} tokens"
        case events.ResumeSequence(dispatch_id, worker_id, ticket):
            return f"resume {dispatch_id} {worker_id}/{ticket}"
        case events.HandOver(dispatch_id, worker_id, ticket, handoff, timeout_s):
            return f"hand over {dispatch_id} {worker_id}/{ticket} {handoff.decode()} in {timeout_s:g} s"
        case events.WithdrawOffer(dispatch_id, worker_id, ticket):
            return f"withdraw {dispatch_id} {worker_id}/{ticket}"
        case events.CancelDispatch(dispatch_id, worker_id):
            return f"cancel {dispatch_id} {worker_id}".rstrip()
        case events.Deliver(request_id, first_index, token_ids, logprobs):
            return f"deliver {request_id} {first_index}: {runs(token_ids)}{' logprobs' * bool(logprobs)}"
        case events.Finish(request_id, outcome, ended):
            assert {attempt.number for attempt in ended} == set(range(1, outcome.attempts + 1)), "for the trace"
            return f"finish {request_id} {_outcome(outcome)}"
        case events.Fail(request_id, error, _, _):
            return f"fail {request_id} {_error(error)}"
        case events.OfferPrefix(dispatch_id, worker_id, ticket, reader, token_ids, _, limit_s):
            reads = f"{_name(reader)}/{ticket} {runs(token_ids)}"
            return f"offer {dispatch_id} {worker_id} to {reads} within {limit_s:.3g} s"
        case events.UpdatePeers(worker_id, changes):
            return f"peers {worker_id} {' '.join(map(_peer, changes))}"
        case _:
            assert_never(action)


def _start(action: events.StartDecode | events.StartPrefill) -> list[str]:
    """The delivered tokens behind the prompt, the prefix that is read, and the time that remains."""
    delivered = action.request.token_ids[action.request.num_prompt_tokens :]
    prefix = action.prefix
    reads = f"reads {prefix.num_tokens} tokens of {_name(prefix.agent)}/{prefix.transfer_id}" if prefix else ""
    timeout = [] if f"{action.timeout_s:g}" == "60" else [f"in {action.timeout_s:g} s"]
    return [*(["behind", runs(delivered)] if delivered else []), *([reads] if reads else []), *timeout]


def _outcome(outcome: events.Outcome) -> str:
    spent = {stage.value: outcome.timeline.seconds_in(stage) for stage in Stage if stage is not Stage.FINISHED}
    numbers = {
        "attempts": outcome.attempts if outcome.attempts > 1 else 0, "moves": outcome.num_moves,
        "cached": outcome.cached_tokens, "recomputed": outcome.recomputed_tokens,
        "resumed": outcome.num_resumed_tokens, "bytes": outcome.transferred_bytes, "first token": outcome.first_token_s,
        "block seconds": outcome.kv_block_seconds, **spent,
        "queue of the worker": outcome.prefill.queue_s if outcome.prefill else 0.0,
    }  # fmt: skip
    words = (outcome.finish_reason.value, outcome.path.value, f"{outcome.num_output_tokens} tokens")
    return ", ".join([*words, *counts(numbers.items())])


def _hashes(num_tokens: int, adapter: str = "") -> Sequence[int]:
    """Of the sequence 1, 2, 3 ..."""
    return sequence_hashes(range(1, num_tokens + 1), LAYOUT.block_size, root_hash("", adapter))


def _peer(change: PeerJoined | PeerLeft) -> str:
    if isinstance(change, PeerLeft):
        return f"left {change.name.removesuffix('@1')}"
    return f"{'owner' if change.is_owner else 'reader'} {_name(change.peer)}"


def _name(address: AgentAddress) -> str:
    return address.name.removesuffix("@1")


def _error(error: TandemError) -> str:
    if isinstance(error, QueueFull) and error.retry_after_s != 1.0:
        return f"{error_words(error)}, retry after {error.retry_after_s:.3g} s"
    return error_words(error)


def _error_of(kind: str, words: Sequence[object]) -> TandemError:
    error: TandemError = getattr(core.errors, kind)(" ".join(map(str, words)))
    return error


def _router_calls(words: str) -> dict[str, RouterCalls]:
    routers = [router.split(":") for router in words.split(",") if router]
    return {name: RouterCalls(int(last), int(num_open)) for name, last, num_open in routers}


def _step_cost(token_s: float | None) -> StepCost:
    return PRIOR if token_s is None else StepCost(0.01, 0.001, 0.0, token_s, 0.0)
