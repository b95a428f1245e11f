"""Every number of every command line, and every file that a command writes, is refused before the work by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from cli.config_file import FLAGS
from cli.main import app
from core.errors import ConfigError
from tests.unit.cli.conftest import Tandem

# A flag of `tandem simulate` that its parts know by another name, and those of a URL
NAMED = [
    ("simulate --prefill -1", "--prefill must not be negative"),
    ("simulate --decode 0", "--decode must be positive"),
    ("simulate --input-tokens 0", "--input-tokens must be positive"),
    ("simulate --prefix-tokens 8", "--prefix-groups and --prefix-tokens must be set together"),
    ("simulate --burstiness 0", "--burstiness needs --arrivals gamma"),
    ("simulate --divisor 2", "--divisor needs a file as --workload"),
    ("simulate --workload a.jsonl --spread 0.1", "--spread needs synthetic requests"),
    ("simulate --admission maybe", "--admission must be queue or shed"),
    ("check ftp://a", "url: must be host:port or a URL of HTTP, is 'ftp://a'"),
    ("check http://a:99999", "url: Port out of range"),
    ("check a --metrics http://b:99999", "--metrics: Port out of range"),
    ("check a --deadline-header a:b", "--deadline-header: must be a name of HTTP"),
    ("status --router a:65536", "router: must be host:port, with a port in [1, 65535], is 'a:65536'"),
    ("role decode-0 nonsense", "'role': must be prefill or decode, is 'nonsense'"),
    ("events --limit 1001", "'--limit': must be int in [1, 1000], is '1001'"),
    ("apply router.max_queued", "'router.max_queued' is neither a file nor TABLE.OPTION=VALUE"),
    *(
        (f"generate x --timeout {s}", "'--timeout': must be float in [0.001, 1000000.0]")
        for s in ("inf", "nan", "0", "1e7")
    ),
    ("serve --prefill two", "--prefill: [cluster] num_prefill must be int, in [0, 2147483647], is 'two'"),
    ("serve --prefill 99999999999", "--prefill: [cluster] num_prefill must be in [0, 2147483647], is 99999999999"),
    ("serve --prefill 257", "--prefill: [cluster] num_prefill must be in [0, 256], is 257"),
    (
        "serve --slo-itl-ms x",
        "--slo-itl-ms: [scheduler] slo_itl_ms must be float, more than 0 and at most 1000000000000000, is 'x'",
    ),
]


COMMANDS: Any = get_command(app)


def numbers() -> Iterator[tuple[str, str]]:
    """The command and the name of each option that is a number."""
    for name, command in COMMANDS.commands.items():
        for parameter in command.params:
            kind = getattr(parameter, "metavar", None) or str(parameter.type_descriptor.annotation)
            if parameter.param_type_name == "option" and ("int" in kind or "float" in kind):
                yield name, parameter.opts[0]


def refusal(*line: str) -> str:
    with pytest.raises((typer.BadParameter, ConfigError)) as refused:
        COMMANDS.main(line, standalone_mode=False)
    error: Any = refused.value
    return str(error) if isinstance(error, ConfigError) else str(error.format_message())


def test_a_text_in_place_of_a_number_is_refused_with_the_name_of_its_option() -> None:
    found = list(numbers())
    assert len(found) > 90
    for command, option in found:
        for value in ("nonsense", "9" * 5000 + "x"):
            said = refusal(command, option, value)
            assert re.search(rf"{option}\b.*must be .{{1,300}}$", said), said


def test_a_number_of_the_config_out_of_its_range_is_refused_with_flag_and_option() -> None:
    for flag in FLAGS:
        if not isinstance(flag.default, str):
            for value in ("-99999999999", "1e30", "inf", "nan", "9" * 5000):
                said = refusal("serve", f"--{flag.name}", value)
                assert said.startswith(f"--{flag.name}: [{flag.table}] {flag.option} must be "), said


@pytest.mark.parametrize(("line", "says"), NAMED)
def test_a_wrong_value_is_refused_with_the_name_that_was_typed_and_the_limit(
    line: str, says: str, tandem: Tandem
) -> None:
    ended = tandem(*line.split())
    shown = " ".join(ended.err.replace("│", "").split())
    assert ended.code in (1, 2)
    assert says in shown.replace("Invalid value for ", "")


@pytest.mark.parametrize(
    "line", ["simulate --json FILE", "simulate --plot FILE", "check a --json FILE", "check a --junit FILE",
             "calibrate FILE"],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_the_work(line: str, tandem: Tandem, tmp_path: Path) -> None:
    folder = tmp_path / "a.png"
    folder.mkdir()
    for file, reason in ((tmp_path / "nowhere" / "a.png", "does not exist"), (folder, "is a directory")):
        ended = tandem(*(str(file) if word == "FILE" else word for word in line.split()))
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("error: ")
        assert reason in ended.err


def test_a_file_without_a_span_is_no_trace_and_an_empty_one_has_no_request(tandem: Tandem, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text("")
    assert tandem("trace", "--file", str(file)).code in (0, None)
    file.write_text('{"x": 1}\n')
    ended = tandem("trace", "--file", str(file))
    assert (ended.code, ended.err.count("must have a span in each line")) == (1, 1)
