"""Predicted times of a fleet of P prefill and D decode workers at a demand, from the fitted times of their steps.

Decode: L = rate x output tokens / D are the tokens per second of a worker, N the sequences in its steps.

    step = step_s + N x a                   a: of a sequence with its context
    N    = L x step                         Little's law
    =>  step = step_s / (1 - L x a)         without room for more once L x a >= 1

    A request in MISSES meets N + NORMAL x sqrt(N) sequences or more. What the step limit leaves of a step is spare:
    the decode worker computes prompts in it. A step of the limit has L x limit sequences, which leave
    1 - L x a - step_s / limit of the time.

Prefill: a queue M/G/k, where k is P and what the decode workers have to spare, as a number of prefill workers. The
share of requests that wait, and their mean wait, are Sakasegawa's approximation; the wait has an exponential tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from core.cost.step_cost import StepCost
from core.traffic import WorkerTraffic

MISSES = 0.05  # share of the requests that may be slower than predicted
NORMAL = 1.645  # so many standard deviations above the mean lies a share MISSES of a normal distribution
POOL_SHARE = 0.9  # of a KV pool that running sequences may take
TINY_S = 1e-6
HALVINGS = 12  # of the range of rates, in the search for a capacity
MESSAGES_S = 0.005  # between client, router and worker


@dataclass(frozen=True, slots=True)
class Demand:
    """Means over requests."""

    rate: float  # requests/s
    prompt_tokens: float
    uncached_tokens: float  # of the prompt
    variation: float  # of the uncached tokens: variance / mean^2
    output_tokens: float

    def __str__(self) -> str:
        return (
            f"{self.rate:.3g} requests/s of {self.prompt_tokens:.0f} + {self.output_tokens:.0f} tokens, "
            f"{self.uncached_tokens:.0f} not cached"
        )


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker of one role."""

    cost: StepCost
    step_limit_s: float  # of a step with sequences in decode; 0 = none
    max_step_tokens: int
    pool_tokens: int

    @classmethod
    def of(cls, workers: list[WorkerTraffic]) -> WorkerModel | None:
        """The worker in the middle, by the time of a prompt; None if none has measured a step."""
        measured = [
            cls(worker.step_cost, worker.step_limit_s, worker.max_step_tokens, worker.pool_tokens)
            for worker in workers
            if worker.step_cost is not None
        ]
        measured.sort(key=lambda model: model.cost.prompt_seconds(1000))
        return measured[len(measured) // 2] if measured else None

    def prompt_s(self, demand: Demand) -> tuple[float, float]:
        """The mean time of a prompt, and its variance / mean^2.

        A part grows with the square of the length. `growth` is by how many per cent the time grows with one per cent of
        length, and so does the scatter.
        """
        cost, tokens = self.cost, demand.uncached_tokens
        start = demand.prompt_tokens - tokens
        linear_s = tokens * (cost.token_s + start * cost.pair_s) + cost.step_s * max(1.0, tokens / self.max_step_tokens)
        square_s = tokens**2 * (1.0 + demand.variation) / 2.0 * cost.pair_s
        if not linear_s + square_s:  # steps that cost nothing: a worker with a fake model
            return TINY_S, demand.variation
        growth = (linear_s + 2.0 * square_s) / (linear_s + square_s)
        return linear_s + square_s, demand.variation * growth**2


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; `math.inf` where the fleet cannot follow."""

    ttft_s: float  # of all but MISSES of the requests
    mean_ttft_s: float
    tpot_s: float  # of all but MISSES of the requests

    def __str__(self) -> str:
        if math.isinf(self.ttft_s):
            return "too many for them"
        return f"TTFT {self.ttft_s:.3g} s, TPOT {self.tpot_s * 1e3:.3g} ms"


NEVER = Times(math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class FleetModel:
    prefill: WorkerModel
    decode: WorkerModel
    local_prefill: bool = True  # decode workers compute prompts while prefill workers serve

    def times(self, num_prefill: int, num_decode: int, demand: Demand) -> Times:
        if not num_decode:
            return NEVER
        tpot_s, spare = self._decode(num_decode, demand)
        if math.isinf(tpot_s):
            return NEVER
        return Times(*self._first_token(num_prefill, num_decode, spare, demand), tpot_s)

    def follows(self, num_prefill: int, num_decode: int, demand: Demand) -> bool:
        """Whether no queue grows without end."""
        return not math.isinf(self.times(num_prefill, num_decode, demand).ttft_s)

    def capacity(self, num_prefill: int, num_decode: int, demand: Demand) -> float:
        """The highest rate that these workers can follow, in requests/s."""
        prompt_s = min(model.prompt_s(demand)[0] for model in (self.prefill, self.decode))
        low, high = 0.0, (num_prefill + num_decode) / prompt_s
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            if self.follows(num_prefill, num_decode, replace(demand, rate=middle)):
                low = middle
            else:
                high = middle
        return low

    def _decode(self, num_decode: int, demand: Demand) -> tuple[float, float]:
        """The time of a token, and the share of a decode worker's time that prompts may take."""
        cost, model = self.decode.cost, self.decode
        tokens_per_s = demand.rate * demand.output_tokens / num_decode
        sequence_s = cost.sequence_s + (demand.prompt_tokens + demand.output_tokens / 2) * cost.context_s
        busy = tokens_per_s * sequence_s
        if busy >= 1.0:
            return math.inf, 0.0
        num_sequences = tokens_per_s * cost.step_s / (1.0 - busy)
        many = num_sequences + NORMAL * math.sqrt(num_sequences)
        if many * (demand.prompt_tokens + demand.output_tokens) > POOL_SHARE * model.pool_tokens:
            return math.inf, 0.0
        step_s = cost.step_s + many * sequence_s
        limit_s = model.step_limit_s
        if not limit_s:
            return step_s, 1.0 - busy
        # Prompts stretch every step to the limit, so that more sequences are in decode at the same time.
        return step_s, max(0.0, 1.0 - busy - cost.step_s / limit_s)

    def _first_token(self, num_prefill: int, num_decode: int, spare: float, demand: Demand) -> tuple[float, float]:
        """The time to the first token: of all but MISSES of the requests, and the mean."""
        on_decode_s, variation = self.decode.prompt_s(demand)
        if num_prefill:
            work_s, variation = self.prefill.prompt_s(demand)
            num_servers = num_prefill + (num_decode * spare * work_s / on_decode_s if self.local_prefill else 0.0)
        elif spare:
            work_s, num_servers = on_decode_s / spare, float(num_decode)
        else:
            return math.inf, math.inf
        busy = demand.rate * work_s / num_servers
        if busy >= 1.0:
            return math.inf, math.inf
        waits = busy ** (math.sqrt(2.0 * (num_servers + 1.0)) - 1.0)  # share of the requests that wait
        wait_s = work_s * (1.0 + variation) / 2.0 / (num_servers * (1.0 - busy))  # of those, exponential
        mean_s = MESSAGES_S + work_s + waits * wait_s
        variance = work_s**2 * variation + wait_s**2 * waits * (2.0 - waits)
        return mean_s + NORMAL * math.sqrt(variance), mean_s
