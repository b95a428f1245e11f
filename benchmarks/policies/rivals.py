"""The rules of other routers, as policies of this router. Every policy sees the same workers.

A rule gives each worker with room a number; the lowest wins, and equal workers take turns. A rival chooses a prefill
worker P by one rule and a decode worker D by another, one after the other. D computes a prompt itself only if no
prefill worker is alive. Where a router's authors say nothing about D, the rival takes the D with the fewest requests.

Differences from the originals, all of which favour the rivals: the load of a worker is what it reports, reconciled with
the calls on the way, where Dynamo has a guess of its own, SGLang counts requests, and llm-d reads metrics 50 ms apart.
Mooncake's P may fetch a better prefix from another P; prefill workers do not do that here, so the rule prices the
prefix that P has. Its refusals of requests that miss the SLO are off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.config import RouterConfig
from core.cost.step_cost import StepWork
from router.routing.policy import (
    Candidate,
    Option,
    Policy,
    RoutingQuestion,
    SecondsPolicy,
    WorkerView,
    alone,
    pair,
    prompt_times,
)

Rule = Callable[[RoutingQuestion, Sequence[Option]], Sequence[float]]

DYNAMO_PREFILL_LOAD_SCALE = 1.0
SGLANG_MAX_DIFFERENCE, SGLANG_MAX_RATIO, SGLANG_MIN_MATCH = 64, 1.5, 0.3
LLM_D_PREFIX, LLM_D_QUEUE, LLM_D_KV_USE = 3.0, 2.0, 2.0


class Rival:
    def __init__(self, prefill: Rule, decode: Rule) -> None:
        self._prefill, self._decode = prefill, decode
        self._num_chosen = 0
        self.compared: Sequence[Candidate] = ()

    def choose(self, question: RoutingQuestion) -> Candidate | None:
        found = self._ranked(question, 1)
        self._num_chosen += bool(found)
        self.compared = found
        return found[0] if found else None

    def candidates(self, question: RoutingQuestion) -> list[Candidate]:
        return self._ranked(question, None)

    def _ranked(self, question: RoutingQuestion, limit: int | None) -> list[Candidate]:
        """The first `limit` of each pool, paired."""
        decode = self._order(self._decode, question, question.decode)[:limit]
        if not question.prefill_alive:
            return [alone(question, *option) for option in decode]
        return [
            pair(question, prompt_times(question, *p), *p, *d)
            for p in self._order(self._prefill, question, question.prefill)[:limit]
            for d in decode
        ]

    def _order(self, rule: Rule, question: RoutingQuestion, options: Sequence[Option]) -> list[Option]:
        values, count = rule(question, options), len(options)
        order = sorted(range(count), key=lambda index: (values[index], (index - self._num_chosen) % count))
        return [options[index] for index in order]


# ---- rules without a cache


def take_turns(_: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    return [0.0] * len(options)


def fewest_requests(_: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    return [worker.num_sequences for worker, _ in options]


def least_queue(_: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """Seconds of prompt work to do."""
    return [sum(worker.backlog) + sum(worker.arriving) for worker, _ in options]


# ---- rules of routers that know the caches


def longest_prefix(_: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    return [-cached for _, cached in options]


def dynamo_prefill(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """Blocks to compute, those in the queue included, and blocks of sequences in decode."""
    costs = []
    for worker, cached in options:
        tokens = queued_tokens(worker) + question.num_tokens
        prefill_blocks = max(tokens / question.block_size - cached / question.block_size, 0.0)
        costs.append(DYNAMO_PREFILL_LOAD_SCALE * prefill_blocks + worker.decode_context / question.block_size)
    return costs


def dynamo_decode(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """Blocks of sequences in decode: D is chosen without a look at its cache."""
    return [worker.decode_context / question.block_size for worker, _ in options]


def queued_tokens(worker: WorkerView) -> float:
    """The prompt tokens to compute on a worker. A view has them as seconds, by size of the prompt."""
    total = 0.0
    for backlog in (worker.backlog, worker.arriving):
        for place, seconds in enumerate(backlog):
            prompt_s = 1.5 * 2**place / 1e3  # the middle of the size class
            total += seconds / prompt_s * worker.cost.tokens_within(prompt_s)
    return total


def cache_aware(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """SGLang: by load if the load is uneven or no worker has enough of the prompt, else by the cache."""
    requests = fewest_requests(question, options)
    most, fewest = max(requests, default=0.0), min(requests, default=0.0)
    uneven = most - fewest > SGLANG_MAX_DIFFERENCE and most > SGLANG_MAX_RATIO * fewest
    best = max((cached for _, cached in options), default=0)
    if uneven or best <= SGLANG_MIN_MATCH * question.num_tokens:
        return requests
    return longest_prefix(question, options)


def llm_d(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """The weighted sum of three scores in [0, 1]: cached share of the prompt, shortness of the queue, free KV share."""
    requests = fewest_requests(question, options)
    most, fewest = max(requests, default=0.0), min(requests, default=0.0)
    costs = []
    for (worker, cached), count in zip(options, requests, strict=True):
        queue = (most - count) / (most - fewest) if most > fewest else 1.0
        free = min(1.0, max(0.0, worker.num_free_blocks / worker.num_blocks))
        costs.append(-(LLM_D_PREFIX * cached / question.num_tokens + LLM_D_QUEUE * queue + LLM_D_KV_USE * free))
    return costs


def mooncake_prefill(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """The predicted seconds of queue and prefill."""
    return [prompt_times(question, worker, cached).total_s for worker, cached in options]


def token_gap(question: RoutingQuestion, options: Sequence[Option]) -> list[float]:
    """Seconds of a step of D with the new sequence."""
    return [
        worker.cost.seconds(StepWork(worker.num_decoding + 1, worker.decode_context + question.num_tokens, 0, 0.0))
        for worker, _ in options
    ]


@dataclass(frozen=True, slots=True)
class Named:
    """A policy of the benchmark. `rules` are those for P and D; None = the policy of Tandem."""

    name: str
    rules: tuple[Rule, Rule] | None = None

    def build(self, config: RouterConfig) -> Policy:
        return SecondsPolicy(config) if self.rules is None else Rival(*self.rules)


OURS = Named("Tandem")
RIVALS = (
    Named("round robin", (take_turns, take_turns)),
    Named("least queue", (least_queue, fewest_requests)),
    Named("longest prefix", (longest_prefix, fewest_requests)),
    Named("Dynamo", (dynamo_prefill, dynamo_decode)),
    Named("SGLang", (cache_aware, fewest_requests)),
    Named("llm-d", (llm_d, llm_d)),
    Named("Mooncake", (mooncake_prefill, token_gap)),
)
POLICIES = {policy.name: policy for policy in (OURS, *RIVALS)}
