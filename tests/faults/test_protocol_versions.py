"""Two versions of the hand-off protocol: workers that state them are not paired; agents that meet fail at once."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest

from core.handoff import PROTOCOL_VERSION, AgentAddress, PullerState
from core.paths import PathState
from kv_transfer import agent as agent_module
from protos import handoff_pb2
from protos.handoff_codec import encode, encode_version
from tandem_client.stubs import inference_pb2
from tests.support.deployment import deploy, transfers
from tests.support.faults import Stream, fault_config, prompt_of, pulls_ended

LEASE_S = 12.0  # three unanswered heartbeats take half of it
NUM_REQUESTS = 3


def of_another_version(payload: bytes) -> bytes:
    envelope = handoff_pb2.HandoffEnvelope.FromString(payload)
    envelope.version += 1
    return envelope.SerializeToString()


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("from_start", [True, False])
async def test_peers_of_two_protocol_versions_recompute_each_request_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, from_start: bool
) -> None:
    """Each agent sees the version of the other as too new, also where one of them is upgraded in mid-flight."""

    def upgrade() -> None:
        monkeypatch.setattr(agent_module, "encode", lambda message: of_another_version(encode(message)))
        monkeypatch.setattr(agent_module, "encode_version", lambda: of_another_version(encode_version()))

    if from_start:
        upgrade()
    with caplog.at_level(logging.WARNING):
        async with deploy(fault_config(lease_s=LEASE_S)) as deployment:
            if not from_start:
                await Stream(deployment.inference, prompt_of(99)).right()
                upgrade()
            for seed in range(NUM_REQUESTS):
                stream = Stream(deployment.inference, prompt_of(seed), timeout_s=LEASE_S / 4)
                await stream.right()
                assert stream.finished.path != inference_pb2.REQUEST_PATH_DISAGGREGATED
            assert pulls_ended(deployment, PullerState.COMPLETE) == (0 if from_start else 1)
            assert pulls_ended(deployment, PullerState.FAILED) >= 1, "the versions met"
            (path,) = transfers(deployment.decode[0]).paths
            assert path.state is PathState.UNREACHABLE
            await deployment.settle()
    assert f"version must be {PROTOCOL_VERSION}, is {PROTOCOL_VERSION + 1}" in caplog.text


@pytest.mark.usefixtures("fabric")
async def test_workers_that_state_two_versions_serve_side_by_side_and_no_hand_off_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a roll. The decode worker computes prompts itself, although its config forbids that."""
    versions = itertools.count(PROTOCOL_VERSION)

    def address(**fields: Any) -> AgentAddress:
        return AgentAddress(**fields, protocol_version=next(versions))

    monkeypatch.setattr(agent_module, "AgentAddress", address)
    async with deploy(fault_config(lease_s=LEASE_S)) as deployment:
        assert next(versions) == PROTOCOL_VERSION + 2, "two workers have stated two versions"
        for seed in range(NUM_REQUESTS):
            stream = Stream(deployment.inference, prompt_of(seed), timeout_s=LEASE_S / 4)
            await stream.right()
            assert stream.finished.path == inference_pb2.REQUEST_PATH_LOCAL
            assert stream.finished.attempts == 1
        assert pulls_ended(deployment, PullerState.COMPLETE) == pulls_ended(deployment, PullerState.FAILED) == 0
        assert not list(transfers(deployment.decode[0]).paths), "a worker has met a peer of another version"
        await deployment.settle()
