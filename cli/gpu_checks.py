"""The part of `tandem doctor` that judges GPUs: driver, memory, peer access, CUDA IPC, RDMA devices, NUMA nodes.

torch is not imported: the installed packages tell its version of CUDA. docs/gpu.md explains the traps.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from cli.findings import Finding, Health, judge
from cli.gpu_facts import Gpu, GpuFacts, read_facts
from core.config import TransferConfig
from core.errors import ConfigError
from kv_transfer.device.device_checks import check_environment, paths_of

MIN_DRIVER = {12: 525, 13: 580}  # major version of CUDA -> oldest branch of the driver
MIN_FREE_SHARE = 0.25  # of a GPU's memory
MIN_CAPABILITY = (8, 0)  # the first with bfloat16
PEER_STATES = {
    "CNS": "the chipset does not support it", "GNS": "the GPU does not support it", "TNS": "the topology prevents it",
    "NS": "not supported", "DR": "disabled in the driver", "U": "unknown",
}  # fmt: skip

Version = Callable[[str], str]  # of an installed package; raises PackageNotFoundError


def gpus() -> list[Finding]:
    return judge_gpus(read_facts(), importlib.metadata.version)


def judge_gpus(facts: GpuFacts, version: Version) -> list[Finding]:
    """One line on a machine without a GPU."""
    if facts.undriven:
        text = "this machine has a GPU, but no driver answers for it"
        fix = "install the driver of NVIDIA and run `nvidia-smi` (in a container: `docker run --gpus all`)"
        return [Finding("GPU", Health.WARN, text, fix)]
    if not facts.gpus:
        return [Finding("GPU", Health.OK, "no GPU: workers run on the CPU")]
    findings = [finding for gpu in facts.gpus for finding in _gpu(gpu)]
    findings += [*_same_type(facts), *_software(facts.gpus[0], version), *_compiler(), *_peer_access(facts)]
    return [*findings, *_cuda_ipc(facts), *_rdma(facts)]


def _gpu(gpu: Gpu) -> list[Finding]:
    subject, share = f"GPU {gpu.index}", gpu.free_mb / max(1, gpu.total_mb)
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    text = f"{gpu.name}, {gpu.free_mb / 1024:.1f} of {gpu.total_mb / 1024:.1f} GB free{node}"
    fix = "end other programs on it (`nvidia-smi` lists them): the KV pool gets what is free"
    findings = [judge(share >= MIN_FREE_SHARE, subject, text, fix)]
    if gpu.compute_capability < MIN_CAPABILITY:
        older = f"compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}, without bfloat16"
        findings.append(Finding(subject, Health.WARN, older, "set `--dtype float32`, or use a newer GPU"))
    if gpu.compute_mode == "Prohibited":
        fix = f"run `nvidia-smi -i {gpu.index} -c DEFAULT`"
        findings.append(Finding(subject, Health.FAIL, "its compute mode forbids every program", fix))
    elif gpu.compute_mode.startswith("Exclusive"):
        fix = f"run `nvidia-smi -i {gpu.index} -c DEFAULT` if prefill_gpus or decode_gpus is a fraction"
        findings.append(Finding(subject, Health.WARN, "its compute mode allows one process: workers cannot share", fix))
    if gpu.mig:
        fix = f"run `nvidia-smi -i {gpu.index} -mig 0`"
        findings.append(Finding(subject, Health.WARN, "MIG splits it, but Tandem uses whole GPUs", fix))
    return findings


def _same_type(facts: GpuFacts) -> list[Finding]:
    names = sorted({gpu.name for gpu in facts.gpus})
    if len(names) == 1:
        return []
    text = f"{', '.join(names)}: Ray gives all of them the type of the first, {facts.gpus[0].name}"
    fix = "if prefill_accelerator or decode_accelerator is set, give each type a Ray node, with CUDA_VISIBLE_DEVICES"
    return [Finding("GPU types", Health.WARN, text, fix)]


def _installed(name: str, version: Version) -> str:
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda_of_torch(version: Version) -> int:
    """Major version of CUDA that the installed torch brings along; 0 = none, a build for CPUs."""
    torch = _installed("torch", version)
    build = torch.partition("+")[2]
    if build.startswith("cu"):
        return int(build[2:4])
    newest = _installed("nvidia-cuda-runtime", version)  # since CUDA 13; before, the name ended in -cu12
    if newest:
        return int(newest.partition(".")[0])
    return 12 if _installed("nvidia-cuda-runtime-cu12", version) else 0


def _software(gpu: Gpu, version: Version) -> list[Finding]:
    cuda = _cuda_of_torch(version)
    if not cuda:
        text = f"driver {gpu.driver}, but torch {_installed('torch', version)} is a build for CPUs"
        return [Finding("CUDA", Health.WARN, text, "install torch for CUDA (deploy/gpus.md), or set `--device cpu`")]
    branch, wanted = gpu.driver.partition(".")[0], MIN_DRIVER.get(cuda, 0)
    enough = branch.isdigit() and int(branch) >= wanted
    text = f"driver {gpu.driver}, CUDA {cuda} of torch {_installed('torch', version)}"
    fix = f"install driver {wanted} or newer, or torch for an older CUDA"
    nixl = f"nixl-cu{cuda}"
    fix_nixl = f"run `pip install {nixl}`: nixl of another CUDA does not find its libraries"
    return [
        judge(enough, "CUDA", text, fix, Health.FAIL),
        judge(bool(_installed(nixl, version)), nixl, _installed(nixl, version) or "not installed", fix_nixl),
    ]


def _compiler() -> list[Finding]:
    """Triton compiles a small C program for each kernel."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    lacks = ["a C compiler"] * (not compiler) + ["Python.h"] * (not headers)
    fix = "install gcc and the headers of Python (Debian: `apt install gcc python3-dev`)"
    text = f"lacks {' and '.join(lacks)}" if lacks else f"{compiler}, Python.h"
    return [judge(not lacks, "GPU kernels", text, fix, Health.FAIL)]


