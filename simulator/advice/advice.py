"""Should a fleet split into prefill and decode pools? An answer with an error band, and "undecided" is one.

1. every shape of the GPUs gets its goodput with the costs as they are
2. the best undivided ones and the best splits are asked again in each scenario: a way in which the model may err
3. the verdict compares them within each scenario, because an error of the costs changes both
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from simulator.advice.goodput import AdviceRefused, Goodput, Load, Search, Slo, Trial
from simulator.advice.shapes import CostModel, Scenario, Shape, highest_rate, split_shapes, undivided_shapes
from simulator.replay.replay_result import WANTED_ATTAINMENT

MIN_REQUESTS = 100  # requests of a log that `tandem advise` answers from, at least; beyond: `AdviceRefused`
MAX_GPUS = 1024  # GPUs that `tandem advise` is asked about; beyond: `AdviceRefused`
MAX_SIMULATED = 16  # GPUs; a larger fleet is asked as equal groups
MIN_GROUP = 8
NUM_FINALISTS = 2  # splits; of undivided workers the best of each token budget
HOPELESS = 0.85  # a shape that misses at this share of the best goodput of its kind is not searched further
LEAST_GAIN = 0.05  # a split that gains less is not worth its second pool
SPARSE_HITS = 0.01  # a lower share of cached tokens changes nothing

NOMINAL = Scenario("as modelled")
SCENARIOS = (
    Scenario("another stretch of the log", seed=1),
    Scenario("a third stretch of the log", seed=2),
    Scenario("prompts hide half the reading of weights", overlap=0.5),
    Scenario("prompts take longer", prompt=1.0),
    Scenario("prompts take less time", prompt=-1.0),
    Scenario("decodes take longer", decode=1.0),
    Scenario("decodes take less time", decode=-1.0),
    Scenario("wide workers gain less", wide=1.0),
    Scenario("wide workers gain more", wide=-1.0),
    Scenario("a quarter of the link's speed", link=0.25),
    Scenario("half the cache hits", hits=0.5),
)


class Verdict(Enum):
    SPLIT = "split"
    DO_NOT_SPLIT = "do not split"
    UNDECIDED = "undecided"
    NEITHER = "neither"  # no shape keeps the limits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A shape. Goodputs are requests/s of all GPUs."""

    shape: Shape
    goodput: float
    beyond: Trial
    is_bound: bool = False  # the goodput is below this, and was not searched further
    low: float | None = None  # over the scenarios; None: the shape was not asked again
    high: float | None = None
    tried: tuple[tuple[float, float], ...] = ()  # rate and attainment as modelled, by rising rate


@dataclass(frozen=True, slots=True)
class Contest:
    """The best undivided shape and the best split in one scenario."""

    scenario: str
    undivided: float
    split: float

    @property
    def gain(self) -> float:
        """Of the split, as a share of the undivided goodput."""
        if self.undivided > 0.0:
            return self.split / self.undivided - 1.0
        return float("inf") if self.split > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    candidates: tuple[Candidate, ...]  # the best first
    contests: tuple[Contest, ...]  # the first is NOMINAL
    num_groups: int  # equal parts of the fleet; shapes are those of one part
    num_trials: int

    @property
    def verdict(self) -> Verdict:
        if len(self.without_answer) == len(self.contests):
            return Verdict.NEITHER
        if self.without_answer:
            return Verdict.UNDECIDED
        gains = [contest.gain for contest in self.contests]
        if min(gains) > LEAST_GAIN:
            return Verdict.SPLIT
        return Verdict.DO_NOT_SPLIT if max(gains) < LEAST_GAIN else Verdict.UNDECIDED

    @property
    def without_answer(self) -> list[Contest]:
        """Those in which no shape keeps the limits: they compare nothing."""
        return [contest for contest in self.contests if not contest.undivided and not contest.split]

    @property
    def worst(self) -> Contest:
        """For the split."""
        return min(self.contests, key=lambda contest: contest.gain)

    @property
    def best(self) -> Contest:
        return max(self.contests, key=lambda contest: contest.gain)

    def best_of(self, *, is_split: bool) -> Candidate | None:
        """By goodput as modelled; None: no such shape can be built."""
        return next((one for one in self.candidates if one.shape.is_split is is_split and not one.is_bound), None)


