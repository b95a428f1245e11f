"""The rows of a step with drafts, for a sampler that draws one token of each sequence.

    chunk with d drafts  --rows_of-->  1 + d chunks of one token  --sampler-->  a token of each  --join-->  one run

Row i is a sequence of its own whose last tokens are the first i drafts. The run of a chunk ends behind the first draft
that differs from the token drawn in its place, so later rows are drawn in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.output_grammar import Masks
from core.step import SampledToken, ScheduledChunk, SequenceView
from engine.sampling import has_penalties


def rows_of(chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
    """Chunks without drafts, in the order of the step's rows."""
    if not any(chunk.drafts for chunk in chunks):
        return chunks
    return [_row(chunk, count) for chunk in chunks for count in range(len(chunk.drafts) + 1)]


def masks_of_rows(masks: Masks, chunks: Iterable[ScheduledChunk]) -> Masks:
    """The masks of the rows. `masks`: of the chunks, each with masks for its first rows or all of them."""
    allowed = {
        _name(chunk, count): (mask,)
        for chunk in chunks
        if chunk.drafts
        for count, mask in enumerate(masks.allowed.get(chunk.sequence.sequence_id, ()))
    }
    return masks._replace(allowed={**masks.allowed, **allowed}) if allowed else masks


def join(
    sampled: Mapping[str, SampledToken], chunks: Iterable[ScheduledChunk], masks: Masks
) -> dict[str, tuple[SampledToken, ...]]:
    """The run of each sequence, from the tokens of the rows. A chunk without a token has none, nor one whose grammar
    has failed. A run ends before a row that has a grammar and no mask. `masks`: of the rows."""
    runs: dict[str, tuple[SampledToken, ...]] = {}
    for chunk in chunks:
        name = chunk.sequence.sequence_id
        if name not in sampled or name in masks.failed:
            continue
        run = [sampled[name]]
        for draft in chunk.drafts:
            row = _name(chunk, len(run))
            if run[-1].token_id != draft or (chunk.sequence.sampling.grammar and row not in masks.allowed):
                break
            run.append(sampled[row])
        runs[name] = tuple(run)
    return runs


def _name(chunk: ScheduledChunk, num_drafts: int) -> str:
    """Of a row, as a sequence id. No id of a request holds the separator."""
    return f"{chunk.sequence.sequence_id}\0{num_drafts}" if num_drafts else chunk.sequence.sequence_id


def _row(chunk: ScheduledChunk, num_drafts: int) -> ScheduledChunk:
    if not num_drafts:
        return chunk._replace(drafts=())
    view, end = chunk.sequence, chunk.start + chunk.num_tokens
    known: Sequence[int] = ()
    if has_penalties(view.sampling):  # nothing else in sampling reads the tokens
        known = [*view.token_ids[:end], *chunk.drafts[:num_drafts]]
    row = SequenceView(_name(chunk, num_drafts), known, view.num_prompt_tokens, view.block_table, view.sampling)
    return ScheduledChunk(row, end - 1 + num_drafts, 1, samples=True, promised=False)
