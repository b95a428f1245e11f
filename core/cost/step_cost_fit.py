"""The step cost of a worker, fitted online to the steps that it has run.

    minimise  sum over steps of weight x ((predicted - measured) / measured)^2
              + prior weight x sum over coefficients of (coefficient / prior - scale)^2 / scale^2     (about)

`scale` is the one factor by which the prior fits all steps best. Terms that the steps cannot separate, such as
the cost of prompts while only decodes run, therefore keep the proportions of the prior. The weight of the prior grows
with the scatter of the steps: on a busy machine, a few steps cannot separate the cost of a decode from that of a step.

    - Steps of similar work share a bin. Each new step of a bin lowers the weight of the older ones there, so a thousand
      decodes do not make the fit forget the one prompt before them.
    - A step that takes far longer or shorter than its bin had suggested counts as MAX_SURPRISE times the prediction.
    - After SURPRISES_OF_A_CHANGE of them in a row, the worker itself has changed: steps count as measured, and earlier
      steps lose most of their weight.
"""

from __future__ import annotations

from dataclasses import astuple

from core.cost.step_cost import PRIOR, StepCost, StepWork

PRIOR_SPREAD = 0.7  # a coefficient is so far from scale x prior, relatively; prior weight = (scatter / spread)^2
EXPECTED_SCATTER = 0.1  # of a step, relative to its prediction, as long as few steps are known
EXPECTED_STEPS = 5.0  # ... as if so many steps had shown it
SCALE_WEIGHT = 1e-12  # of scale = 1
DECAY = 0.97  # of the weight of a step, at each later step of its bin
MAX_SURPRISE = 1.5
MIN_SURPRISE_WEIGHT = 3.0  # a bin with fewer steps suggests nothing
SURPRISES_OF_A_CHANGE = 5
KEPT_AT_A_CHANGE = 0.25  # of all weights, at each surprise from then on
FULL_WEIGHT = 15.0  # of a bin; from then on, every LEARNED_OF_FULL-th step is learned, which saves time
LEARNED_OF_FULL = 5
STEPS_PER_SOLUTION = 8  # after EARLY_STEPS
EARLY_STEPS = 32
MIN_SECONDS = 1e-6

_N = 5  # coefficients
_PAIRS = [(row, column) for row in range(_N) for column in range(row, _N)]

# Of one bin: the upper triangle of the normal matrix, the right side, the measured square, and the weight of the steps.
_Sums = list[float]


