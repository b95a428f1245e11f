"""`tandem doctor`: checks this machine, and says how to fix each fault.

Each check is a function that examines one subject and returns findings (cli/findings.py), faults with a fix.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from cli.checks import check_port
from cli.findings import Finding, Health, judge
from cli.gpu_checks import gpus
from cli.paths import name_of, paths_of
from cli.transport_probe import probe
from core.config import RouterConfig, TransferConfig
from core.errors import ConfigError, TandemError
from core.paths import BROKEN
from model_files import catalogue
from tandem_client import AsyncClient, CallFailed
from tandem_client.stubs import cluster_pb2

MB, GB = 1 << 20, 1 << 30
MIN_RAM_BYTES = 2 * GB
MIN_SHM_BYTES = 128 * MB  # for the object store of Ray and the segments of UCX
MIN_OPEN_FILES = 4096

PACKAGES = ("ray", "torch", "grpcio", "protobuf", "tokenizers", "opentelemetry-sdk")
NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12")  # one of them


def versions() -> list[Finding]:
    found = f"Python {platform.python_version()}"
    findings = [judge(sys.version_info >= (3, 11), "python", found, "install Python 3.11 or newer", Health.FAIL)]
    for name in PACKAGES:
        found = _version_of(name)
        findings.append(judge(bool(found), name, found or "not installed", "run `make setup`", Health.FAIL))
    nixl = next(((name, found) for name in NIXL_PACKAGES if (found := _version_of(name))), ("nixl", ""))
    findings.append(judge(bool(nixl[1]), nixl[0], nixl[1] or "not installed", "run `make setup`", Health.FAIL))
    return findings


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def processor() -> list[Finding]:
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
        flags = set(next(lines, "").partition(":")[2].split())
    native = sorted(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    bfloat16 = f"native bfloat16 ({', '.join(native)})" if native else "no native bfloat16"
    text = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {bfloat16}"
    return [judge(bool(native), "processor", text, "use `--dtype float32`: emulated bfloat16 is likely slower")]


def memory() -> list[Finding]:
    available = psutil.virtual_memory().available
    findings = [
        judge(available >= MIN_RAM_BYTES, "memory", f"{available / GB:.1f} GB available",
              "end other programs, or lower `--kv-memory-mb`"),
    ]  # fmt: skip
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        findings.append(
            judge(free >= MIN_SHM_BYTES, "/dev/shm", f"{free / MB:.0f} MB free",
                  "enlarge it (for a container: `docker run --shm-size=1g`)")
        )  # fmt: skip
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma, unlimited = Path("/dev/infiniband").is_dir(), locked == resource.RLIM_INFINITY
    text = ("unlimited" if unlimited else f"{locked / MB:.0f} MB") + ("" if rdma else " (this machine has no RDMA)")
    findings.append(
        judge(unlimited or not rdma, "locked memory", text,
              "set `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity), because RDMA pins the KV pool")
    )  # fmt: skip
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    findings.append(judge(files >= MIN_OPEN_FILES, "open files", str(files), f"set `ulimit -n {MIN_OPEN_FILES * 16}`"))
    return findings


def model_cache() -> list[Finding]:
    directory = catalogue.default_cache_dir()
    findings = []
    for entry in catalogue.CATALOGUE.values():
        path = catalogue.cached_path(entry, directory)
        if not catalogue.is_cached(entry, directory):
            text, fix = f"not in {directory}", f"run `tandem pull {entry.name}`, or let `tandem serve` fetch the model"
            findings.append(Finding(entry.name, Health.WARN, text, fix))
            continue
        intact = catalogue.file_sha256(path) == entry.sha256
        fix = f"run `tandem pull {entry.name}` to replace the file"
        findings.append(judge(intact, entry.name, f"{path}{'' if intact else ' is damaged'}", fix, Health.FAIL))
    return findings


async def ports() -> list[Finding]:
    config = RouterConfig()
    subject = f"port {config.port}"
    try:
        check_port(config)
        return [Finding(subject, Health.OK, "free")]
    except ConfigError:
        pass
    try:
        async with AsyncClient(f"{config.host}:{config.port}") as client:
            model, fleet = await client.model(), await client.fleet()
        return [Finding(subject, Health.OK, f"a router serves {model.name} on it"), *paths(fleet)]
    except CallFailed:
        text = "taken by another program, or by a router with TLS"
        return [Finding(subject, Health.WARN, text, "choose another port with `tandem serve --port`")]


def paths(fleet: cluster_pb2.GetFleetResponse) -> list[Finding]:
    """The paths between the workers of a running fleet, as its workers measured them."""
    fix = "docs/paths.md lists the causes"
    return [judge(path.state not in BROKEN, name_of(reader, path), str(path), fix) for reader, path in paths_of(fleet)]


async def transports() -> list[Finding]:
    """Check the default transport, and ucxx if it is installed."""
    config = TransferConfig()
    findings = [await transport(config)]
    if importlib.util.find_spec("ucxx") is not None:
        findings.append(await transport(replace(config, transport="ucxx")))
    return findings


async def transport(config: TransferConfig) -> Finding:
    try:
        result = await probe(config)
    except (TandemError, ImportError) as error:
        fix = "reinstall the transport with `make setup`; in a container allow ptrace (`--cap-add SYS_PTRACE`)"
        return Finding(config.transport, Health.FAIL, str(error), fix)
    text = f"between two processes {result.path}, {result.single_read_s * 1e6:.0f} us a block"
    fix = "if this machine is idle, share /dev/shm and allow ptrace (`--cap-add SYS_PTRACE`)"
    return judge(result.path.state not in BROKEN, config.transport, text, fix)


CHECKS: tuple[Callable[[], list[Finding]], ...] = (versions, processor, memory, gpus, model_cache)


async def examine() -> list[Finding]:
    findings = [finding for check in CHECKS for finding in check()]
    return findings + await ports() + await transports()


def doctor(console: Console) -> int:
    """Print every finding. Returns the exit code: 1 if a finding is a FAIL."""
    with console.status("examining this machine"):
        findings = asyncio.run(examine())
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "what", "found"):
        table.add_column(name, overflow="fold")  # show file paths whole
    for finding in findings:
        text = f"{finding.text}\n[bold]-> {finding.fix}[/]" if finding.fix else finding.text
        table.add_row(finding.health.value, finding.subject, text)
    console.print(table)
    return int(any(finding.health is Health.FAIL for finding in findings))
