"""KV block-seconds: the blocks of a sequence, integrated over time, also in the machines of both roles."""

from __future__ import annotations

from decode_worker.events import DecodeDone
from prefill_worker.machine import PrefillDone
from tests.support.driven_worker import request
from tests.unit.decode_worker.driven_decode import Decode
from tests.unit.prefill_worker.driven_prefill import Prefill
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


def test_a_prefill_counts_its_blocks_up_to_the_first_token() -> None:
    worker = Prefill()
    worker.arrive(request("a", 14))  # chunks of 8 and 6 tokens, blocks of 4
    worker.now += 2.0
    worker.finish_step()
    worker.now += 3.0
    worker.finish_step()
    assert worker.only(PrefillDone).kv_block_seconds == 2 * 2 + 4 * 3
    assert len(worker.core.held_blocks) == 0


def test_a_hand_off_counts_from_the_reservation_of_its_blocks() -> None:
    worker = Decode()
    worker.arrive(request("a", 8, max_tokens=2))
    worker.now += 5.0
    worker.ready(0)  # one target
    worker.now += 2.0
    worker.ready(1, first_block=1, token=20)  # another one
    worker.now += 1.0
    worker.finish_reads()  # the step needs a third block
    worker.now += 4.0
    worker.run_until_idle()
    done = worker.only(DecodeDone)
    assert done.kv_block_seconds == 1 * 2 + 2 * 1 + 3 * 4
    assert done.num_skipped_blocks == 0


def test_a_hand_off_says_how_many_blocks_it_did_not_pull() -> None:
    worker = Decode()
    worker.arrive(request("a", 8, max_tokens=2))
    worker.pull()
    worker.run_until_idle()
    worker.arrive(request("b", 10, max_tokens=2), ticket=2)
    worker.pull(ticket=2)
    worker.run_until_idle()
    done = worker.of(DecodeDone)[-1]
    assert done.pull is not None
    assert (done.num_skipped_blocks, done.pull.num_blocks) == (2, 1)
