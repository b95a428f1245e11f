"""The paths between workers as lines of text: a count by state, then the faults."""

from __future__ import annotations

from collections import Counter

from core.paths import BROKEN, PathState, PathStatus
from protos.path_codec import PATH_STATE_FROM_WIRE, decode_path
from tandem_client.stubs import cluster_pb2

MAX_BROKEN_PATHS = 20
ID_DIGITS_HIDDEN = 12  # of the 16 digits of the incarnation in a worker id


def paths_of(fleet: cluster_pb2.GetFleetResponse) -> list[tuple[str, PathStatus]]:
    """(id of the reading worker, path) of every path between two workers of the fleet, but those in a state
    that only a newer router knows."""
    known = {worker.worker_id for worker in fleet.workers}
    found = [
        (worker.worker_id, decode_path(wire))
        for worker in fleet.workers
        for wire in worker.load.paths
        if wire.state in PATH_STATE_FROM_WIRE
    ]
    return [(reader, path) for reader, path in found if path.peer in known]


def name_of(reader: str, path: PathStatus) -> str:
    return f"{path.peer[:-ID_DIGITS_HIDDEN]} -> {reader[:-ID_DIGITS_HIDDEN]}"


def path_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """One line that counts the paths by state, then one line per broken path."""
    paths = paths_of(fleet)
    if not paths:
        return []
    counts = Counter(path.state for _, path in paths)
    summary = " · ".join(f"{counts[state]} {state.value}" for state in PathState if counts[state])
    broken = [f"{name_of(reader, path)}: {path}" for reader, path in paths if path.state in BROKEN]
    more = [f"and {len(broken) - MAX_BROKEN_PATHS} more"] if len(broken) > MAX_BROKEN_PATHS else []
    return [f"paths: {summary}", *broken[:MAX_BROKEN_PATHS], *more]
