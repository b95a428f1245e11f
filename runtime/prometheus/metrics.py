"""The one table of metrics: `METRICS` lists every metric with its kind, labels and meaning, `ALIASES` vLLM's names.

Each router has a metrics page (`runtime/prometheus/metrics_page.py`) with `ROUTER_METRICS`, also with what each worker
reports to the router; each HTTP server has one with `GATEWAY_METRICS`. So with several routers a value of a worker is
on several pages; the counts of requests add up.
Names and units follow OpenTelemetry's semantic conventions for generative AI, in the spelling of Prometheus.
docs/metrics.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from core.scheduling.worker_load import STEP_BOUNDS_S

BUCKETS_S = tuple(0.001 * 2**i for i in range(20))  # 1 ms to 524 s
DECISION_BUCKETS_S = tuple(1e-5 * 2**i for i in range(14))  # 10 us to 82 ms
ADDED_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
GAP_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0,
    5.0,
)  # fmt: skip
RATIO_BUCKETS = (0.2, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.25, 1.5, 2.0, 5.0)
BYTES_BUCKETS = tuple(4096.0 * 4**i for i in range(13))  # 4 KiB to 64 GiB
COUNT_BUCKETS = (0.0, *(float(2**i) for i in range(18)))  # 0, 1, 2, 4, ... 131,072
SPEED_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 500.0, 1000.0)

LENGTHS = (256, 1024, 4096, 16_384)  # tokens of prompt and output: upper ends of the classes of `length_class`
MAX_TENANTS = 100  # tenants with metric series of their own; beyond: counted as `other`
OTHER_TENANTS = "other"


class Metric(Enum):
    REQUESTS = "tandem_requests_total"
    TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
    INTER_TOKEN_LATENCY = "tandem_inter_token_latency_seconds"
    REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
    TTFT_PREDICTION_RATIO = "tandem_router_ttft_prediction_ratio"
    TPOT_PREDICTION_RATIO = "tandem_router_tpot_prediction_ratio"
    DECISION_DURATION = "tandem_router_decision_seconds"
    PHASE_DURATION = "tandem_phase_duration_seconds"
    PROMPT_LENGTH = "tandem_request_prompt_tokens"
    OUTPUT_LENGTH = "tandem_request_output_tokens"
    DECODE_SPEED = "tandem_decode_tokens_per_second"
    TRANSFER_SIZE = "tandem_transfer_size_bytes"
    MOVED_BLOCKS = "tandem_transfer_moved_blocks"
    SKIPPED_BLOCKS = "tandem_transfer_skipped_blocks"
    TOKENS = "tandem_tokens_total"
    PROMPT_TOKENS = "tandem_prompt_tokens_total"
    SLO_REQUESTS = "tandem_slo_requests_total"
    REFUSALS = "tandem_refusals_total"
    RETRIES = "tandem_retries_total"
    MOVES = "tandem_moves_total"
    TENANT_REQUESTS = "tandem_tenant_requests_total"
    TENANT_TOKENS = "tandem_tenant_tokens_total"
    TENANT_SECONDS = "tandem_tenant_seconds_total"
    TENANT_BLOCK_SECONDS = "tandem_tenant_kv_block_seconds_total"
    TENANT_BYTES = "tandem_tenant_transferred_bytes_total"
    PATH_BANDWIDTH = "tandem_transfer_path_bandwidth_bytes_per_second"
    PATH_LATENCY = "tandem_transfer_path_latency_seconds"
    PATHS = "tandem_transfer_paths"
    QUEUED = "tandem_router_queued"
    IN_FLIGHT = "tandem_router_in_flight"
    WORKERS = "tandem_workers"
    WORKER_BLOCKS = "tandem_worker_blocks"
    WORKER_KV_USAGE = "tandem_worker_kv_usage_ratio"
    WORKER_RUNNING = "tandem_worker_running"
    WORKER_WAITING = "tandem_worker_waiting"
    WORKER_PULLS_WAITING = "tandem_worker_pulls_waiting"
    WORKER_BATCH_SEQUENCES = "tandem_worker_batch_sequences"
    WORKER_BATCH_TOKENS = "tandem_worker_batch_tokens"
    WORKER_QUEUED_TOKENS = "tandem_worker_queued_tokens"
    WORKER_PROMPT_SECONDS = "tandem_worker_prompt_seconds"
    WORKER_STEP_SECONDS = "tandem_worker_step_seconds"
    WORKER_DECODE_STEPS = "tandem_worker_decode_step_seconds"
    WORKER_BUSY_SECONDS = "tandem_worker_busy_seconds_total"
    WORKER_PREFILLED_TOKENS = "tandem_worker_prefilled_tokens_total"
    WORKER_SAMPLED_TOKENS = "tandem_worker_sampled_tokens_total"
    WORKER_DRAFTS = "tandem_worker_drafted_tokens_total"
    WORKER_RIGHT_DRAFTS = "tandem_worker_accepted_drafts_total"
    WORKER_FLOP = "tandem_worker_flop_total"
    WORKER_MEMORY_BYTES = "tandem_worker_memory_bytes_total"
    WORKER_FLOP_USE = "tandem_worker_flop_utilisation_ratio"
    WORKER_BANDWIDTH_USE = "tandem_worker_bandwidth_utilisation_ratio"
    WORKER_TRANSFERS = "tandem_worker_transfers"
    WORKER_TRANSFERRED_BYTES = "tandem_worker_transferred_bytes_total"
    WORKER_TRANSFER_SECONDS = "tandem_worker_transfer_seconds_total"
    WORKER_EXPIRED_LEASES = "tandem_worker_expired_leases_total"
    WORKER_PREEMPTIONS = "tandem_worker_preemptions_total"
    WORKER_MALFORMED_MESSAGES = "tandem_worker_malformed_messages_total"
    WORKER_DROPPED_MESSAGES = "tandem_worker_dropped_messages_total"
    WORKER_CORRUPT_BLOCKS = "tandem_worker_corrupt_blocks_total"
    WORKER_DISK_BLOCKS = "tandem_worker_disk_blocks"
    WORKER_DISK_READS = "tandem_worker_disk_read_blocks_total"
    WORKER_DISK_WRITES = "tandem_worker_disk_written_blocks_total"
    WORKER_DISK_FAILURES = "tandem_worker_disk_failures_total"
    GATEWAY_REQUESTS = "tandem_gateway_requests_total"
    GATEWAY_REQUEST_DURATION = "tandem_gateway_request_duration_seconds"
    GATEWAY_ADDED_BEFORE = "tandem_gateway_added_before_seconds"
    GATEWAY_ADDED_PER_MESSAGE = "tandem_gateway_added_per_message_seconds"
    GATEWAY_OPEN_STREAMS = "tandem_gateway_open_streams"
    GATEWAY_DISCONNECTS = "tandem_gateway_client_disconnects_total"

    # Each record hashes a metric, and Enum.__hash__ is slow Python code.
    __hash__ = object.__hash__


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    # Read at each scrape, so the page shows only workers that are in the fleet.
    GAUGE = "gauge"
    TOTAL = "total"  # a counter that a worker, or the machine of the router, keeps
    DISTRIBUTION = "distribution"  # a histogram that a worker keeps


RECORDED = (Kind.COUNTER, Kind.HISTOGRAM)
TYPES = {  # in the text format of Prometheus
    Kind.COUNTER: "counter", Kind.TOTAL: "counter", Kind.GAUGE: "gauge",
    Kind.HISTOGRAM: "histogram", Kind.DISTRIBUTION: "histogram",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Description:
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS_S  # of a histogram


REQUEST = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
WORKER = ("worker", "role")
PATH = ("worker", "peer", "lane")

METRICS: dict[Metric, Description] = {
    Metric.REQUESTS: Description(
        Kind.COUNTER, "Ended choices, by path (none if refused or failed) and by end",
        ("path", "end"),
    ),
    Metric.TIME_TO_FIRST_TOKEN: Description(
        Kind.HISTOGRAM, "Time from the arrival of a request at the router to its first token", REQUEST
    ),
    Metric.TIME_PER_OUTPUT_TOKEN: Description(Kind.HISTOGRAM, "(last token - first token) / (tokens - 1)", REQUEST),
    Metric.INTER_TOKEN_LATENCY: Description(
        Kind.HISTOGRAM, "Every gap between two tokens of a choice, as they reach the router; 0 for tokens that arrive "
        "together", REQUEST, GAP_BUCKETS_S,
    ),
    Metric.REQUEST_DURATION: Description(
        Kind.HISTOGRAM, "Time from the arrival of a request at the router to its end; error_type is empty on success",
        (*REQUEST, "error_type"),
    ),
    Metric.TTFT_PREDICTION_RATIO: Description(
        Kind.HISTOGRAM, "Measured / predicted time to first token, of requests with one attempt",
        ("path",), RATIO_BUCKETS,
    ),
    Metric.TPOT_PREDICTION_RATIO: Description(
        Kind.HISTOGRAM, "Measured / predicted time per output token, of requests with one attempt",
        ("path",), RATIO_BUCKETS,
    ),
    Metric.DECISION_DURATION: Description(
        Kind.HISTOGRAM, "Time of one routing decision: cached prefixes looked up, candidates priced, one chosen", (),
        DECISION_BUCKETS_S,
    ),
    Metric.PHASE_DURATION: Description(
        Kind.HISTOGRAM, "Duration of each phase of a choice (PhaseTimings of protos/inference.proto): tokenize, "
        "router_queue, prefill_queue, prefill, transfer, transfer_exposed, decode", ("phase",)
    ),
    Metric.PROMPT_LENGTH: Description(Kind.HISTOGRAM, "Prompt tokens of a choice", (), COUNT_BUCKETS),
    Metric.OUTPUT_LENGTH: Description(Kind.HISTOGRAM, "Output tokens of a choice", (), COUNT_BUCKETS),
    Metric.DECODE_SPEED: Description(
        Kind.HISTOGRAM, "Tokens per second of a choice in decode, by length of its prompt and output in tokens",
        ("length",), SPEED_BUCKETS,
    ),
    Metric.TRANSFER_SIZE: Description(Kind.HISTOGRAM, "KV bytes that moved for a choice", (), BYTES_BUCKETS),
    Metric.MOVED_BLOCKS: Description(Kind.HISTOGRAM, "KV blocks that moved for a choice", (), COUNT_BUCKETS),
    Metric.SKIPPED_BLOCKS: Description(
        Kind.HISTOGRAM, "KV blocks of the prompt that the decode worker had, of choices with a hand-off", (),
        COUNT_BUCKETS,
    ),
    Metric.TOKENS: Description(
        Kind.COUNTER, "Tokens served, by kind: prompt, cached (part of prompt) or output", ("kind",)
    ),
    Metric.PROMPT_TOKENS: Description(
        Kind.COUNTER, "Prompt tokens on the workers of a choice, by role and source of their KV: computed, local_hit "
        "(prefix cache), peer (read from the prefix cache of another worker) or transferred", ("role", "source"),
    ),
    Metric.SLO_REQUESTS: Description(
        Kind.COUNTER, "Choices by whether they met slo_ttft_ms and, with their mean gap between tokens, slo_itl_ms: "
        "met or missed. A failed choice missed both; a cancelled one is not counted. Goodput = the rate of met, met",
        ("ttft", "itl"),
    ),
    Metric.REFUSALS: Description(
        Kind.COUNTER, "Calls refused before they reached a worker, by reason (the error), e.g. queue_full or "
        "invalid_request", ("reason",),
    ),
    Metric.RETRIES: Description(Kind.TOTAL, "Attempts that failed and were tried again, by error code", ("reason",)),
    Metric.MOVES: Description(
        Kind.TOTAL, "Moves of running requests between decode workers, by reason (drain, room) and outcome: moved, "
        "failed (the request stays where it is), or no_room (no worker has room)", ("reason", "outcome"),
    ),
    Metric.TENANT_REQUESTS: Description(
        Kind.COUNTER, f"Ended choices of a tenant. Of all tenant series: at most {MAX_TENANTS} tenants, then "
        f"{OTHER_TENANTS}; empty = no tenant", ("tenant", "end"),
    ),
    Metric.TENANT_TOKENS: Description(Kind.COUNTER, "Tokens, by kind as in tandem_tokens_total", ("tenant", "kind")),
    Metric.TENANT_SECONDS: Description(
        Kind.COUNTER, "Time by phase: queue, prefill or decode (Receipt of protos/inference.proto)", ("tenant", "phase")
    ),
    Metric.TENANT_BLOCK_SECONDS: Description(
        Kind.COUNTER, "KV blocks times the seconds for which choices held them, on all workers", ("tenant",)
    ),
    Metric.TENANT_BYTES: Description(Kind.COUNTER, "KV bytes that moved between workers", ("tenant",)),
    Metric.PATH_BANDWIDTH: Description(
        Kind.GAUGE, "Measured bandwidth of the path from a peer to the reading worker, by lane", PATH
    ),
    Metric.PATH_LATENCY: Description(Kind.GAUGE, "Shortest round trip of a notification on the path", PATH),
    Metric.PATHS: Description(
        Kind.GAUGE, "Paths of a worker, by state; alert on slow, fallback, unreachable and refused",
        ("worker", "state"),
    ),
    Metric.QUEUED: Description(Kind.GAUGE, "Requests that wait in the router for a worker"),
    Metric.IN_FLIGHT: Description(Kind.GAUGE, "Dispatched requests that have not ended"),
    Metric.WORKERS: Description(
        Kind.GAUGE, "Workers that report to the router, by role and state (serving or draining); 0 if a pool is empty",
        ("role", "state"),
    ),
    Metric.WORKER_BLOCKS: Description(
        Kind.GAUGE, "KV blocks of a worker, by column of its ledger", (*WORKER, "column")
    ),
    Metric.WORKER_KV_USAGE: Description(
        Kind.GAUGE, "Share of the KV blocks in use (held, leased or incoming), 0 to 1; cached blocks are not in use",
        WORKER,
    ),
    Metric.WORKER_RUNNING: Description(Kind.GAUGE, "Running sequences of a worker", WORKER),
    Metric.WORKER_WAITING: Description(Kind.GAUGE, "Sequences of a worker that wait for a step", WORKER),
    Metric.WORKER_PULLS_WAITING: Description(Kind.GAUGE, "Hand-offs that wait for KV blocks of a worker", WORKER),
    Metric.WORKER_BATCH_SEQUENCES: Description(Kind.GAUGE, "Sequences in the newest step of a worker", WORKER),
    Metric.WORKER_BATCH_TOKENS: Description(Kind.GAUGE, "Tokens in the newest step of a worker", WORKER),
    Metric.WORKER_QUEUED_TOKENS: Description(
        Kind.GAUGE, "Tokens that a worker must compute until each of its sequences is in decode", WORKER
    ),
    Metric.WORKER_PROMPT_SECONDS: Description(
        Kind.GAUGE, "Predicted time of the prompts that a worker has to compute", WORKER
    ),
    Metric.WORKER_STEP_SECONDS: Description(
        Kind.GAUGE, "Predicted time of a step of a worker with its sequences in decode and no prompt", WORKER
    ),
    Metric.WORKER_DECODE_STEPS: Description(
        Kind.DISTRIBUTION, "Measured time of each step with a sequence in decode", WORKER, STEP_BOUNDS_S
    ),
    Metric.WORKER_BUSY_SECONDS: Description(Kind.TOTAL, "Time that a worker spent in steps", WORKER),
    Metric.WORKER_PREFILLED_TOKENS: Description(Kind.TOTAL, "Prompt tokens that a worker computed", WORKER),
    Metric.WORKER_SAMPLED_TOKENS: Description(Kind.TOTAL, "Tokens that a worker sampled", WORKER),
    Metric.WORKER_DRAFTS: Description(Kind.TOTAL, "Guessed tokens that a worker computed", WORKER),
    Metric.WORKER_RIGHT_DRAFTS: Description(Kind.TOTAL, "Guessed tokens of a worker that were right", WORKER),
    Metric.WORKER_FLOP: Description(
        Kind.TOTAL, "Floating-point operations of the model in the steps of a worker, by its sizes; 0 for a fake "
        "model", WORKER,
    ),
    Metric.WORKER_MEMORY_BYTES: Description(
        Kind.TOTAL, "Bytes of weights and KV that the steps of a worker read and wrote, by the sizes of the model; 0 "
        "for a fake model", WORKER,
    ),
    Metric.WORKER_FLOP_USE: Description(
        Kind.GAUGE, "FLOP per second in recent steps / peak_tflops of the config; none without this peak", WORKER
    ),
    Metric.WORKER_BANDWIDTH_USE: Description(
        Kind.GAUGE, "Bytes per second in recent steps / peak_gb_per_s of the config; none without this peak", WORKER
    ),
    Metric.WORKER_TRANSFERS: Description(
        Kind.GAUGE, "Open hand-offs of a worker, by side (offer or pull) and state", (*WORKER, "side", "state")
    ),
    Metric.WORKER_TRANSFERRED_BYTES: Description(Kind.TOTAL, "KV bytes that a worker has pulled", WORKER),
    Metric.WORKER_TRANSFER_SECONDS: Description(
        Kind.TOTAL, "Time during which the pulls of a worker had reads in flight", WORKER
    ),
    Metric.WORKER_EXPIRED_LEASES: Description(Kind.TOTAL, "Offers of a worker that expired", WORKER),
    Metric.WORKER_PREEMPTIONS: Description(Kind.TOTAL, "Sequences that a worker has preempted", WORKER),
    Metric.WORKER_MALFORMED_MESSAGES: Description(
        Kind.TOTAL, "Notifications that a worker could not decode", WORKER
    ),
    Metric.WORKER_DROPPED_MESSAGES: Description(
        Kind.TOTAL, "Messages that a worker dropped: late, duplicate, or of an unknown transfer", WORKER
    ),
    Metric.WORKER_CORRUPT_BLOCKS: Description(
        Kind.TOTAL, "Blocks with a wrong digest after a read", WORKER,
    ),
    Metric.WORKER_DISK_BLOCKS: Description(
        Kind.GAUGE, "Cached blocks on the disk of a worker; 0 without a disk", WORKER
    ),
    Metric.WORKER_DISK_READS: Description(Kind.TOTAL, "Blocks that prompts have read from the disk", WORKER),
    Metric.WORKER_DISK_WRITES: Description(Kind.TOTAL, "Blocks that a worker has written to its disk", WORKER),
    Metric.WORKER_DISK_FAILURES: Description(
        Kind.TOTAL, "Reads and writes of the disk that failed, were late, or found another block", WORKER
    ),
    Metric.GATEWAY_REQUESTS: Description(
        Kind.COUNTER, "Ended HTTP requests, by route (other = no such route) and by status (499 = the client left)",
        ("route", "status"),
    ),
    Metric.GATEWAY_REQUEST_DURATION: Description(
        Kind.HISTOGRAM, "Time from the head of an HTTP request to the last byte of its answer", ("route",)
    ),
    Metric.GATEWAY_ADDED_BEFORE: Description(
        Kind.HISTOGRAM, "Time that the gateway adds before a call of the router: body, checks, conversion",
        buckets=ADDED_BUCKETS_S,
    ),
    Metric.GATEWAY_ADDED_PER_MESSAGE: Description(
        Kind.HISTOGRAM, "Time that the gateway adds to a message of the router: conversion and writing, the mean of a "
        "request", buckets=ADDED_BUCKETS_S,
    ),
    Metric.GATEWAY_OPEN_STREAMS: Description(Kind.GAUGE, "Answers that are being streamed"),
    Metric.GATEWAY_DISCONNECTS: Description(
        Kind.COUNTER, "Requests whose client left before the end of the answer"
    ),
}  # fmt: skip
GATEWAY_METRICS = {metric: about for metric, about in METRICS.items() if metric.value.startswith("tandem_gateway_")}
ROUTER_METRICS = {metric: about for metric, about in METRICS.items() if metric not in GATEWAY_METRICS}


@dataclass(frozen=True, slots=True)
class Alias:
    """A second name for series of `source`, made from the same numbers at the scrape.

    Each alias has the label `model_name`. Further labels are renamed ones of the source; the others are summed over.
    """

    source: Metric
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # label of the source -> its values
    labels: Mapping[str, str] = field(default_factory=dict)  # label -> label of the source


ENGINE = {"engine": "worker"}

ALIASES: dict[str, Alias] = {
    "vllm:time_to_first_token_seconds": Alias(Metric.TIME_TO_FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": Alias(Metric.INTER_TOKEN_LATENCY),
    "vllm:request_time_per_output_token_seconds": Alias(Metric.TIME_PER_OUTPUT_TOKEN),
    "vllm:e2e_request_latency_seconds": Alias(Metric.REQUEST_DURATION, {"error_type": ("",)}),
    "vllm:request_queue_time_seconds": Alias(Metric.PHASE_DURATION, {"phase": ("prefill_queue",)}),
    "vllm:request_prefill_time_seconds": Alias(Metric.PHASE_DURATION, {"phase": ("prefill",)}),
    "vllm:request_decode_time_seconds": Alias(Metric.PHASE_DURATION, {"phase": ("decode",)}),
    "vllm:request_prompt_tokens": Alias(Metric.PROMPT_LENGTH),
    "vllm:request_generation_tokens": Alias(Metric.OUTPUT_LENGTH),
    "vllm:prompt_tokens_total": Alias(Metric.TOKENS, {"kind": ("prompt",)}),
    "vllm:generation_tokens_total": Alias(Metric.TOKENS, {"kind": ("output",)}),
    "vllm:prefix_cache_queries_total": Alias(Metric.TOKENS, {"kind": ("prompt",)}),
    "vllm:prefix_cache_hits_total": Alias(Metric.TOKENS, {"kind": ("cached",)}),
    "vllm:request_success_total": Alias(Metric.REQUESTS, {"end": ("stop", "length")}, {"finished_reason": "end"}),
    "vllm:num_requests_running": Alias(Metric.WORKER_RUNNING, labels=ENGINE),
    "vllm:num_requests_waiting": Alias(Metric.WORKER_WAITING, labels=ENGINE),
    "vllm:kv_cache_usage_perc": Alias(Metric.WORKER_KV_USAGE, labels=ENGINE),
    "vllm:num_preemptions_total": Alias(Metric.WORKER_PREEMPTIONS, labels=ENGINE),
    "vllm:estimated_flops_per_gpu_total": Alias(Metric.WORKER_FLOP, labels=ENGINE),
}


def length_class(num_tokens: int) -> str:
    """The label `length`: up to 256 tokens, up to 1024, ..."""
    return next((f"le_{bound}" for bound in LENGTHS if num_tokens <= bound), f"gt_{LENGTHS[-1]}")
