"""`VerifiedConnector` in real vLLM: two `vllm serve`, a client in the proxy's place, and no process of Tandem.

Producer and reader verify every second request, so the same pair shows what happens without digests.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.vllm_fleet import require_vllm
from tests.support.vllm_server import MODEL, VllmServer, started

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
MAX_TOKENS = 16
TIMEOUT_S = 120.0


@dataclass
class Server(VllmServer):
    def ask(self, prompt: list[int], max_tokens: int = MAX_TOKENS, **options: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
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


def server_of(directory: Path, role: str, core: int) -> Server:
    options = {"every": 2, "inner": "FlippingNixlConnector", "inner_module_path": "tests.support.flipping_connector"}
    transfer = {
        "kv_connector": "VerifiedConnector",
        "kv_connector_module_path": "verified_kv.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"verified_kv": options, "num_threads": 1},
    }
    return Server(directory / f"{role}.log", core, transfer, environment={"FLIP_WHILE": str(directory / "flip")})


@pytest.mark.timeout(900)  # two servers start, perhaps on shared cores
def test_a_flipped_bit_costs_a_recomputation_and_without_digests_wrong_tokens(tmp_path: Path) -> None:
    require_vllm()
    cores = sorted(os.sched_getaffinity(0))
    producer = server_of(tmp_path, "kv_producer", cores[0])
    reader = server_of(tmp_path, "kv_consumer", cores[-1])
    with started(producer, reader):
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
