"""A Prefill call that its router cancels. tests/unit/router/test_worker_link.py reads the answers of the servicer."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest

from core.errors import WorkerDrains
from core.request import Request, SamplingParams
from core.scheduling.worker_load import CallId
from prefill_worker.machine import PrefillCancelled, PrefillFailed
from prefill_worker.servicer import PrefillServicer
from protos import codec
from protos.agent_codec import encode_agent
from protos.handoff_codec import encode_transfer_id
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import worker_pb2
from tests.support.driven_worker import address
from tests.support.waiting import until
from worker.request_check import RequestCheck, refuse_grammars


async def test_the_machine_hears_at_once_of_a_cancelled_call_and_not_of_one_that_it_has_ended() -> None:
    servicer, driver = PrefillServicer(60.0), Mock(now=lambda: 0.0)
    servicer.attach(driver, "prefill-0", RequestCheck(100, 100, refuse_grammars))
    calls = []
    for number, name in enumerate(("cancelled", "refused")):
        sequence = codec.encode_sequence(Request(name, (1, 2, 3), 3, SamplingParams(max_tokens=8)), CallId("r", number))
        reader = encode_agent(address("decode-0"))
        wire = worker_pb2.PrefillRequest(sequence=sequence, transfer_id=encode_transfer_id(number), reader=reader)
        calls.append(asyncio.create_task(servicer.Prefill(wire, cast(Any, LocalContext((), 60.0)))))
    await until(lambda: driver.ask.call_count == 2, "both have arrived at the machine")
    servicer.perform(PrefillFailed("refused", WorkerDrains("it drains")))
    with pytest.raises(WorkerDrains):
        await calls[1]
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    driver.post_threadsafe.assert_called_once_with(PrefillCancelled("cancelled"))
