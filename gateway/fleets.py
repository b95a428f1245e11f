"""The fleets behind the gateway: a model name -> a router of a fleet that serves it.

Without `[[models]]` there is one fleet, and it serves its model under the router's name for it. With `[[models]]`, each
model names the fleet that serves it; aliases and rules choose among the models. While a fleet is
away, only its own models are away.

The gateway asks every router for its model once a second, so it knows a restarted router soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from core.config import ModelRuleConfig, ServedModelConfig
from core.errors import ErrorCode, TandemError, WorkerUnavailable, quoted
from core.service import Metadata
from gateway.router_calls import RouterCalls
from runtime.rpc.api_keys import presented_key
from tandem_client.stubs.inference_pb2 import GetModelResponse

OPEN_TIMEOUT_S = 5.0  # for the first answers of the routers; the gateway then starts without the missing ones
POLL_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.2  # of a router that is away
READY_TIMEOUT_S = 2.0  # for the answer of a router about itself; beyond: requests go to the other routers of its fleet
NEXT_ASKED_S = 0.2  # a router or a fleet that has not said in this time whether it takes a key holds up no other
MAX_KEYS = 1024  # keys whose fleet is known; beyond: every fleet is asked about the oldest again
REFUSALS = (ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED)

logger = logging.getLogger(__name__)

Asking = Callable[[], Coroutine[Any, Any, None]]
Connect = Callable[[str], RouterCalls]  # to host:port


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or an adapter of one, and a router of the fleet that serves it."""

    name: str  # the `model` of every answer
    router: RouterCalls
    info: GetModelResponse
    routed_name: str  # for the router


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that clients may use."""

    name: str
    model: str  # the model of this name; empty if a rule decides
    info: GetModelResponse | None  # None as long as the fleet has never answered, and for a rule
    parent: str = ""  # the model that an adapter adapts


def fleets_of(request: Request) -> Fleets:
    """The fleets of the application that serves `request`."""
    fleets: Fleets = request.app.state.fleets
    return fleets


async def _ask_in_turn(askings: Sequence[Asking], final: Collection[ErrorCode] = ()) -> None:
    """Return once one of `askings` succeeds. The next one begins after `NEXT_ASKED_S`, or after the end of the last.

    Raises the error of the first if all fail, and at once an error with a code in `final`.
    """
    tasks: list[asyncio.Task[None]] = []

    def have_decided() -> bool:
        errors = [task.exception() for task in tasks if task.done()]
        for error in errors:
            if isinstance(error, TandemError) and error.code in final:
                raise error
        return None in errors

    try:
        for asking in askings:
            tasks.append(asyncio.create_task(asking()))
            await asyncio.wait(tasks[-1:], timeout=NEXT_ASKED_S)
            if have_decided():
                return
        waiting: set[asyncio.Task[None]] = set(tasks)
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if have_decided():
                return
        await tasks[0]  # raises its refusal
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ModelUnknown(Exception):
    """No fleet serves the model. `names` lists the models that are served."""

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(f"model {quoted(model)} is not served here; served: {', '.join(names)}")
        self.names = names


class RouterLink:
    """One router, and its newest answer."""

    def __init__(self, router: RouterCalls, answered: asyncio.Event) -> None:
        self.router = router
        self.info: GetModelResponse | None = None  # the last answer, also of a router that is away now
        self.fault = "not asked yet"  # for clients; empty while the router answers
        self._answered = answered

    async def ask(self) -> None:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                self.info = await self.router.model()
            self.fault = ""
            self._answered.set()
        except TandemError as error:
            self.fault = str(error)
        except TimeoutError:
            self.fault = f"no answer from the router within {READY_TIMEOUT_S:g} s"
        except Exception as error:  # a bug, too: else nobody would ask this router again
            fault = f"the router cannot be asked: {type(error).__name__}"
            if self.fault != fault:  # it is asked several times a second
                logger.exception("the router at %s cannot be asked for its model", self.router.address)
            self.fault = fault

    async def poll_model(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(RETRY_INTERVAL_S if self.fault else POLL_INTERVAL_S)


class Fleet:
    """The routers of one fleet. They serve the same workers, so requests go to them in turn."""

    def __init__(self, routers: Sequence[RouterCalls]) -> None:
        self.answered = asyncio.Event()  # one of the routers has
        self.links = [RouterLink(router, self.answered) for router in routers]
        self._turn = self._key_turn = 0

    @property
    def info(self) -> GetModelResponse | None:
        return next((link.info for link in self.links if link.info is not None), None)

    def _present(self) -> list[RouterLink]:
        """The routers that answer; if all are away, those that have answered before. Raises `TandemError`."""
        present = [link for link in self.links if not link.fault] or [link for link in self.links if link.info]
        if not present:
            raise WorkerUnavailable(self.links[0].fault)
        return present

    def pick(self) -> RouterLink:
        """The next of the present routers. Raises `TandemError`."""
        present = self._present()
        self._turn += 1
        return present[self._turn % len(present)]

    async def authorize(self, metadata: Metadata) -> None:
        """Raises `TandemError` if a router refuses the key, or if none answers. Keys have a turn of their own: each
        request asks about its key, and would else always be sent to the same of two routers."""
        present = self._present()
        self._key_turn = (self._key_turn + 1) % len(present)
        in_turn = present[self._key_turn :] + present[: self._key_turn]
        await _ask_in_turn([partial(link.router.authorize, metadata) for link in in_turn], final=REFUSALS)

    async def fault(self) -> str:
        """The reason why no request can be served now; empty if one can."""
        await asyncio.gather(*(link.ask() for link in self.links))
        serving = [link for link in self.links if not link.fault]
        if not serving:
            return self.links[0].fault
        able = [link.info for link in serving if link.info is not None and link.info.can_decode]
        if not able:
            return "no decode worker serves"
        awaits_prefill = all(info.awaits_prefill for info in able)
        return 'no prefill worker has served yet ([router] local_prefill = "never")' if awaits_prefill else ""


class Fleets:
    """Open it with `await open()` on the event loop of the gateway."""

    def __init__(
        self,
        routers: Sequence[RouterCalls],
        models: Sequence[ServedModelConfig] = (),
        rules: Sequence[ModelRuleConfig] = (),
        connect: Connect | None = None,
    ) -> None:
        """`routers` of this fleet, which serves every model without a router of its own. `connect` to the others."""
        own, others = Fleet(routers), {}
        for address in dict.fromkeys(model.router for model in models if model.router):
            assert connect is not None
            others[address] = Fleet([connect(address)])
        self._models = {model.name: others[model.router] if model.router else own for model in models}
        self._fleets = list(dict.fromkeys(self._models.values())) or [own]
        self._aliases = {alias: model.name for model in models for alias in model.aliases}
        self._rules = tuple(rules)
        self._tasks: list[asyncio.Task[None]] = []
        self._takers: dict[str | None, Fleet] = {}  # by key, the fleet that took the key last

    @property
    def fleets(self) -> list[Fleet]:
        return list(self._fleets)

    def _links(self) -> Iterator[RouterLink]:
        for fleet in self.fleets:
            yield from fleet.links

    async def open(self) -> None:
        """Connect, and wait at most `OPEN_TIMEOUT_S` for a router of each fleet. A missing fleet may come later."""
        for link in self._links():
            await link.router.open()
            self._tasks.append(asyncio.create_task(link.poll_model()))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.gather(*(fleet.answered.wait() for fleet in self.fleets))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links():
            await link.router.close()

    async def authorize(self, metadata: Metadata) -> None:
        """Raises `TandemError` if no fleet takes calls with the API key in `metadata`.

        The fleet that took the key last is asked first: the others refuse the key again, and need not see it.
        """
        key = presented_key(metadata)
        taker = self._takers.get(key)

        async def ask(fleet: Fleet) -> None:
            await fleet.authorize(metadata)
            self._takers.pop(key, None)  # the oldest come first
            self._takers[key] = fleet

        await _ask_in_turn([partial(ask, fleet) for fleet in sorted(self.fleets, key=lambda each: each is not taker)])
        while len(self._takers) > MAX_KEYS:
            del self._takers[next(iter(self._takers))]

    def names(self) -> list[str]:
        return [listed.name for listed in self.listed()]

    def listed(self) -> list[ListedModel]:
        """Every name that `resolve` accepts: models first, then aliases, rules and adapters."""
        known = [fleet.info for fleet in self.fleets if fleet.info is not None]
        models = [ListedModel(name, name, fleet.info) for name, fleet in self._models.items()]
        if not self._models:
            models = [ListedModel(info.name, info.name, info) for info in known]
        aliases = [ListedModel(alias, name, self._models[name].info) for alias, name in self._aliases.items()]
        rules = [ListedModel(name, "", None) for name in dict.fromkeys(rule.name for rule in self._rules)]
        adapters = [ListedModel(name, name, info, parent=info.name) for info in known for name in info.adapters]
        return models + aliases + rules + adapters

    def resolve(self, model: str | None, num_prompt_chars: int = 0, tag: str = "") -> ServedModel:
        """The model or adapter that `model` names; empty = the first model. Raises `ModelUnknown`, and `TandemError` if
        the fleet of the model has never answered."""
        model = model or ""
        if not self._models:
            (fleet,) = self.fleets
            link = fleet.pick()
            assert link.info is not None
            if model not in ("", link.info.name, *link.info.adapters):
                raise ModelUnknown(model, self.names())
            name = model or link.info.name
            return ServedModel(name, link.router, link.info, name)
        name = self._name_of(model, num_prompt_chars, tag)
        owner = self._models.get(name) or self._fleet_with(name)
        if owner is None:
            raise ModelUnknown(model, self.names())
        link = owner.pick()
        assert link.info is not None
        return ServedModel(name, link.router, link.info, link.info.name if name in self._models else name)

    def _fleet_with(self, adapter: str) -> Fleet | None:
        return next((fleet for fleet in self.fleets if fleet.info is not None and adapter in fleet.info.adapters), None)

    def _name_of(self, model: str, num_prompt_chars: int, tag: str) -> str:
        if not model:
            return next(iter(self._models))
        for rule in self._rules:
            short_enough = not rule.max_prompt_chars or num_prompt_chars <= rule.max_prompt_chars
            if rule.name == model and short_enough and rule.tag in ("", tag):
                return rule.model
        return self._aliases.get(model, model)

    async def faults(self) -> dict[str, str]:
        """Model -> the reason why it cannot be served now; empty for a model that can."""
        fleets = self.fleets
        found = dict(zip(map(id, fleets), await asyncio.gather(*(fleet.fault() for fleet in fleets)), strict=True))
        if not self._models:
            name = fleets[0].info.name if fleets[0].info is not None else "model"
            return {name: found[id(fleets[0])]}
        return {name: found[id(fleet)] for name, fleet in self._models.items()}
