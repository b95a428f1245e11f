"""Every exchange ends, whatever the other side sends or does not send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from conformance.http_exchange import Call, End, Endpoint, exchange

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.asynccontextmanager
async def server(*pieces: bytes, closes: bool = True, endless: bytes = b"") -> AsyncIterator[Endpoint]:
    """Sends these pieces to whoever connects, and `endless` again and again."""
    answering: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(cast("asyncio.Task[None]", asyncio.current_task()))
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while endless:
                writer.write(endless)
                await writer.drain()
            if not closes:
                await reader.read()
        writer.close()

    started = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with started:
        yield Endpoint("127.0.0.1", started.sockets[0].getsockname()[1], tls=False)
    await asyncio.gather(*answering)


@pytest.mark.parametrize(
    ("pieces", "end", "body"),
    [
        ((HEAD, b"content-length: 3\r\n\r\nab", b"c"), End.COMPLETE, b"abc"),
        ((HEAD, b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"0\r\n\r\n"), End.COMPLETE, b"a"),
        ((HEAD, b"\r\nab"), End.COMPLETE, b"ab"),  # until the connection closes
        ((b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, b"content-length: 1\r\n\r\na"), End.COMPLETE, b"a"),
        ((HEAD, b"content-length: 3\r\n\r\nab"), End.CUT, b"ab"),
        ((HEAD, b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"), End.CUT, b"a"),
        ((), End.CUT, b""),
        ((b"220 smtp\r\n",), End.MALFORMED, b""),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), End.CUT, b""),
        ((HEAD + b"content-length: 1\r\n\r\na" + HEAD + b"content-length: 1\r\n\r\nb",), End.MALFORMED, b"a"),
        ((HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",), End.MALFORMED, b""),
        ((b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",), End.MALFORMED, b""),
    ],
)
async def test_an_answer_ends_as_it_was_sent(pieces: tuple[bytes, ...], end: End, body: bytes) -> None:
    async with server(*pieces) as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert (reply.end, bytes(reply.body)) == (end, body)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 100])
async def test_events_are_counted_however_they_are_cut(size: int) -> None:
    body = b"data: a\n\ndata:data: b\n\n"
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    async with server(HEAD, b"transfer-encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n") as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert (reply.end, reply.num_events) == (End.COMPLETE, 3)


@pytest.mark.parametrize("cut_at", range(1, 43))
async def test_a_reset_at_each_byte_is_no_answer(cut_at: int) -> None:
    async with server((HEAD + b"content-length: 5\r\n\r\nabcde")[:cut_at]) as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0)
    assert reply.end is End.CUT


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (HEAD + b"a: ", b"x" * 9000),
        (HEAD, b"a: b\r\n" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        (HEAD + b"\r\n", b"x" * 9000),
        (HEAD + b"\r\n", b"data: {}\n\n" * 1000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;a=", b"x" * 9000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000),
    ],
)
async def test_what_has_no_end_is_left(begin: bytes, endless: bytes) -> None:
    async with server(begin, endless=endless) as endpoint:
        reply = await exchange(endpoint, Call("/", max_reply_bytes=100_000), 10.0)
    assert reply.end is End.TOO_LARGE
    assert len(reply.body) <= 100_000 + (1 << 16)


async def test_a_silent_server_is_left() -> None:
    async with server(HEAD, b"content-length: 5\r\n\r\nab", closes=False) as endpoint:
        reply = await exchange(endpoint, Call("/"), 0.05)
    assert (reply.end, bytes(reply.body)) == (End.LATE, b"ab")


async def test_nobody_there_and_enough_seen_are_ends_too() -> None:
    async with server(HEAD, b"content-length: 5\r\n\r\nab", closes=False) as endpoint:
        reply = await exchange(endpoint, Call("/"), 10.0, lambda reply: len(reply.body) == 2)
        assert reply.end is End.LEFT
    assert (await exchange(endpoint, Call("/"), 10.0)).end is End.UNREACHABLE


def test_an_address_is_read_or_refused() -> None:
    assert Endpoint.parse("https://[::1]:9/a/v1/") == Endpoint("::1", 9, tls=True, path="/a")
    assert b"\r\nhost: [::1]:9\r\n" in Call("/").encode(Endpoint.parse("https://[::1]:9"))
    assert Endpoint.parse("host").url == "http://host:80"
    for wrong in ("ftp://a", "http://", "http://a b", "http://a:x", "http://a..b", "a\r\nx: y"):
        with pytest.raises(ValueError, match=r"."):
            Endpoint.parse(wrong)
    with pytest.raises(ValueError, match="printable"):
        Endpoint.parse("http://a", key="a\r\nb")
