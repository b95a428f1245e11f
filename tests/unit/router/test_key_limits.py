"""Each key stays inside its limits, and each call belongs to the tenant of its key, or to its peer."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import ApiKeyConfig, RouterConfig
from core.errors import InvalidRequest, KeyLimitReached, QueueFull, Unauthenticated
from core.request import MAX_CACHE_SALT_CHARS
from router.serving.call_writer import SinkWriter
from router.serving.inference_servicer import InferenceServicer
from router.serving.key_limits import WINDOW_S, KeyLimits
from router.serving.tenant_admission import TenantAdmission, tenant_salt
from runtime.owner_ledger import Owner
from runtime.rpc.api_keys import CLIENT, FOLLOWING, ApiKeys, hash_of
from runtime.rpc.grpc_server import LocalContext
from tandem_client.stubs import inference_pb2

STREAMS = ApiKeyConfig(name="alice", sha256=hash_of("alice's key"), max_streams=2)
MINUTE = ApiKeyConfig(name="bob", sha256=hash_of("bob's key"), tenant="builders", requests_per_minute=3)
BOTH = ApiKeys((STREAMS, MINUTE))


def headers(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def admitted(key: ApiKeyConfig, *metadata: tuple[str, str], **fields: Any) -> inference_pb2.GenerateRequest:
    """A request that comes with a key, as the router goes on with it."""
    request = inference_pb2.GenerateRequest(**fields)
    with TenantAdmission(ApiKeys((key,))).admit(request, LocalContext([*headers(f"{key.name}'s key"), *metadata]), 0.0):
        return request


def test_a_key_makes_no_more_requests_in_a_minute_than_its_limit_and_learns_when_the_next_may_come() -> None:
    limits = KeyLimits()
    for now in (0.0, 10.0, 20.0):
        limits.admit(MINUTE, now)
        limits.release(MINUTE)
    with pytest.raises(KeyLimitReached, match=r"'bob' has made 3 requests .* \(requests_per_minute\)") as refused:
        limits.admit(MINUTE, 45.0)
    assert refused.value.retry_after_s == 15.0
    limits.admit(MINUTE, 60.0)
    with pytest.raises(KeyLimitReached):
        limits.admit(MINUTE, 69.0)


@pytest.mark.parametrize(
    ("key", "num_calls", "limit"), [(STREAMS, 3, "max_streams"), (MINUTE, 4, "requests_per_minute")]
)
def test_calls_that_can_never_be_open_together_are_refused_for_good(
    key: ApiKeyConfig, num_calls: int, limit: str
) -> None:
    allowed = num_calls - 1
    with pytest.raises(InvalidRequest, match=f"has {num_calls} .* {allowed} .*{limit}") as refused:
        admitted(key, (FOLLOWING, str(num_calls - 1)))
    assert (refused.value.field, refused.value.retryable) == ("prompt", False)
    for hint in (str(allowed - 1), "many", "-1", "9" * 5000):
        admitted(key, (FOLLOWING, hint))


def test_keys_do_not_count_against_each_other_and_0_is_no_limit() -> None:
    limits = KeyLimits()
    for _ in range(100):
        limits.admit(ApiKeyConfig(name="free", sha256="0" * 64), 0.0)
    limits.admit(STREAMS, 0.0)
    assert (limits.num_open("free"), limits.num_open("alice")) == (100, 1)
    limits.admit(STREAMS, 0.0)
    with pytest.raises(KeyLimitReached, match=r"'alice' has 2 open requests, its limit \(max_streams\)") as full:
        limits.admit(STREAMS, 0.0)
    assert (full.value.retryable, full.value.retry_after_s) == (True, 1.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60), st.integers(1, 4), st.integers(1, 5))
def test_the_law_of_the_limits(steps: list[tuple[float, bool]], max_streams: int, per_minute: int) -> None:
    key = ApiKeyConfig(name="k", sha256="0" * 64, max_streams=max_streams, requests_per_minute=per_minute)
    limits, now, admitted = KeyLimits(), 0.0, []
    for pause, ends_one in steps:
        now += pause
        if ends_one and limits.num_open("k"):
            limits.release(key)
        with contextlib.suppress(KeyLimitReached):
            limits.admit(key, now)
            admitted.append(now)
        assert limits.num_open("k") <= max_streams
        assert sum(now - WINDOW_S < time for time in admitted) <= per_minute


def test_a_request_belongs_to_the_tenant_of_its_key_whatever_it_says() -> None:
    tenants = TenantAdmission(BOTH)
    request = inference_pb2.GenerateRequest(user="alice", cache_salt="mine")
    with tenants.admit(request, LocalContext(headers("bob's key")), 0.0):
        assert (request.user, request.cache_salt) == ("builders", tenant_salt("builders", "mine"))
        assert tenants._limits.num_open("bob") == 1
    assert tenants._limits.num_open("bob") == 0


def test_tenants_share_no_salt_and_a_tenant_s_own_salts_stay_apart() -> None:
    salts = {tenant_salt(tenant, salt) for tenant in ("a", "ab", "") for salt in ("", "b", "a")}
    assert len(salts) == 9
    assert all(len(salt) <= MAX_CACHE_SALT_CHARS for salt in salts)


def test_a_salt_that_is_too_long_is_left_for_validation_to_refuse() -> None:
    too_long = "x" * (MAX_CACHE_SALT_CHARS + 1)
    assert admitted(STREAMS, cache_salt=too_long).cache_salt == too_long


@pytest.mark.parametrize(
    ("min_priority", "asked", "priority"),
    [(0, -100, 0), (0, 0, 0), (0, 7, 7), (5, 0, 5), (-10, -100, -10), (-10, -3, -3), (0, -101, -101)],
)
def test_no_request_goes_before_the_priority_of_its_key(min_priority: int, asked: int, priority: int) -> None:
    """What no request may have stays, for validation to refuse."""
    key = ApiKeyConfig(name="alice", sha256=hash_of("alice's key"), min_priority=min_priority)
    assert admitted(key, priority=asked).priority == priority


def test_the_slot_of_a_request_that_fails_is_free_again() -> None:
    tenants = TenantAdmission(ApiKeys((STREAMS,)))
    for _ in range(3):
        with (
            pytest.raises(RuntimeError, match="the stream broke"),
            tenants.admit(inference_pb2.GenerateRequest(), LocalContext(headers("alice's key")), 0.0),
        ):
            raise RuntimeError("the stream broke")


class _Call(LocalContext):
    def __init__(self, peer: str, *metadata: tuple[str, str]) -> None:
        super().__init__(metadata)
        self._peer = peer

    def peer(self) -> str:
        return self._peer


@pytest.mark.parametrize(
    ("call", "owner"),
    [
        (_Call("ipv4:192.0.2.7:5005"), ("192.0.2.7", "")),
        (_Call("ipv4:192.0.2.7:5006", ("authorization", "Bearer any")), ("192.0.2.7", "")),
        (_Call("ipv4:192.0.2.7:5006", (CLIENT, "198.51.100.1")), ("192.0.2.7", "198.51.100.1")),
        (_Call("ipv6:%5B2001:db8::7%5D:5005"), ("2001:db8::/64", "")),
        (_Call("unix:"), ("unix:", "")),
        (_Call("", (CLIENT, "198.51.100.1")), ("198.51.100.1", "")),
        (_Call(""), ("", "")),
    ],
)
def test_without_keys_a_call_belongs_to_its_peer_whatever_it_says(call: _Call, owner: Owner) -> None:
    tenants = TenantAdmission(ApiKeys(()))
    assert tenants.owner_of(call) == tenants.claim(inference_pb2.GenerateRequest(user="a"), call) == owner
    with tenants.admit(inference_pb2.GenerateRequest(user="b"), call, 0.0) as admitted:
        assert admitted == owner


def test_with_keys_a_call_belongs_to_the_tenant_wherever_it_comes_from() -> None:
    tenants = TenantAdmission(BOTH)
    for peer in ("ipv4:192.0.2.7:5005", "ipv4:192.0.2.8:5005", ""):
        call = _Call(peer, *headers("bob's key"), (CLIENT, peer))
        with tenants.admit(inference_pb2.GenerateRequest(), call, 0.0) as admitted:
            assert admitted == tenants.owner_of(call) == ("builders", "")


class FullPool:
    """Refuses every call, and remembers whose it was."""

    def __init__(self) -> None:
        self.owners = list[object]()

    async def run(self, owner: object, *_: object) -> None:
        self.owners.append(owner)
        raise QueueFull("full")


def servicer_of(pool: FullPool) -> InferenceServicer:
    shell = SimpleNamespace(
        config=RouterConfig(), now=lambda: 0.0, new_request_id=lambda: "r", refuse=lambda *_: None,
        count_refusal=lambda _: None, view=SimpleNamespace(decode_limits=()),
    )  # fmt: skip
    tokenizer: Any = SimpleNamespace(info=SimpleNamespace(name="m"), decode=None)
    parts: Any = (tokenizer, shell, pool, TenantAdmission(BOTH), SimpleNamespace(is_quick=lambda _: True))
    return InferenceServicer(*parts)


async def test_more_tokens_than_a_text_may_have_are_refused_before_they_are_read() -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=[1] * 1_000_001)
    with pytest.raises(InvalidRequest, match="token_ids: must have at most 1000000 items, has 1000001"):
        await servicer_of(FullPool()).Detokenize(request, LocalContext(headers("bob's key")))


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_each_method_that_validates_does_so_for_the_tenant_of_the_key(method: str) -> None:
    servicer = servicer_of(pool := FullPool())

    async def call(*metadata: tuple[str, str]) -> None:
        context, sink = LocalContext(metadata, 1.0), cast(Any, None)
        if method == "Generate":
            await servicer.serve(inference_pb2.GenerateRequest(user="alice"), SinkWriter(sink, context))
        else:
            await getattr(servicer, method)(getattr(inference_pb2, f"{method}Request")(), context)

    with pytest.raises(QueueFull):
        await call(("authorization", "Bearer bob's key"))
    assert pool.owners == [("builders", "")]
    with pytest.raises(Unauthenticated):
        await call()
    assert len(pool.owners) == 1
