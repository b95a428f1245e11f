"""Every field of a request reaches the worker: the router puts it into a `Request`, and the codec keeps it.

A field of the dataclasses without a strategy here fails the import.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.config import RouterConfig
from core.model_info import ModelInfo
from core.request import MAX_LOGPROBS, MAX_SEED, MIN_REPETITION_PENALTY, Request, SamplingParams
from protos import codec
from router.serving.output_formats import RequestGrammars
from router.serving.validation import prepare
from tandem_client.stubs import inference_pb2, worker_pb2
from text.tokenizer import ByteCodec, ModelTokenizer

VOCAB_SIZE = 1 << 16
ADAPTERS = ("red", "owner/green:2")
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


def float32(low: float, high: float, *, low_allowed: bool = True) -> st.SearchStrategy[float]:
    """Numbers that fit a float of 32 bits exactly, as on the wire."""
    return st.floats(low, high, width=32, exclude_min=not low_allowed)


SAMPLING: dict[str, st.SearchStrategy[object]] = {
    "max_tokens": st.integers(1, 4096),
    "temperature": float32(0, 100),
    "top_k": st.integers(0, VOCAB_SIZE),
    "top_p": float32(0, 1, low_allowed=False),
    "min_p": float32(0, 1),
    "repetition_penalty": float32(MIN_REPETITION_PENALTY, 100),
    "presence_penalty": float32(-2, 2),
    "frequency_penalty": float32(-2, 2),
    "seed": st.integers(0, MAX_SEED),
    "stop_token_ids": st.frozensets(TOKEN_IDS, max_size=8),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 1),  # at most max_tokens
    "num_logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
    "logit_bias": st.dictionaries(TOKEN_IDS, float32(-100, 100), max_size=8),
    "grammar": st.just("") | st.text(max_size=8),
    "speculation": st.booleans(),
}


def _sampling(drawn: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**(drawn | {"ignore_eos": drawn["ignore_eos"] and not drawn["grammar"]}))


REQUEST: dict[str, st.SearchStrategy[object]] = {
    "request_id": st.text("router-0123.#", min_size=1, max_size=20),
    "token_ids": st.lists(TOKEN_IDS, min_size=1, max_size=20).map(tuple),
    "sampling": st.fixed_dictionaries(SAMPLING).map(_sampling),
    "priority": st.integers(-100, 100),
    "cache_salt": st.text(max_size=8),
    "adapter": st.sampled_from(("", *ADAPTERS)),
    "tenant": st.text(max_size=8),
    "age_s": st.integers(0, 10**9).map(lambda microseconds: microseconds / 1e6),
}

DRAWN = {SamplingParams: SAMPLING.keys(), Request: REQUEST.keys() | {"num_prompt_tokens"}}
for described, names in DRAWN.items():
    without = names ^ {field.name for field in fields(described) if field.init}
    assert not without, f"fields of {described.__name__} without a strategy, or the reverse: {without}"


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """New and resumed requests. The `token_ids` of a resumed request continue after the prompt."""
    drawn: dict[str, Any] = {name: draw(strategy) for name, strategy in REQUEST.items()}
    num_tokens, sampling = len(drawn["token_ids"]), drawn["sampling"]
    fewest = max(1, num_tokens - sampling.max_tokens + 1)
    return Request(num_prompt_tokens=draw(st.integers(fewest, num_tokens)), **drawn)


INFO = ModelInfo("a-model", "fingerprint", VOCAB_SIZE, 1 << 20, eos_token_ids=frozenset(), adapters=ADAPTERS)
TOKENIZER = ModelTokenizer(INFO, ByteCodec(), template=None)  # prompts are token ids here
GRAMMARS = RequestGrammars(TOKENIZER)


@given(requests())
def test_encoding_and_decoding_a_request_gives_an_equal_request(request: Request) -> None:
    sent = codec.encode_sequence(request).SerializeToString()
    assert codec.decode_sequence(worker_pb2.SequenceRequest.FromString(sent)) == request


@given(requests())
def test_every_field_of_a_client_is_in_the_request_that_the_router_queues(request: Request) -> None:
    request = replace(request, sampling=replace(request.sampling, grammar=""))  # it comes from other fields
    wire = codec.encode_sequence(request)
    sent = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.token_ids),
        sampling=wire.sampling,
        stop=wire.stop,
        logprobs=request.sampling.num_logprobs,
        model=request.adapter,
        cache_salt=request.cache_salt,
        priority=request.priority,
        user=request.tenant,
        speculation=request.sampling.speculation,
    )
    (choice,) = prepare(sent, TOKENIZER, RouterConfig(), "name", lambda: 0, (), GRAMMARS).choices
    tenant = request.tenant or request.cache_salt
    sent_by_it = replace(request, request_id="name.0", tenant=tenant, age_s=0.0)
    assert choice == replace(sent_by_it, num_prompt_tokens=len(request.token_ids))
