"""The machines of a rank, with a device that digests when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from verified_kv.ticket import Ticket
from verified_kv.verifier import EARLY_STEPS, Claim, Offer, Owner, PendingDigests, Reader, Verdict

BLOCK_SIZE = 4
TICKET = Ticket("a" * 32, "layout", 10, "b" * 32, (("127.0.0.1", 1),))
CLAIM = Claim(blocks=(7, 8), first_place=1, num_tokens=10, ticket=TICKET)
COMPUTED = [b"0", b"1", b"2"]


class SlowDigests:
    """`found` is what the device has computed; None: it still computes."""

    layout = "layout"

    def __init__(self) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.found: list[bytes] | None = None

    def begin(self, blocks: Sequence[int]) -> SlowDigests:
        self.begun.append(tuple(blocks))
        return self

    def poll(self) -> list[bytes] | None:
        return self.found

    def wait(self) -> list[bytes]:
        raise NotImplementedError


def test_blocks_are_not_freed_before_they_are_digested() -> None:
    digests = SlowDigests()
    published: list[tuple[str, object]] = []
    retired: list[str] = []
    owner = Owner(digests, lambda *answer: published.append(answer), retired.append)
    owner.begin({"one": Offer("secret", (1, 2, 3))})
    assert owner.release({"one", "not offered"}) == {"not offered"}
    assert owner.release(()) == set()
    digests.found = COMPUTED
    assert owner.release(()) == {"one"}
    assert (published, retired) == ([("secret", digests)], ["secret"])
    assert owner.release(()) == set()


def test_what_is_read_before_its_offer_comes_is_offered_and_retired_at_once() -> None:
    published: list[str] = []
    retired: list[str] = []
    owner = Owner(SlowDigests(), lambda secret, _: published.append(secret), retired.append)
    assert owner.release({"one"}) == {"one"}
    owner.begin({"one": Offer("secret", (1, 2, 3))})
    assert (published, retired) == (["secret"], ["secret"])
    for _ in range(EARLY_STEPS):
        owner.release(())
    owner.begin({"one": Offer("another", (1, 2, 3))})  # of a later request with the same id
    assert retired == ["secret"]


@pytest.mark.parametrize("fails_late", [False, True])
def test_an_error_of_the_digests_ends_neither_engine(opened: Opened, fails_late: bool) -> None:
    reader, digests, fetched = opened
    answers: list[PendingDigests] = []
    owner = Owner(digests, lambda _, pending: answers.append(pending), lambda _: None)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    setattr(digests, "poll" if fails_late else "begin", fail)
    owner.begin({"one": Offer("secret", (1, 2, 3))})
    assert owner.release({"one"}) == {"one"}
    assert fails_late or answers[0].poll() == []  # the reader need not wait
    fetched.set_result(COMPUTED)
    settled = reader.settle({"one"}, (), ())
    assert (settled.verdicts, settled.failed_blocks) == ({"one": Verdict.UNVERIFIED}, {7, 8})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(clock: Clock) -> tuple[Reader, SlowDigests, Future[list[bytes] | None]]:
    """A reader of the last two of three blocks: the first one is in its prefix cache."""
    digests, fetched = SlowDigests(), Future[list[bytes] | None]()
    reader = Reader(digests, lambda *_: fetched, num_ranks=1, block_size=BLOCK_SIZE, timeout_s=10.0, clock=clock)
    reader.begin({"one": CLAIM})
    return reader, digests, fetched


Opened = tuple[Reader, SlowDigests, "Future[list[bytes] | None]"]


@pytest.mark.parametrize(("last", "verdict", "failed"), [(b"2", Verdict.VERIFIED, set()), (b"x", Verdict.WRONG, {8})])
def test_a_request_is_held_until_both_sides_have_digested(
    opened: Opened, last: bytes, verdict: Verdict, failed: set[int]
) -> None:
    reader, digests, fetched = opened
    assert not reader.settle((), (), ()).received
    assert not digests.begun  # the blocks are not read yet
    assert not reader.settle({"one"}, (), ()).received
    fetched.set_result(COMPUTED)
    assert not reader.settle((), (), ()).received
    digests.found = [b"1", last]
    settled = reader.settle((), (), ())
    assert (settled.received, settled.failed, settled.verdicts) == ({"one"}, set(), {"one": verdict})
    assert settled.failed_blocks == failed
    assert digests.begun == [(7, 8)]
    assert not reader.settle((), (), ()).received


@pytest.mark.parametrize("error", [None, OSError()])
def test_without_an_answer_in_time_all_its_blocks_fail(opened: Opened, error: Exception | None) -> None:
    reader, digests, fetched = opened
    digests.found = COMPUTED[1:]
    assert not reader.settle({"one"}, (), ()).received
    if error is None:
        fetched.set_result(None)
    else:
        fetched.set_exception(error)
    settled = reader.settle((), (), ())
    assert (settled.verdicts, settled.failed_blocks) == ({"one": Verdict.UNVERIFIED}, {7, 8})


@pytest.mark.parametrize("lacks", ["the producer's digests", "its own"])
def test_a_request_whose_digests_never_come_is_recomputed_at_its_deadline(
    opened: Opened, clock: Clock, lacks: str
) -> None:
    reader, digests, fetched = opened
    if lacks == "its own":
        fetched.set_result(COMPUTED)
    else:
        digests.found = COMPUTED[1:]
    clock.now = 1000.0  # a long read counts for nothing
    assert not reader.settle({"one"}, (), ()).received
    clock.now += 10.0
    settled = reader.settle((), (), ())
    assert (settled.verdicts, settled.failed_blocks) == ({"one": Verdict.UNVERIFIED}, {7, 8})


def test_a_read_that_failed_and_a_request_that_has_ended_wait_for_no_digests(opened: Opened) -> None:
    reader, _, fetched = opened
    settled = reader.settle({"one"}, {"one"}, ())
    assert (settled.received, settled.failed, settled.failed_blocks) == ({"one"}, {"one"}, set())
    reader.begin({"two": CLAIM, "three": CLAIM})
    reader.settle({"two"}, (), ())
    assert reader.settle((), (), {"two", "three"}).received == {"two"}
    assert reader.settle({"three"}, (), ()).received == {"three"}
    assert not fetched.done()


def test_what_the_inner_connector_reads_unasked_fails_as_a_whole(opened: Opened) -> None:
    settled = opened[0].settle({"another"}, (), ())
    assert (settled.received, settled.failed) == ({"another"}, {"another"})
