"""The checks before a pool on a GPU takes part in transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from kv_transfer.device.device_checks import check_environment, has_gpudirect


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


def test_a_machine_without_any_of_these_files_has_no_gpudirect(tmp_path: Path) -> None:
    assert not has_gpudirect(tmp_path / "a", tmp_path / "b", tmp_path / "c")
