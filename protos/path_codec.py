"""Converts between core.paths and PathReport (worker.proto).

Decoding is strict: a value that does not fit raises `InvalidRequest`, which names the field.
"""

from __future__ import annotations

import math

from core.errors import InvalidRequest
from core.paths import Lane, PathState, PathStatus
from tandem_client.stubs import worker_pb2

LANE_TO_WIRE: dict[Lane, worker_pb2.PathLane] = {lane: getattr(worker_pb2, f"PATH_LANE_{lane.name}") for lane in Lane}
LANE_FROM_WIRE: dict[int, Lane] = {wire: lane for lane, wire in LANE_TO_WIRE.items()}

PATH_STATE_TO_WIRE: dict[PathState, worker_pb2.PathState] = {
    state: getattr(worker_pb2, f"PATH_STATE_{state.name}") for state in PathState
}
PATH_STATE_FROM_WIRE: dict[int, PathState] = {wire: state for state, wire in PATH_STATE_TO_WIRE.items()}


def encode_path(path: PathStatus) -> worker_pb2.PathReport:
    return worker_pb2.PathReport(
        peer=path.peer,
        state=PATH_STATE_TO_WIRE[path.state],
        lane=LANE_TO_WIRE[path.lane],
        bytes_per_s=path.bytes_per_s,
        expected_bytes_per_s=path.expected_bytes_per_s,
        latency_ms=path.latency_s * 1e3,
        detail=path.detail,
    )


def decode_path(wire: worker_pb2.PathReport) -> PathStatus:
    if wire.state not in PATH_STATE_FROM_WIRE:
        raise InvalidRequest("paths.state", f"{wire.state} is not a PathState")
    speeds = (wire.bytes_per_s, wire.expected_bytes_per_s, wire.latency_ms)
    if not all(0.0 <= speed < math.inf for speed in speeds):
        raise InvalidRequest("paths", f"speeds and latency must be finite and 0 or more, are {speeds}")
    return PathStatus(
        peer=wire.peer,
        state=PATH_STATE_FROM_WIRE[wire.state],
        lane=LANE_FROM_WIRE.get(wire.lane, Lane.UNKNOWN),
        bytes_per_s=wire.bytes_per_s,
        expected_bytes_per_s=wire.expected_bytes_per_s,
        latency_s=wire.latency_ms / 1e3,
        detail=wire.detail,
    )
