"""`tandem trace` prints the same spans from the router's ring and from the trace file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.commands.trace import show_from_router
from cli.main import app
from core.config import TelemetryConfig
from core.errors import ConfigError
from tandem_client import AsyncClient, CallFailed
from tests.support.deployment import Answer, deploy, tiny_config

STAGES = (
    "tandem.request", "  router.queue", "  router.attempt", "    prefill_worker.prefill", "    decode_worker.transfer",
)  # fmt: skip


async def from_router(address: str, name: str | None, verbose: bool = False) -> str:
    console = Console(record=True, width=120, force_terminal=False)
    with console.capture() as capture:
        await show_from_router(AsyncClient(address), name, 20, verbose, console)
    return capture.get()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path, str, str, str]:
    """One request: its answer, the trace file, and what the command prints from the ring."""
    file = tmp_path_factory.mktemp("traces") / "spans.jsonl"

    async def serve() -> tuple[Answer, Path, str, str, str]:
        async with deploy(tiny_config(telemetry=TelemetryConfig(trace_file=str(file)))) as deployment:
            answer = await deployment.generate(text="hello over there", max_tokens=4)
            address, name = deployment.router_address, answer.finished.request_id
            shown = await from_router(address, name), await from_router(address, name, verbose=True)
            with pytest.raises(CallFailed, match="keeps no request 'nothing'"):
                await from_router(address, "nothing")
            return answer, file, *shown, await from_router(address, None)

    return asyncio.run(serve())


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_request_of_the_ring_is_drawn_with_its_candidates(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, _, drawn, verbose, _ = served
    lines = drawn.splitlines()
    assert answer.finished.trace_id in lines[0]
    assert all(any(line.startswith(stage) for line in lines) for stage in STAGES)
    assert all(line.rstrip().endswith("ms") for line in lines if line.startswith("  router."))
    assert any(line.lstrip().startswith("*") for line in lines), "the chosen candidate"
    assert "tandem.transfer.gb_per_s=" in verbose
    assert "tandem.transfer.gb_per_s=" not in drawn


def test_the_file_gives_the_same_spans(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, file, drawn, _, _ = served
    from_file = [run("--file", str(file), name) for name in (answer.finished.request_id, answer.finished.trace_id)]
    assert from_file[0] == from_file[1]
    names = [line.split()[0] for line in from_file[0].splitlines()[1:]]
    assert names == [line.split()[0] for line in drawn.splitlines()[1 : len(names) + 1]]


def test_without_an_id_the_last_requests_are_listed(served: tuple[Answer, Path, str, str, str]) -> None:
    answer, file, _, _, listed = served
    for text in (listed, run("--file", str(file))):
        assert answer.finished.request_id in text
        assert "disaggregated" in text


def test_a_file_without_the_request_and_no_file_are_errors(
    served: tuple[Answer, Path, str, str, str], tmp_path: Path
) -> None:
    _, file, *_ = served
    with pytest.raises(ConfigError, match="has no request 'nothing'"):
        run("--file", str(file), "nothing")
    with pytest.raises(ConfigError, match=r"--file: cannot read .*: No such file or directory"):
        run("--file", str(tmp_path / "missing"))
