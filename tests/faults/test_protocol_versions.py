"""Agents of two versions of the hand-off protocol meet: hand-offs fail at once and typed, and no request waits."""

from __future__ import annotations

import logging

import pytest

from core.handoff import PROTOCOL_VERSION, PullerState
from core.paths import PathState
from kv_transfer import agent as agent_module
from protos import handoff_pb2
from protos.handoff_codec import encode, encode_version
from tandem_client.stubs import inference_pb2
from tests.support.deployment import deploy, transfers
from tests.support.faults import Stream, fault_config, prompt_of
from tests.support.hand_offs import pulls_ended

LEASE_S = 20.0  # three unanswered heartbeats take half of it
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
                assert stream.answer.finished is not None
                assert stream.answer.finished.path != inference_pb2.REQUEST_PATH_DISAGGREGATED
            assert pulls_ended(deployment, PullerState.COMPLETE) == (0 if from_start else 1)
            assert pulls_ended(deployment, PullerState.FAILED) >= 1, "the versions met"
            (path,) = transfers(deployment.decode[0]).paths
            assert path.state is PathState.UNREACHABLE
            await deployment.settle()
    assert f"version must be {PROTOCOL_VERSION}, is {PROTOCOL_VERSION + 1}" in caplog.text
