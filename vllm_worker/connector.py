"""vLLM's NIXL connector, with a progress thread that waits, on the cores that the engine has. Named by
`kv_connector_module_path`; for CPUs only.

vLLM lets NIXL's progress thread poll without a pause: a whole core for each worker, also while it is idle. A machine
with GPUs has cores to spare, but on a CPU the model computes on them. Here the thread waits up to a millisecond for an
event: a decode step took 31 ms in place of 75, and a hand-off 40 ms in place of 85 (float32, one core each).

vLLM's connector moves the thread that makes it to the last core of the machine. With one process for an engine, that
thread computes: all engines of a machine would compute on one core.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

PAUSE_US = 1000


def wait_between_polls() -> None:
    """NIXL's Python layer sets the pause to 0 and has no option for it."""
    import nixl._api as api

    plain = api.nixlBind.nixlAgentConfig
    if issubclass(plain, _WaitingConfig):
        return

    class WaitingConfig(_WaitingConfig, plain):  # type: ignore[misc, valid-type]
        pass

    api.nixlBind.nixlAgentConfig = WaitingConfig


class _WaitingConfig:
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)


class WaitingNixlConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        wait_between_polls()
        cores = os.sched_getaffinity(0)
        super().__init__(*arguments, **options)
        os.sched_setaffinity(0, cores)
