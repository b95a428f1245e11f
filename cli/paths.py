"""The paths between workers, for people: how many are fine, and what is wrong with the others."""

from __future__ import annotations

from collections import Counter

from core.paths import BROKEN, PathState, PathStatus
from protos.path_codec import decode_path
from tandem_client.stubs import cluster_pb2

MAX_BROKEN_PATHS = 20
ID_DIGITS_HIDDEN = 12  # of the sixteen of a worker's incarnation


def paths_of(fleet: cluster_pb2.GetFleetResponse) -> list[tuple[str, PathStatus]]:
    """(worker that reads, path) of every path whose other end is in the fleet as well."""
    known = {worker.worker_id for worker in fleet.workers}
    found = [
        (worker.worker_id, decode_path(wire))  # type: ignore[arg-type]  # protos/ has the same message
        for worker in fleet.workers
        for wire in worker.load.paths
    ]
    return [(reader, path) for reader, path in found if path.peer in known]


def name_of(reader: str, path: PathStatus) -> str:
    return f"{path.peer[:-ID_DIGITS_HIDDEN]} -> {reader[:-ID_DIGITS_HIDDEN]}"


def path_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """How many paths are in which state, then a line for each that is not as it should be."""
    paths = paths_of(fleet)
    if not paths:
        return []
    counts = Counter(path.state for _, path in paths)
    summary = " · ".join(f"{counts[state]} {state.value}" for state in PathState if counts[state])
    broken = [f"{name_of(reader, path)}: {path}" for reader, path in paths if path.state in BROKEN]
    more = [f"and {len(broken) - MAX_BROKEN_PATHS} more"] if len(broken) > MAX_BROKEN_PATHS else []
    return [f"paths: {summary}", *broken[:MAX_BROKEN_PATHS], *more]
