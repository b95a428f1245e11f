"""An answer that outlives its router: what a client has of it, and the request that continues it at another router.

    Generate --> Started, chunks ... the router is lost
    Generate with the tokens so far --> chunks from the next index on ... Finished

Each token reaches the caller once. The choices of a call with n > 1 go on one after the other, each as a call of its
own, because a router resumes one choice at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from tandem_client.errors import CallFailed
from tandem_client.stubs import inference_pb2

NUM_SEEDS = 2**63  # choice i has seed + i, modulo this


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    has_rest: bool = False  # of the text, behind the last token
    has_ended: bool = False


class Answer:
    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self._choices = [_Choice() for _ in range(request.n or 1)]
        self._choices[0].token_ids.extend(request.resume)
        self._resumed: int | None = None  # the choice that the current call continues; None: the call has all choices
        self.started: inference_pb2.Started | None = None
        self.num_tokens = 0  # received, of all choices

    @property
    def has_ended(self) -> bool:
        return all(choice.has_ended for choice in self._choices)

    @property
    def call_has_ended(self) -> bool:
        """Every choice of the current call has ended."""
        return self.has_ended if self._resumed is None else self._choices[self._resumed].has_ended

    @property
    def can_resume(self) -> bool:
        """A router has told what another one must know."""
        return self.started is not None

    def next_request(self) -> inference_pb2.GenerateRequest:
        """The request of the next call: the caller's, or one that continues the first choice that has not ended."""
        if self.started is None:
            return self._request
        self._resumed = next(number for number, choice in enumerate(self._choices) if not choice.has_ended)
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id, request.n = self.started.request_id, 1
        request.sampling.seed = (self.started.seed + self._resumed) % NUM_SEEDS
        request.stop.max_tokens = self.started.max_tokens
        request.resume[:] = self._choices[self._resumed].token_ids
        return request

    def take(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """The message for the caller; None for one that repeats what the caller has. Raises `CallFailed`."""
        kind = response.WhichOneof("event")
        if kind == "started":
            return self._take_started(response)
        if kind == "tokens":
            return self._take_tokens(response)
        if kind == "finished":
            if self._resumed is not None:
                response.finished.choice = self._resumed
            self._choices[response.finished.choice].has_ended = True
        return response

    def _take_started(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        if self.started is None:
            self.started = response.started
            return response
        found, wanted = response.started.prompt_tokens, self.started.prompt_tokens
        if found != wanted:
            raise CallFailed(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the router that continues the answer counts {found} prompt tokens, the first one counted {wanted}: "
                "all routers of a client must serve the same model",
            )
        return None

    def _take_tokens(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        chunk = response.tokens
        if self._resumed is not None:
            chunk.choice = self._resumed
        choice = self._choices[chunk.choice]
        if not chunk.token_ids:
            if choice.has_rest:
                return None
            choice.has_rest = True
        choice.token_ids.extend(chunk.token_ids)
        self.num_tokens += len(chunk.token_ids)
        return response
