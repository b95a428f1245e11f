"""Memory on GPUs and in nixl's descriptors, and the checks before a pool on a GPU takes part in transfers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.errors import ConfigError
from core.handoff import AgentAddress
from core.kv_layout import KVLayout
from kv_transfer.device.device_checks import check_environment, has_gpudirect
from kv_transfer.protocol.plan import ByteRun
from kv_transfer.transports.nixl_package import import_nixl
from kv_transfer.transports.nixl_transport import NixlTransport
from kv_transfer.transports.transport import PoolMemory

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=2, num_kv_heads=2, block_size=4, head_dim=8)
METADATA = b"nixlSerDes|Agent\x06" + bytes(7) + b"theirs|"


class Agent:
    """Replaces the agent of nixl, and records its arguments."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, str]] = []
        self.prepared: list[tuple[str, list[int], str]] = []
        self.listed: list[tuple[list[tuple[int, int, int]], str]] = []

    def register_memory(self, regions: list[Any], kind: str) -> None:
        self.registered.append((regions[0], kind))

    def prep_xfer_dlist(self, agent: str, rows: np.ndarray, kind: str) -> SimpleNamespace:
        self.prepared.append((agent, rows[0].tolist(), kind))
        return SimpleNamespace(release=lambda: None)

    def add_remote_agent(self, metadata: bytes) -> None: ...

    def get_xfer_descs(self, descriptors: list[tuple[int, int, int]], kind: str) -> None:
        self.listed.append((descriptors, kind))

    def initialize_xfer(self, *_: object) -> None: ...
    def make_prepped_xfer(self, *_: object) -> None: ...
    def transfer(self, _: object) -> str:
        return "DONE"


def transport(device: int | None) -> tuple[NixlTransport, Agent]:
    opened, agent = NixlTransport("ours", on_device=device is not None), Agent()
    opened._agent = agent
    view = None if device is not None else memoryview(bytearray(4 * LAYOUT.block_bytes))
    opened.register(PoolMemory(4096, 4, LAYOUT, view, device))
    return opened, agent


@pytest.mark.parametrize(
    ("ours", "theirs", "local", "remote"),
    [
        (None, None, (0, "DRAM"), (0, "DRAM")),
        (0, 3, (0, "VRAM"), (3, "VRAM")),
        (2, None, (2, "VRAM"), (0, "DRAM")),
        (None, 1, (0, "DRAM"), (1, "VRAM")),
    ],
)
def test_each_side_is_described_by_its_own_device_and_kind_of_memory(
    ours: int | None, theirs: int | None, local: tuple[int, str], remote: tuple[int, str]
) -> None:
    reader, agent = transport(ours)
    reader.connect(replace(AgentAddress("theirs", 1, METADATA, 1 << 20, 8, LAYOUT, 20.0), device=theirs))
    reader.start_read("theirs", [ByteRun(8, 16, 100)])
    reader.start_block_read("theirs", [1], [2])
    assert agent.registered == [((4096, 4 * LAYOUT.block_bytes, local[0], ""), local[1])]
    assert [(name, row[2], kind) for name, row, kind in agent.prepared] == [("", *local), ("theirs", *remote)]
    assert agent.listed == [([(4096 + 16, 100, local[0])], local[1]), ([((1 << 20) + 8, 100, remote[0])], remote[1])]


def test_either_build_of_nixl_is_taken_and_both_are_named_where_there_is_none() -> None:
    assert import_nixl(("nixl_no_such", "nixl_cu12")).__name__ == "nixl_cu12"
    with pytest.raises(ImportError, match=r"nixl-cu13x or nixl-cu12x .*neither is installed"):
        import_nixl(("nixl_cu13x", "nixl_cu12x"))


def test_of_two_builds_that_of_the_loaded_runtime_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("pretended_cu13", "pretended_cu12")
    for name in names:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "_bindings.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    maps = tmp_path / "maps"
    for runtime, taken in (("", names[0]), ("7f /usr/lib/libcudart.so.12.4", names[1]), ("libcudart.so.13", names[0])):
        maps.write_text(runtime)
        assert import_nixl(names, maps).__name__ == taken
    for name in [name for name in sys.modules if name.startswith("pretended_cu")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments:True"])
def test_expandable_segments_are_refused_by_the_variables_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} has expandable_segments"):
        check_environment({variable: value})
    check_environment({variable: "expandable_segments:False"})


def test_reads_over_cuda_ipc_that_are_switched_off_are_refused() -> None:
    for value in ("n", "No", "0", "off"):
        with pytest.raises(ConfigError, match=f"UCX_CUDA_IPC_ENABLE_GET_ZCOPY={value}"):
            check_environment({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": value})
    check_environment({"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"})


@pytest.mark.parametrize(
    ("device", "modules", "driver", "found"),
    [
        (False, "nvidia_peermem 1 0", "", False),
        (True, "", "", False),
        (True, "nvidia 1 0\nnvidia_peermem 16384 0", "", True),
        (True, "nvidia 1 0", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95", True),
        (True, "nvidia 1 0", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95", False),
    ],
)
def test_gpudirect_needs_an_rdma_device_and_a_way_into_gpu_memory(
    tmp_path: Path, device: bool, modules: str, driver: str, found: bool
) -> None:
    devices = tmp_path / "infiniband"
    (devices / "mlx5_0").mkdir(parents=True) if device else devices.mkdir()
    (tmp_path / "modules").write_text(modules)
    (tmp_path / "version").write_text(driver)
    assert has_gpudirect(devices, tmp_path / "modules", tmp_path / "version") is found
    assert not has_gpudirect(tmp_path / "a", tmp_path / "b", tmp_path / "c"), "without any of these files"
