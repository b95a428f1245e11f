"""The output of `tandem explain` where a worker would read a prefix from a peer."""

from __future__ import annotations

from tandem_client.stubs.cluster_pb2 import Candidate
from tests.unit.cli.test_explain import ALONE, PAIR, Router, lines_of

READS = Candidate(source="decode-0.0123456789abcdef", read_tokens=64, read_ms=14.25)


async def test_a_source_is_shown_with_the_time_of_its_read() -> None:
    reading = Candidate()
    reading.CopyFrom(PAIR)
    reading.MergeFrom(READS)
    lines = await lines_of(Router(reading, ALONE))
    assert "prefill decode cached new queue prefill transfer room gap first cost read" in lines
    assert "* prefill-0 decode-1 64 16 12.3 20.5 3.2 1500 1.5 x 4 34.8 1542 decode-0 14.2" in lines
    assert "- decode-1 0 80 0.0 80.5 0.0 0.0 0.0 x 0 0.0 1600 -" in lines
