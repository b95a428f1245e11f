"""The gateway asks a router about a key once, and about a refused one each time."""

from __future__ import annotations

import pytest

from cli.remote_router import RemoteRouter
from core.errors import Unauthenticated
from core.service import Metadata
from tandem_client import Credentials
from tandem_client.stubs import inference_pb2


class Router(RemoteRouter):
    def __init__(self) -> None:
        super().__init__("127.0.0.1:9", Credentials())
        self.num_asked = 0

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, metadata: Metadata
    ) -> inference_pb2.DetokenizeResponse:
        self.num_asked += 1
        assert not request.token_ids
        assert all(name == "authorization" for name, _ in metadata)
        if any(value.endswith("bad") for _, value in metadata) or len(metadata) != 1:
            raise Unauthenticated("not known here")
        return inference_pb2.DetokenizeResponse()


async def test_a_key_is_asked_about_once_however_it_is_spelled() -> None:
    router = Router()
    for spelling in ("Bearer good", "bearer good", "BEARER   good", "Bearer good "):
        await router.authorize([("authorization", spelling), ("traceparent", "00")])
    assert (router.num_asked, len(router._authorized_at)) == (1, 1)


async def test_a_refused_key_opens_nothing_and_is_asked_about_again() -> None:
    router, good = Router(), ("authorization", "Bearer good")
    await router.authorize([good])
    for refused in ([("authorization", "Bearer bad")], [good, good], []):
        for _ in range(2):
            with pytest.raises(Unauthenticated):
                await router.authorize(refused)
    assert router.num_asked == 7
