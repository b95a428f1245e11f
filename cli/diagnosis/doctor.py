"""`tandem doctor`: checks this machine, and says how to fix each fault.

Each check examines one subject and yields findings (cli/diagnosis/doctor_findings.py), faults with a fix. `examine`
lists the checks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.diagnosis.doctor_findings import Finding, Health, judge, judge_installed, version_of
from cli.diagnosis.gpu_checks import judge_gpus
from cli.diagnosis.gpu_facts import read_facts
from cli.diagnosis.start_checks import check_port
from cli.diagnosis.transport_probe import probe
from cli.diagnosis.vllm_environment import environment, python_of
from cli.screens.path_lines import name_of, paths_of
from core.config import RouterConfig, TandemConfig, TransferConfig
from core.errors import ConfigError, TandemError
from core.paths import BROKEN
from model_files import catalogue
from tandem_client import CallFailed, Client
from tandem_client.stubs import cluster_pb2

MB, GB = 1 << 20, 1 << 30
MIN_RAM_BYTES = 2 * GB
MIN_SHM_BYTES = 128 * MB  # for the object store of Ray and the segments of UCX
MIN_OPEN_FILES = 4096
HEAD_DIM = 64  # of the default model
MAX_TCP_RETRIES = 8  # give up after 100 s; the default of 15 after 15 minutes
TCP_RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")
STYLES = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "red"}

PACKAGES = ("ray", "torch", "grpcio", "protobuf", "tokenizers", "opentelemetry-sdk")
NIXL_PACKAGES = ("nixl-cu13", "nixl-cu12")  # one of them


def versions() -> Iterator[Finding]:
    found = f"Python {platform.python_version()}"
    yield judge(sys.version_info >= (3, 11), "python", found, "install Python 3.11 or newer", Health.FAIL)
    nixl = next(filter(version_of, NIXL_PACKAGES), "nixl")
    yield from (judge_installed(name, "run `make setup`", Health.FAIL) for name in (*PACKAGES, nixl))


def processor() -> Iterator[Finding]:
    from engine.backend import cpu_flags, describe_kernels  # imports torch

    native = sorted(cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"})
    bfloat16 = f"native bfloat16 ({', '.join(native)})" if native else "no native bfloat16"
    text = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {bfloat16}"
    yield judge(bool(native), "processor", text, "use `--dtype float32`: emulated bfloat16 is likely slower")
    kernels, reason = describe_kernels(HEAD_DIM)
    text = f"{kernels}: {reason}" if reason else kernels
    fix = "install gcc; AMX needs Linux 5.16 or newer, and no sandbox that filters arch_prctl"
    yield judge(not reason, "CPU kernels", text, fix)


def memory() -> Iterator[Finding]:
    available = psutil.virtual_memory().available
    fix = "end other programs, or lower `--kv-memory-mb`"
    yield judge(available >= MIN_RAM_BYTES, "memory", f"{available / GB:.1f} GB available", fix)
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        writable = os.access("/dev/shm", os.W_OK)
        text = f"{free / MB:.0f} MB free" + ("" if writable else ", not writable")
        fix = "enlarge it (for a container: `docker run --shm-size=1g`)" if writable else "mount it to be written"
        otherwise = Health.WARN if writable else Health.FAIL  # `tandem serve` refuses the start
        yield judge(writable and free >= MIN_SHM_BYTES, "/dev/shm", text, fix, otherwise)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma, unlimited = Path("/dev/infiniband").is_dir(), locked == resource.RLIM_INFINITY
    text = ("unlimited" if unlimited else f"{locked / MB:.0f} MB") + ("" if rdma else " (this machine has no RDMA)")
    fix = "set `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity), because RDMA pins the KV pool"
    yield judge(unlimited or not rdma, "locked memory", text, fix)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield judge(files >= MIN_OPEN_FILES, "open files", str(files), f"set `ulimit -n {MIN_OPEN_FILES * 16}`")


def network() -> Iterator[Finding]:
    """A read that waits for a link which lost everything keeps its blocks until TCP gives the connection up."""
    if TCP_RETRIES.exists():
        retries = int(TCP_RETRIES.read_text())
        text = f"TCP gives up a silent connection after {retries} retries"
        fix = "for KV over TCP between machines: `sysctl -w net.ipv4.tcp_retries2=5` (13 s)"
        yield judge(retries <= MAX_TCP_RETRIES, "network", text, fix)


def gpus() -> Iterator[Finding]:
    return judge_gpus(read_facts(), importlib.metadata.version)


def model_cache() -> Iterator[Finding]:
    directory = catalogue.default_cache_dir()
    for entry in catalogue.CATALOGUE.values():
        path, fix = catalogue.cached_path(entry, directory), f"run `tandem pull {entry.name}`"
        if not catalogue.is_cached(entry, directory):
            fix += ", or let `tandem serve` fetch the model"
            yield Finding(entry.name, Health.WARN, f"not in {directory}", fix)
            continue
        intact = catalogue.file_sha256(path) == entry.sha256
        text = str(path) if intact else f"{path} is damaged"
        yield judge(intact, entry.name, text, f"{fix} to replace the file", Health.FAIL)


def ports(config: RouterConfig) -> Iterator[Finding]:
    """The port of the routers and, if a router listens there, the paths between its workers."""
    subject, fix = f"port {config.port}", "choose another port with `tandem serve --port`"
    try:
        check_port(config)
        yield Finding(subject, Health.OK, "free")
        return
    except ConfigError:
        pass
    try:
        with Client(f"{config.host}:{config.port}") as client:
            model, fleet = client.model(), client.fleet()
    except CallFailed:
        yield Finding(subject, Health.WARN, "taken by another program, or by a router with TLS", fix)
        return
    yield Finding(subject, Health.OK, f"a router serves {model.name} on it")
    yield from paths(fleet)


def paths(fleet: cluster_pb2.GetFleetResponse) -> Iterator[Finding]:
    """The paths between the workers of a running fleet, as its workers measured them."""
    for reader, path in paths_of(fleet):
        yield judge(path.state not in BROKEN, name_of(reader, path), str(path), "docs/paths.md lists the causes")


def vllm(config: TandemConfig) -> Iterator[Finding]:
    """The environment of vLLM, if the config has vLLM as engine, or if `make vllm` has made one."""
    if config.engine.name == "vllm" or python_of(config.vllm).exists():
        found = list(environment(config.vllm))
        yield from [finding for finding in found if finding.health is not Health.OK] or found[:1]


def transports() -> Iterator[Finding]:
    """The default transport, and ucxx if it is installed."""
    yield transport(TransferConfig())
    if importlib.util.find_spec("ucxx") is not None:
        yield transport(TransferConfig(transport="ucxx"))


def transport(config: TransferConfig) -> Finding:
    try:
        path = probe(config)
    except (TandemError, ImportError, OSError) as error:
        fix = "reinstall the transport with `make setup`; in a container allow ptrace (`--cap-add SYS_PTRACE`)"
        return Finding(config.transport, Health.FAIL, str(error), fix)
    fix = "if this machine is idle, share /dev/shm and allow ptrace (`--cap-add SYS_PTRACE`)"
    return judge(path.state not in BROKEN, config.transport, f"between two processes {path}", fix)


def home() -> Iterator[Finding]:
    """A fault without a place for models, kernels and tokens."""
    try:
        catalogue.default_cache_dir()
    except ConfigError as error:
        reason, _, fix = str(error).partition(": ")
        yield Finding("home", Health.FAIL, reason, fix)


def examine(config: TandemConfig) -> list[Finding]:
    if no_home := list(home()):
        return [*versions(), *memory(), *network(), *gpus(), *no_home, *ports(config.router), *transports()]
    return [
        *versions(), *processor(), *memory(), *network(), *gpus(), *model_cache(), *ports(config.router), *transports(),
        *vllm(config),
    ]  # fmt: skip


def doctor(console: Console, config: TandemConfig) -> int:
    """Print every finding. Returns the exit code: 1 if a finding is a FAIL."""
    logging.getLogger("kv_transfer").setLevel(logging.CRITICAL)  # a transport that fails is a finding, not a traceback
    with console.status("examining this machine"):
        findings = examine(config)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "what", "found"):
        table.add_column(name, overflow="fold")  # show file paths whole
    for finding in findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(finding.health.value, style=STYLES[finding.health]), finding.subject, text)
    console.print(table)
    return int(any(finding.health is Health.FAIL for finding in findings))
