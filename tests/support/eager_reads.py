"""Workers read a prefix wherever a peer or their disk has one: a fake model computes a prompt faster than any read.

They avoid no source that has failed, and pause briefly after a failure of the disk. So many reads meet a fault."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from router.requests import open_dispatches
from router.routing import policy
from router.routing.policy import SecondsPolicy
from router.routing.question import Candidate, RoutingQuestion
from router.routing.source_trial import SourceTrial
from worker.tier import disk_tier

COMPUTE_S = 2.0  # that a read from disk seems to save: so a read has about a second
PAUSE_S = 0.05
LATE_S = 0.5  # a busy machine delays messages

_all_candidates = SecondsPolicy._all


def _those_that_read(routing: SecondsPolicy, question: RoutingQuestion) -> list[Candidate]:
    found = _all_candidates(routing, question)
    return [candidate for candidate in found if candidate.read.source is not None] or found


def _changes_of_routers(late_s: float) -> tuple[tuple[Any, str, Any], ...]:
    return (
        (policy, "LEAST_GAIN_S", -1e6),
        (SecondsPolicy, "_all", _those_that_read),
        (open_dispatches, "LATE_S", late_s),
    )


def route_eagerly(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """A router of this process sends every prompt where a prefix of it is read, and gives up a read after `late_s`."""
    for change in _changes_of_routers(late_s):
        monkeypatch.setattr(*change)


def eager_reads() -> list[Any]:
    """Patches of this process, which are for routers and for workers."""
    limit_s = disk_tier.DiskTier.limit_s

    def limit_beside_slow_steps(tier: disk_tier.DiskTier, num_blocks: int, _: float, now: float) -> float | None:
        return limit_s(tier, num_blocks, COMPUTE_S, now)

    return [
        *(patch.object(*change) for change in _changes_of_routers(LATE_S)),
        patch.object(SourceTrial, "begin", lambda *_: None),
        patch.object(SourceTrial, "end", lambda *_: None),
        patch.object(disk_tier.DiskTier, "limit_s", limit_beside_slow_steps),
        patch.object(disk_tier, "FIRST_PAUSE_S", PAUSE_S),
        patch.object(disk_tier, "MAX_PAUSE_S", PAUSE_S),
    ]
