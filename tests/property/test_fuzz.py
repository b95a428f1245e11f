"""20,000 odd messages of clients, workers, peers and supervisors break nothing, and the fuzzer sees what would.

Nor does any parser of a client's bytes take long. `costs` measures CPU time, several times before it fails, and fails
at ten times its law alone: no test fails because the machine is busy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from gateway.routes import tokens
from router.operations.cluster_servicer import ClusterServicer
from router.requests.moves import OpenMoves
from tools.fuzz import growing, machines
from tools.fuzz.__main__ import SHARES, Run, fuzz
from tools.fuzz.costs import BUSY_SLACK, Parser, costs
from tools.fuzz.parsers import PARSERS

NUM_MESSAGES = 20_000


def test_no_odd_message_breaks_anything_or_has_an_answer_without_a_type() -> None:
    run = fuzz(NUM_MESSAGES, seed=1)
    assert not run.faults, "\n\n".join(run.faults)
    assert run.outcomes.keys() == SHARES.keys()
    assert sum(outcomes.total() for outcomes in run.outcomes.values()) >= NUM_MESSAGES
    # Messages that are refused at the door alone would prove little.
    assert all(len(outcomes) >= 4 for outcomes in run.outcomes.values()), run.outcomes
    assert min(run.outcomes["http"]["200"], run.outcomes["grpc"]["OK"]) > 100, run.outcomes
    assert {name.rpartition(" ")[0] for name in run.outcomes["costs"]} == PARSERS.keys()
    assert min(run.outcomes["reports"]["taken"], run.outcomes["records"]["kept"]) > 100, run.outcomes


@pytest.mark.parametrize(
    ("surface", "target", "name"),
    [("http", tokens, "check_extra"), ("grpc", ClusterServicer, "GetFleet"), ("reports", OpenMoves, "on_notice")],
)
def test_it_sees_an_unexpected_exception_and_prints_the_command_that_replays_it(
    surface: str, target: Any, name: str
) -> None:
    with patch.object(target, name, side_effect=KeyError("a later version")):
        run = fuzz(300, seed=3, surfaces=(surface,))
        first_batch = re.findall(f"--surface {surface} --seed 3 --first-batch ([0-9]+) --batches 1`", run.faults[0])
        again = fuzz(100, seed=3, surfaces=(surface,), first_batch=int(first_batch[0]))
    assert again.faults


LIMIT = 128 * 1024


def quadratic(text: str) -> Iterator[None]:
    for end in range(0, len(text), 2):
        text[:end].count("]")
    yield


def holding(text: str) -> Iterator[None]:
    """One call, which lets no other thread work."""
    if len(text) > LIMIT // 2:
        sum(range(10_000_000))
    yield


def endless(text: str) -> Iterator[None]:
    for _ in text:
        sum(range(100))
    yield


@pytest.mark.parametrize(
    ("parser", "slack", "fault"),
    [
        (Parser(LIMIT, growing.text, quadratic), BUSY_SLACK, r"a turn: \d{3,} ms"),
        (Parser(LIMIT, growing.text, quadratic, ends_s=100.0), 1.0, "4 times the size takes "),
        (Parser(LIMIT, growing.text, holding, ends_s=100.0), 1.0, "holds the lock: "),
        (Parser(LIMIT, growing.text, endless, ends_s=0.001), BUSY_SLACK, "ends after "),
    ],
)
def test_it_sees_a_parser_that_takes_long(parser: Parser, slack: float, fault: str) -> None:
    with pytest.raises(AssertionError, match=f"^planted: {fault}"):
        costs(random.Random(1), 4, {"planted": parser}, slack)


def test_it_sees_a_record_that_keeps_a_supervisor_from_starting() -> None:
    run = Run(seed=3)
    with patch.multiple("fleet.supervisor.handover", ROLES=frozenset({"decode", "later"}), ServiceRole={}.get):
        run.fuzz_machine("records", machines.records, 1)
    assert run.faults


def test_the_same_seed_sends_the_same_messages() -> None:
    first, again = (fuzz(1_000, seed=5, surfaces=("hand-offs", "reports", "records")) for _ in range(2))
    assert first.outcomes == again.outcomes
