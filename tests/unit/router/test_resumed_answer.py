"""A client may bring the start of an answer: each token is checked, and the text goes on behind the last one."""

from __future__ import annotations

import pytest

from core.config import RouterConfig
from core.errors import InvalidRequest
from core.lifecycle import FinishReason
from router.serving import validation
from router.serving.output_formats import RequestGrammars
from router.serving.resumed_answer import ResumedAnswer
from router.serving.validation import Generation, prepare
from runtime.validation_threads import MAX_INLINE_BYTES
from tandem_client.stubs.inference_pb2 import Choices, GenerateRequest, OutputFormat, SamplingParams, StopConditions
from text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("fake:tiny")  # a token is a byte
GRAMMARS = RequestGrammars(TOKENIZER)
(EOS,) = TOKENIZER.eos_token_ids
VOCAB_SIZE = TOKENIZER.info.vocab_size


def prepared(wire: GenerateRequest) -> Generation:
    return prepare(wire, TOKENIZER, RouterConfig(), "id", lambda: 7, (), GRAMMARS)


def resuming(output: str | list[int], **fields: object) -> GenerateRequest:
    own = {name: fields.pop(name) for name in ("n", "output_format") if name in fields}
    ids = list(output.encode()) if isinstance(output, str) else output
    stop = StopConditions(**({"max_tokens": 20} | fields))  # type: ignore[arg-type]
    return GenerateRequest(text="a prompt", resume=ids, stop=stop, **own)  # type: ignore[arg-type]


def resumed(output: str | list[int], **fields: object) -> ResumedAnswer:
    found = prepared(resuming(output, **fields)).resumed
    assert found is not None
    return found


CHOICES = OutputFormat(choices=Choices(texts=["yes", "yesterday"]))
REFUSED = {
    "several choices": (resuming("a", n=2), "needs n = 1, n is 2"),
    "more than the context": (resuming([1] * 8192), "fewer ids than the context of 8192 tokens, has 8192"),
    "more than max_tokens": (resuming("abcd", max_tokens=3), r"at most max_tokens \(3\) ids, has 4"),
    "outside the vocabulary": (resuming([1, VOCAB_SIZE]), f"token id {VOCAB_SIZE} is outside the vocabulary"),
    "behind the end of sequence": (resuming([97, EOS, 98]), f"behind index 1, where token {EOS} ended the answer"),
    "behind a stop token": (resuming("ab", stop_token_ids=[97]), "behind index 0, where token 97 ended the answer"),
    "behind a stop string": (resuming("abcd", stop_strings=["bc"]), "behind index 2, where a stop string ended"),
    "another form": (resuming("yen", output_format=CHOICES), "token 110 at index 2 breaks the output format"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_no_answer_begins_with_are_refused_by_name(name: str) -> None:
    wire, says = REFUSED[name]
    with pytest.raises(InvalidRequest, match=f"^resume: .*{says}"):
        prepared(wire)


@pytest.mark.parametrize(
    ("wire", "reason", "match"),
    [
        (resuming([97, EOS]), FinishReason.STOP, ""),
        (resuming([97, EOS], ignore_eos=True), None, ""),
        (resuming("ab", stop_token_ids=[98]), FinishReason.STOP, ""),
        (resuming("abc", max_tokens=3), FinishReason.LENGTH, ""),
        (resuming("xab", stop_strings=["ab"]), FinishReason.STOP, "ab"),
        (resuming("xab", stop_strings=["abc"]), None, ""),
        (resuming("ab", stop_strings=["ab"], min_tokens=2), None, ""),
        (resuming([*b"yes", EOS], output_format=CHOICES), FinishReason.STOP, ""),
        (resuming("yes", output_format=CHOICES), None, ""),
    ],
)
def test_an_answer_that_its_last_token_ends_is_told_from_one_that_goes_on(
    wire: GenerateRequest, reason: FinishReason | None, match: str
) -> None:
    found = prepared(wire).resumed
    assert found is not None
    assert (found.end, found.text.stop_match) == (reason, match)


def test_the_text_goes_on_inside_a_character_and_inside_a_stop_string() -> None:
    snowman = list("x☃".encode())
    assert resumed(snowman[:2]).text.push(snowman[2:]) == ("☃", 2)
    inside = resumed("xs", stop_strings=["stop"])
    assert inside.text.push(list(b"tay")) == ("stay", 3)
    inside = resumed("xs", stop_strings=["stop"])
    assert inside.text.push(list(b"top!")) == ("", 3)
    assert inside.text.stop_match == "stop"


def test_the_request_stays_that_of_the_prompt_and_is_read_in_a_thread() -> None:
    wire = resuming("abc")
    generation = prepared(wire)
    (request,) = generation.choices
    assert request.num_prompt_tokens == len(request.token_ids)
    assert prepared(GenerateRequest(text="a prompt", sampling=SamplingParams())).resumed is None
    assert validation.work_of(wire, GRAMMARS) > MAX_INLINE_BYTES
