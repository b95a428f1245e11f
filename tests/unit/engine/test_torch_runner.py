"""Choices under `auto`, and the errors for choices that are not available."""

from __future__ import annotations

import platform
import resource
import threading

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from engine.backend import choose_device, choose_dtype
from engine.cpu.features import cpu_multiplies_bf16
from engine.host_memory import keep_freed_memory
from engine.kv_pool import MIN_BLOCKS
from engine.torch_runner import TorchRunner


def test_auto_chooses_the_devices_fastest_dtype() -> None:
    assert choose_dtype("auto", torch.device("cuda")) == "bfloat16"
    assert choose_dtype("auto", torch.device("cpu")) == ("bfloat16" if cpu_multiplies_bf16() else "float32")
    assert choose_dtype("float32", torch.device("cuda")) == "float32"


def test_a_device_has_an_index_that_torch_must_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="set device to cpu or auto"):
            choose_device(wanted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:0")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"sees 2 CUDA devices: .* or to at most cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        EngineConfig(device=device)


def test_the_pool_fills_kv_memory_mb() -> None:
    runner = TorchRunner(EngineConfig(model="random:llama-tiny", dtype="float32", kv_memory_mb=3, num_threads=1))
    assert runner.num_blocks == (3 << 20) // runner.layout.block_bytes > MIN_BLOCKS
    assert runner.layout.block_bytes == 2 * 2 * 4 * 16 * 16 * 4


def test_freed_memory_is_kept_for_the_next_step() -> None:
    """By default, malloc would map each allocation of 40 MB anew, with a page fault for every 4 KB."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc has mallopt")
    assert keep_freed_memory()
    for _ in range(20):
        torch.empty(40 << 20, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(40 << 20, dtype=torch.uint8).fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_240, "fresh pages in every allocation"


def test_more_threads_than_the_process_can_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP would end the process at the first step: 'libgomp: Thread creation failed'."""
    start, left = threading.Thread.start, [3]

    def start_three(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(ConfigError, match="num_threads = 5, but this process can start only 3 threads"):
        TorchRunner(EngineConfig(model="random:llama-tiny", kv_memory_mb=1, num_threads=5))
    assert not [thread for thread in threading.enumerate() if "wait" in thread.name]
