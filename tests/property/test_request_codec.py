"""Every field of a request reaches the worker: the router puts it into a `Request`, and the codec keeps it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from core.config import RouterConfig
from core.model_info import ModelInfo
from core.request import Request
from protos import codec
from router.serving.output_formats import RequestGrammars
from router.serving.validation import prepare
from tandem_client.stubs import inference_pb2, worker_pb2
from tests.support.requests import ADAPTERS, VOCAB_SIZE, requests
from text.tokenizer import ByteCodec, ModelTokenizer

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
