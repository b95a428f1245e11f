"""What it means for requests that a pool is empty, for people."""

from __future__ import annotations

from tandem_client.stubs import cluster_pb2, worker_pb2

NO_DECODE = "the decode pool is empty; `tandem scale --decode 1` adds a worker"
COMPUTED_THERE = "decode workers compute the prompts"


def num_serving(fleet: cluster_pb2.GetFleetResponse, role: worker_pb2.WorkerRole) -> int:
    return sum(w.role == role and w.state == worker_pb2.WORKER_STATE_SERVING for w in fleet.workers)


def pool_lines(fleet: cluster_pb2.GetFleetResponse) -> list[str]:
    """A line for the pool in which nobody serves; none where requests go through both."""
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_DECODE):
        return [
            "no decode worker serves yet: requests wait" if fleet.wanted_decode else f"nothing is served: {NO_DECODE}"
        ]
    if not num_serving(fleet, worker_pb2.WORKER_ROLE_PREFILL):
        return [f"no prefill worker serves: {COMPUTED_THERE}"]
    return []


def ready_line(model: str, address: str, num_prefill: int, num_decode: int) -> str:
    """What `tandem serve` says when every worker it was to start is there."""
    sizes, end = f"{num_prefill} prefill, {num_decode} decode", "; Ctrl-C drains and stops"
    if not num_decode:
        return f"nothing is served at {address} ({sizes}): {NO_DECODE}{end}"
    note = "" if num_prefill else f": {COMPUTED_THERE}"
    return f"serving {model} at {address} ({sizes}){note}{end}"
