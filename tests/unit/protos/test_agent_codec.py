"""A router may be faulty, and an address that a transport cannot take ends the agent of the worker that gets it."""

from __future__ import annotations

import math
from functools import reduce

import pytest

from core.errors import InvalidRequest
from protos.agent_codec import decode_agent, encode_agent
from tests.unit.kv_transfer.transfer_pair import address

ODD: list[tuple[str, str, object]] = [
    ("agent", "name", ""),
    ("agent", "name", "x" * 257),
    ("agent", "num_blocks", 0),
    *(("agent.lease_s", "lease_s", seconds) for seconds in (0.0, -1.0, math.inf, math.nan)),
    *(("agent.location", "location.link_bytes_per_s", speed) for speed in (-1.0, math.inf, math.nan)),
    ("agent.pool_base", "pool_base", 2**64 - 1),
    ("agent.pool_base", "probe_bytes", 2**64 - 1),
    ("agent.pool_base", "layout.head_dim", 2**32 - 1),
    ("layout", "layout.block_size", 0),
    ("layout", "layout.dtype", "x"),
]


@pytest.mark.parametrize(("field", "path", "value"), ODD)
def test_an_odd_address_is_refused_with_its_field(field: str, path: str, value: object) -> None:
    good = address("owner", 11)
    wire = encode_agent(good)
    assert decode_agent(wire) == good
    wire.num_blocks, (*outer, name) = 2**32 - 1, path.split(".")
    setattr(reduce(getattr, outer, wire), name, value)
    with pytest.raises(InvalidRequest) as refused:
        decode_agent(wire)
    assert refused.value.field == field
