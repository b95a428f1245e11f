"""Digests travel to whoever shows their ticket, and no client of the socket costs more than its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest

from verified_kv import exchange
from verified_kv.digests import Pending
from verified_kv.exchange import DigestFetcher, DigestServer, LoopThread
from verified_kv.ticket import Ticket

SECRET, OTHER = "a" * 32, "b" * 32
DIGESTS = [bytes([number]) * 16 for number in range(3)]
PENDING = Pending(DIGESTS)
LONG_S, SHORT_S = 60.0, 0.05


class OnADevice(Pending):
    """Digests that are there only for the caller that waits."""

    def poll(self) -> None:
        return None

    def wait(self) -> list[bytes]:
        return DIGESTS


@contextlib.asynccontextmanager
async def served(timeout_s: float = LONG_S) -> AsyncIterator[tuple[DigestServer, tuple[str, int]]]:
    server = DigestServer(timeout_s)
    port = await server.start("127.0.0.1", 0)
    yield server, ("127.0.0.1", port)
    assert server._serving is not None
    server._serving.cancel()
    await asyncio.wait([server._serving])
    while server._open:
        await asyncio.sleep(0)


async def fetched(address: tuple[str, int], secret: str = SECRET, num: int = 3, needed: int = 3) -> Any:
    return await DigestFetcher(LONG_S).fetch(address, secret, num, needed)


async def test_each_reader_gets_as_much_of_the_answer_as_it_needs_until_the_lease_ends() -> None:
    async with served(SHORT_S) as (server, address):
        await server.publish(SECRET, PENDING)
        assert await fetched(address, needed=2) == DIGESTS[:2]
        assert await fetched(address) == DIGESTS
        server.retire(SECRET)
        while server._kept:
            await asyncio.sleep(SHORT_S)
        assert server._num_kept_bytes == 0
    async with served() as (server, address):
        server._drop(SECRET)
        assert await fetched(address) is None  # at once
        await server.publish(SECRET, PENDING)  # late, by a device
        assert not server._kept


async def test_readers_that_come_first_wait() -> None:
    async with served() as (server, address):
        readers = [asyncio.create_task(fetched(address)) for _ in range(2)]
        while [connection.secret for connection in server._open] != [SECRET, SECRET]:
            await asyncio.sleep(0)
        await server.publish(OTHER, PENDING)
        await server.publish(SECRET, OnADevice())
        assert await asyncio.gather(*readers) == [DIGESTS, DIGESTS]


async def test_digests_that_fail_are_no_answer_and_nobody_waits_for_them() -> None:
    class Failing(OnADevice):
        def wait(self) -> list[bytes]:
            raise RuntimeError("CUDA error")

    async with served() as (server, address):
        await server.publish(SECRET, Failing())
        assert await fetched(address) is None


@pytest.mark.parametrize(("num", "needed"), [(2, 2), (4, 3)])
async def test_another_number_of_digests_is_no_answer(num: int, needed: int) -> None:
    async with served() as (server, address):
        await server.publish(SECRET, PENDING)
        assert await fetched(address, num=num, needed=needed) is None


async def test_digests_go_with_their_lease_and_the_oldest_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_KEPT_BYTES", 120)  # two answers of 52 bytes
    async with served(SHORT_S) as (server, _):
        for secret in (SECRET, OTHER, "c" * 32):
            await server.publish(secret, PENDING)
        assert list(server._kept) == [OTHER, "c" * 32]
        server.retire(OTHER)
        while OTHER in server._kept:
            await asyncio.sleep(SHORT_S)
        assert (list(server._kept), server._num_kept_bytes) == (["c" * 32], 52)


@pytest.mark.parametrize("sent", [b"", b"a" * 31, b"\xff" * 32, b"GET / HTTP/1.1\r\n" * 1000, b"\0" * 100_000])
async def test_a_client_with_other_bytes_gets_none_and_leaves_nothing_behind(sent: bytes) -> None:
    async with served(SHORT_S) as (server, address):
        await server.publish(SECRET, PENDING)
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            assert await reader.read() == b""
        writer.close()
        while server._open:
            await asyncio.sleep(SHORT_S)
        assert list(server._kept) == [SECRET]


async def test_strangers_keep_no_reader_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose their places to whoever comes, when they go, and soon if they show no secret."""
    monkeypatch.setattr(exchange, "MAX_CONNECTIONS", 4)
    async with served() as (server, address):
        strangers = [await asyncio.open_connection(*address) for _ in range(2)]
        for _, writer in strangers:
            writer.write(OTHER.encode())
        while [connection.secret for connection in server._open] != [OTHER, OTHER]:
            await asyncio.sleep(0)
        await server.publish(SECRET, PENDING)
        assert await fetched(address) == DIGESTS
        with contextlib.suppress(ConnectionError):
            assert await strangers[0][0].read() == b""
        assert [connection.secret for connection in server._open] == [OTHER]
        strangers[1][1].close()
        while server._open:
            await asyncio.sleep(0)
        monkeypatch.setattr(exchange, "SECRET_TIMEOUT_S", SHORT_S)
        silent, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionError):
            assert await silent.read() == b""
        for _, one in [*strangers, (silent, writer)]:
            one.close()


