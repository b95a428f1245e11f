"""The router smg as a process in front of workers, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save_file

from tests.support.ports import kept_port
from tests.support.tiny_model_files import CONFIG, write_directory
from tests.support.waiting import until

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
START_TIMEOUT_S = 20.0


def smg_program() -> str | None:
    """The path of smg, beside this Python or in PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("smg")
    return str(beside) if beside.exists() else shutil.which("smg")


def write_model(path: Path) -> str:
    """A model directory with random weights, whose chat template smg can render."""
    directory = write_directory(path)
    tokenizer = path / "tokenizer_config.json"
    changes = {"chat_template": CHAT_TEMPLATE, "bos_token": "<s>"}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | changes))
    width, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (CONFIG["vocab_size"], width), "model.norm.weight": (width,)}
    numbers = np.random.default_rng(7)
    tensors = {name: numbers.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return directory


@contextlib.asynccontextmanager
async def running_smg(prefill: str, decode: str, model_path: str, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """smg with disaggregation and the policy cache_aware. Yields a client of its HTTP port."""
    program = smg_program()
    assert program is not None
    with log.open("wb") as output, kept_port("127.0.0.1") as port, kept_port("127.0.0.1") as metrics_port:
        process = await asyncio.create_subprocess_exec(
            program, "launch", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
            "--pd-disaggregation", "--prefill", f"grpc://{prefill}", "--decode", f"grpc://{decode}",
            "--policy", "cache_aware", "--model-path", model_path,
            stdout=output, stderr=output,
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
                await until(
                    lambda: process.returncode is not None or "listening" in log.read_text(), "smg listens", 20.0
                )
                await _wait_for_models(client)
                yield client
        finally:
            if process.returncode is None:
                process.kill()  # it lingers after SIGTERM
            await process.wait()


async def _wait_for_models(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/v1/models")
                if answer.status_code == 200 and answer.json()["data"]:
                    return
            await asyncio.sleep(0.1)
