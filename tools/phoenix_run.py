"""Sends requests through a gateway and two fleets of this process, and reads their traces in Phoenix: `make phoenix`.

Phoenix is installed into <cache>/tandem/phoenix (850 MB), listens on this machine alone, and ends with the program. The
program reads the spans back over Phoenix's API and checks that each request is one tree with every stage. It writes
docs/phoenix.json and the screenshot docs/images/phoenix.png (Chromium and Playwright).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import venv
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from core.config import TelemetryConfig
from gateway.fleets import Fleets
from model_files.catalogue import default_cache_dir
from tests.support.deployment import deploy, tiny_config
from tests.support.gateway import serving_gateway

VERSION = "20.26.1"
PROJECT = "tandem"
ROUTER = {"tandem.request", "router.tokenize", "router.queue", "router.attempt", "router.prefill", "router.decode",
          "router.respond", "gateway.request"}  # fmt: skip
REFUSED = {"gateway.request", "tandem.request"}
# Each request: its name, the number of prefill workers, further fields, its headers, and the spans of its trace.
REQUESTS: list[tuple[str, int, dict[str, Any], dict[str, str], set[str]]] = [
    ("disaggregated", 1, {"max_tokens": 48}, {}, ROUTER | {
        "prefill_worker.queue", "prefill_worker.prefill", "decode_worker.queue", "decode_worker.transfer",
        "decode_worker.decode"}),
    ("local", 0, {"max_tokens": 24}, {},
     ROUTER | {"decode_worker.queue", "decode_worker.prefill", "decode_worker.decode"}),
    ("too many tokens", 1, {"max_tokens": 1_000_000}, {}, REFUSED),
]  # fmt: skip
START_TIMEOUT_S, ARRIVAL_TIMEOUT_S, CALL_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 30.0, 30.0, 20.0
RECORD, SCREENSHOT = Path("docs/phoenix.json"), Path("docs/images/phoenix.png")


def install() -> Path:
    """The Python of Phoenix's own environment."""
    directory = default_cache_dir() / "phoenix"
    python, done = directory / "bin" / "python", directory / "complete"
    if not done.exists() or done.read_text() != VERSION:
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", f"arize-phoenix=={VERSION}"], check=True)
        done.write_text(VERSION)
    return python


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.asynccontextmanager
async def phoenix() -> AsyncIterator[tuple[str, int]]:
    """The URL of Phoenix and its port for spans."""
    port, grpc_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
        environment = os.environ | {
            "PHOENIX_WORKING_DIR": directory, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(grpc_port), "PHOENIX_TELEMETRY_ENABLED": "false",
            "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false", "PYTHONPATH": "",
        }  # fmt: skip
        command = (str(await asyncio.to_thread(install)), "-m", "phoenix.server.main", "serve")
        process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=directory, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient() as client:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(f"{url}/healthz")).is_success:
                            break
                    if process.returncode is not None:
                        log.seek(0)
                        raise SystemExit(f"Phoenix ended:\n{log.read()[-2000:]}")
                    await asyncio.sleep(0.2)
            yield url, grpc_port
        finally:
            process.terminate()
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()


async def send(telemetry: TelemetryConfig) -> dict[str, tuple[str, int]]:
    """Name -> trace id and HTTP status."""
    answers: dict[str, tuple[str, int]] = {}
    for num_prefill in (1, 0):
        config = replace(tiny_config("random:llama-tiny", "nixl", telemetry), telemetry=telemetry)
        async with (
            deploy(config, num_prefill=num_prefill) as deployment,
            serving_gateway(Fleets([deployment.router.calls]), telemetry=telemetry) as url,
            httpx.AsyncClient(base_url=url, timeout=CALL_TIMEOUT_S) as client,
        ):
            for name, wanted_prefill, fields, headers, _ in REQUESTS:
                if wanted_prefill == num_prefill:
                    body = {"model": "random:llama-tiny", "prompt": f"A {name} request. " * 8, **fields}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    answers[name] = answer.headers["x-tandem-trace-id"], answer.status_code
    return answers


async def read_spans(url: str, trace_ids: set[str], num_expected: int) -> list[dict[str, Any]]:
    """The spans of these traces, once all of them have arrived. Raises `TimeoutError`."""
    spans: list[dict[str, Any]] = []
    async with asyncio.timeout(ARRIVAL_TIMEOUT_S), httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as client:
        while len(spans) < num_expected:
            await asyncio.sleep(0.5)
            answer = await client.get(f"{url}/v1/projects/{PROJECT}/spans", params={"limit": 1000})
            found = answer.json()["data"] if answer.is_success else []
            spans = [span for span in found if span["context"]["trace_id"] in trace_ids]
    return spans


def check_tree(name: str, spans: list[dict[str, Any]], expected: set[str]) -> dict[str, Any]:
    names = {span["name"] for span in spans}
    assert names == expected, f"{name}: missing {expected - names}, not expected {names - expected}"
    ids = {span["context"]["span_id"] for span in spans}
    roots = [span for span in spans if span.get("parent_id") not in ids]
    assert [root["name"] for root in roots] == ["gateway.request"], f"{name}: the roots are {roots}"
    return {
        "trace_id": roots[0]["context"]["trace_id"], "spans": sorted(names), "status": roots[0]["status_code"],
    }  # fmt: skip


async def take_screenshot(url: str, trace_id: str) -> None:
    from playwright.async_api import async_playwright

    async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as client:
        project = (await client.get(f"{url}/v1/projects/{PROJECT}")).json()["data"]["id"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.goto(f"{url}/projects/{project}/traces/{trace_id}")
        await page.get_by_text("decode_worker.transfer").first.wait_for(timeout=30_000)
        SCREENSHOT.parent.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOT)
        await browser.close()


async def run() -> dict[str, Any]:
    """The record. Raises `AssertionError` for a trace that is not one tree with every stage."""
    async with phoenix() as (url, port):
        telemetry = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}", service_namespace=PROJECT)
        answers = await send(telemetry)
        num_expected = sum(len(expected) for *_, expected in REQUESTS)
        spans = await read_spans(url, {trace_id for trace_id, _ in answers.values()}, num_expected)
        record: dict[str, Any] = {"phoenix": VERSION, "requests": {}}
        for name, _, _, _, expected in REQUESTS:
            trace_id, status = answers[name]
            tree = check_tree(name, [s for s in spans if s["context"]["trace_id"] == trace_id], expected)
            record["requests"][name] = {"http_status": status, **tree}
            print(f"{name}: HTTP {status}, {len(tree['spans'])} spans in one tree")
        await take_screenshot(url, answers["disaggregated"][0])
    return record


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    RECORD.write_text(json.dumps(asyncio.run(run()), indent=2) + "\n")
    print(f"wrote {RECORD} and {SCREENSHOT}")
