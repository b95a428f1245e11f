"""One service in one operating-system process, without Ray: `python -m tests.support.service_process`.

The first line of standard input is a `Role` as JSON. A router then reads one line for each new list of workers. The
process prints its endpoint, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cli.compose import build_decode_worker, build_prefill_worker, build_router
from core.config import TandemConfig, from_mapping
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.service_host import Placement
from tests.support.steps import slow_down

BUILDERS: dict[str, Callable[[TandemConfig, Placement], Any]] = {
    "router": build_router,
    "prefill": build_prefill_worker,
    "decode": build_decode_worker,
}


@dataclass(frozen=True, slots=True)
class Role:
    """The first line of standard input."""

    name: str  # a key of BUILDERS
    ordinal: int
    host: str  # where it listens
    config: dict[str, Any]  # as parsed from TOML
    step_delay_s: float = 0.0  # added to every step, so that a fault can hit in the middle of one


def line_of(endpoint: Endpoint) -> dict[str, Any]:
    return asdict(endpoint) | {"role": endpoint.role.value}


def endpoint_of(line: dict[str, Any]) -> Endpoint:
    role = ServiceRole(line["role"])
    return Endpoint(line["service_id"], line["address"], role)


async def serve() -> None:
    role = Role(**json.loads(sys.stdin.readline()))
    placement = Placement(ordinal=role.ordinal, host=role.host, address="", num_threads=1, control=None)
    service = BUILDERS[role.name](from_mapping(role.config), placement)
    endpoint = await service.start()
    if role.step_delay_s:
        slow_down(service, role.step_delay_s)
    print(json.dumps(line_of(endpoint)), flush=True)
    while command := await asyncio.to_thread(sys.stdin.readline):
        await service.set_workers([endpoint_of(worker) for worker in json.loads(command)])
    await service.stop()


if __name__ == "__main__":
    asyncio.run(serve())
