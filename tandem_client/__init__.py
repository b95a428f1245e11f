"""The Python client of a Tandem router, for asyncio programs (`AsyncClient`) and for all others (`Client`).

from tandem_client import ChatMessage, ChatPrompt, Client, GenerateRequest

prompt = ChatPrompt(messages=[ChatMessage(role="user", content="What is the capital of France?")])
with Client("127.0.0.1:50051") as client:
    for response in client.generate(GenerateRequest(chat=prompt), timeout_s=30):
        print(response.tokens.text, end="", flush=True)
"""

from tandem_client.client import AsyncClient, Client
from tandem_client.credentials import Credentials
from tandem_client.errors import CallFailed
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
    "AsyncClient",
    "CallFailed",
    "ChatMessage",
    "ChatPrompt",
    "Client",
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
    "RequestPath",
    "SamplingParams",
    "ScaleResponse",
    "StopConditions",
    "TokenIds",
    "TokenizeRequest",
    "TokenizeResponse",
]
