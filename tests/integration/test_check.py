"""`tandem check` against a fleet: nothing fails without a fault, and a proxy with any one fault is found."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import pytest_asyncio

from cli.commands.check import run_check
from cli.screens.terminal import Terminal
from conformance import behaviour_probes, laws, token_probes
from conformance.check import CheckPlan, check
from conformance.findings import Finding, Outcome
from conformance.http_exchange import Endpoint
from gateway.fleets import Fleets
from tests.support.deployment import Deployment, deploy, tiny_config
from tests.support.faulty_proxy import FAULTS, faulty_proxy
from tests.support.gateway import serving_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What fails with a fault. Others may fail, too: a cut stream has no usage.
FOUND_BY = {
    "flips a token": token_probes.ALONE,
    "drifts": token_probes.ALONE,
    "swaps streams": token_probes.CROWD,
    "answers 200 with nothing": laws.NOT_EMPTY,
    "hangs": laws.ANSWERED,
    "cuts streams": laws.ANSWERED,
    "counts wrong": laws.USAGE,
    "finishes twice": laws.EVENTS,
    "gives each event a role": laws.EVENTS,
    "has untyped errors": behaviour_probes.ERRORS,
    "keeps requests of clients that left": behaviour_probes.CANCEL,
    "ignores deadlines": behaviour_probes.DEADLINE,
}
NOT_SHOWN_HERE = {"tokens: no answer has the code of another prompt", "faults: a worker is drained",
                  "faults: a worker is killed"}  # fmt: skip  # a fake model repeats nothing; there is no command


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deploy(tiny_config("fake:slow")) as deployed:
        yield deployed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plan(deployment: Deployment) -> AsyncIterator[CheckPlan]:
    async with serving_gateway(Fleets([deployment.router.calls])) as url:
        gateway, page = Endpoint.parse(url), Endpoint.parse(f"{url}/metrics")
        yield CheckPlan(gateway, gateway, (page,), deadline_header="x-tandem-timeout-ms")


async def findings_of(plan: CheckPlan, fault: str = "") -> list[Finding]:
    async with faulty_proxy(plan.stack.url, fault) as url:
        return [finding async for finding in check(replace(plan, stack=Endpoint.parse(url)))]


def failures(findings: list[Finding]) -> dict[str, str]:
    return {one.question: one.why for one in findings if one.outcome is Outcome.FAILS}


async def test_a_fleet_without_a_fault_fails_nothing(plan: CheckPlan, deployment: Deployment) -> None:
    findings = await findings_of(plan)
    assert not failures(findings)
    assert {one.question for one in findings if one.outcome is Outcome.NOT_SHOWN} == NOT_SHOWN_HERE
    await deployment.settle()


@pytest.mark.slow
async def test_nine_more_runs_fail_nothing(plan: CheckPlan) -> None:
    for seed in range(1, 10):
        assert not failures(await findings_of(replace(plan, seed=seed)))


@pytest.mark.parametrize("fault", FOUND_BY)
async def test_a_fault_is_found(plan: CheckPlan, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviour_probes, "SETTLE_S", 1.0)
    monkeypatch.setattr(behaviour_probes, "LEASE_S", 1.0)
    async with faulty_proxy(plan.stack.url, fault) as url:
        plan = replace(plan, stack=Endpoint.parse(url), limit_s=1.5 if fault == "hangs" else 8.0)
        async with aclosing(check(plan)) as findings:
            async for one in findings:
                if one.outcome is Outcome.FAILS:
                    assert one.curl.startswith("curl ") or one.question == behaviour_probes.IDLE.name
                    if one.question == FOUND_BY[fault].name:
                        return
    raise AssertionError(f"the check does not find a stack that {fault}")


async def test_nothing_of_a_hostile_stack_reaches_the_terminal_as_it_is(plan: CheckPlan) -> None:
    output = io.StringIO()
    async with faulty_proxy(plan.stack.url, "shouts") as url:
        await run_check(replace(plan, stack=Endpoint.parse(url)), Terminal(file=output, width=200), None, None)
    assert r"\x1b[31m" in output.getvalue()
    assert not set("\x1b\x9b\u2028") & set(output.getvalue())


async def test_each_fault_of_the_proxy_is_asked_for() -> None:
    assert set(FAULTS) == {*FOUND_BY, "shouts"}
