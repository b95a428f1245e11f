"""Lines of text about empty pools: how requests are served without them."""

from __future__ import annotations

from tandem_client.stubs import cluster_pb2, worker_pb2

NO_DECODE = "the decode pool is empty; `tandem scale --decode 1` adds a worker"
NO_PREFILL = "decode workers compute the prompts"


def num_serving(fleet: cluster_pb2.GetFleetResponse, role: worker_pb2.WorkerRole) -> int:
    return sum(w.role == role and w.state == worker_pb2.WORKER_STATE_SERVING for w in fleet.workers)


def pool_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """One line if a pool has no serving worker; none if requests go through both pools."""
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_DECODE):
        if fleet.wanted_decode:
            return ["no decode worker serves yet: requests wait"]
        return [f"no request is served: {NO_DECODE}"]
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_PREFILL):
        return [f"no prefill worker serves: {NO_PREFILL}"]
    return []


def ready_line(model: str, address: str, num_prefill: int, num_decode: int) -> str:
    """The line that `tandem serve` prints when every wanted worker serves."""
    sizes, end = f"{num_prefill} prefill, {num_decode} decode", "; Ctrl-C drains and stops"
    if not num_decode:
        return f"no request is served at {address} ({sizes}): {NO_DECODE}{end}"
    note = "" if num_prefill else f": {NO_PREFILL}"
    return f"serving {model} at {address} ({sizes}){note}{end}"
