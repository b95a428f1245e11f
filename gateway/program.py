"""The program of a gateway process: `python -m gateway.program`, started by gateway/processes.py.

Standard input brings the length and the pickle of a `GatewaySpec`, and then stays open: its end means that the parent
has died, and ends this process at once. Standard output tells, as one JSON line, that the process accepts connections,
and which routers have not answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import struct
import sys

import uvloop

from gateway.fleets import Fleets
from gateway.server import GatewaySpec, serve

LENGTH = struct.Struct(">Q")


def read_spec() -> GatewaySpec:
    source = sys.stdin.buffer
    (size,) = LENGTH.unpack(source.read(LENGTH.size))
    spec = pickle.loads(source.read(size))
    assert isinstance(spec, GatewaySpec)
    return spec


def pack_spec(spec: GatewaySpec) -> bytes:
    data = pickle.dumps(spec)
    return LENGTH.pack(len(data)) + data


async def run(spec: GatewaySpec, report: int) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(1))  # only its end makes the pipe readable

    def on_ready(fleets: Fleets) -> None:
        away = [link.fault for fleet in fleets.fleets for link in fleet.links if link.fault]
        os.write(report, (json.dumps({"away": away}) + "\n").encode())

    await serve(spec, on_ready)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops this process by SIGTERM
    report = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but the report goes through the pipe
    uvloop.run(run(read_spec(), report))


if __name__ == "__main__":
    main()
