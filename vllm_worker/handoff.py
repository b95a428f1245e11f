"""The hand-off from one vLLM to another: the parameters of vLLM's KV connector, as bytes with a version.

Wrong parameters end the engine that reads them, with all its requests. So the reader checks each field that the pull
connector of vLLM 0.32 reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

VERSION = 1
MAX_BLOCKS = 1 << 20

# field -> the type that the connector expects
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "do_remote_prefill": bool,
    "do_remote_decode": bool,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
    "tp_size": int,
}


def encode_handoff(parameters: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, "vllm": dict(parameters)}, separators=(",", ":")).encode()


def decode_handoff(handoff: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    try:
        content = json.loads(handoff)
    except ValueError as error:
        raise InvalidRequest("handoff", "must be JSON") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else None
        raise InvalidRequest("handoff", f"has version {found!r}, this worker reads version {VERSION}")
    parameters = content.get("vllm")
    if not isinstance(parameters, dict):
        raise InvalidRequest("handoff", "has no parameters of vLLM")
    for name, kind in _FIELDS.items():
        value = parameters.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequest("handoff", f"{name} has the wrong type")
    if not parameters["do_remote_prefill"] or parameters["do_remote_decode"]:
        raise InvalidRequest("handoff", "must ask for a remote prefill")
    if not 0 < parameters["remote_port"] < 65536 or parameters["tp_size"] < 1:
        raise InvalidRequest("handoff", "remote_port or tp_size is out of range")
    _check_blocks(parameters["remote_block_ids"])
    return parameters


def _check_blocks(groups: list[Any]) -> None:
    """A list of block ids for each group of layers with the same kind of cache."""
    for group in groups:
        if not isinstance(group, list):
            raise InvalidRequest("handoff", "remote_block_ids must be a list of lists")
        if len(group) > MAX_BLOCKS or not all(type(block) is int and block >= 0 for block in group):
            raise InvalidRequest("handoff", "remote_block_ids has an id that is no block")
