"""Commands that files of the project name, parsed as the programs parse them: no option may be invented."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
# At the start, after variables, or after the `--` of `kubectl exec`; up to a comment, an input or the next command.
_COMMAND = re.compile(r"(?:^(?:\w+=\S+ )*| -- )((?:tandem [a-z]|ray start\b)[^#|&<]*)")


def check_command(arguments: Sequence[str]) -> None:
    """Parse a command of `tandem` or `ray start` without running it. Raises a usage error of the parser."""
    program, *rest = arguments
    match program.rpartition("/")[2], rest:
        case "tandem", [name, *options]:
            command = _tandem().commands[name]
            command.make_context(name, list(options), resilient_parsing=False)
        case "ray", ["start", *options]:
            _ray_start().make_context("start", list(options))
        case other:
            raise AssertionError(f"no parser for {other}")


@cache
def _tandem() -> Any:
    from cli.main import app

    return typer.main.get_command(app)


@cache
def _ray_start() -> Any:
    from ray.scripts.scripts import start

    return start


def commands_of(page: Path) -> list[str]:
    """The commands `tandem ...` and `ray start ...` in backticks and code blocks of a page, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = _BLOCK.findall(text)
    spans = [span.replace("\n", " ") for span in _SPAN.findall(_BLOCK.sub("", text))]
    found = [_COMMAND.search(line) for line in [*spans, *"\n".join(blocks).splitlines()]]
    return [match[1].strip() for match in found if match is not None]
