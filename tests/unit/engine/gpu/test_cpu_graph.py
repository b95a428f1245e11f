"""`CpuGraph` finds what a graph would do wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.gpu.cpu_graph import CpuGraph, NotCapturable
from engine.gpu.graphs import buckets_up_to


def test_a_replay_computes_with_new_inputs_at_the_same_addresses() -> None:
    given, kept = torch.ones(3), torch.zeros(3)
    graph = CpuGraph(lambda: kept.add_((given * 2).view(3)) + 1)
    address = graph.result.data_ptr()
    kept.zero_()
    given.fill_(5.0)
    graph.replay()
    assert graph.result.tolist() == [11.0] * 3
    assert graph.result.data_ptr() == address


def test_memory_of_the_capture_holds_nothing_between_replays() -> None:
    given = torch.ones(3)
    graph = CpuGraph(lambda: torch.empty(3).mul(0.0) + given)
    graph.replay()
    assert graph.result.isnan().all(), "the computation reads memory that it has not written"


def test_a_tensor_that_only_the_caller_of_the_capture_held_is_missed() -> None:
    def compute() -> torch.Tensor:
        return torch.ones(3) + inputs.pop()

    inputs = [torch.ones(3)]
    with pytest.raises(NotCapturable, match="ones"):
        CpuGraph(compute)
    inputs = [torch.ones(3)]
    graph = CpuGraph(lambda: inputs.pop() * 2)
    with pytest.raises(NotCapturable, match="is gone"):
        graph.replay()


@pytest.mark.parametrize(
    "compute",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool(x[0] > 0), lambda x: x.sort()],
    ids=["item", "nonzero", "boolean index", "branch", "not on the list"],
)
def test_operators_that_a_graph_must_not_hold_are_refused(compute: object) -> None:
    given = torch.ones(3)
    with pytest.raises(NotCapturable, match="a graph must not hold"):
        CpuGraph(lambda: compute(given))  # type: ignore[operator]


@pytest.mark.parametrize("max_running", [1, 2, 7, 8, 64, 100, 256, 300])
def test_buckets_reach_the_limit_and_waste_little(max_running: int) -> None:
    buckets = buckets_up_to(max_running)
    assert buckets[0] == 1
    assert buckets[-1] == max_running
    assert buckets == sorted(set(buckets))
    for before, bucket in itertools.pairwise(buckets):
        assert bucket - before <= max(before, 1) if bucket <= 16 else bucket - before <= max(16, before // 8)
