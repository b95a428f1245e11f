"""The fleets behind the gateway: a model name -> the client of a fleet that serves it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_client import AsyncClient, GetModelResponse


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and the client of the fleet that serves it."""

    name: str  # as clients name it; the `model` of every answer
    client: AsyncClient
    info: GetModelResponse  # info.name is the name for the router


class ModelUnknown(Exception):
    """No fleet serves the model. `names` lists the models that are served."""

    def __init__(self, model: str, names: list[str]) -> None:
        super().__init__(f"model {model!r} is not served here; served: {', '.join(names)}")
        self.names = names


class Fleets:
    """Open it with `await open()` on the event loop of the gateway."""

    def __init__(self, router: str) -> None:
        self._client = AsyncClient(router)
        self._served: ServedModel | None = None

    async def open(self) -> None:
        """Connect. Raises `tandem_client.CallFailed` if no router answers."""
        await self._client.__aenter__()
        info = await self._client.model()
        self._served = ServedModel(info.name, self._client, info)

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    def names(self) -> list[str]:
        assert self._served is not None
        return [self._served.name]

    def resolve(self, model: str, num_prompt_chars: int = 0, tag: str = "") -> ServedModel:
        """The model that `model` names. Raises `ModelUnknown`."""
        del num_prompt_chars, tag
        assert self._served is not None
        if model not in ("", self._served.name):
            raise ModelUnknown(model, self.names())
        return self._served
