"""The spans of one ended choice, from what the router measured and what the workers returned.

    tandem.request
      router.tokenize, router.queue, router.prefill, router.decode, router.respond    one after the other
      router.attempt                                                                  one for each attempt
        prefill_worker.queue, prefill_worker.prefill
        decode_worker.queue, decode_worker.transfer, decode_worker.decode

Workers have other clocks. Their stages are placed after the start of the attempt, as if the call took no time.
An attempt on a worker that died has its error, and no stages of that worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.lifecycle import Stage
from router.requests.events import Attempt, Outcome, WorkerStage
from router.routing.question import TERMS, Candidate
from router.serving.ended_choice import EndedChoice
from runtime.tracing.span_names import Attribute, SpanName
from runtime.tracing.telemetry import AttributeValue, SpanRecord

PROVIDER = "tandem"  # gen_ai.provider.name of the semantic conventions
ROUTER, PREFILL_WORKER, DECODE_WORKER = "tandem-router", "tandem-prefill-worker", "tandem-decode-worker"
SPAN_OF_STAGE = {
    Stage.TOKENIZE: SpanName.ROUTER_TOKENIZE,
    Stage.QUEUE: SpanName.ROUTER_QUEUE,
    Stage.PREFILL: SpanName.ROUTER_PREFILL,
    Stage.DECODE: SpanName.ROUTER_DECODE,
}
_STAGES = {name.value: name for name in SpanName}
CHAIN = {Attribute.SPAN_KIND: "CHAIN"}


def spans_of(ended: EndedChoice, router_id: str) -> list[SpanRecord]:
    """The root first. Every other span comes after its parent."""
    root = SpanRecord(
        SpanName.REQUEST, ROUTER, router_id, ended.arrived_at, ended.ended_at, root_attributes(ended), ended.error
    )
    records = [root]
    choice: dict[str, AttributeValue] = {Attribute.CHOICE: ended.choice, **CHAIN}
    attempts = iter(ended.attempts)
    for stage, start, end in ended.stages:
        if stage not in SPAN_OF_STAGE:
            continue
        records.append(SpanRecord(SPAN_OF_STAGE[stage], ROUTER, router_id, start, end, choice))
        if stage is Stage.PREFILL and (attempt := next(attempts, None)) is not None:
            _add_attempt(records, attempt, ended.choice, router_id)
    if ended.generated_at is not None:
        times = (ended.generated_at, ended.ended_at)
        records.append(SpanRecord(SpanName.ROUTER_RESPOND, ROUTER, router_id, *times, choice))
    return records


def _add_attempt(records: list[SpanRecord], attempt: Attempt, choice: int, router_id: str) -> None:
    candidate, place = attempt.candidate, len(records)
    common: dict[str, AttributeValue] = {Attribute.CHOICE: choice, Attribute.ATTEMPT: attempt.number, **CHAIN}
    attributes = {
        **common,
        Attribute.PATH: candidate.path.value,
        Attribute.PREFILL_WORKER: candidate.prefill_worker or candidate.decode_worker,
        Attribute.DECODE_WORKER: candidate.decode_worker,
        Attribute.CACHED_TOKENS: candidate.cached_tokens,
        Attribute.UNCACHED_TOKENS: candidate.uncached_tokens,
        **candidate_attributes(candidate),
    }
    if attempt.error:
        attributes[Attribute.ERROR_TYPE] = attempt.error_code
    times = (attempt.started_at, attempt.ended_at)
    records.append(SpanRecord(SpanName.ROUTER_ATTEMPT, ROUTER, router_id, *times, attributes, attempt.error))
    for service, worker_id, stage in _stages(attempt):
        name = _STAGES[stage.name]
        start = attempt.started_at + stage.start_s
        measured = common | {key: _typed(value) for key, value in stage.attributes.items()}
        expected_s = predicted_s(name, candidate)
        if expected_s is not None:
            measured[Attribute.PREDICTED] = expected_s * 1e3
        times = (start, start + stage.duration_s)
        records.append(SpanRecord(name, service, worker_id, *times, measured, parent=place))


def _stages(attempt: Attempt) -> Iterator[tuple[str, str, WorkerStage]]:
    candidate = attempt.candidate
    if attempt.prefill is not None and candidate.prefill_worker is not None:
        for stage in attempt.prefill.stages:
            yield PREFILL_WORKER, candidate.prefill_worker, stage
    if attempt.decode is not None:
        for stage in attempt.decode.stages:
            yield DECODE_WORKER, candidate.decode_worker, stage


def predicted_s(name: SpanName, candidate: Candidate) -> float | None:
    """Length of the span of a worker, the read of a prefix included; None without a prediction."""
    match name:
        case SpanName.PREFILL_QUEUE:
            return candidate.begin_s
        case SpanName.PREFILL_COMPUTE | SpanName.DECODE_PREFILL:
            return candidate.prefill_s
        case SpanName.DECODE_TRANSFER:
            return candidate.transfer_s
        case SpanName.DECODE_QUEUE:
            return candidate.room_wait_s + (candidate.begin_s if candidate.prefill_worker is None else 0.0)
        case _:
            return None


def _typed(value: str) -> AttributeValue:
    """A number, if the text is one: the wire has text only."""
    try:
        return int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError:
        return value


# ---- attributes of the root


def root_attributes(ended: EndedChoice) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        Attribute.OPERATION: ended.operation,
        Attribute.PROVIDER: PROVIDER,
        Attribute.REQUEST_MODEL: ended.model,
        Attribute.RESPONSE_ID: ended.request_id,
        Attribute.SPAN_KIND: "LLM",
        Attribute.LLM_MODEL: ended.model,
        Attribute.CHOICE: ended.choice,
    }
    if ended.tenant:
        attributes[Attribute.TENANT] = ended.tenant
    if ended.sampling is not None:
        attributes |= _request_attributes(ended)
    if ended.outcome is not None:
        attributes |= _outcome_attributes(ended.outcome)
    else:
        attributes |= {Attribute.ERROR_TYPE: ended.error_code, Attribute.ATTEMPTS: num_attempts(ended)}
    return attributes


def num_attempts(ended: EndedChoice) -> int:
    return ended.attempts[-1].number if ended.attempts else 0


def _request_attributes(ended: EndedChoice) -> dict[str, AttributeValue]:
    sampling = ended.sampling
    assert sampling is not None
    return {
        Attribute.MAX_TOKENS: sampling.max_tokens,
        Attribute.TEMPERATURE: sampling.temperature,
        Attribute.TOP_P: sampling.top_p,
        Attribute.TOP_K: sampling.top_k,
        Attribute.SEED: sampling.seed,
        Attribute.INPUT_TOKENS: ended.num_prompt_tokens,
        Attribute.OUTPUT_TOKENS: ended.num_output_tokens,
        Attribute.LLM_PROMPT_TOKENS: ended.num_prompt_tokens,
        Attribute.LLM_OUTPUT_TOKENS: ended.num_output_tokens,
        Attribute.LLM_TOTAL_TOKENS: ended.num_prompt_tokens + ended.num_output_tokens,
    }


def _outcome_attributes(outcome: Outcome) -> dict[str, AttributeValue]:
    candidate = outcome.candidate
    return {
        Attribute.FINISH_REASONS: [outcome.finish_reason.value],
        Attribute.PATH: outcome.path.value,
        Attribute.ATTEMPTS: outcome.attempts,
        Attribute.CACHED_TOKENS: outcome.cached_tokens,
        Attribute.LLM_CACHED_TOKENS: outcome.cached_tokens,
        Attribute.UNCACHED_TOKENS: candidate.uncached_tokens,
        Attribute.PREFILL_WORKER: candidate.prefill_worker or candidate.decode_worker,
        Attribute.DECODE_WORKER: candidate.decode_worker,
        **route_attributes(outcome),
    }


def candidate_attributes(candidate: Candidate) -> dict[str, AttributeValue]:
    """The predicted terms of a candidate (docs/routing.md)."""
    attributes: dict[str, AttributeValue] = {
        **{f"tandem.route.{name}": getattr(candidate, term) * 1e3 for term, name in TERMS.items()},
        Attribute.ROUTE_NUM_STREAMS: candidate.num_streams,
        Attribute.ROUTE_COST: candidate.cost * 1e3,
    }
    if candidate.read.source is not None:
        attributes |= {
            Attribute.ROUTE_SOURCE: candidate.read.source,
            Attribute.ROUTE_READ_TOKENS: candidate.read.num_tokens,
            Attribute.ROUTE_READ: candidate.read.seconds * 1e3,
        }
    return attributes


def route_attributes(outcome: Outcome) -> dict[str, AttributeValue]:
    """The terms of the chosen candidate of the last attempt, and the first token as predicted and as measured."""
    return {
        **candidate_attributes(outcome.candidate),
        Attribute.PREDICTED_TTFT: outcome.predicted_first_token_s * 1e3,
        Attribute.TTFT: outcome.first_token_s * 1e3,
    }
