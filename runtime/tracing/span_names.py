"""The names of all spans and attributes, with their meanings. docs/traces.md prints both tables."""

from __future__ import annotations

from enum import Enum


class SpanName(Enum):
    """The first word names the process that measured the span."""

    GATEWAY = "gateway.request"
    REQUEST = "tandem.request"
    ROUTER_TOKENIZE = "router.tokenize"
    ROUTER_QUEUE = "router.queue"
    ROUTER_PREFILL = "router.prefill"
    ROUTER_DECODE = "router.decode"
    ROUTER_RESPOND = "router.respond"
    ROUTER_ATTEMPT = "router.attempt"
    PREFILL_QUEUE = "prefill_worker.queue"
    PREFILL_COMPUTE = "prefill_worker.prefill"
    DECODE_QUEUE = "decode_worker.queue"
    DECODE_PREFILL = "decode_worker.prefill"
    DECODE_TRANSFER = "decode_worker.transfer"
    DECODE_COMPUTE = "decode_worker.decode"
    DECODE_MOVE = "decode_worker.move"


SPAN_MEANINGS: dict[SpanName, str] = {
    SpanName.GATEWAY: "One HTTP request, from its headers to the last byte of the answer",
    SpanName.REQUEST: "One choice of a Generate call, from its arrival to the last message; or a refused call",
    SpanName.ROUTER_TOKENIZE: "Validation, chat template, tokenizing",
    SpanName.ROUTER_QUEUE: "Waiting in the router for workers with room; again before each further attempt",
    SpanName.ROUTER_PREFILL: "From the dispatch to the first token, as the router measures it",
    SpanName.ROUTER_DECODE: "From the first token to the last one",
    SpanName.ROUTER_RESPOND: "From the end of the generation to the last message written to the client",
    SpanName.ROUTER_ATTEMPT: "One attempt: the calls to the workers, with the predicted times and the error",
    SpanName.PREFILL_QUEUE: "Waiting on the prefill worker for the first step",
    SpanName.PREFILL_COMPUTE: "Computing the prompt on the prefill worker, up to the first token",
    SpanName.DECODE_QUEUE: "Waiting on the decode worker for blocks or for a place in a step",
    SpanName.DECODE_PREFILL: "Computing the prompt on the decode worker",
    SpanName.DECODE_TRANSFER: "Pulling KV blocks, from the first requested block to the last verified block",
    SpanName.DECODE_COMPUTE: "Generating tokens, up to the last one",
    SpanName.DECODE_MOVE: "Pause of a sequence that moves, until the next decode worker has its KV or the move fails",
}


