"""The part of `tandem doctor` that judges GPUs: driver, memory, peer access, CUDA IPC, RDMA devices, NUMA nodes.

torch is not imported: the installed packages tell its version of CUDA. docs/gpu.md explains the traps.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from cli.diagnosis.doctor_findings import Finding, Health, Version, judge, judge_installed, version_of
from cli.diagnosis.gpu_facts import Gpu, GpuFacts
from core.errors import ConfigError
from kv_transfer.device.device_checks import check_environment

MIN_DRIVER = {12: 525, 13: 580}  # major version of CUDA -> oldest branch of the driver
MIN_FREE_SHARE = 0.25  # of a GPU's memory
MIN_CAPABILITY = (8, 0)  # the first with bfloat16
PEER_STATES = {
    "CNS": "the chipset does not support it", "GNS": "the GPU does not support it", "TNS": "the topology prevents it",
    "NS": "not supported", "DR": "disabled in the driver", "U": "unknown",
}  # fmt: skip


def judge_gpus(facts: GpuFacts, version: Version) -> Iterator[Finding]:
    """One line on a machine without a GPU."""
    if facts.undriven:
        text = "this machine has a GPU, but no driver answers for it"
        fix = "install the driver of NVIDIA and run `nvidia-smi` (in a container: `docker run --gpus all`)"
        yield Finding("GPU", Health.WARN, text, fix)
    elif not facts.gpus:
        yield Finding("GPU", Health.OK, "no GPU: workers run on the CPU")
    else:
        for gpu in facts.gpus:
            yield from _gpu(gpu)
        yield from _software(facts.gpus[0], version)
        yield _compiler()
        for check in FACT_CHECKS:
            yield from check(facts)


def _gpu(gpu: Gpu) -> Iterator[Finding]:
    subject, share = f"GPU {gpu.index}", gpu.free_mb / max(1, gpu.total_mb)
    text = f"{gpu.name}, {gpu.free_mb / 1024:.1f} of {gpu.total_mb / 1024:.1f} GB free{_node(gpu.numa_node)}"
    fix = "end other programs on it (`nvidia-smi` lists them): the KV pool gets what is free"
    yield judge(share >= MIN_FREE_SHARE, subject, text, fix)
    older = "compute capability {}.{}, without bfloat16".format(*gpu.compute_capability)
    share_it = f"run `nvidia-smi -i {gpu.index} -c DEFAULT`"
    faults = (
        (gpu.compute_capability < MIN_CAPABILITY, Health.WARN, older, "set `--dtype float32`, or use a newer GPU"),
        (gpu.compute_mode == "Prohibited", Health.FAIL, "its compute mode forbids every program", share_it),
        (
            gpu.compute_mode.startswith("Exclusive"), Health.WARN,
            "its compute mode allows one process: workers cannot share",
            f"{share_it} if prefill_gpus or decode_gpus is a fraction",
        ),
        (gpu.mig, Health.WARN, "MIG splits it, but Tandem uses whole GPUs", f"run `nvidia-smi -i {gpu.index} -mig 0`"),
    )  # fmt: skip
    yield from (Finding(subject, health, text, fix) for is_wrong, health, text, fix in faults if is_wrong)


def _node(number: int | None) -> str:
    return "" if number is None else f", NUMA node {number}"


def _cuda_of_torch(version: Version) -> int:
    """Major version of CUDA that the installed torch brings along; 0 = none, a build for CPUs."""
    build = version_of("torch", version).partition("+")[2]
    if build.startswith("cu"):
        return int(build[2:4])
    newest = version_of("nvidia-cuda-runtime", version)  # since CUDA 13; before, the name ended in -cu12
    if newest:
        return int(newest.partition(".")[0])
    return 12 if version_of("nvidia-cuda-runtime-cu12", version) else 0


def _software(gpu: Gpu, version: Version) -> Iterator[Finding]:
    cuda, torch = _cuda_of_torch(version), version_of("torch", version)
    if not cuda:
        text = f"driver {gpu.driver}, but torch {torch} is a build for CPUs"
        yield Finding("CUDA", Health.WARN, text, "install torch for CUDA (deploy/gpus.md), or set `--device cpu`")
        return
    branch, wanted = gpu.driver.partition(".")[0], MIN_DRIVER.get(cuda, 0)
    enough = branch.isdigit() and int(branch) >= wanted
    fix = f"install driver {wanted} or newer, or torch for an older CUDA"
    yield judge(enough, "CUDA", f"driver {gpu.driver}, CUDA {cuda} of torch {torch}", fix, Health.FAIL)
    nixl = f"nixl-cu{cuda}"
    fix = f"run `pip install {nixl}`: nixl of another CUDA does not find its libraries"
    yield judge_installed(nixl, fix, Health.WARN, version)


def _compiler() -> Finding:
    """Triton compiles a small C program for each kernel."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    lacks = ["a C compiler"] * (not compiler) + ["Python.h"] * (not headers)
    fix = "install gcc and the headers of Python (Debian: `apt install gcc python3-dev`)"
    text = f"lacks {' and '.join(lacks)}" if lacks else f"{compiler}, Python.h"
    return judge(not lacks, "GPU kernels", text, fix, Health.FAIL)


