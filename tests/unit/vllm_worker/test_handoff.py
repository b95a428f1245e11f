"""The hand-off of vLLM: what arrives is checked field by field, because wrong parameters end the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.errors import InvalidRequest
from vllm_worker.handoff import EngineAddress, decode_handoff, encode_handoff

GOOD: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine", "remote_request_id": "a",
    "remote_host": "10.0.0.1", "remote_port": 5600, "remote_block_ids": [[1, 2, 3]], "tp_size": 1,
    "remote_num_tokens": 40,
}  # fmt: skip


def test_a_hand_off_survives_the_wire() -> None:
    assert decode_handoff(encode_handoff(GOOD)) == GOOD


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_remote_prefill": False},
        {"do_remote_decode": True},
        {"remote_engine_id": None},
        {"remote_request_id": 3},
        {"remote_host": None},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_port": True},
        {"tp_size": 0},
        {"tp_size": 2**70},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": [["1"]]},
        {"remote_block_ids": None},
    ],
)
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="handoff: "):
        decode_handoff(encode_handoff(GOOD | wrong))


@pytest.mark.parametrize(
    "handoff", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, json.dumps({"version": 2, "vllm": GOOD}).encode()]
)
def test_other_bytes_and_other_versions_are_refused(handoff: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_handoff(handoff)


def test_an_address_survives_the_wire_and_is_a_part_of_each_hand_off() -> None:
    address = EngineAddress("engine", "10.0.0.1", 5600, tp_size=2, pp_size=2)
    assert EngineAddress.decode(address.encode()) == address
    assert EngineAddress.decode(encode_handoff(GOOD | {"dcp_size": 1, "pp_size": 1})).remote_engine_id == "engine"


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"vllm",
        encode_handoff(GOOD),
        encode_handoff(GOOD | {"dcp_size": "1", "pp_size": 1}),
        encode_handoff(GOOD | {"dcp_size": 1, "pp_size": 0}),
    ],
)
def test_other_bytes_are_no_address(address: bytes) -> None:
    with pytest.raises(InvalidRequest):
        EngineAddress.decode(address)
