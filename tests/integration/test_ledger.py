"""`DescribeLedger` and `GetLedger`: the holders of a worker's blocks add up to its ledger, at every look."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import grpc.aio
import pytest

from core.scheduling.block_pool import Column
from tandem_client.stubs import cluster_pb2, worker_pb2
from tests.support.deployment import Deployment, deploy, machine_of, tiny_config, transfers
from tests.support.steps import slow_down
from tests.support.waiting import until

COLUMN_OF_KIND = {
    worker_pb2.HOLDER_KIND_SEQUENCE: "held",
    worker_pb2.HOLDER_KIND_OFFER: "leased",
    worker_pb2.HOLDER_KIND_PULL: "incoming",
}
PATIENCE_S = 20.0


def assert_adds_up(described: worker_pb2.DescribeLedgerResponse, num_blocks: int) -> None:
    sums: Counter[str] = Counter()
    for holder in described.holders:
        assert holder.num_counted <= holder.num_blocks
        assert holder.age_ms >= 0
        sums[COLUMN_OF_KIND[holder.kind]] += holder.num_counted
    ledger = described.ledger
    assert (sums["held"], sums["leased"], sums["incoming"]) == (ledger.held, ledger.leased, ledger.incoming)
    assert ledger.free + ledger.cached + ledger.held + ledger.leased + ledger.incoming == num_blocks
    ages = [holder.age_ms for holder in described.holders]
    assert ages == sorted(ages, reverse=True), "the oldest first"


async def look(deployment: Deployment, **request: object) -> dict[str, cluster_pb2.WorkerLedger]:
    """By role and number of the worker."""
    asked = cluster_pb2.GetLedgerRequest(**request)  # type: ignore[arg-type]
    answer = await deployment.cluster.GetLedger(asked, timeout=PATIENCE_S)
    return {worker.worker_id.partition(".")[0]: worker for worker in answer.workers}


async def test_at_every_moment_of_many_requests_the_holders_add_up_to_the_ledger() -> None:
    async with deploy(tiny_config(), num_prefill=1, num_decode=2) as deployment:
        for worker in deployment.decode:
            slow_down(worker, 0.005)
        num_blocks = {sum(ledger.values()) for ledger in deployment.ledgers()}
        assert len(num_blocks) == 1
        seen: set[int] = set()
        prompts = [f"story {number % 3}: " + "once upon a time " * (2 + number) for number in range(8)]
        asking = asyncio.gather(*(deployment.generate(text=text, max_tokens=24) for text in prompts))
        while not asking.done():
            workers = await look(deployment)
            assert sorted(name[:-2] for name in workers) == ["decode", "decode", "prefill"]
            for listed in workers.values():
                assert not listed.error
                assert listed.ledger.num_left_out == 0
                assert_adds_up(listed.ledger, *num_blocks)
                seen |= {holder.kind for holder in listed.ledger.holders}
        await asking
        assert worker_pb2.HOLDER_KIND_SEQUENCE in seen
        await deployment.settle()
        for listed in (await look(deployment)).values():
            assert_adds_up(listed.ledger, *num_blocks)
            assert list(listed.ledger.holders) == []


async def test_a_decode_call_that_is_cancelled_on_its_way_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deploy(tiny_config()) as deployment:

        async def stay_on_the_way(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        (prefill,), (decode,) = deployment.prefill, deployment.decode
        link = deployment.router._shell.links[deployment.id_of(decode)]
        monkeypatch.setattr(link._decode, "Decode", stay_on_the_way)
        call = asyncio.create_task(deployment.generate(text="an offer for nobody", max_tokens=4))
        await until(lambda: machine_of(prefill).core.pool.ledger()[Column.LEASED], "the blocks are offered")
        await until(lambda: not machine_of(prefill).load().num_calls, "the prompt is computed")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        within_s = deployment.config.transfer.heartbeat_s
        await until(lambda: not transfers(prefill).alive, "the offer has ended", within_s)
        await deployment.settle()


async def test_one_worker_may_be_asked_and_an_unknown_one_is_refused() -> None:
    async with deploy(tiny_config()) as deployment:
        (worker,) = (await look(deployment, worker_ids=[deployment.id_of(deployment.decode[0])])).values()
        assert worker.ledger.worker_id == worker.worker_id
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await look(deployment, worker_ids=["decode-9"])
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "decode-9" in str(refused.value.details())
