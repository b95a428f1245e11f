"""Which fleet serves a model: by name, alias and rule, and while a fleet is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from core.config import ModelRuleConfig, ServedModelConfig
from core.errors import Unauthenticated, WorkerUnavailable
from gateway import fleets as fleets_module
from gateway.fleets import Fleets, ModelUnknown
from tandem_client.stubs.inference_pb2 import GetModelResponse
from tests.support.waiting import until

MODELS = (ServedModelConfig("small", aliases=("fast",)), ServedModelConfig("big", router="away:2", aliases=("heavy",)))
RULES = (
    ModelRuleConfig("auto", "big", tag="batch"),
    ModelRuleConfig("auto", "small", max_prompt_chars=100),
    ModelRuleConfig("auto", "big"),
)


class FakeRouter:
    """A router that serves one model, or none while `fault` is set."""

    def __init__(self, address: str, model: str) -> None:
        self.address, self.fault, self.can_decode, self.awaits_prefill = address, "", True, False
        self.adapters: tuple[str, ...] = ()
        self.takes_keys: bool | None = True  # None: it does not answer
        self.is_silent = self.is_odd = False
        self.num_keys = 0  # that it was asked about
        self._model = model
        self._is_open = False

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        pass

    async def authorize(self, _: Any) -> None:
        self.num_keys += 1
        if self.fault:
            raise WorkerUnavailable(self.fault)
        if self.takes_keys is None:
            await asyncio.Event().wait()
        if not self.takes_keys:
            raise Unauthenticated(f"unknown at {self.address}")

    async def model(self) -> GetModelResponse:
        assert self._is_open
        if self.is_silent:
            await asyncio.Event().wait()
        if self.fault:
            raise WorkerUnavailable(self.fault)
        if self.is_odd:
            raise ValueError("could not convert string to float")
        return GetModelResponse(
            name=self._model, context_length=64, can_decode=self.can_decode, adapters=self.adapters,
            awaits_prefill=self.awaits_prefill,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def opened(
    *own: str, models: Any = (), rules: Any = (), away: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Fleets, dict[str, FakeRouter]]]:
    routers: dict[str, FakeRouter] = {}

    def connect(address: str) -> Any:
        routers[address] = FakeRouter(address, f"served by {address}")
        routers[address].fault = f"no router at {address}" if address in away else ""
        return routers[address]

    fleets = Fleets([connect(address) for address in own or ("here:1",)], models, rules, connect)
    await fleets.open()
    try:
        yield fleets, routers
    finally:
        await fleets.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets_module, "OPEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(fleets_module, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(fleets_module, "POLL_INTERVAL_S", 0.01)


async def test_without_models_the_name_is_that_of_the_router() -> None:
    async with opened() as (fleets, routers):
        served = fleets.resolve("served by here:1")
        assert (served.name, served.router) == ("served by here:1", routers["here:1"])
        assert fleets.resolve("").name == "served by here:1"
        with pytest.raises(ModelUnknown, match="'other' is not served here; served: served by here:1"):
            fleets.resolve("other")


async def test_a_model_is_found_by_name_alias_and_rule_and_named_by_its_own_name() -> None:
    async with opened(models=MODELS, rules=RULES) as (fleets, routers):
        for asked, chars, tag, name, router in (
            ("small", 0, "", "small", "here:1"),
            ("fast", 0, "", "small", "here:1"),
            ("big", 0, "", "big", "away:2"),
            ("heavy", 0, "", "big", "away:2"),
            ("auto", 100, "", "small", "here:1"),
            ("auto", 101, "", "big", "away:2"),
            ("auto", 100, "batch", "big", "away:2"),
            ("auto", 100, "other tag", "small", "here:1"),
            ("", 0, "", "small", "here:1"),
        ):
            served = fleets.resolve(asked, chars, tag)
            assert (served.name, served.router) == (name, routers[router]), asked
            assert served.info.name == f"served by {router}"
        assert fleets.names() == ["small", "big", "fast", "heavy", "auto"]
        with pytest.raises(ModelUnknown, match="served: small, big, fast, heavy, auto"):
            fleets.resolve("gpt-5")
    async with opened(models=MODELS, rules=(ModelRuleConfig("auto", "small", max_prompt_chars=10),)) as (fleets, _):
        with pytest.raises(ModelUnknown):
            fleets.resolve("auto", 11)


@pytest.mark.parametrize("models", [(), MODELS])
async def test_an_adapter_is_found_by_its_name_in_every_fleet(models: tuple[ServedModelConfig, ...]) -> None:
    async with opened(models=models) as (fleets, routers):
        for address, router in routers.items():
            name = f"red of {address}"
            router.adapters = (name,)
            await until(lambda: name in fleets.names(), "the gateway has asked")  # noqa: B023 - awaited in this round
            served = fleets.resolve(name)
            assert (served.name, served.routed_name, served.router) == (name, name, router)
            assert [one.parent for one in fleets.listed() if one.name == name] == [f"served by {address}"]
        assert fleets.resolve("").routed_name == "served by here:1"


@pytest.mark.parametrize(
    ("first", "second", "refusal"),
    [(None, True, ""), (False, True, ""), (True, None, ""), (False, False, "unknown at here:1")],
)
async def test_a_key_is_taken_if_one_fleet_takes_it_also_while_another_is_silent(
    first: bool | None, second: bool | None, refusal: str
) -> None:
    async with opened(models=MODELS) as (fleets, routers):
        routers["here:1"].takes_keys, routers["away:2"].takes_keys = first, second
        async with asyncio.timeout(5):
            if not refusal:
                await fleets.authorize(())
                return
            with pytest.raises(Unauthenticated, match=refusal):
                await fleets.authorize(())


async def test_a_key_is_shown_to_other_fleets_once_and_again_when_its_own_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(models=MODELS) as (fleets, routers):
        here, away = routers["here:1"], routers["away:2"]
        here.takes_keys = False
        key = [("authorization", "Bearer a key of the other fleet")]
        for _ in range(3):
            await fleets.authorize(key)
        assert (here.num_keys, away.num_keys) == (1, 3)
        here.takes_keys, away.takes_keys = True, False
        for _ in range(3):
            await fleets.authorize(key)
        assert (here.num_keys, away.num_keys) == (4, 4)
        monkeypatch.setattr(fleets_module, "MAX_KEYS", 2)
        for number in (0, 1, 0, 2):
            await fleets.authorize([("authorization", f"Bearer {number}")])
        assert list(fleets._takers) == ["0", "2"], "the newest"


async def test_a_fleet_that_is_away_fails_its_own_models_only() -> None:
    async with opened(models=MODELS, away=("away:2",)) as (fleets, routers):
        assert fleets.resolve("small").name == "small"
        with pytest.raises(WorkerUnavailable, match="no router at away:2") as failed:
            fleets.resolve("big")
        assert failed.value.retryable
        assert await fleets.faults() == {"small": "", "big": "no router at away:2"}
        assert [listed.info is None for listed in fleets.listed()] == [False, True, False, True]
        routers["away:2"].fault = ""
        await until(lambda: fleets.listed()[1].info is not None, "the fleet is found once it is there")
        assert fleets.resolve("big").name == "big"


@contextlib.asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[Fleets, dict[str, FakeRouter]]]:
    async with opened("a:1", "b:1") as (fleets, routers):
        links = fleets.fleets[0].links
        await until(lambda: all(link.info for link in links), "both have answered")
        yield fleets, routers


async def test_requests_go_to_the_routers_of_a_fleet_in_turn_and_past_one_that_is_away() -> None:
    async with two_routers() as (fleets, routers):
        (fleet,) = fleets.fleets
        assert {fleets.resolve("").router.address for _ in range(4)} == {"a:1", "b:1"}
        routers["a:1"].fault = "gone"
        await until(lambda: fleet.links[0].fault, "the gateway notices")
        assert {fleets.resolve("").router.address for _ in range(4)} == {"b:1"}
        routers["b:1"].fault = "gone, too"
        await until(lambda: fleet.links[1].fault, "the gateway notices")
        assert fleets.resolve("").info.name, "the last known model: the call itself will tell"
        assert await fleet.fault() == "gone"


async def test_requests_that_ask_about_their_keys_go_to_the_routers_in_turn_too() -> None:
    async with two_routers() as (fleets, routers):
        found = []
        for _ in range(4):
            await fleets.authorize(())
            found.append(fleets.resolve("").router.address)
        assert sorted(found) == ["a:1", "a:1", "b:1", "b:1"]
        assert {router.num_keys for router in routers.values()} == {2}, "the questions are spread, too"


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_key_is_taken_while_one_router_of_its_fleet_is_dead_or_silent(
    is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets_module, "POLL_INTERVAL_S", 60.0)  # the gateway has not noticed yet
    async with two_routers() as (fleets, routers):
        if is_dead:
            routers["a:1"].fault = "no router at a:1"
        else:
            routers["a:1"].takes_keys = None
        async with asyncio.timeout(5):
            for _ in range(4):
                await fleets.authorize(())
        assert routers["a:1"].num_keys == 2


async def test_the_refusal_of_one_router_is_that_of_its_fleet() -> None:
    async with two_routers() as (fleets, routers):
        for router in routers.values():
            router.takes_keys = False
        for _ in range(4):
            with pytest.raises(Unauthenticated):
                await fleets.authorize(())
        assert sum(router.num_keys for router in routers.values()) == 4


async def test_no_request_goes_to_a_router_that_has_fallen_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets_module, "READY_TIMEOUT_S", 0.05)
    async with two_routers() as (fleets, routers):
        routers["a:1"].is_silent = True
        await until(lambda: fleets.fleets[0].links[0].fault, "the gateway notices", 5)
        assert {fleets.resolve("").router.address for _ in range(4)} == {"b:1"}
        assert await fleets.fleets[0].fault() == ""
        routers["b:1"].is_silent = True
        assert await fleets.fleets[0].fault() == "no answer from the router within 0.05 s"


async def test_a_router_whose_answer_cannot_be_read_is_away_until_one_can(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as (fleets, routers):
        (link,) = fleets.fleets[0].links
        routers["here:1"].is_odd = True
        await until(lambda: link.fault == "the router cannot be asked: ValueError", "the router counts as away")
        assert (await fleets.faults()) == {"served by here:1": "the router cannot be asked: ValueError"}
        routers["here:1"].is_odd = False
        await until(lambda: not link.fault, "the router is back")
    assert caplog.text.count("cannot be asked for its model") == 1


async def test_a_fleet_is_not_ready_without_a_decode_worker_or_before_the_prefill_worker_that_it_needs() -> None:
    async with opened() as (fleets, routers):
        assert await fleets.faults() == {"served by here:1": ""}
        routers["here:1"].awaits_prefill = True
        (fault,) = (await fleets.faults()).values()
        assert fault.startswith("no prefill worker has served yet")
        routers["here:1"].can_decode = False
        assert await fleets.faults() == {"served by here:1": "no decode worker serves"}
