"""Whether the code that an option names can be loaded here, e.g. a routing policy.

A process of its own loads the code: the supervisor would keep a module that is mended later, and a crash would end it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any

from core.config import RouterConfig, TandemConfig
from core.errors import ConfigError, shortened

LOAD_TIMEOUT_S = 25.0  # the code of an operator and its imports, below `APPLY_TIMEOUT_S`; beyond: `ConfigError`
MAX_ERROR_BYTES = 1 << 20  # that the code of an operator prints at its load; beyond: the reason is an earlier line
MAX_REASON_CHARS = 500  # characters of the reason why this code cannot be loaded; beyond: it ends with "..."


def check_code(config: TandemConfig) -> None:
    """Raises `ConfigError` if the routing policy or the guardrail cannot be made."""
    guardrail = config.gateway.guardrail if config.gateway.port else ""
    named = {"[router] policy": config.router.policy, "[gateway] guardrail": guardrail}
    named = {option: name for option, name in named.items() if name}
    if not named:
        return
    options = " and ".join(named)
    command = [sys.executable, "-P", "-m", "cli.diagnosis.named_code"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    content = pickle.dumps((config.router, guardrail))
    with tempfile.TemporaryFile() as errors:  # no pipe, which a process that this code leaves would keep open
        outputs: Any = {"stdout": subprocess.DEVNULL, "stderr": errors}
        try:
            loaded = subprocess.run(command, input=content, timeout=LOAD_TIMEOUT_S, env=env, **outputs)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{options}: not loaded within {LOAD_TIMEOUT_S:g} s") from None
        errors.seek(0)
        lines = errors.read(MAX_ERROR_BYTES).decode(errors="replace").split("\n")
    if loaded.returncode:
        last = next((line for line in reversed(lines) if line.strip()), f"ended with status {loaded.returncode}")
        raise ConfigError(shortened(last if last.startswith("[") else f"{options}: {last}", MAX_REASON_CHARS))


def _load(router: RouterConfig, guardrail: str) -> None:
    from cli.compose import load_policy
    from gateway.guardrails import load_guardrail

    load_policy(router)
    load_guardrail(guardrail)


if __name__ == "__main__":
    try:
        _load(*pickle.load(sys.stdin.buffer))
    except ConfigError as error:
        sys.exit(str(error))
