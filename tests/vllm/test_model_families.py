"""Families that Tandem's own engine does not have, in two pools: experts, and latent attention (MLA)."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem_client import AsyncClient
from tests.support.tiny_model_files import BOS_ID, DIRECTORY, EOS_ID, TOKENS
from tests.support.transformers_models import greedy_tokens, random_model
from tests.support.vllm_fleet import require_vllm, routed, started_workers

SIZES: dict[str, object] = {
    "vocab_size": len(TOKENS), "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "max_position_embeddings": 1024,
    "num_attention_heads": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "initializer_range": 0.1,
}  # fmt: skip
QWEN3_MOE = SIZES | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 8,
}  # fmt: skip
# Of vLLM's CPU build: a head has 512 + 64 values, and experts are bfloat16.
DEEPSEEK_V3 = SIZES | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
REFUSED = "vLLM's own connector moves the KV blocks, not Tandem's: a KV cache of MLAAttentionSpec"
MAX_TOKENS = 16
TIMEOUT_S = 180.0


def write_model(directory: Path, prefix: str, sizes: dict[str, object], **config: object) -> Any:
    """A random model with a tokenizer. `config`: what transformers does not write into config.json."""
    model = random_model(prefix, sizes, seed=5)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(json.dumps(DIRECTORY[name]))
    written = directory / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | config))
    return model


def prompts() -> list[list[int]]:
    draws = random.Random(1)
    return [[draws.randrange(BOS_ID) for _ in range(length)] for length in (40, 400, 900)]


@contextlib.asynccontextmanager
async def two_pools(model: Path, dtype: str, connector: str = "nixl") -> AsyncIterator[AsyncClient]:
    """A pair that serves this model. Afterwards every hand-off was verified."""
    engine = {"model": str(model), "dtype": dtype}
    changes = {"engine": engine, "vllm": {"connector": connector}}
    with started_workers(model.parent, ("prefill", 0), ("decode", 0), changes=changes) as workers:
        async with routed(list(workers.values()), engine, local_prefill="never") as (client, _):
            yield client
        log = workers["decode-0"].log.read_text()
        assert "KV blocks are not verified" not in log
        assert "vLLM recomputes" not in log
        assert (REFUSED if connector == "tandem" else "VerifiedConnector") in log


@pytest.fixture(autouse=True)
def with_vllm() -> None:
    require_vllm()


async def test_a_model_of_experts_has_the_tokens_of_transformers(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "model", "Qwen3Moe", QWEN3_MOE)
    async with two_pools(tmp_path / "model", "float32") as client:
        for prompt in prompts():
            answer = await client.complete(prompt, TIMEOUT_S, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            assert answer.path == "disaggregated"
            assert list(answer.token_ids) == greedy_tokens(reference, prompt, MAX_TOKENS)


async def test_latent_attention_gives_the_same_tokens_twice_by_the_connector_that_can_move_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "DeepseekV3", DEEPSEEK_V3, topk_method="noaux_tc")
    async with two_pools(tmp_path / "model", "bfloat16", connector="tandem") as client:
        for prompt in prompts():
            answers = [
                await client.complete(prompt, TIMEOUT_S, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
                for _ in range(2)
            ]
            assert [answer.path for answer in answers] == ["disaggregated"] * 2
            assert answers[0].token_ids == answers[1].token_ids
