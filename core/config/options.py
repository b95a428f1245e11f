"""An option of the config: its default, what it must be, and whether a running service takes a new value of it
(docs/adr/0052-live-options.md).

    port: int = option(50051, most=65535)
    max_queued: int = live(1024, least=1)
    admission: str = live("queue", choices=("queue", "shed"))

A number without a rule must not be negative. A class of options calls `check_options` first; then it checks what the
options must be together.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, TypeVar

from core.errors import ConfigError, shortened

# Message fields and options of gRPC hold no larger whole number. Milliseconds of the other still fit 64 bits.
LARGEST_INT = 2**31 - 1  # an option that is a whole number; beyond: `ConfigError`
LARGEST_FLOAT = 1e15  # an option that is another number; beyond: `ConfigError`
# gRPC ends a call with a longer time limit at once, and threads wait no longer than 9.2e9 s.
LARGEST_TIME_S = 1e9  # an option that is a time in seconds; beyond: `ConfigError`

# A host as the resolver of Python takes it: labels of 1 to 63 characters.
HOST = r"[!-\-0-~]{1,63}(\.[!-\-0-~]{1,63})*\.?"
HOST_FORM = "a host name or an IP address, in ASCII"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that an option takes, and whether a running service takes a new one."""

    least: float = 0  # of a number
    most: float | None = None  # likewise; None: the largest of its kind
    positive: bool = False  # 0 is refused, too
    choices: tuple[str, ...] = ()  # of a text; empty: any
    given: bool = False  # a blank text is refused
    pattern: str = ""  # of a text that is not the default
    form: str = ""  # the pattern in words
    is_live: bool = False


def option(default: T, *, secret: bool = False, **rule: Any) -> T:
    """The default of an option. `rule`: fields of `Rule`."""
    return field(default=default, repr=not secret, metadata={"rule": Rule(**rule)})


def live(default: T, **rule: Any) -> T:
    """The default of an option of which a running service takes a new value."""
    return option(default, is_live=True, **rule)


def live_options(part: Any) -> list[str]:
    """Names of the live options of a dataclass of options."""
    return [known.name for known in fields(part) if _rule(known).is_live]


def with_live(present: T, new: T) -> T:
    """`present` with the live options of `new`."""
    options: Any = {name: getattr(new, name) for name in live_options(new)}
    return replace(present, **options)  # type: ignore[type-var]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_options(part: Any) -> None:
    """Each option by its own rule. Raises `ConfigError`, which names the option and the rule."""
    for known in fields(part):
        value = getattr(part, known.name)
        if not _fits(known, value):
            raise ConfigError(f"{known.name} must be {rule_in_words(known)}, is {shown(known, value)}")


def rule_in_words(known: Field[Any]) -> str:
    """As what follows "must be"; empty for an option that may be anything of its type."""
    rule = _rule(known)
    if isinstance(known.default, bool):
        return ""
    if isinstance(known.default, int | float):
        most = f"{_most(known):.16g}"
        return f"more than 0 and at most {most}" if rule.positive else f"in [{rule.least:.16g}, {most}]"
    if rule.choices:
        return f"{', '.join(rule.choices[:-1])} or {rule.choices[-1]}"
    return rule.form or ("a text that is not blank" if rule.given else "")


def shown(known: Field[Any], value: object) -> str:
    return written(value) if known.repr else "something else"  # never print a secret


def written(value: object) -> str:
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # more digits or levels than Python writes
        return f"{type(value).__name__} of a size that cannot be shown"


def _rule(known: Field[Any]) -> Rule:
    return known.metadata.get("rule", Rule())  # type: ignore[no-any-return]


def _most(known: Field[Any]) -> float:
    most = _rule(known).most
    if most is not None:
        return most
    if isinstance(known.default, int):
        return LARGEST_INT
    return LARGEST_TIME_S if known.name.endswith("_s") and not known.name.endswith("_per_s") else LARGEST_FLOAT


def _fits(known: Field[Any], value: Any) -> bool:
    rule = _rule(known)
    if isinstance(known.default, int | float) and not isinstance(known.default, bool):
        return bool(rule.least <= value <= _most(known)) and not (rule.positive and value == 0)  # NaN neither
    if not isinstance(known.default, str):
        return True
    if rule.choices:
        return value in rule.choices
    if rule.pattern:
        return value == known.default or re.fullmatch(rule.pattern, value) is not None
    return bool(value.strip()) or not rule.given
