"""The machines of a rank, and the digests of its blocks: equal for equal blocks, another for any change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from verified_kv.digests import BlockDigests, UnsupportedCache
from verified_kv.ticket import Ticket
from verified_kv.verifier import EARLY_STEPS, Claim, Offer, Owner, PendingDigests, Reader, Verdict

NUM_BLOCKS, NUM_HEADS, NUM_ROWS, CONTENT, NUM_LAYERS = 6, 2, 8, 12, 3
KINDS = ("xxh3", "sums")
Caches = dict[str, torch.Tensor]


def random_caches(seed: int, dtype: torch.dtype = torch.bfloat16) -> Caches:
    draws = torch.Generator().manual_seed(seed)
    shape = NUM_BLOCKS, NUM_HEADS, NUM_ROWS, CONTENT
    return {f"layer.{layer}": torch.randn(shape, generator=draws).to(dtype) for layer in range(NUM_LAYERS)}


def digests_of(caches: Caches, blocks: list[int], kind: str) -> list[bytes]:
    found = BlockDigests(caches, NUM_BLOCKS, kind).begin(blocks).poll()
    assert found is not None
    assert all(len(digest) == 16 for digest in found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_each_flipped_bit_changes_the_digest_of_its_block_alone(kind: str, dtype: torch.dtype) -> None:
    blocks, draws = [4, 1, 5], random.Random(1)
    for number in range(50):
        caches = random_caches(number, dtype)
        before = digests_of(caches, blocks, kind)
        place, layer = draws.randrange(len(blocks)), f"layer.{draws.randrange(NUM_LAYERS)}"
        content = caches[layer].view(torch.uint8)[blocks[place], draws.randrange(NUM_HEADS), draws.randrange(NUM_ROWS)]
        content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        after = digests_of(caches, blocks, kind)
        assert [one != other for one, other in zip(before, after, strict=True)] == [i == place for i in range(3)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_depends_on_neither_the_layout_in_memory_nor_the_id_of_the_block(kind: str) -> None:
    caches = random_caches(0)
    plain = digests_of(caches, [4, 1], kind)
    # Rows before heads, and blocks before layers: views as vLLM makes them for its other layouts.
    rows_first = {name: view.transpose(1, 2).contiguous().transpose(1, 2) for name, view in caches.items()}
    assert digests_of(rows_first, [4, 1], kind) == plain
    together = torch.stack(list(caches.values()), 1)
    assert digests_of({name: together[:, layer] for layer, name in enumerate(caches)}, [4, 1], kind) == plain
    moved = {name: view[[0, 4, 2, 1, 3, 5]] for name, view in caches.items()}
    assert digests_of(moved, [1, 3], kind) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_all_of_its_kernel_blocks(kind: str) -> None:
    shape = 2 * NUM_BLOCKS, NUM_HEADS, NUM_ROWS // 2, CONTENT
    caches = {name: view.reshape(shape) for name, view in random_caches(0).items()}
    before = digests_of(caches, [0, 1, 2], kind)
    caches["layer.0"][3] += 1.0
    after = digests_of(caches, [0, 1, 2], kind)
    assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_values_in_another_order_have_another_digest(kind: str, axis: int) -> None:
    """Of layers (0), heads, rows and contents."""
    caches = random_caches(0)
    before = digests_of(caches, [1], kind)
    if axis == 0:
        caches["layer.0"], caches["layer.1"] = caches["layer.1"], caches["layer.0"]
    else:
        caches["layer.0"] = caches["layer.0"].flip(axis)
    assert digests_of(caches, [1], kind) != before


def test_caches_of_another_shape_or_kind_have_another_layout() -> None:
    layouts = {
        BlockDigests(random_caches(0), NUM_BLOCKS).layout,
        BlockDigests(random_caches(0), NUM_BLOCKS, "sums").layout,
        BlockDigests(random_caches(0), NUM_BLOCKS // 2).layout,
        BlockDigests(random_caches(0, torch.float32), NUM_BLOCKS).layout,
        BlockDigests(dict(list(random_caches(0).items())[1:]), NUM_BLOCKS).layout,
    }
    assert len(layouts) == 5
    assert BlockDigests(random_caches(1), NUM_BLOCKS).layout in layouts  # whatever the values


@pytest.mark.parametrize("shape", [(NUM_BLOCKS * 64,), (2, NUM_BLOCKS, 2, 8, 12), (NUM_BLOCKS + 1, 2, 8, 12)])
def test_a_cache_whose_blocks_cannot_be_found_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedCache, match=f"of a layer is not {NUM_BLOCKS} blocks"):
        BlockDigests({"a layer": torch.zeros(shape)}, NUM_BLOCKS)


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


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=0.0)


@pytest.fixture
def opened(clock: SimpleNamespace) -> tuple[Reader, SlowDigests, Future[list[bytes] | None]]:
    """A reader of the last two of three blocks: the first one is in its prefix cache."""
    digests, fetched = SlowDigests(), Future[list[bytes] | None]()
    reader = Reader(
        digests, lambda *_: fetched, num_ranks=1, block_size=BLOCK_SIZE, timeout_s=10.0, clock=lambda: clock.now
    )
    reader.begin({"one": CLAIM})
    return reader, digests, fetched


Opened = tuple[Reader, SlowDigests, "Future[list[bytes] | None]"]


@pytest.mark.parametrize(("last", "verdict", "failed"), [(b"2", Verdict.VERIFIED, set()), (b"x", Verdict.WRONG, {8})])
def test_a_request_waits_for_both_digests(opened: Opened, last: bytes, verdict: Verdict, failed: set[int]) -> None:
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
def test_a_request_without_digests_is_recomputed_in_time(opened: Opened, clock: SimpleNamespace, lacks: str) -> None:
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
