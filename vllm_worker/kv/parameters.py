"""One transfer of a request, as vLLM's `kv_transfer_params`, which go from the worker to its engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.agent_codec import decode_agent, encode_agent
from tandem_client.stubs import worker_pb2
from vllm_worker.engine import EngineTransfer

KEY = "tandem"
FIRST_TOKEN_KEY = "tandem_first_token"


def encode_transfer(transfer: EngineTransfer) -> dict[str, Any]:
    peer = encode_agent(transfer.peer).SerializeToString()
    return {KEY: {"transfer_id": f"{transfer.transfer_id:032x}", "peer": peer, "is_offer": transfer.is_offer}}


def decode_transfer(parameters: Mapping[str, Any] | None) -> EngineTransfer | None:
    """None for a request without a transfer. The worker has written them, so a fault is ours."""
    wire = (parameters or {}).get(KEY)
    if wire is None:
        return None
    peer = decode_agent(worker_pb2.AgentAddress.FromString(wire["peer"]))
    return EngineTransfer(int(wire["transfer_id"], 16), peer, wire["is_offer"])


def encode_first_token(token_id: int) -> dict[str, Any]:
    """What an engine answers at the end of a request whose first token came with its pull."""
    return {FIRST_TOKEN_KEY: token_id}


def decode_first_token(parameters: Mapping[str, Any] | None) -> int | None:
    return (parameters or {}).get(FIRST_TOKEN_KEY)
