"""How a hand-off of a `Pair` (transfer_pair.py) has ended, on both sides."""

from core.handoff import AbortReason, OwnerState, PullerState
from kv_transfer.protocol.events import PullCompleted, PullFailed
from tests.unit.kv_transfer.transfer_pair import Pair


def assert_failed(pair: Pair, reason: AbortReason, state: PullerState = PullerState.FAILED) -> None:
    result = pair.pull_result()
    assert isinstance(result, PullFailed)
    assert (result.reason, result.state) == (reason, state)
    assert not pair.puller.machine.alive


def assert_freed(pair: Pair, state: OwnerState, reason: AbortReason | None) -> None:
    ended = pair.offer_result()
    assert (ended.state, ended.reason) == (state, reason)
    assert pair.num_leases() == 0
    assert not pair.owner.machine.alive


def assert_completed(pair: Pair) -> None:
    assert isinstance(pair.pull_result(), PullCompleted)
    pair.deliver_all()
    assert_freed(pair, OwnerState.RELEASED, None)
    assert all(side.machine.next_deadline() is None for side in pair.sides.values())
