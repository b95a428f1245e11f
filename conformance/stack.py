"""A stack as the check asks it: what it serves, the form of a question, its metrics, and a record of every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance.answers import Answer, count_of, dict_of, list_of, load, read_stream, read_whole, text_of
from conformance.findings import MAX_WHY, curl_of, json_body
from conformance.http_exchange import Call, End, Endpoint, Observe, Reply, exchange
from conformance.metrics_page import InUse, in_use
from core.errors import ErrorCode, TandemError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POLL_S = 0.25  # pause between two looks at a page of metrics
MAX_NAME = 256  # characters of the name of its model; beyond: the stack is not checked
MAX_CONTEXT = 1 << 17  # tokens of its context; beyond: no prompt is sent that exceeds it
FORM_BYTES = 64 << 10  # of an answer of it, with 4 KiB more for each token; beyond: the check closes the connection
_TOKEN_BYTES = 4 << 10
# Fields that not every server takes: outputs of a known length, and margins. The first set that is taken is used.
_OPTIONAL: tuple[dict[str, object], ...] = ({"ignore_eos": True, "logprobs": 2}, {"logprobs": 2}, {})


class StackError(TandemError):
    """The stack cannot be checked at all."""

    code = ErrorCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: str
    max_tokens: int
    stream: bool = False
    chat: bool = False
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One call and what became of it."""

    endpoint: Endpoint
    ask: Ask
    call: Call
    reply: Reply
    answer: Answer

    @property
    def is_good(self) -> bool:
        """A complete answer without an error; it may be empty or wrong."""
        return self.reply.end is End.COMPLETE and self.reply.status == 200 and self.answer.error is None

    @property
    def what(self) -> str:
        """What came in place of a good answer."""
        if self.answer.error is not None:
            return f"status {self.reply.status}, {self.answer.error}"
        return f"status {self.reply.status}, {self.reply.end.value}" if self.reply.status else self.reply.end.value

    @property
    def curl(self) -> str:
        return curl_of(self.endpoint, self.call)


@dataclass
class Stack:
    """`limit_s` bounds each answer. `metrics` are the pages of the stack. `model`: empty for the first one served."""

    endpoint: Endpoint
    limit_s: float
    metrics: Sequence[Endpoint] = ()
    model: str = ""
    context: int | None = None  # tokens of prompt and output, if the stack says it
    options: dict[str, object] = field(default_factory=dict)
    salt: str = ""  # asked for as `cache_salt`, if the server takes it: no prefix of a request without it is used
    records: list[Record] = field(default_factory=list)  # of all answers that should be good

    async def meet(self) -> None:
        """Learn the model and which optional fields are taken. Raises `StackError`."""
        reply = await exchange(self.endpoint, Call("/v1/models"), self.limit_s)
        models: list[object] = []  # of a proxy without this route
        with contextlib.suppress(ValueError):
            models = list_of(dict_of(load(bytes(reply.body))).get("data"))
        found = [dict_of(model) for model in models if not self.model or dict_of(model).get("id") == self.model]
        first = found[0] if found else {}
        self.model = self.model or text_of(first.get("id"))
        if not 0 < len(self.model) <= MAX_NAME:
            what = f"{self.endpoint.url}/v1/models: "
            if reply.end is End.UNREACHABLE:
                raise StackError(what + reply.end.value)
            what += f"status {reply.status}, {reply.end.value}"
            raise StackError(f"{what}; it names no model of 1 to {MAX_NAME} characters: set --model")
        context = count_of(first.get("max_model_len"), 0)
        self.context = context if 0 < context <= MAX_CONTEXT else None
        salts = dict.fromkeys((self.salt, ""))
        for self.salt, self.options in itertools.product(salts, _OPTIONAL):
            record = await self._send(Ask("The sky is", 4))
            if record.reply.status != 400:  # all other faults are findings
                break
        if record.reply.end in (End.UNREACHABLE, End.UNTRUSTED) or 400 <= record.reply.status < 500:
            raise StackError(f"{self.endpoint.url}{COMPLETIONS}: {record.what}"[:MAX_WHY])

    def call_of(self, ask: Ask) -> Call:
        fields: dict[str, object] = {"model": self.model} | self.options
        if ask.chat:
            fields["messages"] = [{"role": "user", "content": ask.prompt}]
            if "logprobs" in self.options:
                fields |= {"logprobs": True, "top_logprobs": 2}
        else:
            fields["prompt"] = ask.prompt
        fields |= {"max_tokens": ask.max_tokens, "temperature": 0}
        if self.salt:
            fields["cache_salt"] = self.salt
        if ask.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        path, max_bytes = CHAT if ask.chat else COMPLETIONS, FORM_BYTES + ask.max_tokens * _TOKEN_BYTES
        return Call(path, json_body(fields), ask.headers, max_bytes)

    async def ask(self, ask: Ask) -> Record:
        """A question that every stack should answer."""
        record = await self._send(ask)
        self.records.append(record)
        return record

    async def ask_all(self, asks: Sequence[Ask]) -> list[Record]:
        return list(await asyncio.gather(*map(self.ask, asks)))

    async def try_to_ask(self, ask: Ask, observe: Observe | None = None) -> Record:
        """A question that may fail rightly: under a fault, or with a deadline."""
        return await self._send(ask, observe)

    async def _send(self, ask: Ask, observe: Observe | None = None) -> Record:
        call = self.call_of(ask)
        reply = await exchange(self.endpoint, call, self.limit_s, observe)
        read = read_stream if ask.stream and reply.status == 200 else read_whole
        answer = read(bytes(reply.body))
        reply.body.clear()  # all records are kept
        return Record(self.endpoint, ask, call, reply, answer)

    # ---- metrics

    async def page(self) -> str:
        """All pages of metrics as one; empty if there is none."""
        replies = [await exchange(endpoint, Call(""), self.limit_s) for endpoint in self.metrics]
        good = [reply for reply in replies if reply.status == 200 and reply.end is End.COMPLETE]
        return "\n".join(bytes(reply.body).decode(errors="replace") for reply in good)

    async def in_use(self) -> InUse:
        return in_use(await self.page())

    async def settled(self, idle: InUse, within_s: float) -> tuple[InUse, float]:
        """Wait until no more is in use than in `idle`. Returns what is left in use, and the seconds that it took."""
        clock = asyncio.get_running_loop()
        start = clock.time()
        while True:
            left = (await self.in_use()).beyond(idle)
            taken_s = clock.time() - start
            if not left or taken_s > within_s:
                return left, taken_s
            await asyncio.sleep(POLL_S)
