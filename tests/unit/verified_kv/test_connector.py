"""No block is used that is not the block that was computed: both halves of `VerifiedConnector`, over real sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import fake_vllm_connectors as fake
from tests.support.fake_vllm_connectors import BLOCK_SIZE, NUM_BLOCKS, CopyingConnector, cache_config, config

NUM_SEEDS = 200


@pytest.fixture
def module() -> Iterator[ModuleType]:
    with fake.installed() as module:
        yield module
    CopyingConnector.fault = None


class Side:
    """The connectors of an engine: in its scheduler and in its only rank. `verified=False`: the inner one alone."""

    def __init__(self, module: ModuleType, role: str, draws: random.Random, *, verified: bool, **options: Any) -> None:
        connector = module.VerifiedConnector if verified else CopyingConnector
        extra = {"verified_kv": options}
        self.scheduler = connector(config(role, extra=extra), "scheduler", cache_config())
        self.rank = connector(config(role, extra=extra), "rank", cache_config())
        self.caches = fake.random_caches(draws)
        self.rank.register_kv_caches(self.caches)
        if verified and (word := self.rank.get_handshake_metadata()) is not None:
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): word})

    def step(self, finished: frozenset[str] = frozenset()) -> Any:
        self.rank.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.rank.start_load_kv(None)
        return self.rank.get_transfer_results(set(finished))

    def read(self, request: SimpleNamespace, blocks: list[int], num_local_tokens: int) -> tuple[list[int], Any]:
        """The blocks that vLLM would use of the request, in order, and the results of the last step."""
        num_tokens, _ = self.scheduler.get_num_new_matched_tokens(request, num_local_tokens)
        held = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, held, num_tokens)
        results = self.step()
        while request.request_id not in results.finished_recving:
            os.sched_yield()  # to the thread that fetches
            results = self.step()
        failed = self.rank.get_block_ids_with_load_errors()
        if request.request_id in results.failed_recving:
            return [], results
        used = next((place for place, block in enumerate(blocks) if block in failed), len(blocks))
        return blocks[:used], results


@contextlib.contextmanager
def two_sides(module: ModuleType, *, verified: bool = True, **options: Any) -> Iterator[tuple[Side, Side]]:
    """A producer and a reader."""
    draws = random.Random(0)
    sides = [Side(module, f"kv_{role}", draws, verified=verified, **options) for role in ("producer", "consumer")]
    yield sides[0], sides[1]
    for side in sides:
        side.rank.shutdown()


def counts_of(side: Side) -> dict[str, int]:
    stats: Any = side.rank.get_kv_connector_stats()
    return dict(stats.data)


def a_request(number: int, num_tokens: int, **parameters: Any) -> SimpleNamespace:
    """Each number has a prompt of its own."""
    return SimpleNamespace(
        request_id=f"request-{number}", num_tokens=num_tokens, num_computed_tokens=num_tokens, num_in_flight_tokens=0,
        in_background=True, kv_transfer_params=parameters,
        prompt_token_ids=[1000 * number + place for place in range(num_tokens)],
        lora_request=None, cache_salt=None, mm_features=[],
    )  # fmt: skip


# ---- faults: each changes computed rows of the blocks that were read


Caches = list[torch.Tensor]  # `before`: those of the reader before its read


def flip_a_bit(draws: random.Random, num_tokens: int, _: Caches, caches: Caches, blocks: list[int]) -> None:
    place = draws.randrange(len(blocks))
    rows = BLOCK_SIZE if place < len(blocks) - 1 else (num_tokens - 1) % BLOCK_SIZE + 1
    row = draws.choice(caches)[blocks[place], draws.randrange(2), draws.randrange(rows)].view(torch.uint8)
    row[draws.randrange(len(row))] ^= 1 << draws.randrange(8)


def a_stale_block(draws: random.Random, _: int, before: Caches, caches: Caches, blocks: list[int]) -> None:
    """One layer of it is what the reader had there before, as if its write had been lost."""
    layer, block = draws.randrange(len(caches)), draws.choice(blocks)
    caches[layer][block] = before[layer][block]


def two_swapped(draws: random.Random, _: int, __: Caches, caches: Caches, blocks: list[int]) -> None:
    one, other = draws.sample(blocks, 2) if len(blocks) > 1 else (blocks[0], NUM_BLOCKS - 1)
    for cache in caches:
        cache[[one, other]] = cache[[other, one]]


def a_short_read(draws: random.Random, _: int, before: Caches, caches: Caches, blocks: list[int]) -> None:
    missing = blocks[draws.randrange(len(blocks)) :]
    for cache, old in zip(caches, before, strict=True):
        cache[missing] = old[missing]


FAULTS = (None, flip_a_bit, a_stale_block, two_swapped, a_short_read)


def differing(producer: Side, reader: Side, remote: list[int], own: list[int], num_tokens: int) -> list[int]:
    """The places whose computed rows are not those of the producer."""
    found = []
    for place, (one, other) in enumerate(zip(remote, own, strict=False)):
        rows = min(BLOCK_SIZE, num_tokens - place * BLOCK_SIZE)
        for name, cache in producer.caches.items():
            if not torch.equal(cache[one, :, :rows], reader.caches[name][other, :, :rows]):
                found.append(place)
                break
    return found


def run(module: ModuleType, *, verified: bool) -> tuple[int, int, int]:
    """(requests with a planted fault, those with a wrong block in use, sound ones that were recomputed)."""
    planted = wrong = wasted = 0
    with two_sides(module, verified=verified) as (producer, reader):
        for seed in range(NUM_SEEDS):
            draws = random.Random(seed)
            num_tokens = draws.randint(1, 8 * BLOCK_SIZE)
            num_blocks = -(-num_tokens // BLOCK_SIZE)
            # The last block is nobody's.
            remote, own = (draws.sample(range(NUM_BLOCKS - 1), num_blocks) for _ in range(2))
            for name, cache in fake.random_caches(draws).items():
                producer.caches[name].copy_(cache)
            num_local = draws.randrange(num_blocks)  # blocks of a hit in the reader's prefix cache
            for name, cache in reader.caches.items():
                cache[own[:num_local]] = producer.caches[name][remote[:num_local]]
            choice = draws.choice(FAULTS)
            before = [cache.clone() for cache in reader.caches.values()]
            CopyingConnector.fault = choice and partial(choice, draws, num_tokens, before)
            offered = producer.scheduler.request_finished_all_groups(a_request(seed, num_tokens), (remote,))[1]
            producer.step()
            used, results = reader.read(a_request(seed, num_tokens, **offered), own, num_local * BLOCK_SIZE)
            assert not results.failed_recving
            faults = differing(producer, reader, remote, own, num_tokens)
            planted += bool(faults)
            wrong += bool(differing(producer, reader, remote, used, num_tokens))
            wasted += len(used) < (min(faults) if faults else num_blocks)
            assert bool(faults) or choice is not flip_a_bit
    return planted, wrong, wasted


def test_of_planted_faults_none_is_used_with_digests_and_all_without(module: ModuleType) -> None:
    planted, wrong, wasted = run(module, verified=True)
    assert planted > NUM_SEEDS // 2
    assert (wrong, wasted) == (0, 0)
    assert run(module, verified=False)[:2] == (planted, planted)


def test_a_request_without_digests_is_recomputed_and_counted(module: ModuleType) -> None:
    """Its producer has none, or another layout, or fewer tokens, or is gone; its ticket is none."""
    with two_sides(module) as (producer, reader):
        offered = producer.scheduler.request_finished_all_groups(a_request(0, 9), ([3, 4, 5],))[1]
        ticket = offered["verified_kv"]
        producer.rank.shutdown()  # whoever asks it gets a refused connection
        two_ranks = {"addresses": ticket["addresses"] * 2}
        others = [{}, {"layout": "xxh3-of another model"}, {"num_tokens": 8}, two_ranks, {"secret": 1}]
        for change in others:
            request = a_request(0, 9, **offered | {"verified_kv": ticket | change})
            assert reader.read(request, [7, 8, 9], BLOCK_SIZE)[0] == [7], change
        del offered["verified_kv"]
        assert reader.read(a_request(9, 9, **offered), [7, 8, 9], 0)[0] == []
        assert counts_of(reader)["unverified"] == len(others) + 1


def test_a_ticket_is_good_for_its_prompt_adapter_salt_and_images_alone(module: ModuleType) -> None:
    """A proxy that exchanges the parameters of two requests hands over sound blocks of the wrong prompt."""
    with two_sides(module) as (producer, reader):
        image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=2))
        own = {"lora_request": SimpleNamespace(lora_name="adapter"), "cache_salt": "salt", "mm_features": [image]}
        prompts = [*range(8), 0], list(range(8))
        others: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
        others += [{"lora_request": None}, {"cache_salt": "another"}, {"mm_features": []}, {"prompt_embeds": object()}]

        def used(change: dict[str, Any]) -> list[int]:
            finished = a_request(0, 9)
            vars(finished).update(own)
            offered = producer.scheduler.request_finished_all_groups(finished, ([3, 4, 5],))[1]
            producer.step()
            asked = a_request(0, 9, **offered)
            vars(asked).update(own | change)
            return reader.read(asked, [7, 8, 9], 0)[0]

        assert used({}) == [7, 8, 9]
        assert [used(change) for change in others] == [[]] * len(others)
        assert counts_of(reader) == {"verified": 1, "unverified": len(others), "failed_blocks": 3 * len(others)}


def test_each_nth_request_is_in_the_sample(module: ModuleType) -> None:
    with two_sides(module, every=3) as (producer, reader):
        for number in range(6):
            offered = producer.scheduler.request_finished_all_groups(a_request(number, 9), ([3, 4, 5],))[1]
            producer.step()
            assert ("secret" in offered["verified_kv"]) is (number % 3 == 2)
            assert reader.read(a_request(number, 9, **offered), [7, 8, 9], 0)[0] == [7, 8, 9]
        assert counts_of(reader) == {"verified": 2, "skipped": 4, "failed_blocks": 0}
        del offered["verified_kv"]  # by a proxy that copies only what it knows
        assert reader.read(a_request(5, 9, **offered), [7, 8, 9], 0)[0] == []


def test_a_load_inside_a_step_is_not_taken_because_nobody_could_verify_it(module: ModuleType) -> None:
    scheduler = module.VerifiedConnector(config(), "scheduler", cache_config())
    request = a_request(0, 9)
    assert scheduler.get_num_new_matched_tokens(request, 4) == (5, True)
    request.in_background = False
    assert scheduler.get_num_new_matched_tokens(request, 4) == (0, False)


def test_every_other_hook_and_attribute_is_the_inner_connectors(module: ModuleType) -> None:
    connector = module.VerifiedConnector(config(), "scheduler", cache_config())
    connector.inner.take_events = lambda: ["an event"]
    connector.inner.connector_worker = worker = object()
    assert (connector.take_events(), connector.connector_worker) == (["an event"], worker)
    assert connector.requires_kv_delivery is False


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({"extra": {"bidirectional_kv_xfer": True}}, "bidirectional_kv_xfer is not supported"),
        ({"extra": {"verified_kv": {"evry": 2}}}, "has no option evry"),
        ({"extra": {"verified_kv": {"every": 0}}}, "out of range"),
        ({"extra": {"verified_kv": {"timeout_s": "10"}}}, "timeout_s must be a float"),
    ],
)
def test_what_cannot_be_verified_is_refused_at_start(module: ModuleType, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        module.VerifiedConnector(config("kv_consumer", **options), "scheduler", cache_config())


def test_a_model_with_several_groups_of_caches_is_refused_at_start(module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"several groups of KV caches \(SimpleNamespace, SimpleNamespace\)"):
        module.VerifiedConnector(config(), "scheduler", cache_config(num_groups=2))


def test_or_the_inner_connector_works_alone(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"verified_kv": {"required": False}}
    scheduler = module.VerifiedConnector(config(extra=extra), "scheduler", cache_config(num_groups=2))
    assert "not verified: this model has several groups" in caplog.text
    rank = module.VerifiedConnector(config(extra=extra), "rank", cache_config(num_groups=2))
    rank.register_kv_caches(fake.random_caches(random.Random(0)))
    assert rank.get_handshake_metadata() is None
    offered = scheduler.request_finished_all_groups(a_request(0, 9), ([3, 4, 5], [6, 7, 8]))
    assert offered == (True, {"do_remote_prefill": True, "blocks": [3, 4, 5]})
    held = SimpleNamespace(get_block_ids=lambda: ([7, 8, 9],))
    scheduler.update_state_after_alloc(a_request(0, 9, **offered[1]), held, 9)
    rank.bind_connector_metadata(scheduler.build_connector_meta(None))
    assert rank.get_transfer_results(set()).finished_recving == {"request-0"}


class OneGroupConnector(fake.KVConnectorBase_V1):
    """Without `SupportsHMA`, and without a word for the scheduler."""

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:  # noqa: ARG002
        return True, {"blocks": block_ids}


def test_or_one_that_takes_one_group_of_blocks_alone(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = SimpleNamespace(get_connector_class=lambda _: OneGroupConnector)
    monkeypatch.setattr(module, "KVConnectorFactory", factory)
    options = config(extra={"verified_kv": {"required": False}})
    connector = module.VerifiedConnector(options, "scheduler", cache_config())
    assert connector.request_finished_all_groups(a_request(0, 9), ([3, 4],)) == (True, {"blocks": [3, 4]})
    connector.register_kv_caches(fake.random_caches(random.Random(0)))
    assert connector.get_handshake_metadata() is None
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        module.VerifiedConnector(options, "scheduler", cache_config(num_groups=2))


def test_or_if_one_rank_cannot_digest_its_caches(module: ModuleType) -> None:
    """Then no rank does: a request is whole only if all its ranks are."""
    draws = random.Random(0)
    reader = Side(module, "kv_consumer", draws, verified=True, required=False)
    other = module.VerifiedConnector(
        config("kv_consumer", extra={"verified_kv": {"required": False}}), "rank", cache_config()
    )
    other.register_kv_caches({"a layer": torch.zeros(3)})
    ranks = {(0, place): rank.get_handshake_metadata() for place, rank in enumerate((reader.rank, other))}
    reader.scheduler.set_xfer_handshake_metadata_pp_aware({key: one for key, one in ranks.items() if one is not None})
    CopyingConnector.producer = reader.caches
    assert reader.read(a_request(0, 9, blocks=[3, 4, 5]), [7, 8, 9], 0)[0] == [7, 8, 9]
    assert reader.rank.get_kv_connector_stats() is None
    reader.rank.shutdown()


def test_each_rank_of_each_data_parallel_engine_has_a_port_at_an_address(module: ModuleType) -> None:
    asked: list[int] = []

    async def start(_: Any, host: str, port: int) -> int:
        assert ipaddress.ip_address(host).is_loopback  # no name: a ticket holds none
        asked.append(port)
        return port

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DigestServer, "start", start)
        for index, rank in itertools.product(range(2), range(2)):
            patch.setattr(module, "_rank", lambda rank=rank: rank)
            parallel: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_index": index}
            options = config("kv_producer", extra={"verified_kv": {"host": "localhost", "port": 7000}}, **parallel)
            connector = module.VerifiedConnector(options, "rank", cache_config())
            connector.register_kv_caches(fake.random_caches(random.Random(0)))
            connector.shutdown()
    assert asked == [7000, 7001, 7002, 7003]


def test_a_vllm_with_another_interface_is_refused_by_the_name_of_the_hook(module: ModuleType) -> None:
    interface = SimpleNamespace(KVConnectorBase_V1=fake.KVConnectorBase_V1, SupportsHMA=fake.SupportsHMA)
    assert module.unmet(interface) == ""
    newer = type("Newer", (fake.KVConnectorBase_V1,), {"wants_more": classmethod(lambda _: None)})
    assert "class hook wants_more" in module.unmet(SimpleNamespace(KVConnectorBase_V1=newer))
    members = vars(fake.KVConnectorBase_V1)
    older = type("Older", (), {name: member for name, member in members.items() if name != "get_transfer_results"})
    assert "lacks the hook get_transfer_results" in module.unmet(SimpleNamespace(KVConnectorBase_V1=older))
