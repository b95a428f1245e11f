"""Each call is validated in the turn of its caller's tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.config import ApiKeyConfig, RouterConfig
from core.errors import QueueFull, Unauthenticated
from router.serving.call_writer import SinkWriter
from router.serving.inference_servicer import InferenceServicer
from router.serving.tenant_admission import TenantAdmission
from runtime.rpc.api_keys import ApiKeys, hash_of
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import inference_pb2

KEYS = ApiKeys((ApiKeyConfig("bob", hash_of("bob's key"), tenant="builders"),))


class FullPool:
    """Refuses every call, and remembers whose it was."""

    def __init__(self) -> None:
        self.owners = list[object]()

    async def run(self, owner: object, *_: object) -> None:
        self.owners.append(owner)
        raise QueueFull("full")


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_each_method_that_validates_does_so_for_the_tenant_of_the_key(method: str) -> None:
    pool, shell = FullPool(), SimpleNamespace(
        config=RouterConfig(), now=lambda: 0.0, new_request_id=lambda: "r", refuse=lambda *_: None,
        count_refusal=lambda _: None, view=SimpleNamespace(decode_limits=()),
    )  # fmt: skip
    tokenizer: Any = SimpleNamespace(info=SimpleNamespace(name="m"), decode=None)
    parts: Any = (tokenizer, shell, pool, TenantAdmission(KEYS), SimpleNamespace(is_quick=lambda _: True))
    servicer = InferenceServicer(*parts)

    async def call(*metadata: tuple[str, str]) -> None:
        match method:
            case "Generate":
                sink: Any = None
                await servicer.serve(inference_pb2.GenerateRequest(user="alice"), SinkWriter(sink, metadata, 1.0))
            case "Tokenize":
                await servicer.Tokenize(inference_pb2.TokenizeRequest(), LocalContext(metadata))
            case "Detokenize":
                await servicer.Detokenize(inference_pb2.DetokenizeRequest(), LocalContext(metadata))

    with pytest.raises(QueueFull):
        await call(("authorization", "Bearer bob's key"))
    assert pool.owners == [("builders", "")]
    with pytest.raises(Unauthenticated):
        await call()
    assert len(pool.owners) == 1
