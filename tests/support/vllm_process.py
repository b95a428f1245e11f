"""One vLLM worker in one process of vLLM's environment, without Ray: `python -m tests.support.vllm_process JSON`.

Prints its endpoint as JSON, and ends with its standard input or when its service fails. It drains at the line "drain",
and prints "drained". With `socket`, its engine alone serves there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict

from cli import vllm
from core.config import from_mapping
from core.lifecycle import ServiceRole
from core.service import Endpoint
from fleet.host.service_host import Placement
from tests.support.engine_relay import EngineServer
from vllm_worker.service import VllmService

BUILDERS = {"prefill": vllm.build_prefill_worker, "decode": vllm.build_decode_worker}
DRAIN_S = 120.0


async def serve(role: str, ordinal: int, core: int, config: dict[str, dict[str, object]], socket: str = "") -> None:
    endpoint_out = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to both; nobody reads a pipe after the endpoint, and a full one would stop the process
    placement = Placement(ordinal, host="", address="", num_threads=1, control=None, cores=(core,), gpus=0.0)
    service = BUILDERS[role](from_mapping(config), placement)
    if socket:
        await EngineServer(service._engine).start(socket)
        endpoint = Endpoint(f"{role}-{ordinal}", socket, ServiceRole(role))
    else:
        endpoint = await service.start()
    os.write(endpoint_out, json.dumps(asdict(endpoint) | {"role": endpoint.role.value}).encode() + b"\n")
    if socket:
        await asyncio.to_thread(sys.stdin.read)
        await service._engine.close()
    else:
        ends = [asyncio.create_task(obey(service, endpoint_out)), asyncio.create_task(service.failed())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await service.stop()
    os._exit(0)  # a thread may still read the standard input


async def obey(service: VllmService, out: int) -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        await service.drain(DRAIN_S)
        os.write(out, b"drained\n")


if __name__ == "__main__":
    asyncio.run(serve(**json.loads(sys.argv[1])))