class StepCostFit:
    """A coefficient that is 0 in the prior stays 0."""

    def __init__(self, prior: StepCost = PRIOR) -> None:
        self.cost = prior
        self._prior: tuple[float, ...] = astuple(prior)
        self._ratios = [1.0] * _N  # of the coefficients to those of the prior
        self._bins: dict[tuple[int, int, int], _Sums] = {}
        self._num_steps = 0  # learned since the start, or since the worker has changed
        self._num_passed = 0  # of full bins
        self._num_surprises = 0  # in a row; negative = shorter than predicted

    def record(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that has taken `seconds`."""
        key, seconds = _bin_of(work), max(seconds, MIN_SECONDS)
        predicted = self.cost.seconds(work)
        weight = self._bins[key][-1] if key in self._bins else 0.0
        if weight >= MIN_SURPRISE_WEIGHT:
            seconds = self._limited(seconds, predicted)
        if weight >= FULL_WEIGHT and abs(self._num_surprises) < 2:
            self._num_passed += 1
            if self._num_passed % LEARNED_OF_FULL:
                return
        self._learn(key, work, seconds, predicted)

    def _learn(self, key: tuple[int, int, int], work: StepWork, seconds: float, predicted: float) -> None:
        sums = self._bins.get(key)
        # Relative to the prediction, the noise of the steps cancels out. A step far above it counts as twice its unit.
        # A step far below it stays small: relative to its own duration, its row would outweigh all others.
        unit = max(predicted, seconds / 2.0)
        step_s, sequence_s, context_s, token_s, pair_s = self._prior
        terms = (
            step_s / unit,
            work.num_decodes * sequence_s / unit,
            work.decode_context * context_s / unit,
            work.prefill_tokens * token_s / unit,
            work.attended_pairs * pair_s / unit,
        )
        measured = seconds / unit
        row = [terms[i] * terms[j] for i, j in _PAIRS]
        row += [term * measured for term in terms]
        row += [measured * measured, 1.0]
        self._bins[key] = row if sums is None else [DECAY * known + new for known, new in zip(sums, row, strict=True)]
        self._num_steps += 1
        must_solve = self._num_steps <= EARLY_STEPS or sums is None or self._num_surprises != 0
        if must_solve or self._num_steps % STEPS_PER_SOLUTION == 0:
            self._solve()

    def _limited(self, seconds: float, predicted: float) -> float:
        """`seconds`, limited to a factor of MAX_SURPRISE from the duration that the bin of the step predicts."""
        shortest, longest = predicted / MAX_SURPRISE, predicted * MAX_SURPRISE
        if shortest <= seconds <= longest:
            self._num_surprises = 0
            return seconds
        direction = 1 if seconds > longest else -1
        self._num_surprises = direction + (self._num_surprises if self._num_surprises * direction > 0 else 0)
        if abs(self._num_surprises) < SURPRISES_OF_A_CHANGE:
            return min(max(seconds, shortest), longest)
        for key, sums in self._bins.items():
            self._bins[key] = [KEPT_AT_A_CHANGE * known for known in sums]
        self._num_steps = 0
        return seconds

    def _solve(self) -> None:
        totals = [sum(column) for column in zip(*self._bins.values(), strict=True)]
        self._ratios = _solution(totals, self._ratios, EXPECTED_SCATTER**2)
        scatter = _scatter_of(totals, self._ratios)
        if scatter > 2.0 * EXPECTED_SCATTER**2:
            self._ratios = _solution(totals, self._ratios, scatter)
        self.cost = StepCost(*(prior * ratio for prior, ratio in zip(self._prior, self._ratios, strict=True)))


def _solution(totals: _Sums, known_ratios: list[float], scatter: float) -> list[float]:
    """The ratios of the coefficients to those of the prior, for steps with this mean square of relative errors."""
    matrix = [[0.0] * _N for _ in range(_N)]
    for (row, column), total in zip(_PAIRS, totals, strict=False):
        matrix[row][column] = matrix[column][row] = total
    right = totals[len(_PAIRS) : len(_PAIRS) + _N]
    scale = (sum(right) + SCALE_WEIGHT) / (sum(map(sum, matrix)) + SCALE_WEIGHT)
    for index, ratio in enumerate(known_ratios):
        weight = scatter / PRIOR_SPREAD**2 / (scale * max(ratio, scale))
        matrix[index][index] += weight
        right[index] += weight * scale
    return _solve_non_negative(matrix, right)


def _scatter_of(totals: _Sums, ratios: list[float]) -> float:
    """The mean square of the relative errors of the steps."""
    errors, num_steps = totals[-2], totals[-1]
    for (row, column), total in zip(_PAIRS, totals, strict=False):
        errors += ratios[row] * ratios[column] * total * (1.0 if row == column else 2.0)
    for ratio, total in zip(ratios, totals[len(_PAIRS) :], strict=False):
        errors -= 2.0 * ratio * total
    expected = EXPECTED_STEPS * EXPECTED_SCATTER**2
    return (max(errors, 0.0) + expected) / (max(num_steps - _N, 0.0) + EXPECTED_STEPS)


def _bin_of(work: StepWork) -> tuple[int, int, int]:
    num_decodes, context, num_tokens, pairs = work
    attended = int((context + pairs) / (num_decodes + num_tokens or 1))  # by a mean token
    return num_decodes.bit_length() // 2, num_tokens.bit_length() // 2, attended.bit_length() // 3


def _solve_non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a positive definite system; what would be negative is 0, and the others are solved without it."""
    free = list(range(len(right)))
    while True:
        values = _solve_free(matrix, right, free)
        if all(value >= 0.0 for value in values):
            break
        free = [index for index, value in zip(free, values, strict=True) if value >= 0.0]
    solution = [0.0] * len(right)
    for index, value in zip(free, values, strict=True):
        solution[index] = value
    return solution


def _solve_free(matrix: list[list[float]], right: list[float], free: list[int]) -> list[float]:
    """Gaussian elimination of the rows and columns `free`; a positive definite matrix needs no pivots."""
    rows = [[matrix[i][j] for j in free] + [right[i]] for i in free]
    for at, pivot in enumerate(rows):
        for row in rows[at + 1 :]:
            factor = row[at] / pivot[at]
            for column in range(at, len(pivot)):
                row[column] -= factor * pivot[column]
    values = [0.0] * len(free)
    for at in range(len(free) - 1, -1, -1):
        row = rows[at]
        known = sum(row[column] * values[column] for column in range(at + 1, len(free)))
        values[at] = (row[-1] - known) / row[at]
    return values
