"""How much time the masks of one sequence may take. All sequences of a step wait for its slowest mask.

Time is that of the CPU on the thread that computes: a busy machine makes no grammar slow. A sequence owes what it takes
beyond its allowance, and pays back with each faster mask. So one slow mask does no harm, and many end the sequence.
"""

from __future__ import annotations

from core.errors import InvalidRequest

FIELD = "output_format"
MASK_S = 5e-3  # the allowance of a mask; most take 50 us
FOLLOW_S = 250e-6  # the allowance of a token of the output that is followed; most take 30 us
MAX_CHARGE_S = 0.1  # at once
MAX_DEBT_S = 0.25  # time of a sequence's masks beyond `MASK_S` for each; beyond: it ends alone, with INVALID_ARGUMENT
_STEP_S, _ROW_S = 10e-3, 500e-6  # of a step that needs no clock for each of its rows


class Account:
    """Of one sequence."""

    def __init__(self) -> None:
        self.debt_s = 0.0

    def charge(self, took_s: float, allowed_s: float) -> None:
        self.debt_s = max(0.0, self.debt_s + min(took_s, MAX_CHARGE_S) - allowed_s)

    @property
    def is_over(self) -> bool:
        return self.debt_s > MAX_DEBT_S

    def check(self) -> None:
        """Raises `InvalidRequest` for a sequence whose grammar takes too long."""
        if self.is_over:
            raise InvalidRequest(
                FIELD,
                f"the grammar is too slow for this output: its masks took {MAX_DEBT_S * 1e3:.0f} ms more than "
                f"{MASK_S * 1e3:.0f} ms each",
            )


def has_slow_row(took_s: float, num_rows: int) -> bool:
    """Whether a step took so long that the next one must look at each row."""
    return took_s > _STEP_S + num_rows * _ROW_S
