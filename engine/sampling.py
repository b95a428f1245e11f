"""From logits to tokens, as a pure function of (logits, the request's tokens so far, seed, position).

    logits -> logit_bias -> repetition penalty (prompt and output) -> presence and frequency penalties (output)
           -> -inf for the tokens that the grammar of the output does not allow here
           -> before min_tokens: -inf for the tokens that end the output, unless the grammar allows no others
           -> greedy: the highest logit, ties to the lowest id
           -> else: of the tokens that top_k, top_p and min_p keep, the one with the largest
                    logit / temperature - log(exponential(draw_key(seed, position), token id))

The last term is noise of Gumbel's distribution, so the token has the probability of the filtered softmax (Gumbel,
Statistical Theory of Extreme Values, 1954). Each token has its own noise: logits that differ by rounding, because the
same request was computed in another batch or on another worker, choose another token only where the two best tokens
lie within that rounding.

Reported log-probabilities are the model's: log-softmax of the raw logits, before any of the above.
The code uses numpy only, so the fake runner shares it. `draw_token` is the law of draws:
`engine/quick_draw.py` finds its token without a sort, and C kernels find it in `engine/cpu/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from core.output_grammar import GrammarRow, Grammars, Masks
from core.request import SamplingParams, draw_key
from core.step import SampledToken, ScheduledChunk
from engine.histories import NO_COUNTS, Counts, Histories
from engine.step_queue import NO_TOKENS, PromisedTokens

_LARGEST_QUANTILE = 0.99999994  # the largest float32 below 1
NO_MASKS = Masks()
# For each byte of a mask: inf for a token that is allowed, -inf for another. A lookup takes a third of np.where's time.
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.float32(np.inf), -np.inf
).astype(np.float32)  # [256, 8]


class Draw(Protocol):
    """As `draw_token`."""

    def __call__(
        self, adjusted: np.ndarray, sampling: SamplingParams, key: int, allowed: bytes | None = None
    ) -> int: ...


class Sampler:
    """Samples the tokens of one step. The constructor does everything that needs no logits.

    A chunk with drafts has a row for its last token and for each draft: the row of draft i is a chunk of its own here,
    which ends with this draft.
    """

    def __init__(
        self,
        chunks: Iterable[ScheduledChunk],
        eos_token_ids: frozenset[int] = frozenset(),
        histories: Histories | None = None,
    ) -> None:
        """`histories`: of the sampler of the step before, to count new tokens alone."""
        self._histories = histories or Histories()
        self._sampling = [chunk for chunk in chunks if chunk.samples]
        self.chunks = self._sampling
        self._has_drafts = any(chunk.drafts for chunk in self._sampling)
        if self._has_drafts:
            self.chunks = [row for chunk in self._sampling for row in _rows_of(chunk)]
        self._names = [chunk.sequence.sequence_id for chunk in self.chunks]
        samplings = [chunk.sequence.sampling for chunk in self.chunks]
        late = [row for row, sampling in enumerate(samplings) if sampling.min_tokens]
        # row -> tokens that its sequence must not draw yet
        self._barred = {row: barred for row in late if (barred := barred_tokens(self.chunks[row], eos_token_ids))}
        self._plain = [row for row, sampling in enumerate(samplings) if is_plain_greedy(sampling)]
        self._written = [row for row, sampling in enumerate(samplings) if sampling.grammar]
        if self._barred or self._written:
            special = {*self._barred, *self._written}
            self._plain = [row for row in self._plain if row not in special]
        bare = {row for row in self._plain if samplings[row].num_logprobs is None}
        self._others = [row for row in range(len(self.chunks)) if row not in bare]

    def begin_masks(self, grammars: Grammars | None, promised: PromisedTokens = NO_TOKENS) -> Callable[[], Masks]:
        """As the function of this name."""
        return begin_masks(self._sampling if self._written else (), grammars, promised)

    def sample(
        self,
        logits: np.ndarray,
        promised: PromisedTokens = NO_TOKENS,
        draw: Draw | None = None,
        masks: Masks = NO_MASKS,
    ) -> dict[str, tuple[SampledToken, ...]]:
        """The tokens of each chunk that samples, but for `masks.failed`; row i of `logits` belongs to chunk i of these.

        `promised` has the tokens of the promised chunks, `draw` replaces `draw_token`, and `masks` has what the
        grammars allow.
        # logits: float32 [len(self.chunks), vocab]
        """
        assert len(logits) == len(self.chunks), "one row of logits for each chunk that samples"
        token_ids = [0] * len(logits)
        if len(self._plain) == len(logits) > 0:
            token_ids = logits.argmax(axis=-1).tolist()
        elif self._plain:
            for row, token_id in zip(self._plain, logits[self._plain].argmax(axis=-1).tolist(), strict=True):
                token_ids[row] = token_id
        if not self._others and not self._has_drafts:
            return {name: (SampledToken(token_id),) for name, token_id in zip(self._names, token_ids, strict=True)}
        sampled: dict[str, tuple[SampledToken, ...]] = {}
        others = set(self._others)
        for row, (name, chunk) in enumerate(zip(self._names, self.chunks, strict=True)):
            before = sampled.get(name, ())
            num_drafts = len(chunk.drafts)
            if num_drafts and (len(before) < num_drafts or before[-1].token_id != chunk.drafts[-1]):
                continue  # behind a draft that is not the token of its place
            token = SampledToken(token_ids[row])
            if row in others:
                allowed = masks.allowed.get(name)
                if name in masks.failed or (allowed is not None and len(allowed) <= num_drafts):
                    continue
                token = self._sample_row(
                    logits[row], row, token_ids[row], promised, draw, None if allowed is None else allowed[num_drafts]
                )
            sampled[name] = (*before, token)
        return sampled

    def _sample_row(
        self,
        logits: np.ndarray,
        row: int,
        highest: int,
        promised: PromisedTokens,
        draw: Draw | None,
        allowed: bytes | None,
    ) -> SampledToken:
        chunk = self.chunks[row]
        sampling = chunk.sequence.sampling
        barred = self._barred.get(row, ())
        if is_plain_greedy(sampling) and not barred and allowed is None:
            token_id = highest
        else:
            adjusted, position = self._adjusted(logits, chunk, promised), chunk.start + chunk.num_rows
            token_id = choose_at(adjusted, sampling, position, barred, draw, allowed)
        return with_logprobs(logits, token_id, sampling.num_logprobs)

    def _adjusted(self, logits: np.ndarray, chunk: ScheduledChunk, promised: PromisedTokens) -> np.ndarray:
        """After bias and penalties. # float32 [vocab]"""
        view, start, num_tokens, _, is_promised, drafts = chunk
        if is_plain(view.sampling):
            return logits
        if not has_penalties(view.sampling):
            return adjust(logits, view.sampling)
        end, newest = (start, (promised[view.sequence_id],)) if is_promised else (start + num_tokens, drafts)
        return adjust(logits, view.sampling, self._histories.counts(view, end, newest=newest))


