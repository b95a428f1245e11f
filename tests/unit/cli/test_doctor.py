"""`tandem doctor` judges a machine and its GPUs by facts, all fake here, and returns an exit code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import logging
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from cli.commands.serve import gpu_use
from cli.diagnosis import doctor, gpu_checks
from cli.diagnosis.doctor_findings import Finding, Health
from cli.diagnosis.gpu_checks import judge_gpus
from cli.diagnosis.gpu_facts import Gpu, GpuFacts, RdmaDevice, read_facts
from cli.diagnosis.start_checks import (
    check_before_start,
    check_certificate,
    check_credentials,
    check_device,
    check_http_port,
    check_metrics_ports,
    check_port,
    warn_without_collector,
)
from core.config import (
    ClusterConfig,
    EngineConfig,
    GatewayConfig,
    RouterConfig,
    SecurityConfig,
    TandemConfig,
    TelemetryConfig,
    TransferConfig,
    from_mapping,
)
from core.errors import ConfigError, TransportError
from fleet.law.claims import GpuUse
from runtime.shared_port import PortClaim

LONG_PATH = "/home/[somebody]/" + "a-long-name/" * 9 + "model.gguf"


@pytest.mark.parametrize(("health", "code"), [(Health.OK, 0), (Health.WARN, 0), (Health.FAIL, 1)])
def test_a_narrow_terminal_shows_a_finding_whole(health: Health, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(_: TandemConfig) -> list[Finding]:
        return [Finding("model", health, LONG_PATH, "set [vllm] python")]

    monkeypatch.setattr(doctor, "examine", examine)
    console = Console(file=io.StringIO(), width=60)
    assert doctor.doctor(console, TandemConfig()) == code
    shown = "".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert LONG_PATH in shown
    assert "->set[vllm]python" in shown


def test_a_user_without_a_home_is_a_finding_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number. It was the only line of the answer."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    monkeypatch.setattr(doctor, "transports", lambda: iter(()))
    faults = [found for found in doctor.examine(TandemConfig()) if found.health is Health.FAIL]
    fix = "set HOME, or XDG_CACHE_HOME for models and tokens"
    assert faults == [Finding("home", Health.FAIL, "this user has no home", fix)]


def test_a_transport_that_fails_is_a_finding_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cli.diagnosis.transport_probe.open_transport", Mock(side_effect=TransportError("no memory")))
    monkeypatch.setattr(doctor, "examine", lambda _: [doctor.transport(TransferConfig())])
    console = Console(file=io.StringIO(), width=200)
    logger = logging.getLogger("kv_transfer")
    try:
        assert doctor.doctor(console, TandemConfig()) == 1
    finally:
        logger.setLevel(logging.NOTSET)
    assert "no memory" in console.file.getvalue()  # type: ignore[attr-defined]
    assert caplog.messages == []


def test_an_interpreter_of_vllm_that_is_missing_is_a_fault_only_of_a_config_that_needs_it() -> None:
    python = {"python": "/nowhere/bin/python"}
    (finding,) = doctor.vllm(from_mapping({"engine": {"name": "vllm"}, "vllm": python}))
    assert (finding.health, finding.text) == (Health.FAIL, "/nowhere/bin/python is not there")
    assert not list(doctor.vllm(from_mapping({"vllm": python})))


@pytest.mark.parametrize(("retries", "health"), [(15, Health.WARN), (5, Health.OK)])
def test_a_machine_whose_tcp_waits_for_a_quarter_of_an_hour_is_told_what_to_set(
    retries: int, health: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp_retries2").write_text(f"{retries}\n")
    monkeypatch.setattr("cli.diagnosis.doctor.TCP_RETRIES", tmp_path / "tcp_retries2")
    (finding,) = doctor.network()
    assert finding.health is health
    assert ("tcp_retries2=5" in finding.fix) == (health is Health.WARN)


QUERY = """\
0, NVIDIA H100 80GB HBM3, 580.82.07, 9.0, 81559, 81008, 00000000:18:00.0, Default, Disabled
1, NVIDIA H100 80GB HBM3, 580.82.07, 9.0, 81559, 4000, 00000000:9A:00.0, Default, [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t52-103\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PEER_READS = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tOK\t
 GPU1\tCNS\tX\t

Legend:

  X    = Self
  CNS  = Chipset not supported
"""
COMMANDS = {"-m": TOPOLOGY, "r": PEER_READS}
RESTRICTED = {"proc/sys/kernel/yama/ptrace_scope": "1\n", "proc/self/status": "Name:\tx\nCapEff:\t00000000a80425fb\n"}

FILES = {
    "sys/bus/pci/devices/0000:18:00.0/numa_node": "0\n",
    "sys/bus/pci/devices/0000:9a:00.0/numa_node": "1\n",
    "sys/class/infiniband/mlx5_0/device/numa_node": "0\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_1/device/numa_node": "-1\n",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\n",
    "dev/infiniband/uverbs0": "",
}  # fmt: skip

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "580.82.07", (9, 0), 81559, 81008, "0000:18:00.0", "Default", False, 0)
PAIR = (H100, replace(H100, index=1, numa_node=1))
NVLINK = {(0, 1): "NV18", (1, 0): "NV18"}
READABLE = {(0, 1): "OK", (1, 0): "OK"}
NIC = RdmaDevice("mlx5_0", True, "InfiniBand, 400 Gb/sec (4X NDR)", 0)
GOOD = GpuFacts(PAIR, links=NVLINK, peer_reads=READABLE)
GPU_PACKAGES = {"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96", "nixl-cu13": "1.5.1"}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def smi(*command: str) -> str | None:
    return QUERY if command[1].startswith("--query-gpu") else COMMANDS[command[-1]]


def no_smi(*_: str) -> None:
    return None


def packages(found: dict[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    return version


def findings_of(facts: GpuFacts, **found: str) -> dict[str, list[Finding]]:
    by_subject: dict[str, list[Finding]] = {}
    for finding in judge_gpus(facts, packages(GPU_PACKAGES | found)):
        by_subject.setdefault(finding.subject, []).append(finding)
    return by_subject


def test_every_fact_is_read(tmp_path: Path) -> None:
    facts = read_facts(machine(tmp_path, FILES | RESTRICTED), smi, {"A": "b"})
    assert facts.gpus == (H100, replace(H100, index=1, free_mb=4000, bus_id="0000:9a:00.0", numa_node=1))
    assert facts.links == NVLINK
    assert facts.peer_reads == {(0, 1): "OK", (1, 0): "CNS"}
    assert facts.rdma == (NIC, RdmaDevice("mlx5_1", False, "no active port", None))
    assert facts.rdma_usable
    assert facts.gpudirect
    assert not facts.ptrace
    assert facts.environment == {"A": "b"}


def test_a_machine_with_one_gpu_has_no_pairs(tmp_path: Path) -> None:
    facts = read_facts(tmp_path, lambda *command: QUERY.splitlines()[0] if "query" in command[1] else None, {})
    assert (len(facts.gpus), facts.links, facts.peer_reads) == (1, {}, {})
    assert facts.gpus[0].numa_node is None


def test_a_cpu_machine_is_one_line(tmp_path: Path) -> None:
    facts = read_facts(machine(tmp_path, {"sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n"}), no_smi, {})
    assert list(judge_gpus(facts, packages({}))) == [Finding("GPU", Health.OK, "no GPU: workers run on the CPU")]


def test_a_gpu_without_a_driver_is_noticed(tmp_path: Path) -> None:
    card = "sys/bus/pci/devices/0000:18:00.0"
    root = machine(tmp_path, {f"{card}/vendor": "0x10de\n", f"{card}/class": "0x030200\n"})
    (finding,) = judge_gpus(read_facts(root, no_smi, {}), packages({}))
    assert (finding.health, "no driver answers" in finding.text) == (Health.WARN, True)
    assert "--gpus all" in finding.fix


def test_nothing_is_wrong_with_a_good_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_compiler", lambda: Finding("GPU kernels", Health.OK, "cc"))
    facts = replace(GOOD, gpus=(H100, replace(H100, index=1)), rdma=(NIC,), rdma_usable=True, gpudirect=True)
    found = findings_of(facts)
    assert {finding.health for group in found.values() for finding in group} == {Health.OK}
    assert found.keys() == {
        "GPU 0", "GPU 1", "CUDA", "nixl-cu13", "GPU kernels", "peer access", "CUDA IPC", "mlx5_0", "RDMA",
        "GPUDirect RDMA",
    }  # fmt: skip
    assert found["GPU 0"][0].text == "NVIDIA H100 80GB HBM3, 79.1 of 79.6 GB free, NUMA node 0"


def with_gpu(**changes: object) -> GpuFacts:
    return GpuFacts((replace(H100, **changes),))  # type: ignore[arg-type]


WRONG = [
    (with_gpu(free_mb=4000), "GPU 0", Health.WARN, r"3.9 of 79.6 GB free"),
    (with_gpu(compute_capability=(7, 5)), "GPU 0", Health.WARN, "compute capability 7.5, without bfloat16"),
    (with_gpu(compute_mode="Exclusive_Process"), "GPU 0", Health.WARN, "workers cannot share"),
    (with_gpu(compute_mode="Prohibited"), "GPU 0", Health.FAIL, "forbids every program"),
    (with_gpu(mig=True), "GPU 0", Health.WARN, "MIG"),
    (with_gpu(driver="535.183.01"), "CUDA", Health.FAIL, "driver 535.183.01, CUDA 13 of torch"),
    (replace(GOOD, gpus=(H100, replace(H100, index=1, name="NVIDIA A100"))), "GPU types", Health.WARN, "of the first"),
    (replace(GOOD, peer_reads={(0, 1): "CNS"}), "peer access", Health.WARN, r"GPU 0 cannot read GPU 1 \(the chipset"),
    (replace(GOOD, peer_reads={}), "peer access", Health.WARN, "does not tell"),
    (replace(GOOD, ptrace=False), "CUDA IPC", Health.WARN, "ptrace_scope"),
    (
        replace(GOOD, environment={"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}),
        "CUDA IPC", Health.FAIL, "PYTORCH_ALLOC_CONF has expandable_segments",
    ),
    (
        replace(GOOD, gpudirect=True, environment={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}),
        "CUDA IPC", Health.FAIL, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=n turns reads",
    ),
    (replace(GOOD, rdma=(replace(NIC, active=False, link="no active port"),)), "mlx5_0", Health.WARN, "no active port"),
    (replace(GOOD, rdma=(NIC,)), "RDMA", Health.WARN, "/dev/infiniband is missing"),
    (replace(GOOD, rdma=(NIC,)), "GPUDirect RDMA", Health.WARN, "pass through host memory"),
    (replace(GOOD, rdma=(NIC,)), "NUMA", Health.WARN, "node of GPU 1: their hand-offs cross"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "subject", "health", "text"), WRONG)
def test_a_fault_is_named_and_comes_with_a_fix(facts: GpuFacts, subject: str, health: Health, text: str) -> None:
    wrong = [finding for finding in findings_of(facts)[subject] if finding.health is not Health.OK]
    assert len(wrong) == 1
    assert wrong[0].health is health
    assert re.search(text, wrong[0].text)
    assert wrong[0].fix
    assert "unset" not in wrong[0].fix or re.search(
        r"unset (PYTORCH_ALLOC_CONF|UCX_CUDA_IPC_ENABLE_GET_ZCOPY):", wrong[0].fix
    )


@pytest.mark.parametrize(
    ("found", "subject", "health", "text"),
    [
        ({"torch": "2.13.0+cpu"}, "CUDA", Health.WARN, "torch 2.13.0+cpu is a build for CPUs"),
        ({"torch": "2.11.0+cu128"}, "CUDA", Health.OK, "CUDA 12 of torch 2.11.0+cu128"),
        ({"torch": "2.11.0+cu128"}, "nixl-cu12", Health.WARN, "not installed"),
        ({"torch": "2.8.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "CUDA", Health.OK, "CUDA 12 of torch 2.8.0"),
    ],
)
def test_the_packages_tell_which_cuda_torch_has(found: dict[str, str], subject: str, health: Health, text: str) -> None:
    version = {"torch": "", "nixl-cu13": "1.5.1"} | found
    findings = {f.subject: f for f in judge_gpus(GpuFacts((H100,)), packages(version))}
    assert findings[subject].health is health
    assert text in findings[subject].text


def test_gpu_kernels_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", no_smi)
    (finding,) = findings_of(GOOD)["GPU kernels"]
    assert finding.health is Health.FAIL
    assert "a C compiler" in finding.text


# ---- `tandem serve` reports faults of the config and of the machine before it starts Ray.


def fake_config(**parts: EngineConfig | TelemetryConfig | ClusterConfig) -> TandemConfig:
    """A config that passes every check, with `parts` replaced."""
    config = TandemConfig(engine=EngineConfig(model="fake:tiny"), router=RouterConfig(port=0))
    return replace(config, **parts)  # type: ignore[arg-type]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_the_error_for_a_taken_port_names_the_flag_that_changes_it() -> None:
    with taken_port() as port:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .* --port"):
            check_port(RouterConfig(port=port))
        with pytest.raises(ConfigError, match=f"metrics on port {port} .* --metrics-port"):
            check_before_start(fake_config(telemetry=TelemetryConfig(metrics_port=port)), Console())
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*; choose another with --http$"):
            check_http_port(GatewayConfig(port=port))
    with contextlib.closing(PortClaim("127.0.0.1", 0)) as claim:  # which routers of another fleet share
        with pytest.raises(ConfigError, match=f"127.0.0.1:{claim.port} .* --port"):
            check_port(RouterConfig(port=claim.port))
    check_port(RouterConfig(port=claim.port))
    both = TandemConfig(router=RouterConfig(port=claim.port), gateway=GatewayConfig(port=claim.port))
    with pytest.raises(ConfigError, match=f"127.0.0.1:{claim.port} .* --http$"):
        check_before_start(both, Console())


def test_each_router_needs_a_metrics_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(_: str, port: int) -> PortClaim:
        if port == 9003:
            raise OSError(98, "Address already in use")
        return PortClaim("127.0.0.1", 0)

    monkeypatch.setattr("cli.diagnosis.start_checks.PortClaim", claim)
    config = TelemetryConfig(metrics_port=9001)
    check_metrics_ports(config, 2)
    with pytest.raises(ConfigError, match=r"metrics on port 9003 .* --metrics-port"):
        check_metrics_ports(config, 3)


def test_the_error_for_an_unwritable_trace_file_names_its_option(tmp_path: Path) -> None:
    nowhere = TelemetryConfig(trace_file=str(tmp_path / "none" / "spans.jsonl"))
    with pytest.raises(ConfigError, match=r"\[telemetry\] trace_file: cannot write .*/none/spans.jsonl"):
        check_before_start(fake_config(telemetry=nowhere), Console())
    here = TelemetryConfig(trace_file=str(tmp_path / "spans.jsonl"))
    check_before_start(fake_config(telemetry=here), Console())


@pytest.mark.parametrize("model", ["fake:tiny", "random:llama-tiny"])
def test_a_context_longer_than_the_limit_of_the_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^max_context must be at most .*, is 1000000$"):
        check_before_start(fake_config(engine=EngineConfig(model=model, max_context=10**6)), Console())
    check_before_start(fake_config(engine=EngineConfig(model=model)), Console())


def test_the_error_for_an_unreadable_credentials_file_names_its_option() -> None:
    with pytest.raises(ConfigError, match=r"\[security\] cluster_token_file: cannot read /no/token"):
        check_credentials(SecurityConfig(cluster_token_file="/no/token"))
    with pytest.raises(ConfigError, match=r"\[security\] tls_cert: cannot read /no/host.pem"):
        check_credentials(SecurityConfig(tls_cert="/no/host.pem", tls_key="/no/host.key", tls_ca="/no/ca.pem"))
    check_credentials(SecurityConfig())


def test_a_missing_collector_only_causes_a_warning() -> None:
    console = Console(file=io.StringIO())
    with taken_port() as port:
        warn_without_collector(TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}"), console)
    warn_without_collector(TelemetryConfig(), console)
    assert not console.file.getvalue()  # type: ignore[attr-defined]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but not listening
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        check_before_start(fake_config(telemetry=TelemetryConfig(otlp_endpoint=endpoint)), console)
    assert f"no trace collector answers at {endpoint} " in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_certificate_of_the_gateway_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    for name in ("cert.pem", "missing.pem"):
        config = GatewayConfig(tls_cert=str(tmp_path / name), tls_key=str(tmp_path / name))
        with pytest.raises(ConfigError, match=r"\[gateway\] tls_cert and tls_key must be a certificate"):
            check_certificate(config)


@pytest.mark.parametrize(
    ("options", "build", "joined", "use"),
    [
        ({"device": "cpu"}, "2.11.0", False, GpuUse.NEVER),
        ({"device": "cuda"}, "2.11.0+cpu", False, GpuUse.ALWAYS),
        ({"device": "auto"}, "2.11.0", False, GpuUse.IF_PRESENT),
        ({"device": "auto"}, "2.11.0+cpu", False, GpuUse.NEVER),
        ({"device": "auto"}, "2.11.0+cpu", True, GpuUse.IF_PRESENT),
        ({"device": "cuda", "model": "fake:tiny"}, "2.11.0", False, GpuUse.NEVER),
    ],
)
def test_workers_use_gpus_by_the_device_and_the_build_of_torch_on_this_machine(
    options: dict[str, str], build: str, joined: bool, use: GpuUse
) -> None:
    assert gpu_use(EngineConfig(**options), build, joined) is use  # type: ignore[arg-type]


def test_a_device_with_an_index_is_refused_because_ray_chooses_it() -> None:
    config = EngineConfig()
    object.__setattr__(config, "device", "cuda:1")
    with pytest.raises(ConfigError, match=r"device = cuda:1: Ray chooses the GPU .* CUDA_VISIBLE_DEVICES"):
        check_device(config)
    for device in ("auto", "cpu", "cuda"):
        check_device(EngineConfig(device=device))


def test_in_a_joined_cluster_ports_are_left_alone_and_certificates_are_read() -> None:
    """An earlier fleet may listen on the ports."""
    with taken_port() as port:
        cluster, router = ClusterConfig(address="127.0.0.1:1"), RouterConfig(port=port)
        check_before_start(TandemConfig(cluster=cluster, router=router, gateway=GatewayConfig(port=port)), Console())
        wrong = GatewayConfig(port=port, tls_cert="/nowhere/cert", tls_key="/nowhere/key")
        with pytest.raises(ConfigError, match=r"\[gateway\] tls_cert"):
            check_before_start(TandemConfig(cluster=cluster, router=router, gateway=wrong), Console())