async def test_connections_take_at_most_half_of_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 1024))
    assert DigestServer(LONG_S)._max_connections == 10


async def test_fetches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_FETCHES", 1)
    async with served() as (server, address):
        fetcher = DigestFetcher(LONG_S)
        waiting = asyncio.create_task(fetcher.fetch(address, SECRET, 3, 3))
        while not server._open:
            await asyncio.sleep(0)
        assert await fetcher.fetch(address, OTHER, 3, 3) is None
        await server.publish(SECRET, PENDING)
        assert await waiting == DIGESTS


async def test_an_address_that_never_answers_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_SLOW_ADDRESSES", 1)
    now = 0.0
    async with served() as (server, address), served() as (_, another):
        fetcher = DigestFetcher(SHORT_S, lambda: now)
        for _ in range(exchange.MAX_TIMEOUTS):
            assert await fetcher.fetch(address, SECRET, 3, 3) is None
        await server.publish(SECRET, PENDING)
        fetcher._timeout_s = LONG_S
        assert await fetcher.fetch(address, SECRET, 3, 3) is None
        now = exchange.PAUSE_S
        assert await fetcher.fetch(address, SECRET, 3, 3) == DIGESTS
        fetcher._timeout_s = SHORT_S
        for one in (address, another):
            assert await fetcher.fetch(one, OTHER, 3, 3) is None
        assert list(fetcher._slow) == [another]


def test_a_loop_stops_whether_or_not_its_thread_lives() -> None:
    loop, dead = LoopThread(), LoopThread()
    waiting = loop.submit(asyncio.sleep(LONG_S))
    dead.post(dead._loop.stop)
    dead._thread.join()
    for one in (loop, loop, dead):
        one.stop()
        assert one._loop.is_closed()
    assert waiting.cancelled()


@pytest.mark.parametrize("answer", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x03" + b"x" * 47, None])
async def test_a_producer_that_answers_wrongly_or_never_is_no_answer(answer: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(SECRET))
        if answer is None:
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until the client gives up
        writer.write(answer or b"")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        fetcher = DigestFetcher(LONG_S if answer is not None else SHORT_S)
        assert await fetcher.fetch(address, SECRET, 3, 3) is None
        assert fetcher._num_fetches == 0
    assert await fetcher.fetch(address, SECRET, 3, 3) is None  # and one that has ended


def test_of_what_a_client_calls_a_ticket_only_a_whole_one_is_one() -> None:
    ticket = Ticket(SECRET, "xxh3-0", 70, OTHER, (("127.0.0.1", 1), ("::1", 65535)))
    wire = ticket.encode()
    assert Ticket.decode(wire) == ticket
    odd: list[Any] = [None, True, -1, 0, 1.5, 1 << 40, {}, "", "A" * 32, "g" * 32, "x" * 300]
    odd += [[], [[]], [["127.0.0.1", 0]], [["127.0.0.1"]], [["localhost", 1]]]
    for name in wire:
        for value in odd:
            if wire[name] != value and not (name == "layout" and value in ("A" * 32, "g" * 32)):
                assert Ticket.decode(wire | {name: value}) is None, (name, value)
        assert Ticket.decode({key: value for key, value in wire.items() if key != name}) is None
    assert [Ticket.decode(content) for content in [*odd, "", 1]] == [None] * (len(odd) + 2)
