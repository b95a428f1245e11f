"""KV block-seconds: the blocks of a sequence, integrated over time."""

from __future__ import annotations

from worker.block_meter import BlockMeter


def test_the_area_under_the_block_count() -> None:
    meter = BlockMeter()
    meter.note("a", 2, 10.0)
    meter.note("a", 4, 13.0)
    assert meter.read("a", 17.0) == 2 * 3 + 4 * 4
    assert meter.read("a", 17.0) == 22, "reading changes nothing"


def test_a_sequence_that_lost_its_blocks_costs_nothing_until_it_has_new_ones() -> None:
    meter = BlockMeter()
    meter.note("a", 3, 0.0)
    meter.note("a", 0, 2.0)
    meter.note("a", 1, 10.0)
    assert meter.read("a", 11.0) == 3 * 2 + 1


def test_an_unknown_and_a_forgotten_sequence_have_cost_nothing() -> None:
    meter = BlockMeter()
    assert meter.read("a", 5.0) == 0.0
    meter.note("a", 3, 0.0)
    meter.forget("a")
    assert meter.read("a", 5.0) == 0.0
    assert len(meter) == 0