class Attribute:
    """Names that start with gen_ai., error., http. or url. are OpenTelemetry's semantic conventions; those of
    OpenInference make Phoenix and other tools show tokens and models."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    MAX_TOKENS = "gen_ai.request.max_tokens"
    TEMPERATURE = "gen_ai.request.temperature"
    TOP_P = "gen_ai.request.top_p"
    TOP_K = "gen_ai.request.top_k"
    SEED = "gen_ai.request.seed"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    RESPONSE_ID = "gen_ai.response.id"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    ERROR_TYPE = "error.type"
    HTTP_METHOD = "http.request.method"
    HTTP_STATUS = "http.response.status_code"
    URL_PATH = "url.path"
    SPAN_KIND = "openinference.span.kind"
    LLM_MODEL = "llm.model_name"
    LLM_PROMPT_TOKENS = "llm.token_count.prompt"
    LLM_OUTPUT_TOKENS = "llm.token_count.completion"
    LLM_TOTAL_TOKENS = "llm.token_count.total"
    LLM_CACHED_TOKENS = "llm.token_count.prompt_details.cache_read"
    TENANT = "tandem.tenant"
    CHOICE = "tandem.choice"
    PATH = "tandem.path"
    ATTEMPT = "tandem.attempt"
    ATTEMPTS = "tandem.attempts"
    UNCACHED_TOKENS = "tandem.uncached_tokens"
    ROUTE_QUEUE = "tandem.route.queue_ms"
    ROUTE_PREFILL = "tandem.route.prefill_ms"
    ROUTE_TRANSFER = "tandem.route.transfer_ms"
    ROUTE_ROOM_WAIT = "tandem.route.room_wait_ms"
    ROUTE_GAP = "tandem.route.gap_ms"
    ROUTE_NUM_STREAMS = "tandem.route.num_streams"
    ROUTE_COST = "tandem.route.cost_ms"
    ROUTE_SOURCE = "tandem.route.source"
    ROUTE_READ_TOKENS = "tandem.route.read_tokens"
    ROUTE_READ = "tandem.route.read_ms"
    PREDICTED_TTFT = "tandem.route.predicted_ttft_ms"
    TTFT = "tandem.route.ttft_ms"
    PREDICTED = "tandem.predicted_ms"
    PREFILL_WORKER = "tandem.prefill_worker"
    DECODE_WORKER = "tandem.decode_worker"
    WORKER = "tandem.worker"
    QUEUE_DEPTH = "tandem.queue.depth"
    QUEUE_TOKENS = "tandem.queue.tokens"
    TOKENS = "tandem.tokens"
    BLOCKS = "tandem.blocks"
    STEPS = "tandem.steps"
    BATCH_SIZE = "tandem.batch_size"
    PREEMPTIONS = "tandem.preemptions"
    TRANSFERRED_BYTES = "tandem.transfer.bytes"
    TRANSFER_EXPOSED_MS = "tandem.transfer.exposed_ms"
    TRANSFER_BLOCKS = "tandem.transfer.blocks"
    TRANSFER_SKIPPED_BLOCKS = "tandem.transfer.skipped_blocks"
    TRANSFER_READS = "tandem.transfer.reads"
    TRANSFER_REREAD_BLOCKS = "tandem.transfer.reread_blocks"
    TRANSFER_GB_PER_S = "tandem.transfer.gb_per_s"
    TRANSFER_LANE = "tandem.transfer.lane"
    TRANSFER_OWNER = "tandem.transfer.owner"
    PREFIX_TOKENS = "tandem.prefix.tokens"
    PREFIX_WAIT_MS = "tandem.prefix.wait_ms"
    PREFIX_BYTES = "tandem.prefix.bytes"
    PREFIX_OWNER = "tandem.prefix.owner"


ATTRIBUTE_MEANINGS: dict[str, str] = {
    Attribute.OPERATION: "chat or text_completion",
    Attribute.PROVIDER: "tandem",
    Attribute.REQUEST_MODEL: "Name of the model",
    Attribute.MAX_TOKENS: "Most output tokens",
    Attribute.TEMPERATURE: "Sampling temperature",
    Attribute.TOP_P: "Nucleus sampling",
    Attribute.TOP_K: "Top-k sampling; 0 = all",
    Attribute.SEED: "Seed of the choice: the same seed repeats the choice",
    Attribute.INPUT_TOKENS: "Tokens of the prompt",
    Attribute.OUTPUT_TOKENS: "Tokens delivered to the client",
    Attribute.CACHED_TOKENS: "Prompt tokens that the worker had cached",
    Attribute.RESPONSE_ID: "Finished.request_id",
    Attribute.FINISH_REASONS: "stop or length",
    Attribute.ERROR_TYPE: "Code of the error",
    Attribute.HTTP_METHOD: "HTTP method",
    Attribute.HTTP_STATUS: "HTTP status of the answer",
    Attribute.URL_PATH: "Path of the HTTP request",
    Attribute.SPAN_KIND: "OpenInference: LLM for a choice, CHAIN for every other span",
    Attribute.LLM_MODEL: "OpenInference: name of the model",
    Attribute.LLM_PROMPT_TOKENS: "OpenInference: tokens of the prompt",
    Attribute.LLM_OUTPUT_TOKENS: "OpenInference: output tokens",
    Attribute.LLM_TOTAL_TOKENS: "OpenInference: prompt and output tokens",
    Attribute.LLM_CACHED_TOKENS: "OpenInference: cached prompt tokens",
    Attribute.TENANT: "Name of the tenant",
    Attribute.CHOICE: "Number of the choice",
    Attribute.PATH: "disaggregated, local, recomputed or migrated",
    Attribute.ATTEMPT: "Number of the attempt, from 1",
    Attribute.ATTEMPTS: "Number of attempts",
    Attribute.UNCACHED_TOKENS: "Prompt tokens to compute, as the router predicted",
    Attribute.ROUTE_QUEUE: "Predicted: until the computing worker begins the prompt (docs/routing.md)",
    Attribute.ROUTE_PREFILL: "Predicted: computing the prompt",
    Attribute.ROUTE_TRANSFER: "Predicted: the exposed part of the transfer",
    Attribute.ROUTE_ROOM_WAIT: "Predicted: until the decode worker has blocks",
    Attribute.ROUTE_GAP: "Predicted: added to each step of the decode worker",
    Attribute.ROUTE_NUM_STREAMS: "Sequences that wait for those longer steps",
    Attribute.ROUTE_COST: "Predicted: the sum that decides",
    Attribute.ROUTE_SOURCE: "Worker from whose prefix cache the computing worker reads",
    Attribute.ROUTE_READ_TOKENS: "Predicted: prompt tokens that it reads from there",
    Attribute.ROUTE_READ: "Predicted: until they are read, while the queue goes on",
    Attribute.PREDICTED_TTFT: "Predicted: from the arrival to the first token",
    Attribute.TTFT: "Measured: from the arrival to the first token",
    Attribute.PREDICTED: "Predicted length of the stage; of a transfer, of its exposed part",
    Attribute.PREFILL_WORKER: "Id of the worker that computes the prompt",
    Attribute.DECODE_WORKER: "Id of the worker that generates the tokens",
    Attribute.WORKER: "Id of the worker that measured the span",
    Attribute.QUEUE_DEPTH: "Sequences that waited on the worker when the call arrived",
    Attribute.QUEUE_TOKENS: "Tokens that these sequences had to compute",
    Attribute.TOKENS: "Tokens computed (prefill) or generated (decode) in the stage",
    Attribute.BLOCKS: "KV blocks of the sequence at the end of the stage",
    Attribute.STEPS: "Steps of the worker during the stage; of a prefill, about its chunks",
    Attribute.BATCH_SIZE: "Mean number of sequences in these steps",
    Attribute.PREEMPTIONS: "How often the sequence lost its blocks to another one",
    Attribute.TRANSFERRED_BYTES: "KV bytes pulled; of a move, offered",
    Attribute.TRANSFER_EXPOSED_MS: "Part of the transfer after the prompt was computed",
    Attribute.TRANSFER_BLOCKS: "KV blocks pulled",
    Attribute.TRANSFER_SKIPPED_BLOCKS: "KV blocks of the prompt that the decode worker had already",
    Attribute.TRANSFER_READS: "Reads, each of one or more blocks",
    Attribute.TRANSFER_REREAD_BLOCKS: "Blocks read again after a wrong digest",
    Attribute.TRANSFER_GB_PER_S: "Bytes over the time in which reads were in flight, in 1e9 bytes per second",
    Attribute.TRANSFER_LANE: "What carried the bytes: shared memory, RDMA, TCP ...",
    Attribute.TRANSFER_OWNER: "Id of the worker that had the blocks",
    Attribute.PREFIX_TOKENS: "Prompt tokens read from the prefix cache of a peer; 0 = the read failed or was late",
    Attribute.PREFIX_WAIT_MS: "Waiting for that read",
    Attribute.PREFIX_BYTES: "Bytes of that read",
    Attribute.PREFIX_OWNER: "Name of the agent that had the prefix",
}
