"""A proxy before two pools of `vllm serve`, with the calls and the error handling of vLLM's example.

    client --body--> proxy --body, max_tokens 1, do_remote_decode--> prefill engine, whose answer has kv_transfer_params
                       '---body, kv_transfer_params----------------> decode engine, whose bytes go to the client

As in toy_proxy_server.py of vLLM 0.32: what the decode engine answers has status 200 and is no event stream by its
type, an error of the prefill engine is status 500, and one of the decode engine cuts the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gateway.server import _Uvicorn

REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
OFFER = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(REMOTE)
ROUTES = ("/v1/completions", "/v1/chat/completions")


class _Proxy:
    def __init__(self, client: httpx.AsyncClient, prefill: str, decode: str) -> None:
        self._client, self._prefill, self._decode = client, prefill, decode

    async def answer(self, request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        headers = {"x-request-id": str(uuid.uuid4())}
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": OFFER}
        offered = await self._client.post(self._prefill + request.url.path, json=first, headers=headers)
        offered.raise_for_status()
        if parameters := offered.json().get("kv_transfer_params"):
            body["kv_transfer_params"] = parameters
        return StreamingResponse(self._decoded(request.url.path, body, headers), media_type="application/json")

    async def _decoded(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        async with self._client.stream("POST", self._decode + path, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                yield piece


@contextlib.asynccontextmanager
async def proxy(prefill: str, decode: str) -> AsyncIterator[str]:
    """The URL of the proxy before a prefill and a decode engine of these URLs."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        app = Starlette(
            routes=[Route(path, _Proxy(client, prefill, decode).answer, methods=["POST"]) for path in ROUTES]
        )
        server = _Uvicorn(uvicorn.Config(app, port=0, log_level="critical"))
        serving = asyncio.create_task(server.serve())
        try:
            await server.has_started.wait()
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.force_exit = server.should_exit = True
            await serving
