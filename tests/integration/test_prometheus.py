"""A real Prometheus scrapes a deployment: every query of every dashboard and rule gives data. `tandem advise` asks one.

The programs are Debian's, from tools/install.sh.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from cli.commands import prometheus_load
from cli.commands.prometheus_load import ASKED, HITS, OUTPUTS, PROMPTS, read_prometheus
from core.config import TandemConfig, TelemetryConfig
from core.errors import ConfigError, QueueFull
from core.request import MAX_CHOICES
from prefill_worker.machine import PrefillArrived
from simulator.advice.goodput import Load
from tests.support.deployment import Deployment, deploy, machine_of, make_request, tiny_config
from tests.support.observability import FOLDER, RULES, compared, read_yaml, rules, targets
from tests.support.ports import kept_port
from tests.support.steps import Gate
from tests.support.waiting import until
from worker.service import WorkerService

DEADLINE_S = 60.0
INTERVAL = "200ms"
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "promtool"))), reason="prometheus is not installed: make tools"
)


def run_tool(*command: str) -> str:
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_the_files() -> None:
    run_tool("promtool", "check", "config", "prometheus.yml")
    run_tool("promtool", "check", "rules", *(str(path) for path in RULES))


def test_each_alert_fires_and_is_silent() -> None:
    run_tool("promtool", "test", "rules", "alerts.test.yml")
    firing, silent = read_yaml(FOLDER / "alerts.test.yml")["tests"]
    fired = json.dumps(firing["promql_expr_test"])
    for rule in rules():
        assert "alert" not in rule or f'alertname=\\"{rule["alert"]}\\"' in fired
    assert silent["promql_expr_test"] == [{"expr": "ALERTS", "eval_time": "25m", "exp_samples": []}]


@pytest.mark.skipif(shutil.which("amtool") is None, reason="prometheus is not installed: make tools")
def test_alertmanager_accepts_its_file() -> None:
    assert "SUCCESS" in run_tool("amtool", "check-config", "alertmanager.yml")


def test_compose_mounts_the_files_that_are_there() -> None:
    services = read_yaml(FOLDER / "compose.yml")["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    local = [path for path in mounted if path.startswith(".")]
    assert len(local) == 5
    assert all((FOLDER / path).exists() for path in local)
    if shutil.which("docker-compose"):
        run_tool("docker-compose", "-f", "compose.yml", "config", "-q")


@contextlib.asynccontextmanager
async def prometheus(folder: Path, metrics_port: int) -> AsyncIterator[tuple[str, Any]]:
    """A server with the config and rules of deploy/, which scrapes `metrics_port`. Gives its URL and a function to ask
    its API."""
    config = read_yaml(FOLDER / "prometheus.yml")
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    config["rule_files"] = [str(path) for path in RULES]
    del config["alerting"]
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{metrics_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with kept_port("127.0.0.1") as port, (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip

        url = f"http://127.0.0.1:{port}"

        def ask(path: str, **parameters: str) -> Any:
            query = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            with urllib.request.urlopen(query, timeout=DEADLINE_S) as answer:
                return json.load(answer)["data"]

        def is_up() -> bool:
            assert server.returncode is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                return bool(ask("query", query="up == 1")["result"])
            return False

        try:
            await until(is_up, "Prometheus has scraped the router", DEADLINE_S)
            yield url, ask
        finally:
            server.terminate()
            await asyncio.wait_for(server.wait(), DEADLINE_S)


def small_config(metrics_port: int) -> TandemConfig:
    """A model that counts FLOP, and a router that soon has a full queue."""
    telemetry = TelemetryConfig(metrics_port=metrics_port)
    config = tiny_config("random:llama-tiny", telemetry=telemetry, max_queued=1, max_in_flight_per_worker=2)
    return replace(
        config,
        engine=replace(config.engine, peak_tflops=1.0, peak_gb_per_s=10.0),
        worker=replace(config.worker, idle_report_interval_s=0.05),
    )


def refuse_next_prompt(worker: WorkerService, patch: pytest.MonkeyPatch) -> None:
    machine = machine_of(worker)
    handle = machine.handle

    def refuse(event: Any, now: float) -> Any:
        if isinstance(event, PrefillArrived):
            patch.undo()
            raise QueueFull("this worker refuses one prompt")
        return handle(event, now)

    patch.setattr(machine, "handle", refuse)


async def send_requests_of_all_kinds(deployment: Deployment) -> None:
    prompt = "a prompt of several blocks, so that some of them move to the decode worker"
    with pytest.MonkeyPatch.context() as patch:
        refuse_next_prompt(deployment.prefill[0], patch)
        answer = await deployment.generate(text=prompt, max_tokens=6)
    assert answer.finished.attempts == 2
    await deployment.generate(text=prompt, max_tokens=6, user="somebody", temperature=1.0)
    with pytest.raises(grpc.aio.AioRpcError, match="temperature"):
        await deployment.generate(text=prompt, temperature=-1)
    gate = Gate(deployment.decode[0])
    gate.close()  # so that the queue stays full
    many = asyncio.create_task(deployment.generate_all(make_request(text=prompt, max_tokens=8, n=MAX_CHOICES)))
    shell = deployment.router._shell
    await until(lambda: shell.view.num_queued, "choices wait in the router", DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError, match="max_queued"):
        await deployment.generate(text="finds the queue full")
    gate.open()
    assert len(await many) == MAX_CHOICES


async def test_every_query_of_every_panel_and_rule_gives_data(tmp_path: Path, metrics_port: int) -> None:
    queries = {
        f"{target.board}: {target.panel} ({target.legend})": target.expression.replace("$__rate_interval", "1m")
        for target in targets()
    }
    for rule in rules():
        is_alert = "alert" in rule
        queries[rule["alert" if is_alert else "record"]] = compared(rule) if is_alert else rule["expr"]
    async with deploy(small_config(metrics_port)) as deployment:
        await send_requests_of_all_kinds(deployment)
        async with prometheus(tmp_path, metrics_port) as (_, ask):
            await send_requests_of_all_kinds(deployment)  # now every counter has grown since the first scrape
            missing = dict(queries)
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            while missing and asyncio.get_running_loop().time() < deadline:
                missing = await asyncio.to_thread(without_data, ask, missing)
            assert not missing, "\n".join(["without data:", *missing])
            evaluated = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
            assert len(evaluated) == len(list(rules()))
            assert [rule["name"] for rule in evaluated if rule["health"] != "ok"] == []


def without_data(ask: Any, queries: dict[str, str]) -> dict[str, str]:
    """The queries without a number in their result. A query with an error raises."""
    return {name: query for name, query in queries.items() if not has_number(ask("query", query=query)["result"])}


def has_number(result: list[dict[str, Any]]) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in result)


async def test_advise_reads_the_load_of_a_vllm_from_its_prometheus(
    tmp_path: Path, metrics_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM stands here as the series that it exports (vllm/v1/metrics/loggers.py, 0.32)."""
    monkeypatch.setattr(prometheus_load, "SETTLED_S", 2.0)  # ten scrapes, with time to store them
    page = CollectorRegistry()
    of_models = Histogram(name_of(PROMPTS), "", ("model_name",), registry=page, buckets=(1000, 2000, 5000))
    prompts, other_prompts = of_models.labels("a"), of_models.labels("b")
    outputs = Histogram(name_of(OUTPUTS), "", ("model_name",), registry=page, buckets=(10, 20, 50, 100)).labels("a")
    hits, asked = (Counter(name_of(metric), "", ("model_name",), registry=page).labels("a") for metric in (HITS, ASKED))
    server, thread = start_http_server(metrics_port, "127.0.0.1", page)
    try:
        async with prometheus(tmp_path, metrics_port) as (url, _):
            for number in range(400):
                prompts.observe(1200 + number)
                outputs.observe(30)
                asked.inc(1200 + number)
            hits.inc(140_000)  # a quarter of 559,800
            load = await until_given(lambda: read_prometheus(url, "", 60.0, 500))
            other_prompts.observe(1)
            await until_refused(
                lambda: read_prometheus(url, "", 60.0, 500), "there are requests of 2 models, such as a, b"
            )
            assert len((await asyncio.to_thread(read_prometheus, url, 'model_name="a"', 60.0, 500)).jobs) == 500
            with pytest.raises(ConfigError, match=r'prompt_tokens\{model_name="b"\} has \d requests in the last 60 s'):
                await asyncio.to_thread(read_prometheus, url, 'model_name="b"', 60.0, 500)
            with pytest.raises(ConfigError, match="answers with status 400: invalid parameter"):
                await asyncio.to_thread(read_prometheus, url, "model_name=", 60.0, 500)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert len(load.jobs) == 500
    assert load.mean.num_prompt_tokens == pytest.approx(1400, abs=2)
    assert load.mean.num_output_tokens == pytest.approx(30, abs=1)
    assert load.mean.num_cached_tokens == pytest.approx(350, abs=2)


def name_of(metric: str) -> str:
    return metric.replace("[:_]", ":").removesuffix("_total")


async def until_refused(read: Callable[[], Load], message: str) -> None:
    """Once the requests have been scraped."""
    refused = ""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while message not in refused:
        assert asyncio.get_running_loop().time() < deadline, refused
        try:
            await asyncio.to_thread(read)
        except ConfigError as error:
            refused = str(error)
        await asyncio.sleep(0.1)


async def until_given(read: Callable[[], Load]) -> Load:
    """Once the requests have been scraped."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        try:
            return await asyncio.to_thread(read)
        except ConfigError:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
