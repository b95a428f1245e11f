"""The names that `tandem_client` offers to programs."""

from tandem_client.client import AsyncClient, Client
from tandem_client.credentials import Credentials
from tandem_client.errors import CallFailed
from tandem_client.prompts import Options, Prompt
from tandem_client.results import Completion, Piece, Promise, Receipt, Timings, TokenLogprob, TopLogprob, Usage
from tandem_client.retries import NO_RETRY, Clock, RetryPolicy
from tandem_client.streams import AsyncStream, Stream
from tandem_client.stubs.cluster_pb2 import ExplainResponse, GetFleetResponse, GetLedgerResponse, ScaleResponse
from tandem_client.stubs.inference_pb2 import (
    ChatMessage,
    ChatPrompt,
    DetokenizeRequest,
    DetokenizeResponse,
    Finished,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    GetModelResponse,
    RequestPath,
    SamplingParams,
    StopConditions,
    TokenIds,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = [
    "NO_RETRY",
    "AsyncClient",
    "AsyncStream",
    "CallFailed",
    "ChatMessage",
    "ChatPrompt",
    "Client",
    "Clock",
    "Completion",
    "Credentials",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ExplainResponse",
    "FinishReason",
    "Finished",
    "GenerateRequest",
    "GenerateResponse",
    "GetFleetResponse",
    "GetLedgerResponse",
    "GetModelResponse",
    "Options",
    "Piece",
    "Promise",
    "Prompt",
    "Receipt",
    "RequestPath",
    "RetryPolicy",
    "SamplingParams",
    "ScaleResponse",
    "StopConditions",
    "Stream",
    "Timings",
    "TokenIds",
    "TokenLogprob",
    "TokenizeRequest",
    "TokenizeResponse",
    "TopLogprob",
    "Usage",
]
