"""What a producer tells a reader of a request, and what an operator can choose.

Both come from outside: whoever calls vLLM's API chooses `kv_transfer_params`. So `Ticket.decode` accepts any object,
and returns None for all but a whole ticket. Then the reader recomputes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

KEY = "verified_kv"  # in kv_transfer_params, and in kv_connector_extra_config
VERSION = 1
SECRET_CHARACTERS = 32
MAX_TEXT = 255  # characters of a host or a layout
MAX_RANKS = 1024
MAX_TOKENS = 1 << 28


@dataclass(frozen=True, slots=True)
class Ticket:
    secret: str  # 32 lower-case hexadecimal digits; it can be shown once
    layout: str  # `BlockDigests.layout` of the producer
    num_tokens: int  # that the producer has computed of the request
    addresses: tuple[tuple[str, int], ...]  # host and port of each rank's `DigestServer`

    def encode(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "secret": self.secret,
            "layout": self.layout,
            "num_tokens": self.num_tokens,
            "addresses": [list(address) for address in self.addresses],
        }

    @classmethod
    def decode(cls, content: object) -> Ticket | None:
        if not isinstance(content, Mapping) or content.get("version") != VERSION:
            return None
        secret, layout, num_tokens = (content.get(name) for name in ("secret", "layout", "num_tokens"))
        if not _is_text(secret, SECRET_CHARACTERS) or len(secret) != SECRET_CHARACTERS or set(secret) - _HEX:
            return None
        if not _is_text(layout, MAX_TEXT) or not _is_number(num_tokens, MAX_TOKENS):
            return None
        addresses = content.get("addresses")
        if not isinstance(addresses, list | tuple) or not 0 < len(addresses) <= MAX_RANKS:
            return None
        if not all(map(_is_address, addresses)):
            return None
        return cls(secret, layout, num_tokens, tuple((host, port) for host, port in addresses))


_HEX = frozenset("0123456789abcdef")


def _is_text(value: object, most: int) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= most


def _is_number(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= most


def _is_address(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and _is_text(value[0], MAX_TEXT)
        and _is_number(value[1], 65535)
    )


@dataclass(frozen=True, slots=True)
class Options:
    """`"verified_kv": {...}` in kv_connector_extra_config. Raises `ValueError`."""

    inner: str = "NixlConnector"  # vLLM's name of the connector that moves the blocks
    inner_module_path: str = ""  # its module, if vLLM does not know the name
    required: bool = True  # refuse what cannot be verified; else the inner connector works alone, with a warning
    every: int = 1  # verify each n-th request of a producer; readers need the same number
    timeout_s: float = 10.0  # a reader waits this long for digests, then recomputes
    host: str = ""  # where readers reach a producer; empty = VLLM_NIXL_SIDE_CHANNEL_HOST
    port: int = 0  # of rank 0, the next ones follow; 0 = any free port

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ValueError(f"{KEY}: {field.name} must be a {kind.__name__}, is {value!r}")
        if self.every < 1 or not 0.0 < self.timeout_s <= 600.0 or not 0 <= self.port < 65536 or not self.inner:
            raise ValueError(f"{KEY}: an option is out of range: {self}")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Options:
        chosen = extra_config.get(KEY, {})
        if not isinstance(chosen, Mapping):
            raise ValueError(f"{KEY} must be a table of options, is {chosen!r}")
        if unknown := set(chosen) - {field.name for field in fields(cls)}:
            raise ValueError(f"{KEY} has no option {min(unknown)}")
        return cls(**chosen)
