"""The words of transcripts of RouterMachine (`tests/support/transcripts.py`), and how its actions are written.

    a lost prefill worker is replaced                                    the name of a test
      fleet P1 P2 D
      arrives r   -> decode r#1 D from P1/1; prefill r#1 P1 for D/1      D reads the KV of P1 by transfer id 1
      lost P1     -> peers D left P1; cancel r#1
                  -> decode r#2 D from P2/2; prefill r#2 P2 for D/2

A number that has its usual value is not written: 60 seconds to the deadline, no cached token, one attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

import core.errors
from core.block_hash import sequence_hashes
from core.cost.step_cost import PRIOR, StepCost
from core.errors import QueueFull, TandemError
from core.handoff import AgentAddress
from core.lifecycle import FinishReason, MoveReason, ServiceRole, Stage, WorkerState
from core.paths import PathState, PathStatus, PeerJoined, PeerLeft
from core.scheduling.block_pool import Column
from core.scheduling.worker_load import WorkerChanges
from core.step import SampledToken
from router.requests import events
from router.requests.events import RouterAction
from tests.support.transcripts import Replay, counts, error_words, numbers_of, runs, transcripts_of
from tests.unit.router.driving_router import (
    CONFIG,
    LAYOUT,
    NUM_BLOCKS,
    SERVING,
    DrivenRouter,
    agent,
    request,
    step_tokens,
)


def transcripts(text: str, setup: str = "") -> Callable[[str], None]:
    return transcripts_of(RouterReplay, text, setup)


class RouterReplay(DrivenRouter, Replay):
    """A worker whose name begins with P computes prompts; others decode."""

    def __init__(self) -> None:
        super().__init__(CONFIG, (), ())

    def seen(self, action: RouterAction) -> str:
        return seen(action)

    def check(self) -> None:
        self.machine.check()

    # ---- workers

    def fleet(self, *names: str, **options: Any) -> list[RouterAction]:
        """Workers join. What they learn of each other is not shown."""
        for name in names:
            self.enter(name, **options)
        return []

    def enter(self, name: str, incarnation: int = 1, blocks: int = NUM_BLOCKS, **options: Any) -> list[RouterAction]:
        role = ServiceRole(options.get("role", "prefill" if name.startswith("P") else "decode"))
        layout = replace(LAYOUT, model=options.get("model", LAYOUT.model))
        load = replace(SERVING, ledger={Column.FREE: blocks}, step_cost=_step_cost(options.get("token_s")))
        return self.post(events.WorkerJoined(name, role, agent(name, incarnation, layout, blocks), (), load))

    def reports(self, name: str, state: str = "serving", free: int = NUM_BLOCKS, **load: Any) -> list[RouterAction]:
        """`token_s` is the measured cost of a token of a prompt; `backlog` are seconds of prompts that wait."""
        ledger = {Column.FREE: free, Column.HELD: NUM_BLOCKS - free}
        cost, backlog = _step_cost(load.pop("token_s", None)), (load.pop("backlog"),) if "backlog" in load else ()
        return self.report(name, WorkerState(state), ledger=ledger, step_cost=cost, prompt_backlog=backlog, **load)

    def caches(self, name: str, num_tokens: int) -> list[RouterAction]:
        """A worker has the blocks of the sequence 1, 2, 3 ... in its prefix cache."""
        return self.store(name, *sequence_hashes(range(1, num_tokens + 1), LAYOUT.block_size))

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

    # ---- requests

    def arrives(self, name: str, prompt: int = 8, max_tokens: int = 4, **options: Any) -> list[RouterAction]:
        """`others` are the other choices, and `resumed` are the tokens that another router has delivered."""
        timeout_s, tenant = options.pop("timeout_s", 60.0), options.pop("tenant", "")
        others, resumed = options.pop("others", "").split(), numbers_of(options.pop("resumed", ""))
        first, *choices = [
            replace(request(each, range(1, prompt + 1), max_tokens, **options), tenant=tenant)
            for each in (name, *(choice for names in others for choice in names.split(",")))
        ]
        return self.post(events.RequestArrived(first, self.now, self.now + timeout_s, tuple(choices), tuple(resumed)))

    def prefilled(self, dispatch: str, token: int, index: int = 0, **options: Any) -> list[RouterAction]:
        reason = FinishReason(options["ends"]) if "ends" in options else None
        sampled, cached = SampledToken(token, options.get("logprob")), options.get("cached", 0)
        handoff = options.get("handoff", "").encode()
        result = events.PrefillResult(index, sampled, reason, cached, options.get("queue_s", 0.0), 0.0, handoff=handoff)
        return self.post(events.PrefillReturned(dispatch, result))

    def tokens_from(
        self, dispatch: str, first: int, *words: int | str, logprob: float | None = None
    ) -> list[RouterAction]:
        tokens = [SampledToken(token, logprob) for token in numbers_of(*words)]
        return self.sampled_tokens(first, *tokens, dispatch=dispatch)

    def step(self, *words: str) -> list[RouterAction]:
        """A message of a decode worker, with tokens of several calls as dispatch:index:token."""
        tokens = [word.split(":") for word in words]
        return self.post(step_tokens(*((self.call_of(d), int(i), SampledToken(int(token))) for d, i, token in tokens)))

    def ends(self, dispatch: str, reason: str = "length", num_tokens: int = 0, **result: Any) -> list[RouterAction]:
        """The decode call returns. Without `num_tokens`, all of its tokens have arrived."""
        count = num_tokens or len(self.sent.get(dispatch, ())) or 1
        returned = events.DecodeResult(FinishReason(reason), count, 0, 0.0, 0.0, 0.0, 0.0, 0)
        return self.post(events.DecodeReturned(dispatch, replace(returned, **result)))

    def decode_error(self, dispatch: str, kind: str, *words: object) -> list[RouterAction]:
        return self.decode_fails(getattr(core.errors, kind)(" ".join(map(str, words))), dispatch)

    def prefill_error(self, dispatch: str, kind: str, *words: object) -> list[RouterAction]:
        return self.prefill_fails(getattr(core.errors, kind)(" ".join(map(str, words))), dispatch)

    def cancelled(self, name: str) -> list[RouterAction]:
        return self.post(events.ClientCancelled(name))

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
        return self.pass_time(seconds)

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
        case events.HandOver(dispatch_id, worker_id, ticket, handoff, _):
            return f"hand over {dispatch_id} {worker_id}/{ticket} {handoff.decode()}"
        case events.CancelDispatch(dispatch_id):
            return f"cancel {dispatch_id}"
        case events.Deliver(request_id, first_index, token_ids, logprobs):
            return f"deliver {request_id} {first_index}: {runs(token_ids)}{' logprobs' * bool(logprobs)}"
        case events.Finish(request_id, outcome, _):
            return f"finish {request_id} {_outcome(outcome)}"
        case events.Fail(request_id, error, _, _):
            return f"fail {request_id} {_error(error)}"
        case events.UpdatePeers(worker_id, changes):
            return f"peers {worker_id} {' '.join(map(_peer, changes))}"
        case _:
            assert_never(action)


def _start(action: events.StartDecode | events.StartPrefill) -> list[str]:
    """The delivered tokens behind the prompt, and the time that remains."""
    delivered = action.request.token_ids[action.request.num_prompt_tokens :]
    timeout = [] if f"{action.timeout_s:g}" == "60" else [f"in {action.timeout_s:g} s"]
    return [*(["behind", runs(delivered)] if delivered else []), *timeout]


def _outcome(outcome: events.Outcome) -> str:
    spent = {stage.value: outcome.timeline.seconds_in(stage) for stage in Stage if stage is not Stage.FINISHED}
    numbers = {
        "attempts": outcome.attempts if outcome.attempts > 1 else 0, "moves": outcome.num_moves,
        "cached": outcome.cached_tokens, "recomputed": outcome.recomputed_tokens,
        "resumed": outcome.num_resumed_tokens, "first token": outcome.first_token_s,
        "block seconds": outcome.kv_block_seconds, **spent,
        "queue of the worker": outcome.prefill.queue_s if outcome.prefill else 0.0,
    }  # fmt: skip
    words = (outcome.finish_reason.value, outcome.path.value, f"{outcome.num_output_tokens} tokens")
    return ", ".join([*words, *counts(numbers.items())])


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


def _step_cost(token_s: float | None) -> StepCost:
    return PRIOR if token_s is None else StepCost(0.01, 0.001, 0.0, token_s, 0.0)
