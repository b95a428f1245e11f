"""Tokens that the device samples, beside numpy's from the same float32 logits: every parameter, ties and barred tokens.

The cases are those of tests/unit/engine/gpu/sampling_cases.py. A draw on the border of two tokens may take either.
"""

from __future__ import annotations

from benchmarks.gpu_sections.section import Section
from benchmarks.report import Line
from tests.unit.engine.gpu.sampling_cases import by_numpy, differing, on_device, some_case

CASES = [(259, 200, 4), (128_256, 24, 4)]  # (vocabulary, rows of a case, cases)
TINY_CASES = [(259, 8, 1)]
CASE_S = 2.0


def run(section: Section) -> None:
    for vocab, num_rows, num_cases in TINY_CASES if section.rehearse else CASES:
        name = f"sampling, vocabulary of {vocab:,}"
        num_compared = num_differing = 0
        for seed in range(num_cases):
            if not section.has_time_for(CASE_S if not section.rehearse else 0, f"{name}, case {seed}"):
                break
            case = some_case(seed, num_rows, vocab)
            found, _ = on_device(case, section.device)
            num_differing += len(differing(case, found, by_numpy(case)))
            num_compared += num_rows
        section.add(Line(f"{name}: tokens that differ from numpy's, of {num_compared:,}", num_differing, "", most=0))
