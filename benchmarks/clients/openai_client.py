"""Exercise a gateway with OpenAI's Python client: `python openai_client.py URL MODEL` in the client's environment.

Each check prints one line. The program ends with status 1 at the first check that fails.
"""

from __future__ import annotations

import contextlib
import sys
import time
import urllib.request

import httpx2 as httpx
import openai

URL, MODEL = sys.argv[1:3]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}  # fmt: skip
SETTLE_S = 10.0

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120)


def metric(name: str) -> float:
    """The sum of a metric on the gateway's page."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def models() -> str:
    (first, *_) = client.models.list().data
    assert client.models.retrieve(MODEL).id == first.id == MODEL
    return MODEL


def chat() -> str:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text, text
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    return text


def streamed_chat() -> str:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0)
    parts, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    return f"{len(parts)} chunks, the text of the answer that was not streamed"


def completion() -> str:
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4, n=2, seed=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("One, two,")
    likely = client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2, logprobs=2).choices[0].logprobs
    assert likely is not None
    assert likely.top_logprobs is not None
    assert len(likely.top_logprobs) == 2
    return "two prompts, two choices each"


def responses() -> str:
    answer = client.responses.create(model=MODEL, input="What is the capital of France?", max_output_tokens=16)
    assert answer.output_text
    return repr(answer.output_text)


def tools() -> str:
    try:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], max_tokens=8)
    except openai.BadRequestError as error:
        if "tools" not in str(error):
            raise
        return "refused by name: the chat template of this model knows no tools"
    return f"accepted, ended with {answer.choices[0].finish_reason}"


def errors() -> str:
    for kind, options in (
        (openai.NotFoundError, {"model": "gpt-5"}),
        (openai.BadRequestError, {"model": MODEL, "temperature": 9000}),
        (openai.BadRequestError, {"model": MODEL, "response_format": {"type": "xml"}}),
        (openai.BadRequestError, {"model": MODEL, "extra_body": {"no_such_field": 1}}),
    ):
        try:
            client.chat.completions.create(messages=QUESTION, **options)
        except kind:
            continue
        raise AssertionError(f"{options} was accepted")
    return "404 for a model, 400 for three fields"


def retries() -> str:
    """The first attempt of each call fails on its way."""
    statuses: list[int] = []

    class Flaky(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            fails = not statuses
            answer = httpx.Response(503, headers={"retry-after": "0"}) if fails else super().handle_request(request)
            statuses.append(answer.status_code)
            return answer

    with httpx.Client(transport=Flaky()) as http, openai.OpenAI(
        base_url=f"{URL}/v1", api_key="none", http_client=http
    ) as flaky:  # fmt: skip
        flaky.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
        assert statuses == [503, 200], statuses
        with contextlib.suppress(openai.NotFoundError):
            flaky.chat.completions.create(model="gpt-5", messages=QUESTION)
        assert statuses == [503, 200, 404], statuses
    return "a 503 is retried, a 404 is not"


def cancellation() -> str:
    left_before = metric("tandem_gateway_client_disconnects_total")
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    end = time.monotonic() + SETTLE_S
    while metric("tandem_router_in_flight") or metric("tandem_gateway_client_disconnects_total") == left_before:
        assert time.monotonic() < end, "the request still runs"
        time.sleep(0.05)
    return "no request is left in the router"


for check in (models, chat, streamed_chat, completion, responses, tools, errors, retries, cancellation):
    print(f"{check.__name__}: {check()}", flush=True)
