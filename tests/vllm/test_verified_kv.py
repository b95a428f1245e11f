"""`VerifiedConnector` in real vLLM: two `vllm serve`, a client in the proxy's place, and no process of Tandem.

Producer and reader verify every second request, so the same pair shows what happens without digests.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.processes import START_TIMEOUT_S
from benchmarks.service import ROOT
from cli.diagnosis.vllm_environment import default_model_dir, python_of, variables
from core.config import VllmConfig
from tests.support.vllm_fleet import require_vllm

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
MAX_TOKENS = 16
TIMEOUT_S = 120.0


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.5)
        raise AssertionError(f"{self.url} did not start")

    def ask(self, prompt: list[int], max_tokens: int = MAX_TOKENS, **options: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        answer = httpx.post(
            f"{self.url}/v1/completions", json=body | {"return_token_ids": True} | options, timeout=TIMEOUT_S
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def tokens(self, prompt: list[int], **options: Any) -> list[int]:
        return list(self.ask(prompt, **options)["choices"][0]["token_ids"])

    def counts(self) -> dict[str, int]:
        """Those of `VerifiedConnector` that are not 0, but for requests outside of the sample."""
        found = re.findall(r"^vllm:verified_kv_(\w+)_total\{.*\} (\d+)", httpx.get(f"{self.url}/metrics").text, re.M)
        return {name: int(count) for name, count in found if int(count) and name != "skipped"}


@contextlib.contextmanager
def started(directory: Path, role: str, core: int) -> Iterator[Server]:
    port, side_port = _free_port(), _free_port()
    options = {"every": 2, "inner": "FlippingNixlConnector", "inner_module_path": "tests.support.flipping_connector"}
    transfer = {
        "kv_connector": "VerifiedConnector",
        "kv_connector_module_path": "verified_kv.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"verified_kv": options, "num_threads": 1},
    }
    python = python_of(VllmConfig())
    command = [
        str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(default_model_dir()), "--served-model-name", "m",
        "--port", str(port), "--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager",
        "--distributed-executor-backend", "uni", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = os.environ | variables(python) | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as Tandem's workers: one process schedules and computes
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "FLIP_WHILE": str(directory / "flip"),
    }  # fmt: skip
    log = directory / f"{role}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


@pytest.mark.timeout(900)  # two servers start, perhaps on shared cores
def test_a_flipped_bit_costs_a_recomputation_and_without_digests_wrong_tokens(tmp_path: Path) -> None:
    require_vllm()
    cores = sorted(os.sched_getaffinity(0))
    with started(tmp_path, "kv_producer", cores[0]) as producer, started(tmp_path, "kv_consumer", cores[-1]) as reader:
        producer.wait_until_ready()
        reader.wait_until_ready()
        draws = random.Random(0)
        # Blocks of 32 tokens; the last one is partly filled.
        prompts = [[draws.randint(1000, 40_000) for _ in range(length)] for length in (70, 200, 333, 70)]
        right = [producer.tokens(prompt) for prompt in prompts]

        def hand_over(number: int) -> list[int]:
            offered = producer.ask(prompts[number], max_tokens=1, kv_transfer_params=OFFER)["kv_transfer_params"]
            assert ("secret" in offered["verified_kv"]) is bool(number % 2)
            return reader.tokens(prompts[number], kv_transfer_params=offered)

        # The pair shakes hands. On a busy machine vLLM gives up at times, and recomputes.
        assert hand_over(0) == right[0]
        assert hand_over(1) == right[1]
        assert reader.counts() == {"verified": 1}

        (tmp_path / "flip").touch()
        assert hand_over(2) != right[2], "the fault changed no token"
        assert hand_over(3) == right[3]
        assert reader.counts() == {"verified": 1, "wrong": 1, "failed_blocks": 1}
        assert reader.tokens(prompts[3]) == right[3], "the wrong block is in the prefix cache"
        assert producer.counts() == {"offered": 2}
