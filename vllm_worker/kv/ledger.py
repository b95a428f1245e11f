"""The transfers of an engine that hold blocks, on their way to the worker: plain values in the statistics of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from core.handoff import LIVE_STATES
from core.scheduling.block_pool import Column
from core.scheduling.ledger import BlockHolder, Claim, count_once

STATES = {state.value: state for state in LIVE_STATES}


class _Columns:
    """A block that is held by its readers alone is LEASED."""

    def __init__(self, claims: Iterable[Claim], blocks: Sequence[Any]) -> None:
        self._blocks = blocks  # vLLM's
        self._leases: Counter[int] = Counter()
        self._incoming: set[int] = set()
        for claim in claims:
            (self._leases if claim.column is Column.LEASED else self._incoming).update(claim.blocks)

    def column_of(self, block: int) -> Column:
        if block in self._incoming:
            return Column.INCOMING
        return Column.LEASED if self._blocks[block].ref_cnt <= self._leases[block] else Column.HELD


def encode_holders(claims: Sequence[Claim], blocks: Sequence[Any]) -> list[list[Any]]:
    """`blocks`: those of vLLM's pool."""
    holders = count_once(claims, _Columns(claims, blocks), 0.0)
    return [
        [claim.name, claim.state.value, len(claim.blocks), num_counted, claim.since, claim.peer]
        for claim, num_counted in ((holder.claim, holder.num_counted) for holder in holders)
    ]


def decode_holders(wire: Iterable[Sequence[Any]]) -> tuple[BlockHolder, ...]:
    """The clocks of the two processes are one. The blocks have lost their numbers, and the holders their age."""
    return tuple(
        BlockHolder(Claim(name, STATES[state], range(num_blocks), since, peer), num_counted, age_s=0.0)
        for name, state, num_blocks, num_counted, since, peer in wire
    )
