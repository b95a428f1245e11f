"""Three network namespaces that stand for machines: a control network joins all, a data link joins two.

    router --- bridge --- prefill        control network 10.88.0.0/24: gRPC, Ray
                  `------ decode
                          prefill === decode       data link 10.88.1.0/30: KV over UCX

Tests degrade only the data link, so that a hand-off fails and not the router. On the host only the namespaces are new;
their names differ from run to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.processes import Site

CONTROL_IP = {"router": "10.88.0.1", "prefill": "10.88.0.2", "decode": "10.88.0.3"}
DATA_IP = {"prefill": "10.88.1.1", "decode": "10.88.1.2"}
CONTROL, DATA = "ctl", "dat"  # devices inside a namespace
TCP_RETRIES = 3  # then TCP gives a silent connection up: after 3 s, as `tandem doctor` asks for with 5 and 13 s
_CLONE_NEWNET = 0x4000_0000
# Instructions of a socket filter (linux/filter.h) and its verdicts (linux/pkt_cls.h): `tc` drops packets with them.
_LOAD, _JUMP_IF_ABOVE, _RETURN = 0x20, 0x25, 0x06
_RANDOM = 0xFFFF_F038  # SKF_AD_OFF + SKF_AD_RANDOM: 32 random bits
_PASS, _DROP = 0, 2


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def why_not() -> str:
    """The reason why this machine allows no namespaces; empty if it allows them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    name = f"tandem-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    run("ip", "netns", "delete", name)
    return ""


