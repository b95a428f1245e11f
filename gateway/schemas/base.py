"""The base of every schema, and the bounds of their lists."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """Unknown fields are kept apart, for `gateway.fields.check_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


MAX_MODEL_CHARS = 1024  # characters of the name of a model in a request; beyond: status 400
ModelName = Annotated[str, Field(max_length=MAX_MODEL_CHARS)]


def items(max_length: int, min_length: int = 0) -> Any:
    """The bounds of a list or a map. Its validation ends at the first wrong item, so it makes one error."""
    return Field(min_length=min_length, max_length=max_length, fail_fast=True)
