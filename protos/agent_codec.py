"""Converts the address of a transfer agent between core.handoff and worker.proto.

Decoding is strict, as in protos/codec.py.
"""

from __future__ import annotations

import math

from core.errors import InvalidRequest
from core.handoff import MAX_NAME_CHARS, AgentAddress, Location
from core.kv_layout import KVLayout
from tandem_client.stubs import worker_pb2

_LAYOUT_FIELDS = (
    "model", "dtype", "num_layers", "num_kv_heads", "block_size", "head_dim", "first_layer", "first_kv_head",
    "quantization",
)  # fmt: skip


def encode_layout(layout: KVLayout) -> worker_pb2.KVLayout:
    return worker_pb2.KVLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})


def decode_layout(wire: worker_pb2.KVLayout) -> KVLayout:
    try:
        found = {name: getattr(wire, name) for name in _LAYOUT_FIELDS}
        return KVLayout(**(found | {"quantization": wire.quantization or "none"}))
    except ValueError as error:
        raise InvalidRequest("layout", str(error)) from error


ADDRESS_SPACE = 1 << 64  # bytes; nixl ends with an exception of its own behind them
_LOCATION_FIELDS = ("machine", "on_gpu", "memory_bytes_per_s", "link_bytes_per_s", "gpu")


def encode_agent(address: AgentAddress) -> worker_pb2.AgentAddress:
    return worker_pb2.AgentAddress(
        name=address.name,
        incarnation=address.incarnation,
        metadata=address.metadata,
        pool_base=address.pool_base,
        num_blocks=address.num_blocks,
        layout=encode_layout(address.layout),
        lease_s=address.lease_s,
        probe_bytes=address.probe_bytes,
        location=worker_pb2.Location(**{name: getattr(address.location, name) for name in _LOCATION_FIELDS}),
        device=address.device,
        protocol_version=address.protocol_version,
    )


def decode_agent(wire: worker_pb2.AgentAddress) -> AgentAddress:
    if not wire.name or not wire.num_blocks:
        raise InvalidRequest("agent", f"name and num_blocks must be set, are {wire.name!r} and {wire.num_blocks}")
    if len(wire.name) > MAX_NAME_CHARS:
        raise InvalidRequest("agent", f"a name has at most {MAX_NAME_CHARS} characters, this one {len(wire.name)}")
    if not 0 < wire.lease_s < math.inf:
        raise InvalidRequest("agent.lease_s", f"must be more than 0 and finite, is {wire.lease_s}")
    location = Location(**{name: getattr(wire.location, name) for name in _LOCATION_FIELDS})
    if not (0.0 <= location.memory_bytes_per_s < math.inf and 0.0 <= location.link_bytes_per_s < math.inf):
        raise InvalidRequest("agent.location", f"speeds must be finite and 0 or more, are in {location}")
    address = AgentAddress(
        name=wire.name,
        incarnation=wire.incarnation,
        metadata=wire.metadata,
        pool_base=wire.pool_base,
        num_blocks=wire.num_blocks,
        layout=decode_layout(wire.layout),
        lease_s=wire.lease_s,
        probe_bytes=wire.probe_bytes,
        location=location,
        device=wire.device if wire.HasField("device") else None,
        protocol_version=wire.protocol_version,
    )
    if (end := address.pool_base + address.num_bytes) > ADDRESS_SPACE:
        raise InvalidRequest("agent.pool_base", f"the pool must end below {ADDRESS_SPACE:#x}, ends at {end:#x}")
    return address
