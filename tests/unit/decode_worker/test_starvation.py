"""Hand-offs wait for blocks while local requests keep arriving: neither starves, and running sequences continue."""

from __future__ import annotations

import pytest

from tests.support.driven_worker import request
from tests.unit.decode_worker.driven_decode import Decode


class Busy(Decode):
    """Four local requests of 3 blocks each run on 16 blocks and end in different steps. More arrive later."""

    def __init__(self, local_priority: int = 0) -> None:
        super().__init__()
        self.local_priority = local_priority
        self.num_local = 0
        for _ in range(4):
            self.arrive_locally()
            self.finish_step()

    def arrive_locally(self) -> None:
        self.num_local += 1
        first = 100 * self.num_local  # shares no prefix with the others
        self.arrive_alone(request(f"local{self.num_local}", 8, first=first, priority=self.local_priority))

    def keep_busy_until_wanted(self, ticket: int, max_steps: int) -> None:
        """Run steps, with at least three local requests in the queue, until the hand-off is admitted and has blocks."""
        for _ in range(max_steps):
            if self.is_wanted(ticket):
                self.ready_all(ticket)
                return
            while len(self.core.scheduler.waiting) < 3:
                self.arrive_locally()
            self.finish_step()
        raise AssertionError(f"hand-off {ticket} is not admitted after {max_steps} steps")


@pytest.mark.parametrize(("priority", "local_priority"), [(0, 0), (-10, 10)])
@pytest.mark.parametrize("num_tokens", [40, 59])  # 10 and 15 of the 16 blocks
def test_later_local_requests_do_not_keep_a_hand_off_waiting(
    num_tokens: int, priority: int, local_priority: int
) -> None:
    worker = Busy(local_priority)
    worker.arrive(request("pulled", num_tokens, first=5000, priority=priority))
    assert not worker.is_wanted(1), "the hand-off does not have to wait, so the test shows nothing"
    worker.keep_busy_until_wanted(1, max_steps=20)
    worker.run_steps_and_reads()
    assert worker.finished() == {"pulled", *(f"local{n + 1}" for n in range(worker.num_local))}
    assert worker.ledger == {}


def test_a_waiting_hand_off_does_not_hold_up_local_requests_of_higher_priority() -> None:
    worker = Busy()
    worker.arrive(request("pulled", 59, first=5000))
    worker.arrive_alone(request("urgent", 8, first=6000, priority=-1))
    while "urgent" not in worker.finished():
        assert not worker.is_wanted(1)
        worker.finish_step()
    worker.run_until_idle()
    assert worker.is_wanted(1)


def test_a_preempted_sequence_waits_behind_a_hand_off_of_higher_rank_and_finishes() -> None:
    worker = Decode(num_blocks=8)
    worker.arrive_alone(request("before", 8, max_tokens=12, first=100))
    worker.arrive_alone(request("behind", 8, max_tokens=20, first=200, priority=2))
    worker.finish_step()
    worker.arrive(request("pulled", 24, first=5000, priority=1))
    while not worker.is_wanted(1):
        worker.finish_step()
    worker.ready_all()
    assert worker.core.scheduler.num_preemptions == 1
    assert worker.finished() == {"before"}
    worker.run_steps_and_reads()
    assert worker.finished() == {"before", "pulled", "behind"}
