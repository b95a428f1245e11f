"""The whole check, question by question. It needs a stack that serves nobody else meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass

from conformance import behaviour_probes as behaviour
from conformance import laws, token_probes
from conformance.fault_probes import DRAIN, KILL, FaultProbe
from conformance.findings import Finding, Question
from conformance.http_exchange import Endpoint
from conformance.prompts import PromptSource
from conformance.stack import Stack, StackError
from conformance.token_probes import TokenProbes

WHOLE_S = 1800.0  # of a check; beyond: the questions that are left are not shown


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """`metrics`: empty for `/metrics` of the stack. `seed` decides the prompts: a new one meets no cached prefix."""

    stack: Endpoint
    reference: Endpoint | None = None
    metrics: tuple[Endpoint, ...] = ()
    model: str = ""
    deadline_header: str = ""
    kill: str = ""
    drain: str = ""
    limit_s: float = 60.0  # of an answer, and of a command
    whole_s: float = WHOLE_S
    seed: int = 0


async def check(plan: CheckPlan) -> AsyncGenerator[Finding]:
    """Each finding as soon as there is one, one for each question. Raises `StackError`."""
    end = asyncio.get_running_loop().time() + plan.whole_s
    late = f"the check has taken {plan.whole_s:g} s"

    async def in_time(question: Question, probe: Awaitable[Finding]) -> Finding:
        try:
            async with asyncio.timeout_at(end):
                return await probe
        except TimeoutError:
            return question.not_shown(late)

    pages = plan.metrics or (Endpoint.parse(f"{plan.stack.url}/metrics", plan.stack.key),)
    stack = Stack(plan.stack, plan.limit_s, pages, plan.model)
    # A decode worker as the reference has wrong KV in its cache, if that is what was handed over to it.
    salt = f"tandem check {plan.seed}"
    reference = Stack(plan.reference, plan.limit_s, model=plan.model, salt=salt) if plan.reference else None
    try:
        async with asyncio.timeout_at(end):
            idle = await stack.in_use()
            await _meet(stack, reference)
    except TimeoutError:
        raise StackError(f"{plan.stack.url}: {late}") from None
    source = PromptSource(plan.seed)
    tokens = TokenProbes(stack, reference, source)
    try:
        async with asyncio.timeout_at(end):
            found: Sequence[Finding] = await tokens.run()
    except TimeoutError:
        found = [question.not_shown(late) for question in token_probes.QUESTIONS]
    for finding in found:
        yield finding
    yield await in_time(behaviour.ERRORS, behaviour.errors(stack))
    yield await in_time(behaviour.READER, behaviour.slow_readers(stack, source, tokens.bound))
    yield await in_time(behaviour.DEADLINE, behaviour.deadline(stack, source, plan.deadline_header))
    yield await in_time(behaviour.CANCEL, behaviour.cancel(stack, source, idle))
    for finding in laws.findings_of(stack.records, tokens.pairs):
        yield finding
    faults = FaultProbe(stack, source, tokens.bound)
    yield await in_time(DRAIN, faults.run(DRAIN, plan.drain))
    yield await in_time(KILL, faults.run(KILL, plan.kill))
    yield await in_time(behaviour.IDLE, behaviour.idle_again(stack, idle))


async def _meet(stack: Stack, reference: Stack | None) -> None:
    await stack.meet()
    if reference is not None:
        await reference.meet()
        stack.context = stack.context or reference.context  # a proxy without /v1/models does not say it
        # Both are asked alike: another set of fields would give other answers.
        stack.options = reference.options = min(stack.options, reference.options, key=len)
