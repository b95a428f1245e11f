"""The names of all spans and attributes. Each has its meaning as a comment, which docs/traces.md prints."""

from __future__ import annotations

from enum import Enum


class SpanName(Enum):
    """The first word names the process that measured the span."""

    GATEWAY = "gateway.request"  # One HTTP request, from its headers to the last byte of the answer
    REQUEST = "tandem.request"  # One choice of a Generate call, from its arrival to the last message; or a refused call
    ROUTER_TOKENIZE = "router.tokenize"  # Validation, chat template, tokenizing
    ROUTER_QUEUE = "router.queue"  # Waiting in the router for workers with room; again before each further attempt
    ROUTER_PREFILL = "router.prefill"  # From the dispatch to the first token, as the router measures it
    ROUTER_DECODE = "router.decode"  # From the first token to the last one
    ROUTER_RESPOND = "router.respond"  # From the end of the generation to the last message written to the client
    ROUTER_ATTEMPT = "router.attempt"  # One attempt: the calls to the workers, with the predicted times and the error
    PREFILL_QUEUE = "prefill_worker.queue"  # Waiting on the prefill worker for the first step
    PREFILL_COMPUTE = "prefill_worker.prefill"  # Computing the prompt on the prefill worker, up to the first token
    DECODE_QUEUE = "decode_worker.queue"  # Waiting on the decode worker for blocks or for a place in a step
    DECODE_PREFILL = "decode_worker.prefill"  # Computing the prompt on the decode worker
    # Pulling KV blocks, from the first requested block to the last verified block
    DECODE_TRANSFER = "decode_worker.transfer"
    DECODE_COMPUTE = "decode_worker.decode"  # Generating tokens, up to the last one
    # Pause of a sequence that moves, until the next decode worker has its KV or the move fails
    DECODE_MOVE = "decode_worker.move"


