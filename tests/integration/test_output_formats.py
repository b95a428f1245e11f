"""An output format holds on every way of a request, and the tokens are those of one engine that nothing disturbs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import jsonschema
import pytest
import pytest_asyncio

from core.errors import InvalidRequest
from core.output_grammar import GrammarRow
from router.serving.output_formats import format_grammar
from tandem_client.stubs import inference_pb2
from tandem_client.stubs.inference_pb2 import Choices, OutputFormat
from tests.support.deployment import Deployment, deploy, make_request, tiny_config, trailers_of
from tests.support.reference import CoLocatedEngine, random_prompt
from text.grammars import GrammarReader

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,8}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
FORMATS = {
    "json_schema": OutputFormat(json_schema=json.dumps(SCHEMA)),
    "regex": OutputFormat(regex=r"[A-F0-9]{4}(-[A-F0-9]{4}){2,7}"),
    "choices": OutputFormat(choices=Choices(texts=["a long answer that goes over many tokens", "another long answer"])),
    "lark": OutputFormat(lark='start: "(" start ")" | start "+" start | /[0-9]{1,9}/'),
}
NUM_OUTPUT = 90
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.875, "presence_penalty": 0.5, "seed": 7}
LONG = 150  # tokens of a prompt: three chunks of the scheduler's 64


@pytest.fixture(scope="module")
def model() -> str:
    """Of both models, some formats are in test_path_matrix.py."""
    return "random:llama-tiny"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: str) -> AsyncIterator[Deployment]:
    async with deploy(tiny_config(model, transport="nixl"), num_decode=2) as deployment:
        yield deployment


def expected(engine: CoLocatedEngine, prompt: tuple[int, ...], form: str, **sampling: Any) -> list[int]:
    return engine.tokens(prompt, NUM_OUTPUT, ignore_eos=False, grammar=format_grammar(FORMATS[form]), **sampling)


def ask(prompt: tuple[int, ...], form: str, **fields: Any) -> inference_pb2.GenerateRequest:
    return make_request(
        token_ids=prompt, max_tokens=NUM_OUTPUT, ignore_eos=False, output_format=FORMATS[form], **fields
    )


def is_right(form: str, text: str, finished: inference_pb2.Finished) -> bool:
    if finished.finish_reason != inference_pb2.FINISH_REASON_STOP:
        return len(text) > 0
    match form:
        case "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            return re.fullmatch(FORMATS["regex"].regex, text) is not None
        case "choices":
            return text in FORMATS["choices"].choices.texts
    return True


@pytest.mark.parametrize("form", FORMATS)
async def test_two_pools_give_the_tokens_of_one_engine(
    deployment: Deployment, engine: CoLocatedEngine, form: str
) -> None:
    prompt = random_prompt(LONG)
    answers = await asyncio.gather(
        *(deployment.generate_all(ask(prompt, form, **(SAMPLED | {"seed": seed}))) for seed in range(3))
    )
    for seed, (answer,) in enumerate(answers):
        assert answer.token_ids == expected(engine, prompt, form, **(SAMPLED | {"seed": seed}))
        assert is_right(form, answer.text, answer.finished)
        assert answer.finished.path == inference_pb2.REQUEST_PATH_DISAGGREGATED


async def test_a_grammar_that_becomes_too_complex_ends_its_stream_alone(
    deployment: Deployment, engine: CoLocatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, prompts = GrammarReader._follow, [random_prompt(20, seed) for seed in (5, 6)]
    failed_at: set[int] = set()

    def fails_late(reader: GrammarReader, row: GrammarRow) -> Any:
        view, place = row.sequence, row.num_known + len(row.promised)
        if list(view.token_ids[:20]) == list(prompts[0]) and place >= 25:
            failed_at.add(place)
            raise InvalidRequest("output_format", "the grammar is too complex here")
        return follow(reader, row)

    monkeypatch.setattr(GrammarReader, "_follow", fails_late)
    broken = asyncio.create_task(deployment.generate_all(ask(prompts[0], "regex", **SAMPLED)))
    (other,) = await deployment.generate_all(ask(prompts[1], "regex", **SAMPLED))
    with pytest.raises(grpc.aio.AioRpcError, match="output_format: the grammar is too complex here") as failed:
        await broken
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert 1 <= len(failed_at) <= 2, "at most the step that was planned ahead fails, too; nothing is tried again"
    monkeypatch.undo()
    assert other.token_ids == expected(engine, prompts[1], "regex", **SAMPLED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (OutputFormat(), "output_format: one of json_schema, json_object, regex, choices, lark must be set"),
        (OutputFormat(json_schema="{"), "output_format.json_schema: must be JSON"),
        (OutputFormat(json_schema="3"), "output_format.json_schema: must be a JSON object, true or false"),
        (OutputFormat(json_schema='{"type": "objekt"}'), "output_format: Invalid type: objekt"),
        (OutputFormat(json_object=False), "output_format.json_object: must be true"),
        (OutputFormat(choices=Choices()), "output_format.choices: must have 1 to 1024 texts, has 0"),
        (OutputFormat(choices=Choices(texts=["a", ""])), "output_format.choices: must not have an empty text"),
        (OutputFormat(regex="a" * 70_000), "output_format.regex: must have 1 to 65536 characters, has 70000"),
        (OutputFormat(lark="start: nothing"), "output_format: "),
    ],
)
async def test_a_wrong_format_is_refused_by_name(running: Deployment, given: OutputFormat, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.generate(text="a", ignore_eos=False, output_format=given)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(message)
    assert trailers_of(refused.value)["tandem-field"] == message.partition(":")[0]


async def test_a_format_needs_an_end(running: Deployment) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="ignore_eos: must be false beside output_format"):
        await running.generate(text="a", ignore_eos=True, output_format=FORMATS["regex"])
