"""What the worker tells vLLM's connector of a request, and its answer at the end, as vLLM's `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.agent_codec import decode_agent, encode_agent
from tandem_client.stubs import worker_pb2
from vllm_worker.engine import EngineTransfer

NAME_KEY = "tandem_request"
TRANSFER_KEY = "tandem"
END_KEY = "tandem_end"
# in the statistics of each step
NUM_LENT, HOLDERS, LOST_MOVES = "tandem_num_lent", "tandem_holders", "tandem_lost_moves"


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Tokens that came with the blocks of a pull. `is_moved`: the engine of a peer goes on with the request."""

    pulled_tokens: tuple[int, ...] = ()
    is_moved: bool = False


def encode_request(request_id: str, transfer: EngineTransfer | None) -> dict[str, Any]:
    """The request id is that of the worker: vLLM gives requests other ids."""
    named = {NAME_KEY: request_id}
    return named if transfer is None else named | encode_transfer(transfer)


def encode_transfer(transfer: EngineTransfer) -> dict[str, Any]:
    return {
        TRANSFER_KEY: {
            "transfer_id": f"{transfer.transfer_id:032x}",
            "peer": encode_agent(transfer.peer).SerializeToString(),
            "is_offer": transfer.is_offer,
            "is_move": transfer.is_move,
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
    peer = decode_agent(worker_pb2.AgentAddress.FromString(wire["peer"]))
    return EngineTransfer(int(wire["transfer_id"], 16), peer, wire["is_offer"], wire["is_move"])


def encode_end(end: RequestEnd) -> dict[str, Any] | None:
    """None where there is nothing to tell."""
    return {END_KEY: [list(end.pulled_tokens), end.is_moved]} if end != RequestEnd() else None


def decode_end(parameters: Mapping[str, Any] | None) -> RequestEnd:
    token_ids, is_moved = (parameters or {}).get(END_KEY, ((), False))
    return RequestEnd(tuple(token_ids), is_moved)