def _peer_access(facts: GpuFacts) -> list[Finding]:
    if len(facts.gpus) < 2:
        return []
    refused = {pair: state for pair, state in sorted(facts.peer_reads.items()) if state != "OK" and pair[0] < pair[1]}
    if not facts.peer_reads:
        fix = "run `nvidia-smi topo -p2p r`"
        return [Finding("peer access", Health.WARN, "nvidia-smi does not tell which GPUs read each other", fix)]
    if refused:
        (one, other), state = next(iter(refused.items()))
        more = f", and {len(refused) - 1} more pairs" if len(refused) > 1 else ""
        text = f"GPU {one} cannot read GPU {other} ({PEER_STATES.get(state, state)}){more}"
        fix = "turn off ACS and the IOMMU in the BIOS if the GPUs can; until then, hand-offs pass through host memory"
        return [Finding("peer access", Health.WARN, text, fix)]
    links = sorted({link for pair, link in facts.links.items() if pair[0] < pair[1]})
    fast = bool(links) and all(link.startswith("NV") for link in links)
    over = "NVLink" if fast else "PCIe" if not any(link.startswith("NV") for link in links) else "NVLink and PCIe"
    return [Finding("peer access", Health.OK, f"every GPU reads every other, over {over} ({', '.join(links)})")]


def _cuda_ipc(facts: GpuFacts) -> list[Finding]:
    """Workers of one machine read each other's pools in GPU memory."""
    problems = []
    try:
        check_environment(facts.environment, paths_of(TransferConfig().device_path, True, facts.gpudirect))
    except ConfigError as error:
        variable = str(error).partition("=")[0].partition(" ")[0]
        fix = f"unset {variable}: a worker on a GPU refuses to start with it"
        problems.append(Finding("CUDA IPC", Health.FAIL, str(error), fix))
    if not facts.ptrace:
        text = "a process may not read the memory of another one of its user (kernel.yama.ptrace_scope)"
        fix = "run `sysctl kernel.yama.ptrace_scope=0` (for a container: `--cap-add SYS_PTRACE`)"
        problems.append(Finding("CUDA IPC", Health.WARN, text, fix))
    return problems or [Finding("CUDA IPC", Health.OK, "no setting prevents it")]


def _rdma(facts: GpuFacts) -> list[Finding]:
    """Workers of several machines read each other's pools."""
    if not facts.rdma:
        return [Finding("RDMA", Health.OK, "no device: between machines, hand-offs pass through host memory and TCP")]
    findings = []
    for device in facts.rdma:
        node = "" if device.numa_node is None else f", NUMA node {device.numa_node}"
        fix = "connect it, or leave it out with UCX_NET_DEVICES"
        findings.append(judge(device.active, device.name, f"{device.link}{node}", fix))
    fix = "pass it to the container (`--device /dev/infiniband --ulimit memlock=-1`)"
    text = "/dev/infiniband holds the devices" if facts.rdma_usable else "/dev/infiniband is missing or empty"
    findings.append(judge(facts.rdma_usable, "RDMA", text, fix))
    text = "RDMA devices read GPU memory" if facts.gpudirect else "hand-offs between machines pass through host memory"
    fix = "run `modprobe nvidia-peermem`, or use the open kernel modules of the driver (dmabuf) on Linux 5.12 or newer"
    findings.append(judge(facts.gpudirect, "GPUDirect RDMA", text, fix))
    return findings + _far_from_rdma(facts)


def _far_from_rdma(facts: GpuFacts) -> list[Finding]:
    nodes = {device.numa_node for device in facts.rdma if device.active} - {None}
    far = [gpu.index for gpu in facts.gpus if gpu.numa_node is not None and gpu.numa_node not in nodes]
    if not nodes or not far:
        return []
    text = f"no active RDMA device on the node of GPU {', '.join(map(str, far))}: their hand-offs cross the sockets"
    return [Finding("NUMA", Health.WARN, text, "run decode and prefill workers on the GPUs beside an RDMA device")]
