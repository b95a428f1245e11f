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
    labels: tuple[str, ...]
    buckets: tuple[float, ...]  # of a histogram


REQUEST = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
WORKER = ("worker", "role")
PATH = ("worker", "peer", "lane")


class Metric(Enum):
    """Name, kind, meaning, labels, and the buckets of a histogram."""

    _value_: str
    about: Description

    def __new__(
        cls, name: str, kind: Kind, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = BUCKETS_S
    ) -> Metric:
        metric = object.__new__(cls)
        metric._value_, metric.about = name, Description(kind, text, labels, buckets)
        return metric

    # fmt: off
    REQUESTS = ("tandem_requests_total", Kind.COUNTER,
        "Ended choices, by path (none if refused or failed) and by end", ("path", "end"))
    TIME_TO_FIRST_TOKEN = ("gen_ai_server_time_to_first_token_seconds", Kind.HISTOGRAM,
        "Time from the arrival of a request at the router to its first token", REQUEST)
    TIME_PER_OUTPUT_TOKEN = ("gen_ai_server_time_per_output_token_seconds", Kind.HISTOGRAM,
        "(last token - first token) / (tokens - 1)", REQUEST)
    INTER_TOKEN_LATENCY = ("tandem_inter_token_latency_seconds", Kind.HISTOGRAM,
        "Every gap between two tokens of a choice, as they reach the router; 0 for tokens that arrive together",
        REQUEST, GAP_BUCKETS_S)
    REQUEST_DURATION = ("gen_ai_server_request_duration_seconds", Kind.HISTOGRAM,
        "Time from the arrival of a request at the router to its end; error_type is empty on success",
        (*REQUEST, "error_type"))
    TTFT_PREDICTION_RATIO = ("tandem_router_ttft_prediction_ratio", Kind.HISTOGRAM,
        "Measured / predicted time to first token, of requests with one attempt", ("path",), RATIO_BUCKETS)
    TPOT_PREDICTION_RATIO = ("tandem_router_tpot_prediction_ratio", Kind.HISTOGRAM,
        "Measured / predicted time per output token, of requests with one attempt", ("path",), RATIO_BUCKETS)
    DECISION_DURATION = ("tandem_router_decision_seconds", Kind.HISTOGRAM,
        "Time of one routing decision: cached prefixes looked up, candidates priced, one chosen",
        (), DECISION_BUCKETS_S)
    PHASE_DURATION = ("tandem_phase_duration_seconds", Kind.HISTOGRAM,
        "Duration of each phase of a choice (PhaseTimings of protos/inference.proto): tokenize, router_queue, "
        "prefill_queue, prefill, transfer, transfer_exposed, decode", ("phase",))
    PROMPT_LENGTH = "tandem_request_prompt_tokens", Kind.HISTOGRAM, "Prompt tokens of a choice", (), COUNT_BUCKETS
    OUTPUT_LENGTH = "tandem_request_output_tokens", Kind.HISTOGRAM, "Output tokens of a choice", (), COUNT_BUCKETS
    DECODE_SPEED = ("tandem_decode_tokens_per_second", Kind.HISTOGRAM,
        "Tokens per second of a choice in decode, by length of its prompt and output in tokens",
        ("length",), SPEED_BUCKETS)
    TRANSFER_SIZE = "tandem_transfer_size_bytes", Kind.HISTOGRAM, "KV bytes that moved for a choice", (), BYTES_BUCKETS
    MOVED_BLOCKS = ("tandem_transfer_moved_blocks", Kind.HISTOGRAM,
        "KV blocks that moved for a choice", (), COUNT_BUCKETS)
    SKIPPED_BLOCKS = ("tandem_transfer_skipped_blocks", Kind.HISTOGRAM,
        "KV blocks of the prompt that the decode worker had, of choices with a hand-off", (), COUNT_BUCKETS)
    TOKENS = ("tandem_tokens_total", Kind.COUNTER,
        "Tokens served, by kind: prompt, cached (part of prompt) or output", ("kind",))
    PROMPT_TOKENS = ("tandem_prompt_tokens_total", Kind.COUNTER,
        "Prompt tokens on the workers of a choice, by role and source of their KV: computed, local_hit (prefix "
        "cache), peer (read from the prefix cache of another worker) or transferred", ("role", "source"))
    SLO_REQUESTS = ("tandem_slo_requests_total", Kind.COUNTER,
        "Choices by whether they met slo_ttft_ms and, with their mean gap between tokens, slo_itl_ms: met or missed. "
        "A failed choice missed both; a cancelled one is not counted. Goodput = the rate of met, met", ("ttft", "itl"))
    REFUSALS = ("tandem_refusals_total", Kind.COUNTER,
        "Calls refused before they reached a worker, by reason (the error), e.g. queue_full or invalid_request",
        ("reason",))
    RETRIES = ("tandem_retries_total", Kind.TOTAL,
        "Attempts that failed and were tried again, by error code", ("reason",))
    MOVES = ("tandem_moves_total", Kind.TOTAL,
        "Moves of running requests between decode workers, by reason (drain, room) and outcome: moved, failed (the "
        "request stays where it is), or no_room (no worker has room)", ("reason", "outcome"))
    TENANT_REQUESTS = ("tandem_tenant_requests_total", Kind.COUNTER,
        f"Ended choices of a tenant. Of all tenant series: at most {MAX_TENANTS} tenants, then {OTHER_TENANTS}; "
        "empty = no tenant", ("tenant", "end"))
    TENANT_TOKENS = ("tandem_tenant_tokens_total", Kind.COUNTER,
        "Tokens, by kind as in tandem_tokens_total", ("tenant", "kind"))
    TENANT_SECONDS = ("tandem_tenant_seconds_total", Kind.COUNTER,
        "Time by phase: queue, prefill or decode (Receipt of protos/inference.proto)", ("tenant", "phase"))
    TENANT_BLOCK_SECONDS = ("tandem_tenant_kv_block_seconds_total", Kind.COUNTER,
        "KV blocks times the seconds for which choices held them, on all workers", ("tenant",))
    TENANT_BYTES = ("tandem_tenant_transferred_bytes_total", Kind.COUNTER,
        "KV bytes that moved between workers", ("tenant",))
    PATH_BANDWIDTH = ("tandem_transfer_path_bandwidth_bytes_per_second", Kind.GAUGE,
        "Measured bandwidth of the path from a peer to the reading worker, by lane", PATH)
    PATH_LATENCY = ("tandem_transfer_path_latency_seconds", Kind.GAUGE,
        "Shortest round trip of a notification on the path", PATH)
    PATHS = ("tandem_transfer_paths", Kind.GAUGE,
        "Paths of a worker, by state; alert on slow, fallback, unreachable and refused", ("worker", "state"))
    QUEUED = "tandem_router_queued", Kind.GAUGE, "Requests that wait in the router for a worker"
    IN_FLIGHT = "tandem_router_in_flight", Kind.GAUGE, "Dispatched requests that have not ended"
    WORKERS = ("tandem_workers", Kind.GAUGE,
        "Workers that report to the router, by role and state (serving or draining); 0 if a pool is empty",
        ("role", "state"))
    WORKER_BLOCKS = ("tandem_worker_blocks", Kind.GAUGE,
        "KV blocks of a worker, by column of its ledger", (*WORKER, "column"))
    WORKER_KV_USAGE = ("tandem_worker_kv_usage_ratio", Kind.GAUGE,
        "Share of the KV blocks in use (held, leased or incoming), 0 to 1; cached blocks are not in use", WORKER)
    WORKER_RUNNING = "tandem_worker_running", Kind.GAUGE, "Running sequences of a worker", WORKER
    WORKER_WAITING = "tandem_worker_waiting", Kind.GAUGE, "Sequences of a worker that wait for a step", WORKER
    WORKER_PULLS_WAITING = ("tandem_worker_pulls_waiting", Kind.GAUGE,
        "Hand-offs that wait for KV blocks of a worker", WORKER)
    WORKER_BATCH_SEQUENCES = ("tandem_worker_batch_sequences", Kind.GAUGE,
        "Sequences in the newest step of a worker", WORKER)
    WORKER_BATCH_TOKENS = "tandem_worker_batch_tokens", Kind.GAUGE, "Tokens in the newest step of a worker", WORKER
    WORKER_QUEUED_TOKENS = ("tandem_worker_queued_tokens", Kind.GAUGE,
        "Tokens that a worker must compute until each of its sequences is in decode", WORKER)
    WORKER_PROMPT_SECONDS = ("tandem_worker_prompt_seconds", Kind.GAUGE,
        "Predicted time of the prompts that a worker has to compute", WORKER)
    WORKER_STEP_SECONDS = ("tandem_worker_step_seconds", Kind.GAUGE,
        "Predicted time of a step of a worker with its sequences in decode and no prompt", WORKER)
    WORKER_DECODE_STEPS = ("tandem_worker_decode_step_seconds", Kind.DISTRIBUTION,
        "Measured time of each step with a sequence in decode", WORKER, STEP_BOUNDS_S)
    WORKER_BUSY_SECONDS = "tandem_worker_busy_seconds_total", Kind.TOTAL, "Time that a worker spent in steps", WORKER
    WORKER_PREFILLED_TOKENS = ("tandem_worker_prefilled_tokens_total", Kind.TOTAL,
        "Prompt tokens that a worker computed", WORKER)
    WORKER_SAMPLED_TOKENS = "tandem_worker_sampled_tokens_total", Kind.TOTAL, "Tokens that a worker sampled", WORKER
    WORKER_DRAFTS = "tandem_worker_drafted_tokens_total", Kind.TOTAL, "Guessed tokens that a worker computed", WORKER
    WORKER_RIGHT_DRAFTS = ("tandem_worker_accepted_drafts_total", Kind.TOTAL,
        "Guessed tokens of a worker that were right", WORKER)
    WORKER_FLOP = ("tandem_worker_flop_total", Kind.TOTAL,
        "Floating-point operations of the model in the steps of a worker, by its sizes; 0 for a fake model", WORKER)
    WORKER_MEMORY_BYTES = ("tandem_worker_memory_bytes_total", Kind.TOTAL,
        "Bytes of weights and KV that the steps of a worker read and wrote, by the sizes of the model; 0 for a fake "
        "model", WORKER)
    WORKER_FLOP_USE = ("tandem_worker_flop_utilisation_ratio", Kind.GAUGE,
        "FLOP per second in recent steps / peak_tflops of the config; none without this peak", WORKER)
    WORKER_BANDWIDTH_USE = ("tandem_worker_bandwidth_utilisation_ratio", Kind.GAUGE,
        "Bytes per second in recent steps / peak_gb_per_s of the config; none without this peak", WORKER)
    WORKER_TRANSFERS = ("tandem_worker_transfers", Kind.GAUGE,
        "Open hand-offs of a worker, by side (offer or pull) and state", (*WORKER, "side", "state"))
    WORKER_TRANSFERRED_BYTES = ("tandem_worker_transferred_bytes_total", Kind.TOTAL,
        "KV bytes that a worker has pulled", WORKER)
    WORKER_TRANSFER_SECONDS = ("tandem_worker_transfer_seconds_total", Kind.TOTAL,
        "Time during which the pulls of a worker had reads in flight", WORKER)
    WORKER_EXPIRED_LEASES = "tandem_worker_expired_leases_total", Kind.TOTAL, "Offers of a worker that expired", WORKER
    WORKER_PREEMPTIONS = "tandem_worker_preemptions_total", Kind.TOTAL, "Sequences that a worker has preempted", WORKER
    WORKER_MALFORMED_MESSAGES = ("tandem_worker_malformed_messages_total", Kind.TOTAL,
        "Notifications that a worker could not decode", WORKER)
    WORKER_DROPPED_MESSAGES = ("tandem_worker_dropped_messages_total", Kind.TOTAL,
        "Messages that a worker dropped: late, duplicate, or of an unknown transfer", WORKER)
    WORKER_CORRUPT_BLOCKS = ("tandem_worker_corrupt_blocks_total", Kind.TOTAL,
        "Blocks with a wrong digest after a read", WORKER)
    WORKER_DISK_BLOCKS = ("tandem_worker_disk_blocks", Kind.GAUGE,
        "Cached blocks on the disk of a worker; 0 without a disk", WORKER)
    WORKER_DISK_READS = ("tandem_worker_disk_read_blocks_total", Kind.TOTAL,
        "Blocks that prompts have read from the disk", WORKER)
    WORKER_DISK_WRITES = ("tandem_worker_disk_written_blocks_total", Kind.TOTAL,
        "Blocks that a worker has written to its disk", WORKER)
    WORKER_DISK_FAILURES = ("tandem_worker_disk_failures_total", Kind.TOTAL,
        "Reads and writes of the disk that failed, were late, or found another block", WORKER)
    GATEWAY_REQUESTS = ("tandem_gateway_requests_total", Kind.COUNTER,
        "Ended HTTP requests, by route (other = no such route) and by status (499 = the client left)",
        ("route", "status"))
    GATEWAY_REQUEST_DURATION = ("tandem_gateway_request_duration_seconds", Kind.HISTOGRAM,
        "Time from the head of an HTTP request to the last byte of its answer", ("route",))
    GATEWAY_ADDED_BEFORE = ("tandem_gateway_added_before_seconds", Kind.HISTOGRAM,
        "Time that the gateway adds before a call of the router: body, checks, conversion", (), ADDED_BUCKETS_S)
    GATEWAY_ADDED_PER_MESSAGE = ("tandem_gateway_added_per_message_seconds", Kind.HISTOGRAM,
        "Time that the gateway adds to a message of the router: conversion and writing, the mean of a request",
        (), ADDED_BUCKETS_S)
    GATEWAY_OPEN_STREAMS = "tandem_gateway_open_streams", Kind.GAUGE, "Answers that are being streamed"
    GATEWAY_DISCONNECTS = ("tandem_gateway_client_disconnects_total", Kind.COUNTER,
        "Requests whose client left before the end of the answer")
    # fmt: on

    # Each record hashes a metric, and Enum.__hash__ is slow Python code.
    __hash__ = object.__hash__


METRICS = {metric: metric.about for metric in Metric}
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
