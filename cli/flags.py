"""Command-line flags made from tables: what a table lists is on the command line, documented, and nothing else is.

typer reads a function's signature; `with_flags` gives a function of keyword arguments the signature its table says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.descriptor import FieldDescriptor

from cli.config_file import FLAGS
from core.errors import InvalidRequest
from tandem_client.stubs import inference_pb2

F = TypeVar("F", bound=Callable[..., Any])

# What an integer field can hold at all; the router knows the narrower limits.
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True)
class CommandFlag:
    name: str  # without the dashes
    type: Any
    help: str

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class RequestFlag(CommandFlag):
    """A flag that sets one field of a GenerateRequest."""

    field: str  # e.g. sampling.temperature


CONFIG_FLAGS = tuple(
    CommandFlag(flag.name, type(flag.default), f"{flag.help} (default: {flag.default or repr(flag.default)})")
    for flag in FLAGS
)

REQUEST_FLAGS = (
    RequestFlag("max-tokens", int, "Most tokens to generate. (default: what the context holds)", "stop.max_tokens"),
    RequestFlag("temperature", float, "0 = always the most likely token. (default: 1)", "sampling.temperature"),
    RequestFlag("top-k", int, "Keep the k most likely tokens; 0 = all. (default: 0)", "sampling.top_k"),
    RequestFlag("top-p", float, "Keep the most likely tokens that add up to this. (default: 1)", "sampling.top_p"),
    RequestFlag("min-p", float, "Keep tokens this likely, relative to the best. (default: 0)", "sampling.min_p"),
    RequestFlag("repetition-penalty", float, "Divides logits of tokens already there. (default: 1)",
                "sampling.repetition_penalty"),
    RequestFlag("presence-penalty", float, "Taken once from tokens already generated. (default: 0)",
                "sampling.presence_penalty"),
    RequestFlag("frequency-penalty", float, "Taken for each time a token was generated. (default: 0)",
                "sampling.frequency_penalty"),
    RequestFlag("seed", int, "The same seed gives the same tokens. (default: random)", "sampling.seed"),
    RequestFlag("stop", list[str], "End before this text; may be given several times.", "stop.stop_strings"),
    RequestFlag("stop-token-id", list[int], "End after this token; may be given several times.", "stop.stop_token_ids"),
    RequestFlag("ignore-eos", bool, "Go on past the end-of-sequence token.", "stop.ignore_eos"),
    RequestFlag("cache-salt", str, "Share cached prefixes only with requests of the same salt.", "cache_salt"),
    RequestFlag("priority", int, "Lower goes first. (default: 0)", "priority"),
)  # fmt: skip

# Those of `generate` alone: a chat shows one answer.
CHOICE_FLAGS = (
    RequestFlag("n", int, "Independent continuations. (default: 1)", "n"),
    RequestFlag("logprobs", int, "Log-probabilities of this many tokens at each place; shown by --json.", "logprobs"),
)


def with_flags(table: Sequence[CommandFlag]) -> Callable[[F], F]:
    """Replace a function's `**flags` by one keyword argument per entry of `table`; what is not given is None."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [
            inspect.Parameter(
                flag.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[flag.type | None, typer.Option(f"--{flag.name}", help=flag.help)],
            )
            for flag in table
        ]
        function.__signature__ = signature.replace(parameters=kept + made)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in kept + made}
        return function

    return decorate


def fill_request(request: inference_pb2.GenerateRequest, flags: dict[str, Any]) -> None:
    """Set the fields whose flags are given. Raises `InvalidRequest` for a number its field cannot hold."""
    for flag in (*REQUEST_FLAGS, *CHOICE_FLAGS):
        value = flags.get(flag.parameter)
        if value is None or value == []:
            continue
        message: Any = request
        *path, name = flag.field.split(".")
        for part in path:
            message = getattr(message, part)
        try:
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except UnicodeError:  # a ValueError, too, but not about a number
            raise
        except ValueError as error:
            low, high = INTEGERS[message.DESCRIPTOR.fields_by_name[name].cpp_type]
            raise InvalidRequest(name, f"must be in [{low}, {high}], is {value}") from error
