"""Functions of an operator's own code that an option names, e.g. a guardrail or a routing policy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from core.errors import ConfigError


def load_function(option: str, name: str) -> Callable[..., Any]:
    """The function that "module:function" names. Raises `ConfigError`, which begins with `option`.

    The module must be importable: installed, or in a folder of PYTHONPATH.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: cannot import {module_name}: {fault} (see PYTHONPATH)") from error
    found: Any = getattr(module, function_name, None)
    if not callable(found):
        raise ConfigError(f"{option}: {module_name} has no function {function_name}")
    return found  # type: ignore[no-any-return]
