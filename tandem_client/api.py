"""The names that `tandem_client` offers to programs."""

from tandem_client.client import AsyncClient, Client
from tandem_client.credentials import Credentials
from tandem_client.errors import CallFailed
from tandem_client.prompts import Options, Prompt
from tandem_client.results import (
    Completion,
    Piece,
    Promise,
    Receipt,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from tandem_client.retries import NO_RETRY, RESUME, Clock, RetryPolicy
from tandem_client.streams import AsyncStream, Stream

__all__ = [
    "NO_RETRY",
    "RESUME",
    "AsyncClient",
    "AsyncStream",
    "CallFailed",
    "Client",
    "Clock",
    "Completion",
    "Credentials",
    "Options",
    "Piece",
    "Promise",
    "Prompt",
    "Receipt",
    "RetryPolicy",
    "Stream",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
]
