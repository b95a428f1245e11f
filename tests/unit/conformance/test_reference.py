"""A decode worker of the stack as the reference: what it has cached of the stack's own requests is not its answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from conformance import behaviour_probes, stack
from conformance.check import CheckPlan, check
from conformance.findings import Finding, Outcome
from conformance.http_exchange import Call, Endpoint, Reply
from conformance.token_probes import ALONE
from tests.unit.conformance.test_hostile_stack import HERE, right_message, whole

CONTEXT = 2048
PROXY = Endpoint("127.0.0.1", 8, tls=False)


class Pair:
    """A proxy whose hand-offs give wrong KV, and its decode worker, which caches by prompt and by `cache_salt`."""

    def __init__(self, takes_salts: bool) -> None:
        self._wrong: set[tuple[str, str]] = set()
        self._takes_salts, self._draws = takes_salts, random.Random(0)

    async def answer(self, endpoint: Endpoint, call: Call, *_options: object) -> Reply:
        if not call.body:
            return whole(json.dumps({"data": [{"id": "m", "max_model_len": CONTEXT}]}).encode())
        fields: dict[str, Any] = json.loads(call.body)
        if "cache_salt" in fields and not self._takes_salts:
            return whole(b'{"error": {"type": "t", "message": "no such field"}}', 400)
        key = str(fields.get("cache_salt")), str(fields.get("prompt"))
        if endpoint == PROXY:
            self._wrong.add(key)
        message = right_message(fields, self._draws)
        if key in self._wrong and "prompt" in fields:
            message["choices"][0]["text"] = "b" * len(message["choices"][0]["text"])
            message["choices"][0]["logprobs"]["tokens"] = list(message["choices"][0]["text"])
        data = json.dumps(message).encode()
        return whole(b"data: " + data + b"\n\ndata: [DONE]\n\n" if fields.get("stream") else data)


@pytest.mark.parametrize(
    ("takes_salts", "outcome"),
    [(True, Outcome.FAILS), (False, Outcome.HOLDS)],  # without salts nothing tells the two caches apart
)
async def test_a_decode_worker_that_takes_salts_shows_the_wrong_kv_that_it_was_given(
    takes_salts: bool, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "exchange", Pair(takes_salts).answer)
    async for finding in check(CheckPlan(PROXY, HERE)):
        if finding.question == ALONE.name:
            assert finding.outcome is outcome, finding
            return


async def test_the_context_of_a_proxy_without_models_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, asked = Pair(takes_salts=True), list[int]()

    async def answer(endpoint: Endpoint, call: Call, *_options: object) -> Reply:
        if endpoint == PROXY and call.path == "/v1/models":
            return whole(b"not found", 404)
        asked.append(json.loads(call.body or b"{}").get("max_tokens", 0))
        return await pair.answer(endpoint, call)

    monkeypatch.setattr(stack, "exchange", answer)
    plan = CheckPlan(PROXY, HERE, model="m", deadline_header="x-deadline")
    monkeypatch.setattr(behaviour_probes, "errors", nothing)
    monkeypatch.setattr(behaviour_probes, "slow_readers", nothing)
    async for finding in check(plan):
        if finding.question == behaviour_probes.DEADLINE.name:
            break
    assert max(asked) == CONTEXT // 2, "a longer output would be refused"


async def nothing(*_arguments: object) -> Finding:
    return behaviour_probes.ERRORS.not_shown("left out")