class Machines:
    """`with Machines.made() as machines:`"""

    def __init__(self) -> None:
        self._tag = secrets.token_hex(3)

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Machines]:
        machines = cls()
        try:
            machines._make()
            yield machines
        finally:
            for machine in CONTROL_IP:
                subprocess.run(["ip", "netns", "delete", machines.namespace(machine)], capture_output=True, check=False)

    def namespace(self, machine: str) -> str:
        return f"tandem-{self._tag}-{machine}"

    def inside(self, machine: str, *command: str) -> str:
        return run("ip", "netns", "exec", self.namespace(machine), *command)

    def _make(self) -> None:
        for machine in CONTROL_IP:
            run("ip", "netns", "add", self.namespace(machine))
            self.inside(machine, "ip", "link", "set", "lo", "up")
        self.inside("router", "ip", "link", "add", CONTROL, "type", "bridge")
        self._up("router", CONTROL, f"{CONTROL_IP['router']}/24")
        for machine in DATA_IP:
            self._join((machine, CONTROL), ("router", f"to-{machine}"))
            self.inside("router", "ip", "link", "set", f"to-{machine}", "master", CONTROL, "up")
            self._up(machine, CONTROL, f"{CONTROL_IP[machine]}/24")
        self._join(("prefill", DATA), ("decode", DATA))
        for machine, address in DATA_IP.items():
            self._up(machine, DATA, f"{address}/30")
            self.inside(machine, "sh", "-c", f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2")

    def _join(self, one: tuple[str, str], other: tuple[str, str]) -> None:
        """A cable between a device of one machine and a device of another."""
        ends = [f"{self._tag}a", f"{self._tag}b"]
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, (machine, device) in zip(ends, (one, other), strict=True):
            run("ip", "link", "set", end, "netns", self.namespace(machine), "name", device)

    def _up(self, machine: str, device: str, address: str) -> None:
        self.inside(machine, "ip", "address", "add", address, "dev", device)
        self.inside(machine, "ip", "link", "set", device, "up")

    # ---- services

    def site_of(self, name: str) -> Site:
        machine = name.partition("-")[0]
        environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DATA}
        return Site(CONTROL_IP[machine], ("ip", "netns", "exec", self.namespace(machine)), environment)

    @contextlib.asynccontextmanager
    async def reachable(self) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
        """A function that gives an address inside a namespace a port of the host's loopback."""
        machine_of = {address: machine for machine, address in CONTROL_IP.items()}
        async with contextlib.AsyncExitStack() as stack:

            async def reach(address: str) -> str:
                host, _, port = address.rpartition(":")
                inside = ThreadPoolExecutor(1, initializer=_enter, initargs=(self.namespace(machine_of[host]),))
                stack.callback(inside.shutdown, False)
                tunnel = _Tunnel(inside, host, int(port))
                stack.push_async_callback(tunnel.ended)
                server = await asyncio.start_server(tunnel.serve, "127.0.0.1", 0)
                stack.callback(server.close)
                return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

            yield reach

    # ---- faults of the data link

    def cut(self) -> None:
        self.inside("decode", "ip", "link", "set", DATA, "down")

    def mend(self) -> None:
        self.inside("decode", "ip", "link", "set", DATA, "up")

    def drop_packets(self, share: float) -> None:
        """Drop a random share of the packets that the decode machine receives over the data link."""
        program = [f"{_LOAD} 0 0 {_RANDOM}", f"{_JUMP_IF_ABOVE} 0 1 {round(share * 0xFFFF_FFFF)}",
                   f"{_RETURN} 0 0 {_PASS}", f"{_RETURN} 0 0 {_DROP}"]  # fmt: skip
        bytecode = ",".join([str(len(program)), *program])
        self.inside("decode", "tc", "qdisc", "add", "dev", DATA, "ingress")
        self.inside("decode", "tc", "filter", "add", "dev", DATA, "ingress", "bpf", "da", "bytecode", bytecode)

    def num_dropped(self) -> int:
        qdiscs = json.loads(self.inside("decode", "tc", "-s", "-j", "qdisc", "show", "dev", DATA))
        return sum(int(qdisc["drops"]) for qdisc in qdiscs if qdisc["kind"] == "ingress")

    def drop_no_more(self) -> None:
        subprocess.run(
            ["ip", "netns", "exec", self.namespace("decode"), "tc", "qdisc", "delete", "dev", DATA, "ingress"],
            capture_output=True, check=False,  # without dropped packets there is nothing to delete
        )  # fmt: skip

    def slow_down(self, rate: str) -> None:
        """Limit the rate at which the prefill machine sends, e.g. 1mbit."""
        shape = ["rate", rate, "burst", "2kb", "latency", "2s"]
        self.inside("prefill", "tc", "qdisc", "replace", "dev", DATA, "root", "tbf", *shape)

    def num_held_up(self) -> int:
        """Number of packets that waited for the slow link."""
        (qdisc,) = json.loads(self.inside("prefill", "tc", "-s", "-j", "qdisc", "show", "dev", DATA))
        return int(qdisc["overlimits"])

    def slow_down_no_more(self) -> None:
        self.inside("prefill", "tc", "qdisc", "delete", "dev", DATA, "root")

    def num_bytes_arrived(self) -> int:
        """Bytes that the decode machine has received over the data link."""
        (link,) = json.loads(self.inside("decode", "ip", "-s", "-j", "link", "show", "dev", DATA))
        return int(link["stats64"]["rx"]["bytes"])


END_S = 10.0


class _Tunnel:
    """A socket belongs to the namespace of the thread that made it; then any thread may use it."""

    def __init__(self, inside: ThreadPoolExecutor, host: str, port: int) -> None:
        self._inside, self._host, self._port = inside, host, port
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._open.discard(task)

    async def ended(self) -> None:
        """Both ends of every connection are gone: wait until their sockets are closed."""
        if self._open:
            await asyncio.wait(self._open, timeout=END_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            made = await asyncio.get_running_loop().run_in_executor(self._inside, self._connect)
            far_reader, far_writer = await asyncio.open_connection(sock=made)
        except OSError:
            writer.close()  # nothing listens there: the caller sees its connection end
            return
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

    def _connect(self) -> socket.socket:
        made = socket.create_connection((self._host, self._port), timeout=5)
        made.setblocking(False)
        return made


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _enter(namespace: str) -> None:
    """Move the calling thread into the namespace."""
    descriptor = os.open(Path("/var/run/netns") / namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)