def begin_masks(
    sampling: Iterable[ScheduledChunk], grammars: Grammars | None, promised: PromisedTokens
) -> Callable[[], Masks]:
    """Let another thread find what the grammars of chunks that sample allow, while the model runs."""
    rows = []
    for view, start, num_tokens, _, is_promised, drafts in sampling:
        if view.sampling.grammar:
            last = (promised[view.sequence_id],) if is_promised else ()
            rows.append(GrammarRow(view, start + num_tokens - len(last), last, drafts))
    if not rows:
        return lambda: NO_MASKS
    assert grammars is not None, "the worker has refused grammars"
    return grammars.begin(rows)


def _rows_of(chunk: ScheduledChunk) -> list[ScheduledChunk]:
    return [chunk._replace(drafts=chunk.drafts[:count]) for count in range(len(chunk.drafts) + 1)]


def barred_tokens(chunk: ScheduledChunk, eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens that would end the output before it has min_tokens tokens. Depends on the position alone."""
    view = chunk.sequence
    if chunk.start + chunk.num_rows - view.num_prompt_tokens >= view.sampling.min_tokens:
        return []
    return sorted(view.sampling.stop_tokens(eos_token_ids))


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Whether the token is the argmax of the raw logits."""
    return sampling.greedy and is_plain(sampling)


def is_plain(sampling: SamplingParams) -> bool:
    """Whether no bias and no penalty changes the logits."""
    return not sampling.logit_bias and not has_penalties(sampling)


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether the logits depend on the tokens before."""
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


def choose_at(
    adjusted: np.ndarray,
    sampling: SamplingParams,
    position: int,
    barred: Sequence[int] = (),
    draw: Draw | None = None,
    allowed: bytes | None = None,
) -> int:
    """The token at `position` of a sequence, counted from the start of its prompt.

    `allowed` is a mask of `core.output_grammar.Masks`; None = every token. # float32 [vocab], left unchanged
    """
    if barred:
        late = adjusted.copy()
        late[barred] = -np.inf
        if allowed is None or masked(late, allowed).max() > -np.inf:
            adjusted = late
    if sampling.greedy:
        return int((adjusted if allowed is None else masked(adjusted, allowed)).argmax())
    return (draw or draw_token)(adjusted, sampling, draw_key(sampling.seed, position), allowed)


def masked(logits: np.ndarray, allowed: bytes) -> np.ndarray:
    """-inf for the tokens that the mask does not allow. # float32 [vocab], a new array"""
    ceilings = np.take(_CEILINGS, np.frombuffer(allowed, np.uint8), axis=0).reshape(-1)
    return np.minimum(logits, ceilings[: len(logits)])


def draw_token(adjusted: np.ndarray, sampling: SamplingParams, key: int, allowed: bytes | None = None) -> int:
    """The token of the filtered distribution of the allowed tokens that `key` draws. # float32 [vocab]"""
    if allowed is not None:
        adjusted = masked(adjusted, allowed)
    token_ids, weights = filtered_distribution(adjusted, sampling)
    return int(token_ids[scores_of(weights, key, token_ids).argmax()])


def scores_of(weights: np.ndarray, key: int, token_ids: np.ndarray) -> np.ndarray:
    """Logarithms of weight / exponential variate: the highest one is drawn. # float64 [n], int [n] -> float64 [n]"""
    with np.errstate(divide="ignore"):  # a token without weight
        return np.log(weights) - np.log(exponentials(key, token_ids))


def exponentials(key: int, token_ids: np.ndarray) -> np.ndarray:
    """An exponential variate for each token: the same for a key and a token wherever it is drawn.

    # int [n] -> float64 [n]
    """
    bits = token_ids.astype(np.uint32)
    scramble(bits, key, np.empty_like(bits))
    return -np.log1p(-np.minimum((bits + 0.5) / 2.0**32, _LARGEST_QUANTILE))


def scramble(bits: np.ndarray, key: int, spare: np.ndarray) -> None:
    """Turn token ids into random bits, by an integer hash (Wellons, hash-prospector: "lowbias32") with the key added
    before and inside. # uint32 [n], changed in place; uint32 [n] scratch
    """
    bits ^= np.uint32(key & 0xFFFFFFFF)
    bits ^= np.right_shift(bits, 16, out=spare)
    bits *= np.uint32(0x7FEB352D)
    bits += np.uint32(key >> 32)
    bits ^= np.right_shift(bits, 15, out=spare)
    bits *= np.uint32(0x846CA68B)
    bits ^= np.right_shift(bits, 16, out=spare)


def adjust(logits: np.ndarray, sampling: SamplingParams, counts: Counts = NO_COUNTS) -> np.ndarray:
    """Logits after bias and penalties. `counts`: of the tokens before. # float32 [vocab] -> float32 [vocab]"""
    token_ids, num_written = counts
    adjusted = logits.copy()
    if sampling.logit_bias:
        adjusted[list(sampling.logit_bias.keys())] += list(sampling.logit_bias.values())
    if sampling.repetition_penalty != 1.0:
        penalized = adjusted[token_ids]
        adjusted[token_ids] = np.where(
            penalized > 0, penalized / sampling.repetition_penalty, penalized * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        written = num_written > 0
        adjusted[token_ids[written]] -= sampling.presence_penalty + sampling.frequency_penalty * num_written[written]
    return adjusted


def filtered_distribution(adjusted: np.ndarray, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids that may be drawn, and their unnormalized probabilities.

    With a filter the most likely token comes first (ties: lowest id first), else the lowest id. Each filter applies to
    the renormalized result of the previous filter. The most likely token always stays.
    # float [vocab] -> int64 [n], float64 [n]
    """
    if not np.isfinite(adjusted.max()):  # of a model that overflows: a valid id, though perhaps no right token
        return np.array([adjusted.argmax()]), np.ones(1)
    weights = np.exp((adjusted.astype(np.float64) - adjusted.max()) / sampling.temperature)
    if not sampling.top_k and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        return np.arange(len(adjusted)), weights
    order = _descending(adjusted, sampling.top_k)
    probabilities = weights[order]
    if sampling.top_p < 1.0:
        # A token stays if the mass before it is below top_p, so the token that crosses top_p stays too.
        cumulative = probabilities.cumsum()
        probabilities = probabilities[: int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1]
    probabilities = probabilities[: int(np.count_nonzero(probabilities >= sampling.min_p))]
    return order[: len(probabilities)], probabilities


def _descending(values: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the `top_k` highest values (0 = all), highest first, ties by lowest index."""
    if not 0 < top_k < len(values):
        return np.argsort(-values, kind="stable")
    # Sort only candidates: all values at or above the k-th highest, including ties.
    border = np.partition(values, len(values) - top_k)[len(values) - top_k]
    candidates = np.flatnonzero(values >= border)
    return candidates[np.argsort(-values[candidates], kind="stable")][:top_k]


def with_logprobs(logits: np.ndarray, token_id: int, num_logprobs: int | None) -> SampledToken:
    """The token with the requested log-probabilities. # logits: float32 [vocab], raw"""
    if num_logprobs is None:
        return SampledToken(token_id)
    highest = logits.max()
    logprobs = logits - (highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))).astype(np.float32)
    best = _descending(logits, num_logprobs) if num_logprobs else ()
    return SampledToken(
        token_id,
        logprob=float(logprobs[token_id]),
        top_logprobs=tuple((int(index), float(logprobs[index])) for index in best),
    )
