"""The load report of a vLLM worker, from the statistics of the engine's steps and the calls that are open.

vLLM counts steps, tokens and the use of its pool, and nothing by request until the first token. So the prompts that
wait are known from the calls, and the prompt tokens of each step count for the oldest of them, as vLLM computes them.
vLLM says how much of its pool is in use with each step only. Without open calls the pool counts as free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from core.cost.step_cost import StepWork
from core.cost.step_cost_fit import StepCostFit
from core.lifecycle import WorkerState
from core.scheduling.block_pool import Column
from core.scheduling.ledger import BlockHolder, Claim, SequenceState
from core.scheduling.worker_load import WorkerLoad
from vllm_worker.engine import EngineInfo, EngineStep
from worker.open_calls import OpenCalls
from worker.reported_load import ReportedCost, backlog_of
from worker.step_stats import StepStats


@dataclass(slots=True)
class EngineLoad:
    info: EngineInfo
    slo_itl_s: float = 0.0
    costs: StepCostFit = field(default_factory=StepCostFit)
    stats: StepStats = field(default_factory=StepStats)
    num_prefilled_tokens: int = 0
    num_sampled_tokens: int = 0
    num_bytes_read: int = 0
    read_seconds: float = 0.0
    _step: EngineStep = EngineStep(0, 0, 0.0, 0, 0)  # noqa: RUF009 - the newest one
    _step_ended_at: float = 0.0
    _prompt_came_at: float = 0.0  # the newest one that found no other request
    _prompts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by request id: tokens, and those computed
    _contexts: dict[str, int] = field(default_factory=dict)  # by request id: tokens of a sequence in decode
    _reported_cost: ReportedCost = field(init=False)

    def __post_init__(self) -> None:
        self._reported_cost = ReportedCost(self.costs.cost)

    # ---- requests

    def add_prompt(self, request_id: str, num_tokens: int, now: float) -> None:
        """A prompt waits for its steps."""
        if not self._prompts and not self._contexts:
            self._prompt_came_at = now
        self._prompts[request_id] = (num_tokens, 0)

    def note_tokens(self, request_id: str, num_tokens: int, context: int) -> None:
        """A sequence has `num_tokens` new tokens, and `context` in all."""
        self._prompts.pop(request_id, None)
        self._contexts[request_id] = context
        self.num_sampled_tokens += num_tokens

    def forget(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        self._contexts.pop(request_id, None)

    # ---- steps

    def record(self, step: EngineStep, now: float) -> None:
        """A step has ended. vLLM's own duration leaves the computation out, so the reports' times are compared."""
        goes_on = self._step.num_running or self._step.num_waiting
        started_at = self._step_ended_at if goes_on else self._prompt_came_at
        seconds = now - started_at if started_at >= self._step_ended_at else 0.0  # 0 = not known
        self._step, self._step_ended_at = step, now
        work = StepWork(step.num_decodes, self._decode_context, step.prompt_tokens, self._compute(step.prompt_tokens))
        self.num_prefilled_tokens += step.prompt_tokens
        self.num_bytes_read += step.read_bytes
        self.read_seconds += step.read_seconds
        self.stats.num_sequences = step.num_running
        self.stats.num_tokens = step.num_decodes + step.prompt_tokens
        if seconds > 0.0 and self.stats.num_tokens:
            self.costs.record(work, seconds)
            self.stats.record(work, seconds)

    def _compute(self, num_tokens: int) -> float:
        """Count the prompt tokens of a step for the oldest prompts. Returns the pairs that they attend to."""
        pairs = 0.0
        for request_id, (size, computed) in self._prompts.items():
            taken = min(num_tokens, size - computed)
            self._prompts[request_id] = (size, computed + taken)
            pairs += taken * (computed + taken / 2)
            num_tokens -= taken
            if not num_tokens:
                break
        return pairs

    @property
    def _decode_context(self) -> int:
        return sum(self._contexts.values())

    @property
    def num_waiting(self) -> int:
        """Prompts without a computed token."""
        return sum(not computed for _, computed in self._prompts.values())

    @property
    def num_queued_tokens(self) -> int:
        return sum(size - computed for size, computed in self._prompts.values())

    # ---- the report

    def ledger(self, num_open: int) -> Mapping[Column, int]:
        """vLLM does not tell blocks of requests from blocks that its own connector keeps for another engine."""
        step, num_blocks = self._step, self.info.num_blocks
        ledger = dict.fromkeys(Column, 0)
        for holder in step.holders:
            ledger[holder.claim.column] += holder.num_counted
        num_used = round(step.kv_usage * num_blocks) if num_open or step.num_lent else 0
        ledger[Column.HELD] = max(0, num_used - sum(ledger.values()))
        ledger[Column.FREE] = num_blocks - sum(ledger.values())
        return ledger

    def holders(self, calls: OpenCalls, now: float) -> list[BlockHolder]:
        """The transfers, and the sequences by their tokens: vLLM does not tell their blocks."""
        left = self.ledger(len(calls))[Column.HELD]
        found = [(holder.claim, holder.num_counted) for holder in self._step.holders]
        computed = {name: (SequenceState.WAITING, done) for name, (_, done) in self._prompts.items() if done}
        computed |= {name: (SequenceState.RUNNING, num_tokens) for name, num_tokens in self._contexts.items()}
        for name, (state, num_tokens) in computed.items():
            num_blocks = self.info.layout.num_blocks_for(num_tokens)
            found.append((Claim(name, state, range(num_blocks), calls.timelines[name].begun_at), min(left, num_blocks)))
            left -= min(left, num_blocks)
        found.sort(key=lambda each: each[0].since)
        return [BlockHolder(claim, num_counted, now - claim.since) for claim, num_counted in found]

    @property
    def num_lent(self) -> int:
        """References of peers to blocks, after the newest step. vLLM makes steps until there are none."""
        return self._step.num_lent

    def worker_load(self, calls: OpenCalls, draining: bool) -> WorkerLoad:
        stats, cost = self.stats, self._reported_cost.update(self.costs.cost)
        prompts = [(size - computed, computed) for size, computed in self._prompts.values() if size > computed]
        return WorkerLoad(
            state=WorkerState.DRAINING if draining else WorkerState.SERVING,
            num_running=len(self._contexts),
            num_waiting=self.num_waiting,
            num_calls=len(calls),
            router_calls=dict(calls.router_calls),
            num_queued_tokens=self.num_queued_tokens,
            ledger=self.ledger(len(calls)),
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_sampled_tokens=self.num_sampled_tokens,
            transferred_bytes=self.num_bytes_read,
            transfer_seconds=self.read_seconds,
            step_cost=cost,
            max_step_tokens=self.info.max_step_tokens,
            num_decoding=len(self._contexts),
            decode_context=self._decode_context,
            prompt_backlog=backlog_of(prompts, cost),
            batch_sequences=stats.num_sequences,
            batch_tokens=stats.num_tokens,
            busy_seconds=stats.seconds,
            decode_steps=stats.decode_steps,
            decode_step_seconds=stats.decode_seconds,
            slo_itl_s=self.slo_itl_s,
            takes_moves=self.info.agent is not None,
            gives_prefixes=self.info.agent is not None,
        )

    def check(self, open_calls: Collection[str]) -> None:
        assert not self._prompts.keys() & self._contexts.keys()
        assert self._prompts.keys() | self._contexts.keys() <= set(open_calls)
