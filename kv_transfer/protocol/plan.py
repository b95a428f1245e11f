"""Which bytes of one pool go where in another pool: the intersection of two boxes, without addresses.

A pool's layout covers a box: layers x heads x tokens of a sequence, cut into blocks of `block_size` tokens. Two pools
share the intersection of their boxes. Where heads, layers or block sizes differ, a block becomes many runs:

      source block (layers 0-3, heads 0-3)          target block (layers 2-5, heads 2-3)
      layer 2: K [h0 h1 h2 h3] V [h0 h1 h2 h3]  ->  layer 2: K [h2 h3] V [h2 h3]
      layer 3: K [h0 h1 h2 h3] V [h0 h1 h2 h3]  ->  layer 3: K [h2 h3] V [h2 h3]

Offsets count bytes from block 0 of each pool. Runs that touch on both sides are merged, so equal layouts give one run
for each block, and neighbouring blocks move as one run. Scales behind the values of a block are cut like the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from core.errors import LayoutMismatch
from core.kv_layout import KVLayout


class ByteRun(NamedTuple):
    source: int  # bytes from block 0 of the source pool
    target: int  # bytes from block 0 of the target pool
    num_bytes: int


Runs = Sequence[tuple[int, int, int]]  # with the fields of `ByteRun`: a plain tuple takes a third of the time
Span = tuple[int, int]  # first byte from block 0 of a pool, and length


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Raises `LayoutMismatch` where two layouts differ in more than their box, or their boxes do not overlap."""

    source: KVLayout
    target: KVLayout

    def __post_init__(self) -> None:
        compared = self.source.differences(self.target)
        differing = [str(name) for name in ("model", "quantization", "dtype", "head_dim") if name in compared]
        small, large = sorted((self.source.block_size, self.target.block_size))
        if large % small:
            differing.append("block_size")
        if not self.layers:
            differing += ["first_layer", "num_layers"]
        if not self.kv_heads:
            differing += ["first_kv_head", "num_kv_heads"]
        if differing:
            raise LayoutMismatch({name: (getattr(self.source, name), getattr(self.target, name)) for name in differing})

    @property
    def layers(self) -> range:
        """Layers both pools hold."""
        return _overlap(
            (self.source.first_layer, self.source.num_layers), (self.target.first_layer, self.target.num_layers)
        )

    @property
    def kv_heads(self) -> range:
        """Heads both pools hold."""
        return _overlap(
            (self.source.first_kv_head, self.source.num_kv_heads), (self.target.first_kv_head, self.target.num_kv_heads)
        )

    @property
    def moves_whole_blocks(self) -> bool:
        return self.source == self.target

    def overlaps(self, other: TransferPlan) -> bool:
        """Whether two plans into the same target blocks write the same bytes."""
        return bool(set(self.layers) & set(other.layers)) and bool(set(self.kv_heads) & set(other.kv_heads))

    # ---- pieces: the units that move where blocks do not map one to one. Piece i of a sequence is its tokens
    # [i * piece_tokens, (i + 1) * piece_tokens), in the layers and heads that both pools hold.

    @property
    def piece_tokens(self) -> int:
        return min(self.source.block_size, self.target.block_size)

    @property
    def source_parts(self) -> int:
        """Pieces in a source block."""
        return self.source.block_size // self.piece_tokens

    @property
    def target_parts(self) -> int:
        """Pieces in a target block."""
        return self.target.block_size // self.piece_tokens

    @property
    def piece_bytes(self) -> int:
        row_bytes = sum(num_bytes for _, num_bytes in self.source.arrays)
        return len(self.layers) * 2 * len(self.kv_heads) * self.piece_tokens * row_bytes

    def runs_of_pieces(self, pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Runs for (piece, source block, target block) triples."""
        source_bytes, source_parts = self.source.block_bytes, self.source_parts
        target_bytes, target_parts = self.target.block_bytes, self.target_parts
        runs = []
        for piece, source_block, target_block in pieces:
            source, target = source_block * source_bytes, target_block * target_bytes
            within = _runs_of_piece(self, piece % source_parts, piece % target_parts)
            runs += [(source + a, target + b, num_bytes) for a, b, num_bytes in within]
        return merged(runs)

    def source_spans(self, piece: int, block: int) -> list[Span]:
        """Where the piece lies in a source block, by layer, K or V, and head."""
        first = block * self.source.block_bytes
        return [(first + at, num_bytes) for at, num_bytes in _spans(self, self.source, piece % self.source_parts)]

    def target_spans(self, piece: int, block: int) -> list[Span]:
        """Where the piece lies in a target block, in the order of `source_spans`."""
        first = block * self.target.block_bytes
        return [(first + at, num_bytes) for at, num_bytes in _spans(self, self.target, piece % self.target_parts)]

    def _rows(self, layout: KVLayout, part: int) -> list[Span]:
        """A piece's rows in block 0 of a pool. A row has tokens of one head, in K or V of one layer, contiguous."""
        return [
            (
                first + (_row(layout, layer, key_or_value, head) * layout.block_size + part * self.piece_tokens) * size,
                self.piece_tokens * size,
            )
            for first, size in layout.arrays
            for layer in self.layers
            for key_or_value in (0, 1)
            for head in self.kv_heads
        ]


# A piece has hundreds of runs, the same in every block: they are computed once.


@lru_cache(maxsize=256)
def _runs_of_piece(plan: TransferPlan, source_part: int, target_part: int) -> tuple[tuple[int, int, int], ...]:
    """Within source block 0 and target block 0."""
    rows = zip(plan._rows(plan.source, source_part), plan._rows(plan.target, target_part), strict=True)
    return tuple(merged((source, target, num_bytes) for (source, num_bytes), (target, _) in rows))


@lru_cache(maxsize=256)
def _spans(plan: TransferPlan, layout: KVLayout, part: int) -> tuple[Span, ...]:
    """Within block 0."""
    rows = ((first, first, num_bytes) for first, num_bytes in plan._rows(layout, part))
    return tuple((first, num_bytes) for first, _, num_bytes in merged(rows))


def plan_from(source: KVLayout, ours: KVLayout) -> TransferPlan:
    """The plan of a read into our pool. Raises `LayoutMismatch`, whose differences are (ours, theirs)."""
    try:
        return TransferPlan(source, ours)
    except LayoutMismatch as mismatch:
        raise LayoutMismatch({name: (here, there) for name, (there, here) in mismatch.differences.items()}) from None


def runs_of_blocks(pairs: Iterable[tuple[int, int]], block_bytes: int) -> list[tuple[int, int, int]]:
    """Runs for (source block, target block) pairs of two equal layouts."""
    return merged((source * block_bytes, target * block_bytes, block_bytes) for source, target in pairs)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> range:
    """Of two (first, count) ranges."""
    return range(max(a[0], b[0]), min(a[0] + a[1], b[0] + b[1]))


def _row(layout: KVLayout, layer: int, key_or_value: int, head: int) -> int:
    """The row's number in a block of [num_layers, 2, num_kv_heads] rows."""
    row = (layer - layout.first_layer) * 2 + key_or_value
    return row * layout.num_kv_heads + head - layout.first_kv_head


def merged(runs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge each run with the run before it where they touch on both sides.

    Plain Python: right after a copy the CPU's caches are cold, and numpy takes three times as long.
    """
    found: list[tuple[int, int, int]] = []
    first_source = first_target = length = 0  # of the run that grows
    for source, target, num_bytes in runs:
        if length and source - first_source == length == target - first_target:
            length += num_bytes
            continue
        if length:
            found.append((first_source, first_target, length))
        first_source, first_target, length = source, target, num_bytes
    if length:
        found.append((first_source, first_target, length))
    return found
