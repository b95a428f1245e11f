"""The commands of docs/runbook.md that ask a router, against one: none is refused, each says something."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from typer.testing import CliRunner

from cli.main import app
from tests.support.commands_of_docs import commands_of
from tests.support.deployment import deploy, tiny_config

RUNBOOK = Path(__file__).resolve().parents[2] / "docs/runbook.md"
ASKING = ("status", "trace", "explain")  # `scale` and `events` need a supervisor, `doctor` asks the machine


async def test_the_commands_of_the_runbook_answer() -> None:
    commands = [command for command in dict.fromkeys(commands_of(RUNBOOK)) if command.split()[1] in ASKING]
    assert len(commands) >= 5
    async with deploy(tiny_config()) as deployment:
        answer = await deployment.generate(text="Hello", max_tokens=8)
        for command in commands:
            _, *arguments = shlex.split(command.replace("REQUEST_ID", answer.finished.request_id))
            arguments += ["--router", deployment.router_address]
            result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            assert result.exit_code == 0, (command, result.output)
            assert result.output.strip(), command
