"""Command-line flags made from tables. A command has exactly the flags of its tables, each with a help text.

typer makes a command line from the signature of a function. `with_flags` makes this signature from a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.descriptor import FieldDescriptor
from typer.core import TyperArgument, TyperGroup, TyperOption

from cli.config_file import FLAGS
from core.errors import InvalidRequest, shortened
from tandem_client.stubs import inference_pb2


class Commands(TyperGroup):
    """A wrong value is refused with what it must be: typer prints the words of pydantic."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            found: Any = error.__cause__
            if found is not None and isinstance(error.param, TyperOption | TyperArgument):
                wanted = error.param.display_type(error.ctx or ctx).strip("<>").replace("|", " or ")
                wanted = wanted.replace("range", f"in [{error.param.min}, {error.param.max}]")
                error.message = f"must be {wanted}, is {shortened(repr(found.errors()[0]['input']))}"
            raise


F = TypeVar("F", bound=Callable[..., Any])

# Range of each integer type of a field. The router checks narrower limits.
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
    metavar: str | None = field(default=None, kw_only=True)

    @property
    def parameter(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class RequestFlag(CommandFlag):
    """A flag that sets one field of a GenerateRequest."""

    field: str  # e.g. sampling.temperature


CONFIG_FLAGS = tuple(  # texts, of which the config makes values
    CommandFlag(
        flag.name,
        str,
        f"{flag.help} (default: {flag.default or repr(flag.default)})",
        metavar=f"<{type(flag.default).__name__}>",
    )
    for flag in FLAGS
)

# For `gateway`, which takes the other options from the config file.
GATEWAY_FLAGS = tuple(
    replace(flag, help=flag.help.replace("0 = none", "0 = any free port"))
    for flag in CONFIG_FLAGS
    if flag.name.startswith("http")
)

REQUEST_FLAGS = (
    RequestFlag("model", str, "Name of the model, or of a LoRA adapter. (default: the served model)", "model"),
    RequestFlag("max-tokens", int, "Most tokens to generate. (default: the model's, or all that fit)",
                "stop.max_tokens"),
    RequestFlag("temperature", float,
                "Sampling temperature; 0 = always the most likely token. (default: the model's, or 1)",
                "sampling.temperature"),
    RequestFlag("top-k", int, "Sample from the k most likely tokens; 0 = from all. (default: the model's, or 0)",
                "sampling.top_k"),
    RequestFlag("top-p", float,
                "Sample from the most likely tokens whose probabilities add up to this. (default: the model's, or 1)",
                "sampling.top_p"),
    RequestFlag("min-p", float,
                "Drop tokens less likely than this share of the most likely token. (default: the model's, or 0)",
                "sampling.min_p"),
    RequestFlag("repetition-penalty", float, "Divide positive logits of tokens already present by this; "
                "multiply negative ones. (default: the model's, or 1)", "sampling.repetition_penalty"),
    RequestFlag("presence-penalty", float, "Subtract this from the logit of each generated token. (default: 0)",
                "sampling.presence_penalty"),
    RequestFlag("frequency-penalty", float,
                "Subtract this from a token's logit for each time it was generated. (default: 0)",
                "sampling.frequency_penalty"),
    RequestFlag("seed", int, "The same seed gives the same tokens. (default: random)", "sampling.seed"),
    RequestFlag("stop", list[str], "End the output before this text. May be repeated.", "stop.stop_strings"),
    RequestFlag("stop-token-id", list[int], "End the output after this token. May be repeated.", "stop.stop_token_ids"),
    RequestFlag("ignore-eos", bool, "Continue after the end-of-sequence token.", "stop.ignore_eos"),
    RequestFlag("min-tokens", int, "Do not end the output before this many tokens. (default: 0)", "stop.min_tokens"),
    RequestFlag("json-schema", str, "The output is JSON that follows this JSON Schema.", "output_format.json_schema"),
    RequestFlag("regex", str, "The output matches this regular expression.", "output_format.regex"),
    RequestFlag("choice", list[str], "The output is one of these texts. May be repeated.",
                "output_format.choices.texts"),
    RequestFlag("cache-salt", str, "Share cached prefixes only with requests of the same salt.", "cache_salt"),
    RequestFlag("user", str, "Share prefill workers equally with requests of other users. (default: the cache salt)",
                "user"),
    RequestFlag("priority", int, "A lower number is scheduled first. (default: 0)", "priority"),
    RequestFlag("min-interval-ms", int, "Join the tokens of this time into one message. (default: 0)",
                "min_interval_ms"),
)  # fmt: skip

# For `generate` only: a chat shows one answer.
CHOICE_FLAGS = (
    RequestFlag("n", int, "Number of independent answers. (default: 1)", "n"),
    RequestFlag("logprobs", int, "Return log-probabilities of this many tokens per position; needs --json.",
                "logprobs"),
)  # fmt: skip

# For `explain`: the flags that change the choice of workers.
ROUTE_FLAGS = tuple(flag for flag in REQUEST_FLAGS if flag.name in ("model", "cache-salt"))


def _plain(text: str) -> str:
    """Typer prints help with rich, which takes a name such as [vllm] for a style. (`rich` is slow to import.)"""
    return text.replace("[", r"\[")


def with_flags(table: Sequence[CommandFlag]) -> Callable[[F], F]:
    """Replace the `**flags` of a function by one keyword argument per flag; the default of each is None."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [
            inspect.Parameter(
                flag.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    flag.type | None, typer.Option(f"--{flag.name}", help=_plain(flag.help), metavar=flag.metavar)
                ],
            )
            for flag in table
        ]
        function.__signature__ = signature.replace(parameters=kept + made)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in kept + made}
        return function

    return decorate


def _refuse_second(message: Any, part: str, flag: CommandFlag) -> None:
    """Raises `InvalidRequest` for a second flag of one choice: the message would keep the last one alone."""
    choice = message.DESCRIPTOR.fields_by_name[part].containing_oneof
    if choice is not None and message.WhichOneof(choice.name) not in (None, part):
        raise InvalidRequest(flag.name, f"cannot be combined with {message.WhichOneof(choice.name)}")


def fill_request(request: inference_pb2.GenerateRequest, flags: dict[str, Any]) -> None:
    """Set the field of every given flag. Raises `InvalidRequest` for a number that the field cannot hold."""
    for flag in (*REQUEST_FLAGS, *CHOICE_FLAGS):
        value = flags.get(flag.parameter)
        if value is None or value == []:
            continue
        message: Any = request
        *path, name = flag.field.split(".")
        for part in path:
            _refuse_second(message, part, flag)
            message = getattr(message, part)
        _refuse_second(message, name, flag)
        try:
            if isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except UnicodeError:  # also a ValueError, but not about a number
            raise
        except ValueError as error:
            low, high = INTEGERS[message.DESCRIPTOR.fields_by_name[name].cpp_type]
            raise InvalidRequest(name, f"must be in [{low}, {high}], is {value}") from error
