"""Faults during peer discovery cost no request."""

from __future__ import annotations

from dataclasses import replace

from cli.compose import build_router
from core.config import RouterConfig, TandemConfig
from core.errors import PeerDisconnected, TransportError
from core.handoff import HandoffMessage, Ping
from core.paths import PathState
from kv_transfer.transports.memory_transport import MemoryFabric
from tests.support.deployment import Deployment, deploy, place, transfers
from tests.support.faults import Stream, Wire, fault_config, prompt_of
from tests.support.waiting import until

PROMPT = prompt_of(1)
MAX_STREAMS = 4  # until the fault has happened


def impatient() -> TandemConfig:
    config = fault_config()
    return replace(config, transfer=replace(config.transfer, connect_timeout_s=0.3))


def path_states(deployment: Deployment) -> list[PathState]:
    return [path.state for worker in deployment.workers for path in transfers(worker).paths]


async def test_an_error_during_peer_discovery_costs_no_request(fabric: MemoryFabric) -> None:
    """Connecting, PINGs and probes fail one after the other; the first hand-off connects.

    On a slow machine discovery ends before the last of these operations. Then the fault meets a hand-off.
    """
    seen = set()
    for nth in range(1, 13):
        error = (TransportError, PeerDisconnected)[nth % 2]
        fabric.fail_operation(nth, error(f"operation {nth}"))
        async with deploy(impatient()) as deployment:
            seen |= set(path_states(deployment))
            for number in range(1, MAX_STREAMS + 1):
                await Stream(deployment.inference, prompt_of(number), num_output=6).right()
                if fabric.faults_done["fail"] == nth:
                    break
            assert fabric.faults_done["fail"] == nth
            await deployment.settle()
    assert PathState.UNREACHABLE in seen


async def test_workers_that_never_hear_each_other_s_ping_are_unreachable_and_hand_off_all_the_same(wire: Wire) -> None:
    def lose_pings(message: HandoffMessage) -> tuple[int, ...] | None:
        return () if isinstance(message, Ping) else None

    wire.rule = lose_pings
    async with deploy(impatient()) as deployment:
        assert wire.done["Ping"] >= 2, "the reader asks again"
        assert path_states(deployment) == [PathState.UNREACHABLE]
        await Stream(deployment.inference, PROMPT, num_output=6).right()
        await deployment.settle()


async def test_a_worker_that_dies_while_no_router_runs_is_forgotten_by_its_peers_when_one_runs_again() -> None:
    config = replace(impatient(), router=RouterConfig(port=0, worker_lost_s=1.0, report_stale_s=0.5))
    async with deploy(config, num_prefill=2) as deployment:
        (reader,), (dead, alive) = deployment.decode, deployment.prefill
        name_of = {worker: deployment.id_of(worker) for worker in (dead, alive)}

        def peers() -> set[str]:
            return {path.peer for path in transfers(reader).paths}

        await deployment.router.stop()
        await dead.stop()
        assert peers() == set(name_of.values()), "nobody has told it"
        router = build_router(config, place(0))
        try:
            await router.start()
            await router.set_workers([deployment.endpoints[id(worker)] for worker in (reader, alive)])
            await until(lambda: peers() == {name_of[alive]}, lambda: f"it still has paths to {peers()}", seconds=20.0)
        finally:
            await router.stop()
