"""Random rows of logits and parameters, and the tokens of `engine/sampling.py` for these rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from core.request import SamplingParams
from core.step import SampledToken, ScheduledChunk, SequenceView
from engine.gpu.sampling import DeviceSampler
from engine.sampling import Sampler, exponentials, filtered_distribution

EOS = frozenset({2, 5})
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    chunks: list[ScheduledChunk]
    logits: np.ndarray  # float32 [S, vocab]
    promised: dict[str, int]


def some_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(share: float, value: object, otherwise: object) -> object:
        return value if rng.random() < share else otherwise

    options = {
        "temperature": maybe(0.8, float(rng.choice([0.01, 0.3, 0.7, 1.0, 2.5, 50.0])), 0.0),
        "top_k": maybe(0.4, int(rng.choice([1, 2, 7, 40, 500, 2**33])), 0),
        "top_p": maybe(0.4, float(rng.choice([1e-6, 0.2, 0.5, 0.9, 0.999])), 1.0),
        "min_p": maybe(0.3, float(rng.choice([1e-6, 1e-3, 0.1, 0.5, 1.0])), 0.0),
        "repetition_penalty": maybe(0.2, float(rng.choice([0.5, 1.1, 1.8])), 1.0),
        "presence_penalty": maybe(0.2, float(rng.uniform(-2, 2)), 0.0),
        "frequency_penalty": maybe(0.2, float(rng.uniform(-2, 2)), 0.0),
        "seed": int(rng.integers(2**62)),
        "num_logprobs": maybe(0.3, int(rng.integers(0, 21)), None),
        "logit_bias": maybe(0.2, {int(i): float(rng.uniform(-9, 9)) for i in rng.integers(0, 60, 4)}, {}),
        "min_tokens": maybe(0.2, int(rng.integers(0, 20)), 0),
        "stop_token_ids": maybe(0.3, frozenset(rng.integers(0, 60, 3).tolist()), frozenset()),
        "ignore_eos": bool(rng.random() < 0.2),
    }
    return SamplingParams(max_tokens=20, **options)  # type: ignore[arg-type]


def some_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """Peaked to flat, with ties, with tokens of no probability. # float32 [vocab]"""
    logits = rng.normal(0.0, rng.choice([0.0, 0.1, 1.0, 4.0, 20.0]), vocab)
    kind = rng.integers(4)
    if kind == 0:
        logits = logits.round()  # ties
    elif kind == 1:
        logits[rng.random(vocab) < 0.5] = -np.inf
        logits[rng.integers(vocab)] = 1.0
    return logits.astype(np.float32)


def some_chunk(rng: np.random.Generator, name: str, sampling: SamplingParams) -> ScheduledChunk:
    num_prompt, num_output = int(rng.integers(1, 30)), int(rng.integers(0, 15))
    tokens = rng.integers(0, 60, num_prompt + num_output).tolist()
    view = SequenceView(name, tokens, num_prompt, [0], sampling)
    if num_output and rng.random() < 0.5:
        tokens.pop()  # the last token is the promised one
        return ScheduledChunk(view, len(tokens), 1, True, True)
    start = int(rng.integers(0, len(tokens)))
    return ScheduledChunk(view, start, len(tokens) - start, True, False)


def some_case(seed: int, num_rows: int, vocab: int) -> Case:
    rng = np.random.default_rng(seed)
    chunks = [some_chunk(rng, str(row), some_params(rng)) for row in range(num_rows)]
    promised = {c.sequence.sequence_id: int(rng.integers(0, 60)) for c in chunks if c.promised}
    return Case(chunks, np.stack([some_logits(rng, vocab) for _ in chunks]), promised)


def by_numpy(case: Case) -> dict[str, SampledToken]:
    sampled = Sampler(case.chunks, EOS).sample(case.logits, case.promised)
    return {name: token for name, (token,) in sampled.items()}


def on_device(case: Case, device: torch.device = CPU) -> tuple[dict[str, SampledToken], np.ndarray]:
    """The tokens, and the logits after sampling."""
    vocab = case.logits.shape[1]
    sampler = DeviceSampler(vocab, len(case.chunks), device, EOS)
    before = torch.tensor([*case.promised.values(), 0], dtype=torch.int32, device=device)
    rows_before = {name: row for row, name in enumerate(case.promised)}
    logits = torch.from_numpy(case.logits.copy()).to(device)
    plan = sampler.prepare(case.chunks, rows_before)
    sampled = sampler.collect(sampler.sample(logits, plan, before))
    return sampled, logits.cpu().numpy()


def assert_as_numpy(case: Case) -> None:
    """Rounding may move one draw of a row across a border, not more. The logits are as before."""
    found, logits = on_device(case)
    wanted = by_numpy(case)
    assert differing(case, found, wanted) == []
    assert sum(found[name].token_id == wanted[name].token_id for name in wanted) >= len(wanted) - 1
    np.testing.assert_array_equal(logits, case.logits)
    for name, token in wanted.items():
        ours = found[name]
        assert (ours.logprob is None) == (token.logprob is None)
        if token.logprob is not None and ours.token_id == token.token_id:
            assert ours.logprob == pytest.approx(token.logprob, abs=2e-5)
        assert [index for index, _ in ours.top_logprobs] == [index for index, _ in token.top_logprobs]
        for (_, a), (_, b) in zip(ours.top_logprobs, token.top_logprobs, strict=True):
            assert a == pytest.approx(b, abs=2e-5)


def differing(case: Case, found: Mapping[str, SampledToken], wanted: Mapping[str, SampledToken]) -> list[str]:
    """The sequences with another token, whose score is not the best one's but for rounding."""
    return [
        chunk.sequence.sequence_id
        for row, chunk in enumerate(case.chunks)
        if (name := chunk.sequence.sequence_id)
        and found[name].token_id != wanted[name].token_id
        and found[name].token_id not in _within_rounding(case, row)
    ]


def _within_rounding(case: Case, row: int) -> list[int]:
    """The tokens with a score within rounding of the best, for values of top_p one part in a million beside too."""
    chunk, tokens = case.chunks[row], list[int]()

    def draw(adjusted: np.ndarray, sampling: SamplingParams, key: int, allowed: bytes | None = None) -> int:
        assert allowed is None
        for share in (1 - 1e-6, 1.0, 1 + 1e-6):
            filters = replace(sampling, top_p=min(1.0, sampling.top_p * share))
            token_ids, probabilities = filtered_distribution(adjusted, filters)
            with np.errstate(divide="ignore"):
                scores = np.log(probabilities) - np.log(exponentials(key, token_ids))
            rounding = 1e-5 + 1e-6 * float(np.abs(adjusted[np.isfinite(adjusted)]).max()) / sampling.temperature
            tokens.extend(token_ids[scores >= scores.max() - rounding].tolist())
        return tokens[0]

    Sampler([chunk], EOS).sample(case.logits[row : row + 1], case.promised, draw)
    return tokens
