"""Flags made from tables set the fields of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from cli.flags import CHOICE_FLAGS, REQUEST_FLAGS, fill_request, with_flags
from cli.main import app
from core.errors import InvalidRequest
from tandem_client.stubs.inference_pb2 import Choices, GenerateRequest, OutputFormat, SamplingParams, StopConditions

# A command line, and the message that it makes.
TYPED = [
    ("--max-tokens 7", GenerateRequest(stop=StopConditions(max_tokens=7))),
    ("--temperature 0.5", GenerateRequest(sampling=SamplingParams(temperature=0.5))),
    ("--top-k 5", GenerateRequest(sampling=SamplingParams(top_k=5))),
    ("--top-p 0.5", GenerateRequest(sampling=SamplingParams(top_p=0.5))),
    ("--min-p 0.25", GenerateRequest(sampling=SamplingParams(min_p=0.25))),
    ("--repetition-penalty 1.5", GenerateRequest(sampling=SamplingParams(repetition_penalty=1.5))),
    ("--presence-penalty 0.5", GenerateRequest(sampling=SamplingParams(presence_penalty=0.5))),
    ("--frequency-penalty 0.5", GenerateRequest(sampling=SamplingParams(frequency_penalty=0.5))),
    ("--seed 3", GenerateRequest(sampling=SamplingParams(seed=3))),
    ("--stop a --stop b", GenerateRequest(stop=StopConditions(stop_strings=["a", "b"]))),
    ("--stop-token-id 4 --stop-token-id 5", GenerateRequest(stop=StopConditions(stop_token_ids=[4, 5]))),
    ("--ignore-eos", GenerateRequest(stop=StopConditions(ignore_eos=True))),
    ("--min-tokens 3", GenerateRequest(stop=StopConditions(min_tokens=3))),
    ("--json-schema {}", GenerateRequest(output_format=OutputFormat(json_schema="{}"))),
    ("--regex a+", GenerateRequest(output_format=OutputFormat(regex="a+"))),
    ("--choice a --choice b", GenerateRequest(output_format=OutputFormat(choices=Choices(texts=["a", "b"])))),
    ("--model red", GenerateRequest(model="red")),
    ("--cache-salt mine", GenerateRequest(cache_salt="mine")),
    ("--user me", GenerateRequest(user="me")),
    ("--priority -3", GenerateRequest(priority=-3)),
    ("--min-interval-ms 50", GenerateRequest(min_interval_ms=50)),
    ("--n 2", GenerateRequest(n=2)),
    ("--logprobs 4", GenerateRequest(logprobs=4)),
]


@pytest.mark.parametrize(("typed", "wanted"), TYPED, ids=[typed.split()[0] for typed, _ in TYPED])
def test_each_flag_sets_its_field_and_no_other(typed: str, wanted: GenerateRequest) -> None:
    request = GenerateRequest()
    small = typer.Typer()

    @small.command()
    @with_flags((*REQUEST_FLAGS, *CHOICE_FLAGS))
    def ask(**flags: object) -> None:
        fill_request(request, flags)

    result = CliRunner().invoke(small, typed.split())
    assert result.exit_code == 0, result.output
    assert request == wanted


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *path, name)


def test_every_command_and_each_of_its_options_has_a_help_text_and_shows_every_word_of_it() -> None:
    for path, command in commands(get_command(app)):
        result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "1000"})
        assert result.exit_code == 0, result.output
        assert command.help, path
        shown = " ".join(result.output.split())
        for parameter in command.params:
            written = " ".join((getattr(parameter, "help", "") or "").replace("\\[", "[").split())
            assert written, (path, parameter.name)
            assert written in shown, (path, parameter.name)


def test_every_flag_has_a_row() -> None:
    assert {f"--{flag.name}" for flag in (*REQUEST_FLAGS, *CHOICE_FLAGS)} == {typed.split()[0] for typed, _ in TYPED}


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("seed", -1, r"^seed: must be in \[0, 18446744073709551615\], is -1$"),
        ("max_tokens", 2**32, r"^max_tokens: must be in \[0, 4294967295\], is 4294967296$"),
        ("priority", 2**31, r"^priority: must be in \[-2147483648, 2147483647\], is 2147483648$"),
    ],
)
def test_a_number_out_of_the_range_of_its_field_names_field_and_limit(flag: str, value: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        fill_request(GenerateRequest(), {flag: value})


def test_two_forms_of_one_output_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^choice: cannot be combined with regex$"):
        fill_request(GenerateRequest(), {"regex": "a", "choice": ["b"]})
