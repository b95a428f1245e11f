"""The prefixes that each worker has cached, learned from the block events of the workers.

A worker *holds* a set of sequence hashes. A prefix of a request is *reachable* on a worker if the worker holds every
block of it, from the root on. The score of a worker is the length of the longest reachable prefix. Memory is bounded by
the pools of the workers: a worker holds at most one hash for each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    def __init__(self) -> None:
        self._workers_of: dict[int, set[str]] = {}
        self._held: dict[str, set[int]] = {}

    def store(self, worker_id: str, sequence_hash: int) -> None:
        self._held.setdefault(worker_id, set()).add(sequence_hash)
        self._workers_of.setdefault(sequence_hash, set()).add(worker_id)

    def remove(self, worker_id: str, sequence_hash: int) -> None:
        """Ignores an unknown hash: a router may start while workers run."""
        self._held.get(worker_id, set()).discard(sequence_hash)
        workers = self._workers_of.get(sequence_hash)
        if workers is not None:
            workers.discard(worker_id)
            if not workers:
                del self._workers_of[sequence_hash]

    def replace(self, worker_id: str, sequence_hashes: Iterable[int]) -> None:
        """Replace everything known of a worker by its snapshot."""
        self.forget(worker_id)
        for sequence_hash in sequence_hashes:
            self.store(worker_id, sequence_hash)

    def forget(self, worker_id: str) -> None:
        for sequence_hash in list(self._held.get(worker_id, ())):
            self.remove(worker_id, sequence_hash)
        self._held.pop(worker_id, None)

    def match(self, sequence_hashes: Sequence[int]) -> dict[str, int]:
        """Worker id -> blocks of the longest reachable prefix, for workers with at least one block."""
        matched: dict[str, int] = {}
        reaching: set[str] | None = None
        for depth, sequence_hash in enumerate(sequence_hashes):
            holders = self._workers_of.get(sequence_hash, set())
            still_reaching = holders if reaching is None else reaching & holders
            for worker_id in (reaching or set()) - still_reaching:
                matched[worker_id] = depth
            reaching = set(still_reaching)
            if not reaching:
                return matched
        for worker_id in reaching or ():
            matched[worker_id] = len(sequence_hashes)
        return matched

    def held(self, worker_id: str) -> frozenset[int]:
        """The sequence hashes that a worker holds."""
        return frozenset(self._held.get(worker_id, ()))

    def num_held(self, worker_id: str) -> int:
        return len(self._held.get(worker_id, ()))

    def check(self) -> None:
        """The two mappings hold the same pairs."""
        from_workers = {(worker, h) for worker, held in self._held.items() for h in held}
        from_hashes = {(worker, h) for h, workers in self._workers_of.items() for worker in workers}
        assert from_workers == from_hashes
        assert all(self._workers_of.values()), "a hash is listed that no worker holds"
