"""CudaDeviceMemory on the host: the operators' references in place of kernels."""

from __future__ import annotations

import pytest
import torch
import xxhash

from core.errors import DeviceLost, TransportError
from engine.gpu import device_memory
from engine.gpu.device_memory import CudaDeviceMemory

BLOCKS, SHAPE = 6, (2, 2, 1, 4, 8)
BLOCK_BYTES = 2 * 2 * 4 * 8 * 4


def memory_of() -> tuple[torch.Tensor, CudaDeviceMemory]:
    pool = torch.randn(BLOCKS, *SHAPE)
    return pool, CudaDeviceMemory(pool, probe_bytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: invalid argument", TransportError),
        ("CUDA error: out of memory", TransportError),
        ("CUDA error: an illegal memory access was encountered", DeviceLost),
        ("CUDA error: unspecified launch failure", DeviceLost),
    ],
)
def test_an_error_of_the_device_fails_the_call_and_a_lost_device_the_agent(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    _, memory = memory_of()
    buffer = memory.host_buffer(BLOCK_BYTES)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError(text)

    for owner, name, call in (
        (device_memory, "upload", lambda: memory.digests([0], BLOCK_BYTES)),
        (CudaDeviceMemory, "_rows", lambda: memory.copy_out(0, buffer)),
        (CudaDeviceMemory, "_rows", lambda: memory.copy_in(0, buffer)),
    ):
        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("max_sums_bytes", [device_memory._MAX_SUMS_BYTES, 128])
def test_digests_are_those_of_xxhash(monkeypatch: pytest.MonkeyPatch, max_sums_bytes: int) -> None:
    """In one launch, and in several."""
    monkeypatch.setattr(device_memory, "_MAX_SUMS_BYTES", max_sums_bytes)
    pool, memory = memory_of()
    blocks = [4, 0, 5, 4]
    assert memory.digests(blocks, BLOCK_BYTES) == tuple(
        xxhash.xxh3_64_intdigest(pool[block].numpy().tobytes()) for block in blocks
    )
    assert memory.digests([], BLOCK_BYTES) == ()


def test_a_block_goes_to_the_host_and_into_another_block() -> None:
    """Also out of a pool that was made in inference mode."""
    with torch.inference_mode():
        pool = torch.randn(BLOCKS, *SHAPE)
    before = pool.numpy().copy()
    memory = CudaDeviceMemory(pool, probe_bytes=1 << 20)
    buffer = memory.host_buffer(2 * BLOCK_BYTES)[BLOCK_BYTES:]
    memory.copy_out(4, buffer)
    assert buffer.tobytes() == before[4].tobytes()
    memory.copy_in(1, buffer)
    before[1] = before[4]
    assert pool.numpy().tobytes() == before.tobytes()


def test_making_it_measures_copies_and_leaves_the_pool_as_it_is() -> None:
    pool = torch.randn(BLOCKS, *SHAPE)
    before = pool.clone()
    memory = CudaDeviceMemory(pool, probe_bytes=1 << 20)
    assert torch.equal(pool, before)
    assert memory.copy_bytes_per_s > 1e6
    assert (memory.device, memory.uuid) == (0, "")
