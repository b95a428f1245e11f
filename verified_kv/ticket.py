"""What a producer tells a reader of a request, and what an operator can choose.

Both come from outside: whoever calls vLLM's API chooses `kv_transfer_params`. So `Ticket.decode` accepts any object,
and returns None for all but a whole ticket. Then the reader recomputes.
"""

from __future__ import annotations

import hashlib
import ipaddress
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

KEY = "verified_kv"  # in kv_transfer_params, and in kv_connector_extra_config
VERSION = 1
SECRET_CHARACTERS = 32
MAX_TEXT = 255  # characters of a host or a layout
MAX_RANKS = 1024
MAX_TOKENS = 1 << 28
SKIP = {"version": VERSION, "skip": True}  # instead of a ticket: the request is not in the producer's sample


@dataclass(frozen=True, slots=True)
class Ticket:
    secret: str  # 32 lower-case hexadecimal digits
    layout: str  # `BlockDigests.layout` of the producer
    num_tokens: int  # that the producer has computed of the prompt
    prompt: str  # `prompt_digest` of these tokens
    addresses: tuple[tuple[str, int], ...]  # IP address and port of each rank's `DigestServer`

    def encode(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "secret": self.secret,
            "layout": self.layout,
            "num_tokens": self.num_tokens,
            "prompt": self.prompt,
            "addresses": [list(address) for address in self.addresses],
        }

    @classmethod
    def decode(cls, content: object) -> Ticket | None:
        if not isinstance(content, Mapping) or content.get("version") != VERSION:
            return None
        secret, prompt = content.get("secret"), content.get("prompt")
        if not _is_hexadecimal(secret) or not _is_hexadecimal(prompt):
            return None
        layout, num_tokens = content.get("layout"), content.get("num_tokens")
        if not _is_text(layout, MAX_TEXT) or not _is_number(num_tokens, MAX_TOKENS):
            return None
        addresses = content.get("addresses")
        if not isinstance(addresses, list | tuple) or not 0 < len(addresses) <= MAX_RANKS:
            return None
        if not all(map(_is_address, addresses)):
            return None
        return cls(secret, layout, num_tokens, prompt, tuple((host, port) for host, port in addresses))


def prompt_digest(request: Any, num_tokens: int, secret: str) -> str:
    """32 hexadecimal digits, which name the first `num_tokens` tokens of the prompt and all else that decides their KV.

    `request` is vLLM's. Keyed with the secret of the ticket, so that a ticket says nothing about prompts. Empty if the
    prompt has fewer tokens, or embeddings, which have no name.
    """
    tokens = (request.prompt_token_ids or ())[:num_tokens]
    if len(tokens) < num_tokens or getattr(request, "prompt_embeds", None) is not None:
        return ""
    adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
    features = [
        (feature.identifier, feature.mm_position.offset)
        for feature in getattr(request, "mm_features", None) or ()
        if feature.mm_position.offset < num_tokens
    ]
    digest = hashlib.blake2b(array("q", tokens), digest_size=SECRET_CHARACTERS // 2, key=secret.encode())
    digest.update(repr((adapter, getattr(request, "cache_salt", None), features)).encode())
    return digest.hexdigest()


_HEX = frozenset("0123456789abcdef")


def _is_hexadecimal(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) == SECRET_CHARACTERS and not set(value) - _HEX


def _is_text(value: object, most: int) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= most


def _is_number(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= most


def _is_address(value: Any) -> bool:
    """No name: the resolver's threads are few, and a slow name would hold up all others."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    if not _is_text(value[0], MAX_TEXT) or not _is_number(value[1], 65535):
        return False
    try:
        ipaddress.ip_address(value[0])
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Options:
    """`"verified_kv": {...}` in kv_connector_extra_config. Raises `ValueError`."""

    inner: str = "NixlConnector"  # vLLM's name of the connector that moves the blocks
    inner_module_path: str = ""  # its module, if vLLM does not know the name
    required: bool = True  # refuse what cannot be verified; else the inner connector works alone, with a warning
    every: int = 1  # verify each n-th request of a producer; readers need the same number
    timeout_s: float = 10.0  # a reader waits this long for digests, then recomputes
    host: str = ""  # where readers reach a producer; empty = VLLM_NIXL_SIDE_CHANNEL_HOST
    port: int = 0  # of rank 0, the next ones follow, then those of the next data-parallel engine; 0 = any

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
