"""The address at which a peer reaches our listener: a host may have several, and not every peer can reach each."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from core.errors import TransportError

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` serves this machine alone."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def machine_id() -> str:
    """Equal for two processes if and only if they run on one machine, in one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.exists() else socket.gethostname()
    namespace = Path("/proc/self/ns/net")
    return f"{boot_id} {os.readlink(namespace) if namespace.exists() else ''}"


@dataclass(frozen=True, slots=True)
class HostAddresses:
    host: str  # equal for two processes if and only if loopback works between them
    networks: tuple[str, ...]  # address/prefix of each interface that is up, without loopback

    @classmethod
    def of_this_process(cls) -> HostAddresses:
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        # UCX carries no connection at the address of a device that UCX_NET_DEVICES leaves out.
        up = up & set(os.environ.get("UCX_NET_DEVICES", "").split(",")) or up
        networks = [
            f"{address.address}/{address.netmask}"
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if name in up and address.family == socket.AF_INET and not address.address.startswith("127.")
        ]
        return cls(machine_id(), tuple(networks))

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> HostAddresses:
        """Raises `TransportError`."""
        try:
            fields = json.loads(text)
            addresses = cls(str(fields["host"]), tuple(str(network) for network in fields["networks"]))
            for network in addresses.networks:
                ipaddress.ip_interface(network)
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"not a list of addresses: {error}") from error
        return addresses


def pick_address(ours: HostAddresses, theirs: HostAddresses) -> str:
    """The peer's address to connect to: loopback, else one in a network of ours, else the peer's first.

    Raises `TransportError` where there is none.
    """
    if ours.host == theirs.host:
        return LOOPBACK
    here = [ipaddress.ip_interface(network) for network in ours.networks]
    # An address that both hosts have, such as that of a container bridge, does not lead to the peer.
    there = [ipaddress.ip_interface(network) for network in theirs.networks]
    there = [address for address in there if address.ip not in {own.ip for own in here}]
    if not there:
        raise TransportError("the peer has no address of its own")
    near = [address for address in there if any(address.ip in own.network for own in here)]
    return str((near or there)[0].ip)
