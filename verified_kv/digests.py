"""Digests of the blocks of a KV cache: 16 bytes for each block, over all layers.

vLLM views the cache of each layer as [num_kernel_blocks, num_heads, num_rows, content], whatever its layout in memory.
A digest covers the values in this logical order, so both sides may differ in layout, but not in shape.

    xxh3    cache in host memory: XXH3 over the bytes
    sums    any other device: two sums of 64 bits for each layer, of the words of the block, each with an odd multiplier
            of its own position. They run on the device, and only they cross to the host.

A word times an odd number is never 0 modulo 2**64 unless the word is, so one changed word always changes both sums.
Any other change passes with a probability of about 2**-64 or less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

DIGEST_BYTES = 16
CHUNK_BYTES = 16 << 20  # of cache, for one call on a device; the device holds five times as much for a moment


class UnsupportedCache(ValueError):
    """A cache whose blocks this module cannot find."""


class Pending:
    """Digests that a device may still compute."""

    def __init__(self, digests: list[bytes] | None = None, sums: Any = None, event: Any = None) -> None:
        self._digests, self._sums, self._event = digests, sums, event

    def poll(self) -> list[bytes] | None:
        """None until they are there. Never waits."""
        sums, event = self._sums, self._event  # first: another thread may drop them below
        if self._digests is None and (event is None or event.query()):
            self._digests = [hashlib.blake2b(row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in sums.numpy()]
            self._sums = self._event = None
        return self._digests

    def wait(self) -> list[bytes]:
        """For another thread than that of the steps."""
        event = self._event
        if event is not None:
            event.synchronize()
        digests = self.poll()
        assert digests is not None
        return digests


class BlockDigests:
    """`kv_caches`: views [num_kernel_blocks, num_heads, num_rows, content] by the names of their layers.

    A block is one or several kernel blocks in a row. A digest covers a whole block, because only the attention backend
    knows where in a block the values of a token are. Raises `UnsupportedCache` in its constructor.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, kind: str | None = None) -> None:
        if not kv_caches:
            raise UnsupportedCache("there is no KV cache")
        shapes, self._pages = [], []
        for name in sorted(kv_caches):
            view = kv_caches[name]
            if not isinstance(view, torch.Tensor) or view.ndim != 4 or not len(view) or len(view) % num_blocks:
                raise UnsupportedCache(f"the KV cache of {name} is not {num_blocks} blocks of heads, rows and contents")
            self._device = view.device
            self.kind = kind or ("xxh3" if self._device.type == "cpu" else "sums")
            words = _words(view, 1 if self.kind == "xxh3" else 4)
            self._pages.append(words.view(num_blocks, len(view) // num_blocks, *words.shape[1:]))
            shapes.append((name, tuple(self._pages[-1].shape[1:]), view.element_size()))
        self._arrays = [pages.numpy() for pages in self._pages] if self.kind == "xxh3" else []
        self._multipliers: dict[int, torch.Tensor] = {}  # by number of words
        self.layout = f"{self.kind}-{hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()}"

    def begin(self, blocks: Sequence[int]) -> Pending:
        """The device computes them behind everything that it was asked for before."""
        if self.kind == "xxh3":
            return Pending(self._host_digests(blocks))
        return self._device_digests(blocks)

    def _host_digests(self, blocks: Sequence[int]) -> list[bytes]:
        digests = [xxhash.xxh3_128() for _ in blocks]
        for pages in self._arrays:  # the blocks of a layer often lie side by side, which reads 10 % faster
            for block, digest in zip(blocks, digests, strict=True):
                digest.update(np.ascontiguousarray(pages[block]).data)
        return [digest.digest() for digest in digests]

    def _device_digests(self, blocks: Sequence[int]) -> Pending:
        sums = torch.empty((len(blocks), len(self._pages), 2), dtype=torch.int64, device=self._device)
        # From pinned memory, because a copy from pageable memory would wait for all work of the device.
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        index = index.to(self._device, non_blocking=True)
        for layer, pages in enumerate(self._pages):
            num_words = pages[0].numel()
            step = max(1, CHUNK_BYTES // (num_words * pages.element_size()))
            for start in range(0, len(blocks), step):
                words = pages[index[start : start + step]].flatten(1).to(torch.int64)
                for place, multipliers in enumerate(self._multipliers_of(num_words)):
                    sums[start : start + step, layer, place] = (words * multipliers).sum(1)
        if self._device.type != "cuda":
            return Pending(sums=sums.cpu())
        host = torch.empty(sums.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        return Pending(sums=host, event=torch.cuda.current_stream(self._device).record_event())

    def _multipliers_of(self, num_words: int) -> torch.Tensor:
        """[2, num_words], odd: the output of SplitMix64 for each place."""
        if num_words not in self._multipliers:
            place = torch.arange(1, 2 * num_words + 1, dtype=torch.int64, device=self._device)
            mixed = place * _signed(0x9E3779B97F4A7C15)
            mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
            self._multipliers[num_words] = ((mixed ^ _shifted(mixed, 31)) | 1).view(2, num_words)
        return self._multipliers[num_words]


def _words(view: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """The view as integers of at most `most_bytes` bytes, as many as its strides allow."""
    for dtype in (torch.int32, torch.int16, torch.uint8):
        if dtype.itemsize <= most_bytes:
            try:
                return view.view(dtype)
            except RuntimeError:  # torch's word for strides that the wider type does not divide
                continue
    raise UnsupportedCache(f"the values of a row are not contiguous: strides {view.stride()}")


def _signed(number: int) -> int:
    return number - (1 << 64)


def _shifted(numbers: torch.Tensor, places: int) -> torch.Tensor:
    """A logical shift to the right; torch's own one keeps the sign."""
    return (numbers >> places) & ((1 << (64 - places)) - 1)
