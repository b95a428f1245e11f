"""The messages that one vLLM sends to another: parameters of vLLM's KV connector, as bytes with a version.

    a hand-off    of one prompt: where its KV is
    an address    of an engine: the part that is the same in each of its hand-offs, for a handshake before the first one

Wrong parameters end the engine that reads them, with all its requests. So the reader checks each field that the pull
connector of vLLM 0.32 reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from core.errors import InvalidRequest

VERSION = 1
MAX_BLOCKS = 1 << 20
MAX_SIZE = 1 << 16  # processes of an engine

# field -> the type that the connector expects
_ADDRESS_FIELDS: dict[str, type] = {"remote_engine_id": str, "remote_host": str, "remote_port": int, "tp_size": int}
_SIZE_FIELDS: dict[str, type] = {"dcp_size": int, "pp_size": int}
_PROMPT_FIELDS: dict[str, type] = {
    "do_remote_prefill": bool,
    "do_remote_decode": bool,
    "remote_request_id": str,
    "remote_block_ids": list,
}


def encode_handoff(parameters: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, "vllm": dict(parameters)}, separators=(",", ":")).encode()


def decode_handoff(handoff: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    parameters = _decode(handoff, _ADDRESS_FIELDS | _PROMPT_FIELDS)
    if not parameters["do_remote_prefill"] or parameters["do_remote_decode"]:
        raise InvalidRequest("handoff", "must ask for a remote prefill")
    _check_blocks(parameters["remote_block_ids"])
    return parameters


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine shakes hands with those that read from it. The fields have the names of vLLM."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    dcp_size: int = 1
    pp_size: int = 1

    def encode(self) -> bytes:
        return encode_handoff(asdict(self))

    @classmethod
    def decode(cls, content: bytes) -> EngineAddress:
        """Raises `InvalidRequest`."""
        parameters = _decode(content, _ADDRESS_FIELDS | _SIZE_FIELDS)
        return cls(**{field.name: parameters[field.name] for field in fields(cls)})


def _decode(encoded: bytes, kinds: Mapping[str, type]) -> dict[str, Any]:
    try:
        content = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("handoff", "must be JSON") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else None
        raise InvalidRequest("handoff", f"has version {found!r}, this worker reads version {VERSION}")
    parameters = content.get("vllm")
    if not isinstance(parameters, dict):
        raise InvalidRequest("handoff", "has no parameters of vLLM")
    for name, kind in kinds.items():
        value = parameters.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequest("handoff", f"{name} has the wrong type")
    sizes = [parameters[name] for name in kinds if name.endswith("_size")]
    if not 0 < parameters["remote_port"] < 65536 or not all(0 < size <= MAX_SIZE for size in sizes):
        raise InvalidRequest("handoff", "remote_port or a size is out of range")
    return parameters


def _check_blocks(groups: list[Any]) -> None:
    """A list of block ids for each group of layers with the same kind of cache."""
    for group in groups:
        if not isinstance(group, list):
            raise InvalidRequest("handoff", "remote_block_ids must be a list of lists")
        if len(group) > MAX_BLOCKS or not all(type(block) is int and block >= 0 for block in group):
            raise InvalidRequest("handoff", "remote_block_ids has an id that is no block")
