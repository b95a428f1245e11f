"""What the worker tells vLLM's connector of a request, and its answer at the end, as vLLM's `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.handoff import AgentAddress, PrefixSource
from protos.agent_codec import decode_agent, encode_agent
from tandem_client.stubs import worker_pb2
from vllm_worker.engine import EngineTransfer

NAME_KEY = "tandem_request"
TRANSFER_KEY = "tandem"
PREFIX_KEY = "tandem_prefix"
END_KEY = "tandem_end"
# in the statistics of each step
NUM_LENT, HOLDERS, LOST_MOVES = "tandem_num_lent", "tandem_holders", "tandem_lost_moves"
PULLED_TOKENS, READ_BYTES, READ_SECONDS = "tandem_pulled_tokens", "tandem_read_bytes", "tandem_read_seconds"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """`is_moved`: the engine of a peer goes on with the request."""

    is_moved: bool = False
    num_prefix_tokens: int | None = None  # read from the source of a prefix; None: no read began


def encode_request(
    request_id: str, transfer: EngineTransfer | None, prefix: PrefixSource | None = None
) -> dict[str, Any]:
    """The request id is that of the worker: vLLM gives requests other ids."""
    wire: dict[str, Any] = {NAME_KEY: request_id}
    if transfer is not None:
        wire |= encode_transfer(transfer)
    if prefix is not None:
        wire[PREFIX_KEY] = {
            "transfer_id": f"{prefix.transfer_id:032x}",
            "peer": encode_agent(prefix.agent).SerializeToString(),
            "num_tokens": prefix.num_tokens,
            "limit_s": prefix.limit_s,
        }
    return wire


def encode_transfer(transfer: EngineTransfer) -> dict[str, Any]:
    return {
        TRANSFER_KEY: {
            "transfer_id": f"{transfer.transfer_id:032x}",
            "peer": encode_agent(transfer.peer).SerializeToString(),
            "is_offer": transfer.is_offer,
            "is_move": transfer.is_move,
            "deadline": transfer.deadline,
        }
    }


def name_of(parameters: Mapping[str, Any] | None) -> str:
    """Empty for a request of vLLM's own."""
    return str((parameters or {}).get(NAME_KEY, ""))


def decode_transfer(parameters: Mapping[str, Any] | None) -> EngineTransfer | None:
    """None for a request without a transfer. The worker has written them, so a fault is ours."""
    wire = (parameters or {}).get(TRANSFER_KEY)
    if wire is None:
        return None
    return EngineTransfer(
        int(wire["transfer_id"], 16), _peer_of(wire), wire["is_offer"], wire["deadline"], wire["is_move"]
    )


def decode_prefix(parameters: Mapping[str, Any] | None) -> PrefixSource | None:
    """None for a request without a source."""
    wire = (parameters or {}).get(PREFIX_KEY)
    if wire is None:
        return None
    return PrefixSource(int(wire["transfer_id"], 16), _peer_of(wire), wire["num_tokens"], wire["limit_s"])


def _peer_of(wire: Mapping[str, Any]) -> AgentAddress:
    return decode_agent(worker_pb2.AgentAddress.FromString(wire["peer"]))


def encode_end(end: RequestEnd) -> dict[str, Any] | None:
    """None where there is nothing to tell."""
    return {END_KEY: [end.is_moved, end.num_prefix_tokens]} if end != RequestEnd() else None


def decode_end(parameters: Mapping[str, Any] | None) -> RequestEnd:
    return RequestEnd(*(parameters or {}).get(END_KEY, ()))
