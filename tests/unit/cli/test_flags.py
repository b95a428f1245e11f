"""Flags made from tables reach the request they describe."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from cli.flags import CHOICE_FLAGS, REQUEST_FLAGS, fill_request, with_flags
from cli.main import app
from core.errors import InvalidRequest
from protos import inference_pb2

VALUES: dict[object, object] = {int: 3, float: 0.5, str: "x", bool: True, list[str]: ["a", "b"], list[int]: [4, 5]}


@pytest.mark.parametrize("flag", [*REQUEST_FLAGS, *CHOICE_FLAGS], ids=lambda flag: flag.name)
def test_each_flag_sets_its_field(flag: object) -> None:
    request = inference_pb2.GenerateRequest()
    value = VALUES[flag.type]  # type: ignore[attr-defined]
    fill_request(request, {flag.parameter: value})  # type: ignore[attr-defined]
    found: object = request
    for part in flag.field.split("."):  # type: ignore[attr-defined]
        found = getattr(found, part)
    assert (list(found) if isinstance(value, list) else found) == value  # type: ignore[call-overload]


def test_flags_that_are_not_given_leave_their_fields_unset() -> None:
    request = inference_pb2.GenerateRequest()
    fill_request(request, {flag.parameter: None for flag in REQUEST_FLAGS})
    assert request == inference_pb2.GenerateRequest()


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("seed", -1, r"^seed: must be in \[0, 18446744073709551615\], is -1$"),
        ("max_tokens", 2**32, r"^max_tokens: must be in \[0, 4294967295\], is 4294967296$"),
        ("priority", 2**31, r"^priority: must be in \[-2147483648, 2147483647\], is 2147483648$"),
    ],
)
def test_a_number_that_its_field_cannot_hold_names_field_and_limit(flag: str, value: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        fill_request(inference_pb2.GenerateRequest(), {flag: value})


def test_the_table_is_the_command_line() -> None:
    seen: dict[str, object] = {}
    small = typer.Typer()

    @small.command()
    @with_flags(REQUEST_FLAGS)
    def ask(prompt: str, **flags: object) -> None:
        seen.update(flags, prompt=prompt)

    result = CliRunner().invoke(small, ["hello", "--top-k", "5", "--stop", "a", "--stop", "b", "--ignore-eos"])
    assert result.exit_code == 0, result.output
    given = {name: value for name, value in seen.items() if value not in (None, [])}
    assert given == {"prompt": "hello", "top_k": 5, "stop": ["a", "b"], "ignore_eos": True}


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "status", "scale", "pull", "demo", "doctor"])
def test_every_command_and_each_of_its_options_is_explained(command: str) -> None:
    made = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    assert made.help
    for parameter in made.params:
        assert parameter.help, parameter.name
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert "[security]" in result.output or command not in ("generate", "chat", "status", "scale"), "taken for markup"
