"""What must hold of every answer of a stack, whatever the question was. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from conformance.findings import Finding, Question, Severity
from conformance.stack import Record

ANSWERED = Question("answers: each is complete, in time, without an error", Severity.SERVICE)
NOT_EMPTY = Question("answers: no status 200 without a token", Severity.OUTPUT)
EVENTS = Question("answers: one of each event, in the form of the API", Severity.FORM)
USAGE = Question("answers: usage counts the tokens", Severity.FORM)

Law = Callable[[Record], str]  # what is wrong; empty if nothing is


def findings_of(records: Sequence[Record], pairs: Sequence[tuple[Record, Record]]) -> Iterable[Finding]:
    """`pairs`: an answer of the reference, and one of the stack to the same prompt."""
    good = [record for record in records if record.is_good]
    full = [record for record in good if not record.answer.is_empty]
    yield _judge(ANSWERED, records, lambda record: "" if record.is_good else record.what)
    yield _judge(NOT_EMPTY, good, lambda record: "no token, and no error" if record.answer.is_empty else "")
    owners = Counter(name for record in full for name in record.answer.ids)
    yield _judge(EVENTS, full, lambda record: wrong_events(record, owners))
    prompts = {id(found): expected.answer.usage.prompt for expected, found in pairs if expected.answer.usage}
    yield _judge(USAGE, full, lambda record: wrong_usage(record, prompts.get(id(record))))


def _judge(question: Question, records: Sequence[Record], law: Law) -> Finding:
    found = [(record, wrong) for record in records if (wrong := law(record))]
    if found:
        record, wrong = found[0]
        return question.fails(f"{len(found)} of {len(records)} answers; the first: {wrong}", record.curl)
    if not records:
        return question.not_shown("no answer to judge")
    late = max(record.reply.seconds for record in records)
    return question.holds(
        f"{len(records)} answers" + (f", the slowest in {late:.1f} s" if question is ANSWERED else "")
    )


def wrong_events(record: Record, owners: Mapping[str, int]) -> str:
    """`owners`: how many answers have an id."""
    answer, wrong = record.answer, list(record.answer.faults)
    once = {"finish_reason": len(answer.finish_reasons)}
    if record.ask.chat:
        once["role"] = answer.num_roles
    if record.ask.stream:
        once |= {"[DONE]": answer.num_done}
    wrong += [f"{count} times {name}" for name, count in once.items() if count != 1]
    if len(answer.usages) > 1:
        wrong.append(f"{len(answer.usages)} times usage")
    if len(answer.ids) != 1:
        wrong.append(f"{len(answer.ids)} ids")
    wrong += [f"{owners[name]} answers have the id {name}" for name in answer.ids if owners[name] > 1]
    return ", ".join(wrong)


def wrong_usage(record: Record, prompt: int | None = None) -> str:
    """`prompt`: the tokens of the prompt, as the reference counts them."""
    usage, answer = record.answer.usage, record.answer
    if usage is None:
        return "no usage"
    if usage.total != usage.prompt + usage.completion or usage.prompt < 1:
        return f"{usage.prompt} + {usage.completion} tokens are {usage.total} in total"
    if prompt is not None and usage.prompt != prompt:
        return f"{usage.prompt} tokens of the prompt in place of {prompt}"
    if usage.cached is not None and not 0 <= usage.cached <= usage.prompt:
        return f"{usage.cached} of {usage.prompt} tokens of the prompt are cached"
    at_limit = answer.finish_reasons == ["length"]
    counted = len(answer.tokens) if answer.tokens and at_limit else record.ask.max_tokens if at_limit else None
    if counted is not None and usage.completion != counted:
        return f"{usage.completion} tokens counted, {counted} came"
    if usage.completion > record.ask.max_tokens:
        return f"{usage.completion} tokens counted, at most {record.ask.max_tokens} were asked for"
    return ""
