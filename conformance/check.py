"""The whole check, question by question. It needs a stack that serves nobody else meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from conformance import behaviour_probes as behaviour
from conformance import laws
from conformance.fault_probes import DRAIN, KILL, FaultProbe
from conformance.findings import Finding
from conformance.http_exchange import Endpoint
from conformance.prompts import PromptSource
from conformance.stack import Stack
from conformance.token_probes import TokenProbes


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """`metrics`: empty for `/metrics` of the stack. `seed` decides the prompts: a new one meets no cached prefix."""

    stack: Endpoint
    reference: Endpoint | None = None
    metrics: tuple[Endpoint, ...] = ()
    model: str = ""
    reference_model: str = ""
    deadline_header: str = ""
    kill: str = ""
    drain: str = ""
    limit_s: float = 60.0
    seed: int = 0


async def check(plan: CheckPlan) -> AsyncIterator[Finding]:
    """Each finding as soon as there is one. Raises `StackError`."""
    pages = plan.metrics or (Endpoint.parse(f"{plan.stack.url}/metrics", plan.stack.key),)
    stack = Stack(plan.stack, plan.limit_s, pages, plan.model)
    reference = Stack(plan.reference, plan.limit_s, model=plan.reference_model) if plan.reference else None
    idle = await stack.in_use()
    await stack.meet()
    if reference is not None:
        await reference.meet()
        # Both are asked alike: another set of fields would give other answers.
        stack.options = reference.options = min(stack.options, reference.options, key=len)
    source = PromptSource(plan.seed)
    tokens = TokenProbes(stack, reference, source)
    for finding in await tokens.run():
        yield finding
    yield await behaviour.errors(stack)
    yield await behaviour.slow_readers(stack, source, tokens.bound)
    yield await behaviour.deadline(stack, source, plan.deadline_header)
    yield await behaviour.cancel(stack, source, idle)
    for finding in laws.findings_of(stack.records, tokens.pairs):
        yield finding
    faults = FaultProbe(stack, source, tokens.bound)
    yield await faults.run(DRAIN, plan.drain)
    yield await faults.run(KILL, plan.kill)
    yield await behaviour.idle_again(stack, idle)
