"""smg, a router of another project, in front of one prefill and one decode worker: real processes, gRPC and UCX."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the extra smg: pip install smg-grpc-proto")

from tests.support.deployment import deploy, machine_of, tiny_config, transfers
from tests.support.smg import running_smg, smg_program, write_model
from tests.support.vllm_calls import with_vllm_engine
from text.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(smg_program() is None, reason="smg is not installed: pip install smg")

CUT_CHARACTER = "\ufffd"  # smg keeps back the bytes of a character that is not complete at the end
TEXT = "in an instant a sane man can win a ban in an inn, and in vain an ant can span a pan"


async def test_smg_drives_both_pools_and_follows_their_caches(tmp_path: Path) -> None:
    model = write_model(tmp_path / "M")
    log = tmp_path / "smg.log"
    config = with_vllm_engine(tiny_config(model, transport="nixl"))
    async with deploy(config) as deployment:
        prefill, decode = deployment.prefill[0], deployment.decode[0]
        addresses = [deployment.endpoints[id(worker)].address for worker in (prefill, decode)]
        async with running_smg(*addresses, model, log) as smg:
            served = (await smg.get("/v1/models")).json()["data"][0]["id"]
            request = {
                "model": served,
                "messages": [{"role": "user", "content": TEXT}],
                "max_tokens": 12,
                "temperature": 0,
                "logprobs": True,
                "ignore_eos": True,
            }
            answers = []
            for _ in range(2):
                response = await smg.post("/v1/chat/completions", json=request)
                assert response.status_code == 200, f"{response.text}\n{log.read_text()[-4000:]}"
                answers.append(response.json())
            moved = transfers(decode).counters.num_bytes_read
            num_prefilled = machine_of(decode).load().num_prefilled_tokens
        prompt = load_tokenizer(model).encode_chat([{"role": "user", "content": TEXT}])
        alone = await deployment.generate(token_ids=prompt, max_tokens=12, logprobs=0)
        text = load_tokenizer(model).decode(alone.token_ids)
        logprobs = [entry.logprob for chunk in alone.chunks for entry in chunk.logprobs]
        for answer in answers:
            choice = answer["choices"][0]
            assert choice["message"]["content"].rstrip(CUT_CHARACTER) == text.rstrip(CUT_CHARACTER)
            found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert len(found) >= 9
            assert found == pytest.approx(logprobs[: len(found)], abs=1e-5)
            assert answer["usage"]["completion_tokens"] == 12
            assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert moved > 0, "no KV moved"
        assert num_prefilled == 0, "the decode worker computed a prompt"
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        await deployment.settle()