def advise(
    load: Load, model: CostModel, slo: Slo, num_gpus: int, on_progress: Callable[[int], None] = lambda _: None
) -> Advice:
    """`on_progress` gets the number of trials so far. Raises `AdviceRefused`."""
    if len(load.jobs) < MIN_REQUESTS:
        raise AdviceRefused(
            f"{load.name} has {len(load.jobs)} requests, at least {MIN_REQUESTS} are needed: give a longer log, or let "
            "--requests read more of it"
        )
    group = group_of(num_gpus)
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in load.jobs)
    width = max((width for width in model.widths if width <= group), default=1)
    if longest > width * model.pool_tokens:
        raise AdviceRefused(
            f"a request of {longest:,} tokens does not fit into the KV of the widest worker, {width} GPUs with "
            f"{width * model.pool_tokens:,} tokens"
        )
    search = Search(load, model, slo)
    splits = list(split_shapes(group, model, search.mean, slo.tpot_s))
    undivided = list(undivided_shapes(group, model, search.mean))
    if not splits or not undivided:
        widths = ", ".join(str(width) for width in model.widths)
        raise AdviceRefused(f"no undivided fleet and no split of {group} GPUs can be built of workers of {widths} GPUs")
    found: list[Candidate] = []
    for shapes in (undivided, splits):
        found += _survey(search, shapes, on_progress)
    finalists = _finalists(found)
    scenarios = [scenario for scenario in SCENARIOS if _matters(scenario, search, finalists)]
    goodputs: dict[str, dict[Shape, float]] = {NOMINAL.name: {one.shape: one.goodput for one in finalists}}
    for scenario in scenarios:
        goodputs[scenario.name] = {}
        for one in finalists:
            goodputs[scenario.name][one.shape] = search.goodput(one.shape, scenario, one.goodput or None).rate
            on_progress(search.num_trials)
    num_groups = num_gpus // group
    candidates = [
        _banded(one, [by_shape.get(one.shape) for by_shape in goodputs.values()], num_groups) for one in found
    ]
    candidates.sort(key=lambda one: (one.is_bound, -one.goodput))
    contests = tuple(
        Contest(name, *(num_groups * _best(by_shape, is_split) for is_split in (False, True)))
        for name, by_shape in goodputs.items()
    )
    return Advice(tuple(candidates), contests, num_groups, search.num_trials)


def group_of(num_gpus: int) -> int:
    """GPUs of each of the equal groups that are asked as one. Raises `AdviceRefused`."""
    if not 2 <= num_gpus <= MAX_GPUS:
        raise AdviceRefused(f"the number of GPUs must be in [2, {MAX_GPUS}], is {num_gpus}")
    if num_gpus <= MAX_SIMULATED:
        return num_gpus
    for group in range(MAX_SIMULATED, MIN_GROUP - 1, -1):
        if num_gpus % group == 0:
            return group
    raise AdviceRefused(
        f"more than {MAX_SIMULATED} GPUs are asked as equal groups of {MIN_GROUP} to {MAX_SIMULATED}: "
        f"{num_gpus} has no such divisor"
    )


def _survey(search: Search, shapes: Iterable[Shape], on_progress: Callable[[int], None]) -> list[Candidate]:
    """The goodput of each shape of one kind; of a hopeless one a bound alone."""
    found: list[Candidate] = []
    best = 0.0
    by_promise = sorted(shapes, key=lambda one: -highest_rate(one, search.model, search.mean, search.slo.tpot_s))
    for shape in by_promise:
        on_progress(search.num_trials)
        if best:
            trial = search.trial(shape, NOMINAL, HOPELESS * best)
            if trial.attainment < WANTED_ATTAINMENT:
                found.append(Candidate(shape, HOPELESS * best, trial, is_bound=True))
                continue
        goodput: Goodput = search.goodput(shape, NOMINAL, best or None)
        best = max(best, goodput.rate)
        found.append(Candidate(shape, goodput.rate, goodput.beyond, tried=goodput.tried))
    return found


def _finalists(found: Iterable[Candidate]) -> list[Candidate]:
    searched = sorted((one for one in found if not one.is_bound), key=lambda one: -one.goodput)
    undivided: dict[int, Candidate] = {}
    for one in searched:
        if not one.shape.is_split:
            undivided.setdefault(one.shape.max_step_tokens, one)
    return [*undivided.values(), *[one for one in searched if one.shape.is_split][:NUM_FINALISTS]]


def _matters(scenario: Scenario, search: Search, finalists: Iterable[Candidate]) -> bool:
    if scenario.wide:
        return len({width for one in finalists for width in (one.shape.width, one.shape.decode_width)}) > 1
    if scenario.hits < 1.0:
        return search.mean.num_cached_tokens > SPARSE_HITS * search.mean.num_prompt_tokens
    return True


def _best(goodputs: dict[Shape, float], is_split: bool) -> float:
    return max((goodput for shape, goodput in goodputs.items() if shape.is_split is is_split), default=0.0)


def _banded(one: Candidate, goodputs: list[float | None], num_groups: int) -> Candidate:
    known = [num_groups * goodput for goodput in goodputs if goodput is not None]
    low, high = (min(known), max(known)) if known else (None, None)
    tried = tuple((num_groups * rate, attainment) for rate, attainment in one.tried)
    return Candidate(one.shape, num_groups * one.goodput, one.beyond, one.is_bound, low, high, tried)
