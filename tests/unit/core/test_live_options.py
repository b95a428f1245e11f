"""Which options are live, and what differs between two configs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config import (
    ApiKeyConfig,
    ClusterConfig,
    EngineConfig,
    RouterConfig,
    SchedulerConfig,
    SecurityConfig,
    TandemConfig,
    changes,
    is_live,
    too_large,
    with_live,
)


def test_a_service_takes_live_options_and_keeps_the_others() -> None:
    present = RouterConfig(port=1, max_queued=2)
    assert with_live(present, RouterConfig(port=9, max_queued=3)) == RouterConfig(port=1, max_queued=3)


def test_each_option_that_differs_is_named_with_its_values_unless_they_are_secret() -> None:
    old = TandemConfig()
    new = replace(
        old,
        router=RouterConfig(max_queued=7, local_prefill="never"),
        security=SecurityConfig(cluster_token="a-token-that-nobody-reads"),
        api_keys=(ApiKeyConfig("bob", "0" * 64),),
    )
    assert [(str(change), change.is_live) for change in changes(old, new)] == [
        ("[router] max_queued 1024 -> 7", True),
        ("[router] local_prefill auto -> never", False),
        ("[security] cluster_token", False),
        ("[[api_keys]]", False),
    ]
    assert changes(old, old) == []


def test_vllm_has_step_sizes_of_its_own() -> None:
    config = TandemConfig(engine=EngineConfig(name="vllm"), cluster=ClusterConfig())
    assert not is_live(config, "scheduler", "max_running")
    assert is_live(config, "scheduler", "max_waiting")


@pytest.mark.parametrize(
    ("built", "new", "on_gpu", "named"),
    [
        (SchedulerConfig(), SchedulerConfig(max_running=64, max_batched_tokens=512), False, ""),
        (SchedulerConfig(), SchedulerConfig(max_running=65), False, "max_running must be at most 64"),
        (SchedulerConfig(), SchedulerConfig(max_running=65), True, ""),
        (SchedulerConfig(max_running=8), SchedulerConfig(), False, "max_running must be at most 8"),
        (SchedulerConfig(), SchedulerConfig(max_batched_tokens=513), False, "max_batched_tokens must be at most 512"),
    ],
)
def test_steps_grow_no_larger_than_those_that_the_engines_were_built_for(
    built: SchedulerConfig, new: SchedulerConfig, on_gpu: bool, named: str
) -> None:
    found = too_large(built, new, on_gpu)
    assert named in found
    assert bool(named) == bool(found)