def _same_type(facts: GpuFacts) -> Iterator[Finding]:
    names = sorted({gpu.name for gpu in facts.gpus})
    if len(names) > 1:
        text = f"{', '.join(names)}: Ray gives all of them the type of the first, {facts.gpus[0].name}"
        fix = "if prefill_accelerator or decode_accelerator is set, give each type a Ray node with CUDA_VISIBLE_DEVICES"
        yield Finding("GPU types", Health.WARN, text, fix)


def _peer_access(facts: GpuFacts) -> Iterator[Finding]:
    if len(facts.gpus) < 2:
        return
    refused = [(pair, state) for pair, state in sorted(facts.peer_reads.items()) if state != "OK" and pair[0] < pair[1]]
    links = sorted({link for pair, link in facts.links.items() if pair[0] < pair[1]})
    over = " and ".join(sorted({"NVLink" if link.startswith("NV") else "PCIe" for link in links})) or "PCIe"
    text = f"every GPU reads every other, over {over} ({', '.join(links)})"
    fix = "turn off ACS and the IOMMU in the BIOS if the GPUs can; until then, hand-offs pass through host memory"
    if not facts.peer_reads:
        text, fix = "nvidia-smi does not tell which GPUs read each other", "run `nvidia-smi topo -p2p r`"
    elif refused:
        (one, other), state = refused[0]
        more = f", and {len(refused) - 1} more pairs" if len(refused) > 1 else ""
        text = f"GPU {one} cannot read GPU {other} ({PEER_STATES.get(state, state)}){more}"
    yield judge(bool(facts.peer_reads) and not refused, "peer access", text, fix)


def _cuda_ipc(facts: GpuFacts) -> Iterator[Finding]:
    """Workers of one machine read each other's pools in GPU memory."""
    fault = ""
    try:
        check_environment(facts.environment)
    except ConfigError as error:
        fault = str(error)
        variable = fault.partition("=")[0].partition(" ")[0]
        yield Finding("CUDA IPC", Health.FAIL, fault, f"unset {variable}: a worker on a GPU refuses to start with it")
    if not facts.ptrace:
        text = "a process may not read the memory of another one of its user (kernel.yama.ptrace_scope)"
        fix = "run `sysctl kernel.yama.ptrace_scope=0` (for a container: `--cap-add SYS_PTRACE`)"
        yield Finding("CUDA IPC", Health.WARN, text, fix)
    elif not fault:
        yield Finding("CUDA IPC", Health.OK, "no setting prevents it")


def _rdma(facts: GpuFacts) -> Iterator[Finding]:
    """Workers of several machines read each other's pools."""
    if not facts.rdma:
        yield Finding("RDMA", Health.OK, "no device: between machines, hand-offs pass through host memory and TCP")
        return
    for device in facts.rdma:
        fix = "connect it, or leave it out with UCX_NET_DEVICES"
        yield judge(device.active, device.name, f"{device.link}{_node(device.numa_node)}", fix)
    fix = "pass it to the container (`--device /dev/infiniband --ulimit memlock=-1`)"
    text = "/dev/infiniband holds the devices" if facts.rdma_usable else "/dev/infiniband is missing or empty"
    yield judge(facts.rdma_usable, "RDMA", text, fix)
    text = "RDMA devices read GPU memory" if facts.gpudirect else "hand-offs between machines pass through host memory"
    fix = "run `modprobe nvidia-peermem`, or use the open kernel modules of the driver (dmabuf) on Linux 5.12 or newer"
    yield judge(facts.gpudirect, "GPUDirect RDMA", text, fix)
    nodes = {device.numa_node for device in facts.rdma if device.active} - {None}
    far = [str(gpu.index) for gpu in facts.gpus if gpu.numa_node is not None and gpu.numa_node not in nodes]
    if nodes and far:
        text = f"no active RDMA device on the node of GPU {', '.join(far)}: their hand-offs cross the sockets"
        yield Finding("NUMA", Health.WARN, text, "run decode and prefill workers on the GPUs beside an RDMA device")


FACT_CHECKS: tuple[Callable[[GpuFacts], Iterator[Finding]], ...] = (_same_type, _peer_access, _cuda_ipc, _rdma)
