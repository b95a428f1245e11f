"""The metrics of requests: one record for each that ends or is refused, and the gaps between tokens."""

from __future__ import annotations

import re

from core.errors import DeadlineExceeded, RequestCancelled, TandemError
from core.lifecycle import ServiceRole, Stage
from core.plain_text import escaped
from router.operations.request_spans import PROVIDER
from router.requests.events import Fail, Finish, Outcome
from router.serving.choice_stream import ChoiceStream
from router.serving.receipt import phase_timings, receipt_of
from runtime.prometheus.metric_series import Buckets
from runtime.prometheus.metrics import MAX_TENANTS, OTHER_TENANTS, REQUEST, Metric, length_class
from runtime.prometheus.metrics_page import Metrics

# Phases of PhaseTimings. The time to the first token and the total have metrics of their own.
PHASES = ("tokenize", "router_queue", "prefill_queue", "prefill", "decode")
TRANSFER_PHASES = ("transfer", "transfer_exposed")  # of requests whose KV moved between workers


class RequestMetrics:
    def __init__(self, metrics: Metrics, slo_ttft_ms: float) -> None:
        self._metrics = metrics
        self.slo_ttft_ms = slo_ttft_ms
        self._tenants: set[str] = set()  # with series of their own
        self._gaps: dict[str, Buckets] = {}  # by operation

    # ---- tokens

    def note_tokens(self, stream: ChoiceStream, num_tokens: int, now: float) -> None:
        """New tokens of a choice, for the gaps between them. Called for every token, so it must stay cheap."""
        buckets = self._gaps.get(stream.operation)
        if buckets is None:
            labels = dict(zip(REQUEST, (stream.operation, PROVIDER, stream.model), strict=True))
            buckets = self._gaps[stream.operation] = self._metrics.buckets(Metric.INTER_TOKEN_LATENCY, **labels)
        if stream.last_token_at:
            buckets.observe(now - stream.last_token_at)
        stream.last_token_at = now
        if num_tokens > 1:
            buckets.counts[0] += num_tokens - 1

    # ---- ends

    def refused(self, error: TandemError) -> None:
        """A call ends before a worker has it."""
        self._metrics.record(Metric.REQUESTS, 1, path="none", end=error.code.value)
        self._note_refusal(error)

    def _note_refusal(self, error: TandemError) -> None:
        if not isinstance(error, RequestCancelled | DeadlineExceeded):
            self._metrics.record(Metric.REFUSALS, 1, reason=reason_of(error))

    def ended(self, stream: ChoiceStream, result: Finish | Fail, now: float) -> None:
        labels = dict(zip(REQUEST, (stream.operation, PROVIDER, stream.model), strict=True))
        error_type = result.error.code.value if isinstance(result, Fail) else ""
        self._metrics.record(Metric.REQUEST_DURATION, now - stream.arrived_at, **labels, error_type=error_type)
        tenant = self._tenant_of(stream)
        if isinstance(result, Fail):
            self._failed(result, tenant)
            return
        outcome = result.outcome
        reason = outcome.finish_reason.value
        self._metrics.record(Metric.REQUESTS, 1, path=outcome.path.value, end=reason)
        self._metrics.record(Metric.TENANT_REQUESTS, 1, tenant=tenant, end=reason)
        self._latencies(outcome, labels)
        self._tokens(outcome, tenant)
        self._transfer(outcome)
        self._receipt(outcome, tenant)
        timings = phase_timings(outcome, now - stream.arrived_at)
        for phase in (*PHASES, *TRANSFER_PHASES) if _has_moved(outcome) else PHASES:
            self._metrics.record(Metric.PHASE_DURATION, getattr(timings, f"{phase}_ms") / 1e3, phase=phase)

    def _failed(self, result: Fail, tenant: str) -> None:
        end = result.error.code.value
        self._metrics.record(Metric.REQUESTS, 1, path="none", end=end)
        self._metrics.record(Metric.TENANT_REQUESTS, 1, tenant=tenant, end=end)
        if not any(stage is Stage.PREFILL for stage, _, _ in result.timeline.history):
            self._note_refusal(result.error)
        if not isinstance(result.error, RequestCancelled):
            self._metrics.record(Metric.SLO_REQUESTS, 1, ttft="missed", itl="missed")

    def _latencies(self, outcome: Outcome, labels: dict[str, str]) -> None:
        record, path = self._metrics.record, outcome.path.value
        gap_s = outcome.gap_s
        record(Metric.TIME_TO_FIRST_TOKEN, outcome.first_token_s, **labels)
        if outcome.num_gaps:
            record(Metric.TIME_PER_OUTPUT_TOKEN, gap_s, **labels)
            if gap_s > 0.0:
                length = length_class(outcome.num_prompt_tokens + outcome.num_output_tokens)
                record(Metric.DECODE_SPEED, 1.0 / gap_s, length=length)
        if outcome.attempts == 1:  # else the path tells nothing of the attempt that was predicted
            record(Metric.TTFT_PREDICTION_RATIO, outcome.first_token_s / outcome.predicted_first_token_s, path=path)
            if outcome.promise is not None and outcome.promise.tpot_s > 0.0 and outcome.num_gaps:
                record(Metric.TPOT_PREDICTION_RATIO, gap_s / outcome.promise.tpot_s, path=path)
        ttft = "met" if outcome.first_token_s * 1e3 <= self.slo_ttft_ms else "missed"
        itl = "met" if outcome.within_itl else "missed"
        record(Metric.SLO_REQUESTS, 1, ttft=ttft, itl=itl)

    def _tokens(self, outcome: Outcome, tenant: str) -> None:
        record, num_prompt = self._metrics.record, outcome.num_prompt_tokens
        num_new = outcome.num_output_tokens - outcome.num_resumed_tokens
        counts = {"prompt": num_prompt, "cached": outcome.cached_tokens, "output": num_new}
        for kind, count in counts.items():
            record(Metric.TOKENS, count, kind=kind)
            record(Metric.TENANT_TOKENS, count, tenant=tenant, kind=kind)
        record(Metric.PROMPT_LENGTH, num_prompt)
        record(Metric.OUTPUT_LENGTH, outcome.num_output_tokens)
        pulls = outcome.candidate.prefill_worker is not None
        computing = ServiceRole.PREFILL if pulls else ServiceRole.DECODE
        for role, result in ((ServiceRole.PREFILL, outcome.prefill), (ServiceRole.DECODE, outcome.decode)):
            if result is not None:
                cached, read_tokens = min(result.cached_tokens, num_prompt), result.read_tokens or 0
            elif role is computing:  # as predicted
                cached, read_tokens = outcome.cached_tokens, outcome.read_tokens
            else:
                continue
            read = min(read_tokens, cached)
            source = "transferred" if role is ServiceRole.DECODE and pulls else "computed"
            record(Metric.PROMPT_TOKENS, cached - read, role=role.value, source="local_hit")
            if read:
                record(Metric.PROMPT_TOKENS, read, role=role.value, source="peer")
            record(Metric.PROMPT_TOKENS, num_prompt - cached, role=role.value, source=source)

    def _transfer(self, outcome: Outcome) -> None:
        decode = outcome.decode
        if decode is None or outcome.candidate.prefill_worker is None:
            return
        if decode.transferred_bytes:
            self._metrics.record(Metric.TRANSFER_SIZE, decode.transferred_bytes)
        self._metrics.record(Metric.MOVED_BLOCKS, decode.num_moved_blocks)
        self._metrics.record(Metric.SKIPPED_BLOCKS, decode.num_skipped_blocks)

    def _receipt(self, outcome: Outcome, tenant: str) -> None:
        receipt = receipt_of(outcome)
        for phase in ("queue", "prefill", "decode"):
            self._metrics.record(
                Metric.TENANT_SECONDS, getattr(receipt, f"{phase}_ms") / 1e3, tenant=tenant, phase=phase
            )
        self._metrics.record(Metric.TENANT_BLOCK_SECONDS, receipt.kv_block_seconds, tenant=tenant)
        self._metrics.record(Metric.TENANT_BYTES, receipt.transferred_bytes, tenant=tenant)

    def _tenant_of(self, stream: ChoiceStream) -> str:
        """The label of the tenant: one of the first `MAX_TENANTS`, or `OTHER_TENANTS`."""
        tenant = escaped(stream.request.tenant_name)
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant


def reason_of(error: TandemError) -> str:
    """The class of the error, e.g. queue_full."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


def _has_moved(outcome: Outcome) -> bool:
    return outcome.decode is not None and outcome.decode.transferred_bytes > 0