class Attribute:
    """Names that start with gen_ai., error., http. or url. are OpenTelemetry's semantic conventions; those of
    OpenInference make Phoenix and other tools show tokens and models."""

    OPERATION = "gen_ai.operation.name"  # chat or text_completion
    PROVIDER = "gen_ai.provider.name"  # tandem
    REQUEST_MODEL = "gen_ai.request.model"  # Name of the model
    MAX_TOKENS = "gen_ai.request.max_tokens"  # Most output tokens
    TEMPERATURE = "gen_ai.request.temperature"  # Sampling temperature
    TOP_P = "gen_ai.request.top_p"  # Nucleus sampling
    TOP_K = "gen_ai.request.top_k"  # Top-k sampling; 0 = all
    SEED = "gen_ai.request.seed"  # Seed of the choice: the same seed repeats the choice
    INPUT_TOKENS = "gen_ai.usage.input_tokens"  # Tokens of the prompt
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"  # Tokens delivered to the client
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"  # Prompt tokens that the worker had cached
    RESPONSE_ID = "gen_ai.response.id"  # Finished.request_id
    FINISH_REASONS = "gen_ai.response.finish_reasons"  # stop or length
    ERROR_TYPE = "error.type"  # Code of the error
    HTTP_METHOD = "http.request.method"  # HTTP method
    HTTP_STATUS = "http.response.status_code"  # HTTP status of the answer
    URL_PATH = "url.path"  # Path of the HTTP request
    SPAN_KIND = "openinference.span.kind"  # OpenInference: LLM for a choice, CHAIN for every other span
    LLM_MODEL = "llm.model_name"  # OpenInference: name of the model
    LLM_PROMPT_TOKENS = "llm.token_count.prompt"  # OpenInference: tokens of the prompt
    LLM_OUTPUT_TOKENS = "llm.token_count.completion"  # OpenInference: output tokens
    LLM_TOTAL_TOKENS = "llm.token_count.total"  # OpenInference: prompt and output tokens
    LLM_CACHED_TOKENS = "llm.token_count.prompt_details.cache_read"  # OpenInference: cached prompt tokens
    TENANT = "tandem.tenant"  # Name of the tenant
    CHOICE = "tandem.choice"  # Number of the choice
    PATH = "tandem.path"  # disaggregated, local, recomputed or migrated
    ATTEMPT = "tandem.attempt"  # Number of the attempt, from 1
    ATTEMPTS = "tandem.attempts"  # Number of attempts
    UNCACHED_TOKENS = "tandem.uncached_tokens"  # Prompt tokens to compute, as the router predicted
    ROUTE_QUEUE = "tandem.route.queue_ms"  # Predicted: until the computing worker begins the prompt (docs/routing.md)
    ROUTE_PREFILL = "tandem.route.prefill_ms"  # Predicted: computing the prompt
    ROUTE_TRANSFER = "tandem.route.transfer_ms"  # Predicted: the exposed part of the transfer
    ROUTE_ROOM_WAIT = "tandem.route.room_wait_ms"  # Predicted: until the decode worker has blocks
    ROUTE_GAP = "tandem.route.gap_ms"  # Predicted: added to each step of the decode worker
    ROUTE_NUM_STREAMS = "tandem.route.num_streams"  # Sequences that wait for those longer steps
    ROUTE_EVICT = "tandem.route.evict_ms"  # Predicted: to compute again what leaves the caches for the prompt
    ROUTE_COST = "tandem.route.cost_ms"  # Predicted: the sum that decides
    ROUTE_SOURCE = "tandem.route.source"  # Worker from whose prefix cache the computing worker reads
    ROUTE_READ_TOKENS = "tandem.route.read_tokens"  # Predicted: prompt tokens that it reads from there
    ROUTE_READ = "tandem.route.read_ms"  # Predicted: until they are read, while the queue goes on
    PREDICTED_TTFT = "tandem.route.predicted_ttft_ms"  # Predicted: from the arrival to the first token
    TTFT = "tandem.route.ttft_ms"  # Measured: from the arrival to the first token
    PREDICTED = "tandem.predicted_ms"  # Predicted length of the stage; of a transfer, of its exposed part
    PREFILL_WORKER = "tandem.prefill_worker"  # Id of the worker that computes the prompt
    DECODE_WORKER = "tandem.decode_worker"  # Id of the worker that generates the tokens
    WORKER = "tandem.worker"  # Id of the worker that measured the span
    QUEUE_DEPTH = "tandem.queue.depth"  # Sequences that waited on the worker when the call arrived
    QUEUE_TOKENS = "tandem.queue.tokens"  # Tokens that these sequences had to compute
    TOKENS = "tandem.tokens"  # Tokens computed (prefill) or generated (decode) in the stage
    BLOCKS = "tandem.blocks"  # KV blocks of the sequence at the end of the stage
    STEPS = "tandem.steps"  # Steps of the worker during the stage; of a prefill, about its chunks
    BATCH_SIZE = "tandem.batch_size"  # Mean number of sequences in these steps
    PREEMPTIONS = "tandem.preemptions"  # How often the sequence lost its blocks to another one
    TRANSFERRED_BYTES = "tandem.transfer.bytes"  # KV bytes pulled; of a move, offered
    TRANSFER_EXPOSED_MS = "tandem.transfer.exposed_ms"  # Part of the transfer after the prompt was computed
    TRANSFER_BLOCKS = "tandem.transfer.blocks"  # KV blocks pulled
    # KV blocks of the prompt that the decode worker had already
    TRANSFER_SKIPPED_BLOCKS = "tandem.transfer.skipped_blocks"
    TRANSFER_READS = "tandem.transfer.reads"  # Reads, each of one or more blocks
    TRANSFER_REREAD_BLOCKS = "tandem.transfer.reread_blocks"  # Blocks read again after a wrong digest
    # Bytes over the time in which reads were in flight, in 1e9 bytes per second
    TRANSFER_GB_PER_S = "tandem.transfer.gb_per_s"
    TRANSFER_LANE = "tandem.transfer.lane"  # What carried the bytes: shared memory, RDMA, TCP ...
    TRANSFER_OWNER = "tandem.transfer.owner"  # Id of the worker that had the blocks
    # Prompt tokens read from the prefix cache of a peer; 0 = the read failed or was late
    PREFIX_TOKENS = "tandem.prefix.tokens"
    PREFIX_WAIT_MS = "tandem.prefix.wait_ms"  # Waiting for that read
    PREFIX_BYTES = "tandem.prefix.bytes"  # Bytes of that read
    PREFIX_OWNER = "tandem.prefix.owner"  # Name of the agent that had the prefix
