"""The base of every schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """Unknown fields are kept apart, for `gateway.fields.check_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
