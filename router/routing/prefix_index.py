"""The prefixes that each worker has cached, learned from the block events of the workers.

A worker *holds* a set of sequence hashes. A prefix of a request is *reachable* on a worker if the worker holds every
block of it, from the root on. The score of a worker is the length of the longest reachable prefix. A worker with a disk
holds the hashes of the blocks there, too, as `hash_on_disk` makes them. Memory is bounded by the pools and the disks of
the workers: a worker holds at most one hash for each block.

Each worker has a bit. The holders of a hash are one int with their bits: one AND finds the workers that reach a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # sequence hash -> bits of the workers
        self._held: dict[str, set[int]] = {}
        self._bit_of: dict[str, int] = {}
        self._worker_of: dict[int, str] = {}  # by bit
        self._free_bits: list[int] = []

    def store(self, worker_id: str, sequence_hashes: Collection[int]) -> None:
        bit = self._bit_of.get(worker_id) or self._assign_bit(worker_id)
        self._held[worker_id].update(sequence_hashes)
        holders = self._holders
        for sequence_hash in sequence_hashes:
            bits = holders.get(sequence_hash)
            holders[sequence_hash] = bit if bits is None else bits | bit

    def remove(self, worker_id: str, sequence_hashes: Iterable[int]) -> None:
        """Ignores an unknown hash: a router may start while workers run."""
        held, others = self._held.get(worker_id, set()), ~self._bit_of.get(worker_id, 0)
        holders = self._holders
        for sequence_hash in sequence_hashes:
            if sequence_hash in held:
                held.discard(sequence_hash)
                bits = holders[sequence_hash] & others
                if bits:
                    holders[sequence_hash] = bits
                else:
                    del holders[sequence_hash]

    def replace(self, worker_id: str, sequence_hashes: Collection[int]) -> None:
        """Replace everything known of a worker by its snapshot."""
        self.forget(worker_id)
        self.store(worker_id, sequence_hashes)

    def forget(self, worker_id: str) -> None:
        self.remove(worker_id, self.held(worker_id))
        self._held.pop(worker_id, None)
        bit = self._bit_of.pop(worker_id, None)
        if bit is not None:
            del self._worker_of[bit]
            self._free_bits.append(bit)

    def match(self, sequence_hashes: Iterable[int]) -> dict[str, int]:
        """Worker id -> blocks of the longest reachable prefix, for workers with at least one block.

        Takes no hash behind the first one that no worker reaches.
        """
        matched: dict[str, int] = {}
        holders = self._holders
        depth, reaching = 0, -1  # every bit
        for sequence_hash in sequence_hashes:
            still_reaching = holders.get(sequence_hash, 0) & reaching
            if still_reaching != reaching:
                if depth:
                    self._note(matched, reaching & ~still_reaching, depth)
                if not still_reaching:
                    return matched
                reaching = still_reaching
            depth += 1
        if depth:
            self._note(matched, reaching, depth)
        return matched

    def _note(self, matched: dict[str, int], bits: int, depth: int) -> None:
        while bits:
            bit = bits & -bits
            matched[self._worker_of[bit]] = depth
            bits ^= bit

    def _assign_bit(self, worker_id: str) -> int:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit_of)
        self._bit_of[worker_id], self._worker_of[bit] = bit, worker_id
        self._held[worker_id] = set()
        return bit

    def held(self, worker_id: str) -> frozenset[int]:
        """The sequence hashes that a worker holds."""
        return frozenset(self._held.get(worker_id, ()))

    def num_held(self, worker_id: str) -> int:
        return len(self._held.get(worker_id, ()))

    def check(self) -> None:
        """The two mappings hold the same pairs, and each worker has a bit of its own."""
        assert self._held.keys() == self._bit_of.keys()
        holders = self._holders
        for worker, held in self._held.items():
            bit = self._bit_of[worker]
            unlisted = [h for h in held if not holders.get(h, 0) & bit]
            assert not unlisted, f"{worker} holds hashes that are not listed for it"
        num_listed = sum(map(int.bit_count, holders.values()))
        assert num_listed == sum(map(len, self._held.values())), "a hash is listed for a worker that does not hold it"
        assert all(holders.values()), "a hash is listed that no worker holds"
        assert {bit: worker for worker, bit in self._bit_of.items()} == self._worker_of
        assert not set(self._free_bits) & self._worker_of.keys()
