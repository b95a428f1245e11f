"""The table of a disk tier: what is kept, what goes, and that nothing is kept behind a gap."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.scheduling.block_pool import BlockRemoved, BlockStored
from tests.support.driven_worker import LAYOUT
from worker.tier.names import chain_name, identity_of, root_name
from worker.tier.slot_file import MAX_NUMBER, StoredBlock
from worker.tier.slot_table import SlotTable

ROOT = b"root"


def chain(*tokens: int) -> list[bytes]:
    """The names of the blocks of a prompt with one token in each block."""
    names = [ROOT]
    for token in tokens:
        names.append(chain_name(names[-1], bytes([token])))
    return names[1:]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
# A prompt that is asked for, with as much of it as is here, and then written up to some block. Every write may fail.
steps = st.lists(st.tuples(prompts, st.integers(0, 6), st.booleans()), max_size=40)


def kept(table: SlotTable, names: list[bytes]) -> int:
    """The number of leading blocks that are here."""
    return next((place for place, name in enumerate(names) if table.slot_of(name) is None), len(names))


@given(steps, st.integers(2, 6))
@settings(max_examples=300)
def test_what_is_here_begins_at_the_first_block_of_its_prompt_also_after_a_restart(
    asked: list[tuple[list[int], int, bool]], num_slots: int
) -> None:
    table, headers = SlotTable(num_slots, {}), {}
    for tokens, num_written, fails in asked:
        names = chain(*tokens)
        table.use(names[: kept(table, names)])
        begun = []
        for position, name in enumerate(names[:num_written]):
            parent = names[position - 1] if position else ROOT
            if (found := table.begin(name, parent, hash(name), position)) is not None:
                begun.append((name, *found))
            table.check()
        for place, (name, slot, header) in enumerate(begun):
            is_written = not (fails and place == len(begun) // 2)
            table.end(name, is_written=is_written)
            if is_written:
                headers[slot] = header
            else:
                headers.pop(slot, None)
                for later, later_slot, _ in begun[place + 1 :]:
                    table.end(later, is_written=False)
                    headers.pop(later_slot, None)
                break
        table.check()
        here = {slot: header for slot, header in headers.items() if table.slot_of(header.name) == slot}
        assert len(here) == len(table) <= num_slots
        names_here = {header.name for header in here.values()}
        assert all(not header.position or header.parent in names_here for header in here.values())
        again = SlotTable(num_slots, here)
        again.check()
        assert len(again) == len(table)


def write(table: SlotTable, *tokens: int) -> int:
    """Ask for a prompt, and write what is not here. Returns the number of leading blocks that are here then."""
    names = chain(*tokens)
    table.use(names[: kept(table, names)])
    for parent, position, name in zip([ROOT, *names], range(len(names)), names, strict=False):
        if table.begin(name, parent, hash(name), position) is not None:
            table.end(name, is_written=True)
        table.check()
    return kept(table, names)


def test_blocks_that_are_asked_for_stay() -> None:
    table = SlotTable(4, {})
    for _ in range(4):
        assert write(table, 1, 1) == 2  # asked for three times
    for new in range(2, 5):
        assert write(table, new, new) == 2, "a new prompt takes the place of one that was not asked for"
        assert kept(table, chain(1, 1)) == 2
    for new in range(5, 30):
        write(table, new, new)
    assert kept(table, chain(1, 1)) == 0, "old uses count ever less"


def test_a_full_table_of_used_blocks_takes_new_prompts() -> None:
    table = SlotTable(4, {})
    for _ in range(3):
        assert write(table, 1, 1) == write(table, 2, 2) == 2
    assert [write(table, new, new) for new in range(3, 9)] == [2] * 6
    single = SlotTable(4, {})
    assert [write(single, new) for new in range(1, 20)] == [1] * 19
    single.forget(chain(16)[0])
    assert [write(single, new) for new in range(20, 22)] == [1] * 2


def test_a_block_that_is_written_again_is_worth_what_the_blocks_behind_it_are() -> None:
    table = SlotTable(3, {})
    for _ in range(5):
        write(table, 1, 1)
    first, second = chain(1, 1)
    table.forget(first)
    assert table.begin(first, ROOT, 0, 0) is not None
    table.end(first, is_written=False)
    assert write(table, 1, 1) == 2
    while table.slot_of(second) is not None:
        assert table.slot_of(first) is not None, "a block stays without its parent"
        write(table, table._next_number, table._next_number)


def test_a_block_whose_parent_goes_while_it_is_written_is_dropped() -> None:
    table = SlotTable(2, {})
    first, second = chain(1, 1)
    write(table, 1)
    assert table.begin(second, first, 0, 1) is not None
    assert write(table, 2) == 1, "it takes the slot of the parent"
    table.end(second, is_written=True)
    assert table.slot_of(second) is None
    table.check()


def test_a_corrupt_block_is_gone_at_once_and_its_slot_is_free_once_it_is_erased() -> None:
    table = SlotTable(1, {})
    write(table, 1)
    assert table.forget_corrupt({hash(chain(1)[0])}) == [0]
    assert write(table, 1) == write(table, 2) == 0
    table.on_erased(0)
    assert write(table, 2) == 1


def test_a_forged_hash_is_reported_until_the_last_block_with_it_goes() -> None:
    """A client can make two prompts whose blocks have one hash."""
    table, names = SlotTable(2, {}), chain(1) + chain(2)
    for name, events in zip(names, ([BlockStored(7)], []), strict=True):
        assert table.begin(name, ROOT, 7, 0) is not None
        table.end(name, is_written=True)
        table.check()
        assert table.drain_events() == events
    assert table.sequence_hashes() == [7]
    table.forget(names[0])
    assert table.drain_events() == []
    table.forget(names[1])
    table.check()
    assert table.drain_events() == [BlockRemoved(7)]


def test_a_block_that_turns_out_corrupt_while_it_is_written_is_erased() -> None:
    table = SlotTable(1, {})
    assert table.begin(b"name", ROOT, 7, 0) is not None
    assert table.forget_corrupt({7}) == []
    assert table.end(b"name", is_written=True) == [0]
    assert table.slot_of(b"name") is None
    table.check()


def test_after_a_restart_stored_blocks_count_as_used_once() -> None:
    names = [name for token in range(3) for name in chain(token)]
    table = SlotTable(3, {slot: StoredBlock(name, ROOT, slot, 0, 7, slot) for slot, name in enumerate(names)})
    assert not table.drain_events(), "a snapshot has them"
    assert table._rows[names[0]].value == table._age + 2


def test_of_one_long_prompt_the_first_blocks_stay() -> None:
    table = SlotTable(3, {})
    names = chain(*range(6))
    begun = [table.begin(name, ([ROOT, *names])[position], 0, position) for position, name in enumerate(names)]
    assert [found is not None for found in begun] == [True] * 3 + [False] * 3


def test_a_block_behind_a_lost_one_is_not_found_after_a_restart() -> None:
    first, second, third = chain(1, 2, 3)
    stored = {5: StoredBlock(first, ROOT, 11, 0, 3, 1), 2: StoredBlock(third, second, 13, 2, 3, 3)}
    table = SlotTable(6, stored)
    table.check()
    assert len(table) == 1
    assert table.slot_of(first) == 5


links = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, MAX_NUMBER - 1))


@given(st.dictionaries(st.integers(0, 5), links))
@example({0: (1, 0, 0, 1), 1: (2, 1, 1, 1), 2: (3, 2, 1, 1)})
def test_headers_that_no_worker_has_written_make_no_table_wrong(headers: dict[int, tuple[int, int, int, int]]) -> None:
    """Their digests are right: another program wrote them."""
    stored = {
        slot: StoredBlock(bytes([name]) * 32, bytes([parent]) * 32, 7, position, value, value)
        for slot, (name, parent, position, value) in headers.items()
        if name not in [other for before, (other, *_) in headers.items() if before < slot]  # as `scan`
    }
    table = SlotTable(6, stored)
    table.check()
    for token in range(8):
        write(table, token)
        table.check()


def test_names_differ_if_salt_tokens_model_or_layout_differ() -> None:
    others = (replace(LAYOUT, model="n"), replace(LAYOUT, dtype="bfloat16"), replace(LAYOUT, head_dim=2))
    identities = [identity_of(LAYOUT), identity_of(LAYOUT, "other weights"), *map(identity_of, others)]
    roots = [root_name(identity, salt) for identity in identities for salt in ("", "tenant", "tenant2")]
    names = [chain_name(root, tokens) for root in roots for tokens in (b"1234", b"1235")]
    assert len({*roots, *names}) == len(roots) + len(names)
