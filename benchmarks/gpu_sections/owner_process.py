"""A process that owns a pool, and the side of its reader. Commands and answers are JSON, one a line.

    python -m benchmarks.gpu_sections.owner_process prefill '{...}'    a runner; options of EngineConfig
    python -m benchmarks.gpu_sections.owner_process pool '{"num_blocks": ...}'    random bytes, and transports

Between commands, the owner polls its transport. A pool on a device is exported, and the reader maps it. In a rehearsal
the pool of a runner is in host memory, and a file takes the place of the mapping.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child_process import ChildProcess
from benchmarks.gpu_sections.harness import ROOT
from benchmarks.gpu_sections.pool_end import PoolOwner, copy_and_wait
from kv_transfer.device.device_memory import Copy


class Owner(ChildProcess):
    def __init__(self, kind: str, rehearse: bool, options: dict[str, Any]) -> None:
        arguments = [kind, json.dumps(options | {"rehearse": rehearse})]
        command = [sys.executable, "-m", "benchmarks.gpu_sections.owner_process", *arguments]
        super().__init__(f"owner of a {kind}", command, {"PYTHONPATH": str(ROOT)}, ROOT)


def take_blocks(runner: Any, offered: dict[str, Any], targets: Sequence[int]) -> None:
    """Copy the offered blocks into these blocks of the runner's pool."""
    size, pairs = runner.layout.block_bytes, list(zip(offered["blocks"], targets, strict=True))
    if not offered["handle"]:
        memory, content = runner.pool_memory(), Path(offered["file"]).read_bytes()
        for index, (_, target) in enumerate(pairs):
            memory[target * size : (target + 1) * size] = content[index * size : (index + 1) * size]
        return
    memory = runner.device_memory()
    address = memory.map(base64.b64decode(offered["handle"]))
    copies = [Copy(address + source * size, runner.pool_address() + target * size, size) for source, target in pairs]
    copy_and_wait(memory, copies)
    memory.unmap(address)


class PrefillOwner:
    """Computes prompts. Each public method is a command."""

    def __init__(self, rehearse: bool, **options: Any) -> None:
        import torch

        from benchmarks.gpu_sections.driver import RunnerDriver, build
        from benchmarks.gpu_sections.section import Section
        from engine.runner import StepLimits

        torch.manual_seed(0)
        limits = StepLimits(max_running=8, max_batched_tokens=128)
        self._runner = build(Section(60.0, rehearse, sys.stderr), limits, **options)
        self._driver = RunnerDriver(self._runner, limits)
        self._folder = tempfile.TemporaryDirectory()
        self._memory: Any = self._runner.device_memory()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The sequence stays alive, so its blocks do."""
        from benchmarks.gpu_sections.driver import request

        sequence = self._driver.add(request("offered", prompt, max_tokens=64))
        (token,) = self._driver.run(num_steps=1)["offered"]
        blocks = sequence.block_table[: self._runner.layout.num_blocks_for(len(prompt))]
        return {"token": token, "blocks": blocks} | self._export(blocks)

    def _export(self, blocks: Sequence[int]) -> dict[str, str]:
        if self._memory is not None:
            return {"handle": base64.b64encode(self._memory.export()).decode(), "file": ""}
        size, content = self._runner.layout.block_bytes, self._runner.pool_memory()
        assert content is not None
        path = Path(self._folder.name) / "blocks"
        path.write_bytes(b"".join(bytes(content[block * size : (block + 1) * size]) for block in blocks))
        return {"handle": "", "file": str(path)}


OWNERS: dict[str, Any] = {"prefill": PrefillOwner, "pool": PoolOwner}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    owner = OWNERS[sys.argv[1]](**json.loads(sys.argv[2]))
    idle = getattr(owner, "idle", None)
    while True:
        while idle is not None and not select.select([sys.stdin], [], [], 0)[0]:
            idle()
        line = sys.stdin.readline()  # one command at a time, so no second one waits in the buffer
        if not line:
            return
        command = json.loads(line)
        print(json.dumps(getattr(owner, command.pop("do"))(**command)), file=answers)


if __name__ == "__main__":
    main()
