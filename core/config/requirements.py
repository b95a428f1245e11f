"""What an option must be. Each function raises `ConfigError`, which names the option."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

from core.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def require_given(config: object, *names: str) -> None:
    for name in names:
        require(bool(getattr(config, name).strip()), f"{name} must not be empty")


def require_choice(config: object, name: str, *choices: str) -> None:
    value = getattr(config, name)
    require(value in choices, f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}: {value}")


def require_function(config: object, name: str) -> None:
    value = getattr(config, name)
    require(
        not value or re.fullmatch(r"[\w.]+:\w+", value) is not None, f"{name} must be module:function, is {value!r}"
    )


def require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(0 < value < math.inf, f"{name} must be more than 0 and finite, is {value}")


def require_finite_floats(config: Any) -> None:
    """Refuses NaN, infinity and negative values of float options: an infinite duration is an unbounded wait."""
    for option in fields(config):
        value = getattr(config, option.name)
        if isinstance(option.default, float):
            require(0 <= value < math.inf, f"{option.name} must be 0 or more and finite, is {value}")
