"""What a grammar allows next: compared with languages that are listed out, byte by byte and token by token."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from core.errors import DeadlineExceeded, InvalidRequest
from core.output_grammar import GrammarRow, Masks
from core.request import SamplingParams
from core.scheduling.drafts import MAX_DRAFTS
from core.step import FORCED, Proposal, SequenceView
from model_files.builtin_configs import BYTE_SPECIAL_TOKENS
from text import compiled_grammars
from text.compiled_grammars import MAX_KEPT_BYTES, CompiledGrammars, Measures
from text.grammar_account import MASK_S, Account
from text.grammar_limits import MAX_PATTERNS, check_limits
from text.grammars import GrammarReader
from text.output_format import choice_grammar, json_object_grammar, json_schema_grammar, regex_grammar
from text.schema_patterns import MAX_GENERAL, MAX_PLACES
from text.tokenizer import ModelTokenizer, load_tokenizer
from text.tool_grammar import tool_grammar

TOKENIZER = load_tokenizer("fake:tiny")
(EOS,) = TOKENIZER.eos_token_ids
READER = GrammarReader(lambda: TOKENIZER)
PROMPT = [5, 6, 7]
NAME = regex_grammar(r'\{"name": "[a-z]{2,4}", "is": (true|false)\}')


def view_of(grammar: str, output: Sequence[int] = ()) -> SequenceView:
    sampling = SamplingParams(max_tokens=100, grammar=grammar)
    return SequenceView("a", [*PROMPT, *output], len(PROMPT), (), sampling)


def allowed(row: GrammarRow, reader: GrammarReader = READER) -> set[int]:
    masks = reader.begin([row])()
    if masks.failed:
        raise masks.failed["a"]
    bits = np.unpackbits(np.frombuffer(masks.allowed["a"][0], np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: TOKENIZER.info.vocab_size]).tolist())


def allowed_after(grammar: str, text: bytes) -> set[int]:
    view = view_of(grammar, list(text))
    return allowed(GrammarRow(view, len(view.token_ids)))


def takes(grammar: str, text: str) -> bool:
    """Whether the grammar allows each byte of `text` in turn, and then the end."""
    view = view_of(grammar)
    tokens = view.token_ids
    assert isinstance(tokens, list)
    for token_id in [*text.encode(), EOS]:
        if token_id not in allowed(GrammarRow(view, len(tokens))):
            return False
        tokens.append(token_id)
    return True


LANGUAGES: dict[str, tuple[str, Iterable[str]]] = {
    "choices": (choice_grammar(["yes", "no", "not sure", 'say "no"', "ja, \u00e9\n"]),
                ["yes", "no", "not sure", 'say "no"', "ja, \u00e9\n"]),
    "regex": (regex_grammar(r"a[bc]{1,3}(d|ef)?"),
              ["a" + "".join(middle) + end for n in (1, 2, 3) for middle in itertools.product("bc", repeat=n)
               for end in ("", "d", "ef")]),
    "lark": ('start: "x" item ("," item)~0..1\nitem: "1" | "22"',
             ["x1", "x22", "x1,1", "x1,22", "x22,1", "x22,22"]),
    "enum": (json_schema_grammar({"enum": ["red", 12, True, None]}), ['"red"', "12", "true", "null"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_has_exactly_the_tokens_that_some_text_of_the_language_goes_on_with(name: str) -> None:
    grammar, listed = LANGUAGES[name]
    texts = {text.encode() for text in listed}
    prefixes = {text[:length] for text in texts for length in range(len(text) + 1)}
    for prefix in prefixes:
        wanted = {text[len(prefix)] for text in texts if text.startswith(prefix) and text != prefix}
        wanted |= {EOS} if prefix in texts else set()
        assert allowed_after(grammar, prefix) == wanted, prefix


def test_a_mask_depends_on_the_output_alone_not_on_what_was_asked_before() -> None:
    grammar = json_schema_grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    output = list(b'{"n": 12}')
    one_by_one = view_of(grammar, output)
    in_turn = [allowed(GrammarRow(one_by_one, len(PROMPT) + length)) for length in range(len(output) + 1)]
    for length in (4, 9, 0, 7, 7, 3):  # on, back and again, with and without a promised token
        assert allowed(GrammarRow(one_by_one, len(PROMPT) + length)) == in_turn[length]
        if length:
            before = len(PROMPT) + length - 1
            promised = GrammarRow(view_of(grammar, output[: length - 1]), before, (output[length - 1],))
            assert allowed(promised) == in_turn[length]
            another = GrammarReader(lambda: TOKENIZER)
            assert allowed(GrammarRow(view_of(grammar, output), len(PROMPT) + length), another) == in_turn[length]


def test_after_its_end_an_output_may_only_end_again() -> None:
    """A step that was planned ahead computes one token more."""
    view = view_of(choice_grammar(["a"]), [ord("a"), EOS])
    assert allowed(GrammarRow(view, len(view.token_ids))) == {EOS}


def test_an_output_that_cannot_follow_the_grammar_fails_alone() -> None:
    wrong, right = view_of(choice_grammar(["a"]), [ord("b")]), view_of(choice_grammar(["a"]))
    other = SequenceView("b", right.token_ids, right.num_prompt_tokens, (), right.sampling)
    masks = READER.begin([GrammarRow(wrong, len(wrong.token_ids)), GrammarRow(other, len(PROMPT))])()
    assert list(masks.allowed) == ["b"]
    assert isinstance(masks.failed["a"], InvalidRequest)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: nothing", "unknown name"),
        ("not lark", "output_format: "),
        (regex_grammar("(a"), "output_format: "),
        (json_schema_grammar({"type": "objekt"}), "Invalid type: objekt"),
        (json_schema_grammar({"type": "object", "unevaluatedProperties": False}), "unevaluatedProperties"),
        (json_schema_grammar(False), "not"),
        ("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3_000)) + '\na3000: "y"', "at most 500 rules"),
        ("start: " + " | ".join("%json {}" for _ in range(501)), "at most 500 rules, terminals and %json"),
        ('start: %json {"multipleOf": 9.99983e5}', "least common multiple"),
        ('start: %json {"multiple\\u004ff" : 999983, "type": "number"}', "least common multiple"),
    ],
)
def test_a_grammar_that_is_wrong_or_too_large_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        READER.compile(grammar)
    assert refused.value.field == "output_format"
    assert len(str(refused.value)) < 600


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def divisible(by: float, kind: str = "integer") -> dict[str, object]:
    return {"type": kind, "multipleOf": by}


def linked(depth: int, between: int) -> dict[str, object]:
    """Definitions of which each leads to the next."""
    defs: dict[str, object] = {f"d{depth}": {"type": "string"}}
    for number in range(depth):
        defs[f"d{number}"] = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(between):
            defs[f"d{number}"] = {"items": defs[f"d{number}"]}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, tuple[str, object]] = {
    "alternatives of many properties": ("too big", {"anyOf": [
        {"type": "object", "properties": {f"k{i}_{j}": {"type": "string"} for j in range(20)}} for i in range(200)
    ]}),
    "a long chain": ("recursion limit", nested(200)),
    "a chain that overflows a usual stack": ("too big", linked(60, between=28)),
    "patterns that must all match": ("Unable to determine if regex is empty",
        {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(12)]}),
    "30 of these": ("at most 12 patterns",
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(30)]}),
    "products of alternatives": ("schema too large", {"allOf": [
        {"anyOf": [{"properties": {f"{name}{i}": divisible(2)}} for name in "ab"]} for i in range(14)
    ]}),
    "many values": ("too big", {"enum": [f"{i:x}" * 2 for i in range(6_000)]}),
    "many values with parts": ("at most 500 objects and lists", {"const": [{"a": [i]} for i in range(251)]}),
    "a large multiple": ("least common multiple", divisible(999_983)),
    "a multiple of decimals": ("least common multiple", divisible(1234.567)),
    "multiples of each other": ("least common multiple",
        {"allOf": [divisible(by, "number") for by in (101, 103, 107)]}),
    "pairs of names": ("at most 120 pairs of patternProperties", {"allOf": [
        {"patternProperties": {f"^a{i}_{j}": {} for j in range(9)}} for i in range(2)
    ]}),
    "an object whose row is too long": ("at most 150 optional properties", {
        "properties": {f"k{i}": {} for i in range(160)}, "required": [f"k{i}" for i in range(9)]
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_by_name_in_each_place(name: str) -> None:
    """As a format, in Lark, and in Lark inside JSON."""
    message, schema = HOSTILE[name]
    lark = f"start: %json {json.dumps(schema)}"
    grammars = (json_schema_grammar(schema), lark, json.dumps({"grammars": [{"lark_grammar": lark}]}))  # type: ignore[arg-type]
    for grammar in grammars:
        with pytest.raises(InvalidRequest, match=message) as refused:
            READER.compile(grammar)
        assert refused.value.field == "output_format"
        assert len(str(refused.value)) < 600


def test_a_small_multiple_is_taken() -> None:
    for by in (0.01, 5, 7.5, 10_000):
        READER.compile(json_schema_grammar(divisible(by)))
    assert takes(json_schema_grammar({"allOf": [divisible(100), divisible(12)]}), "300")


# ---- time and memory


class Clocks:
    """Each mask of a row that is computed alone takes the next of `masks_s`."""

    def __init__(self, step_s: float, masks_s: Iterable[float]) -> None:
        self.measures = Measures(wall_s=self._wall, cpu_s=self._cpu)
        self._step_s, self._masks_s, self._now = step_s, iter(masks_s), 0.0
        self._is_end = False

    def _wall(self) -> float:
        self._now += self._step_s
        return self._now

    def _cpu(self) -> float:
        self._now += next(self._masks_s) if self._is_end else 0.0
        self._is_end = not self._is_end
        return self._now


def masks_of(reader: GrammarReader, *views: SequenceView) -> Masks:
    return reader.begin([GrammarRow(view, len(view.token_ids)) for view in views])()


def test_a_sequence_whose_masks_take_too_long_ends_alone() -> None:
    slow, fast = view_of(NAME), SequenceView("b", PROMPT, len(PROMPT), (), SamplingParams(max_tokens=9, grammar=NAME))
    times_s = itertools.chain([0.0], itertools.cycle([0.06, 0.001]))  # the first: reading NAME
    reader = GrammarReader(lambda: TOKENIZER, Clocks(1.0, times_s).measures)
    steps = [masks_of(reader, slow, fast) for _ in range(7)]
    assert [list(step.failed) for step in steps] == [[]] * 5 + [["a"]] * 2
    assert all(step.allowed["b"] == steps[0].allowed["b"] for step in steps)
    with pytest.raises(InvalidRequest, match="output_format: the grammar is too slow for this output"):
        raise steps[-1].failed["a"]


def test_a_row_is_looked_at_alone_only_behind_a_slow_step() -> None:
    view = view_of(NAME)
    drafts = GrammarRow(view, len(PROMPT), drafts=tuple(b'{"'))
    clocks = (Clocks(step_s, itertools.repeat(0.0)) for step_s in (0.001, 1.0))
    quick, late = (GrammarReader(lambda: TOKENIZER, each.measures) for each in clocks)
    assert [len(quick.begin([drafts])().allowed["a"]) for _ in range(3)] == [3, 3, 3]
    assert [len(late.begin([drafts])().allowed["a"]) for _ in range(4)] == [3, 1, 3, 1], "alone, drafts are not taken"
    for output in (b'{"na', b'{"name": "bo', b'{"name": "bo", "is": true}', [*b'{"name": "bo", "is": true}', EOS]):
        row = GrammarRow(view_of(NAME, output), len(PROMPT) + len(output))
        assert allowed(row, late) == allowed(row, late) == allowed(row), output


def test_one_slow_mask_is_forgiven() -> None:
    account = Account()
    for took_s in (9.0, 0.05, 0.05):
        account.charge(took_s, MASK_S)
    account.check()
    for _ in range(40):
        account.charge(50e-6, MASK_S)
    assert account.debt_s == 0.0
    for _ in range(3):
        account.charge(0.1, MASK_S)
    with pytest.raises(InvalidRequest, match="too slow"):
        account.check()


AMBIGUOUS = 'start: s\ns: s s s s | s s s | s s | "a"'


def test_an_ambiguous_grammar_ends_its_output_soon() -> None:
    """The items of its rows grow with the output: 700 behind 40 tokens."""
    reader = GrammarReader(lambda: TOKENIZER, Measures(cpu_s=lambda: 0.0))
    assert allowed_after(AMBIGUOUS, b"a" * 10)
    with pytest.raises(InvalidRequest, match="items; max is 700"):
        reader.num_accepted(AMBIGUOUS, list(b"a" * 100))
    assert "items; max is 700" in str(masks_of(reader, view_of(AMBIGUOUS, b"a" * 100)).failed["a"])


def test_tokens_of_a_resumed_output_are_followed_until_the_deadline() -> None:
    asked = iter([False, False, True])
    with pytest.raises(DeadlineExceeded):
        READER.num_accepted(regex_grammar("a*"), list(b"a" * 1_000), lambda: next(asked))
    assert READER.num_accepted(regex_grammar("a*"), list(b"a" * 20 + b"b")) == 20


def test_an_output_that_takes_too_long_to_follow_is_refused() -> None:
    reader = GrammarReader(lambda: TOKENIZER, Clocks(0.0, itertools.repeat(0.08)).measures)
    with pytest.raises(InvalidRequest, match="too slow"):
        reader.num_accepted(regex_grammar("a*"), list(b"a" * 100))


def test_compiled_grammars_are_kept_while_their_memory_fits() -> None:
    memory = itertools.count(0, MAX_KEPT_BYTES // 3)  # a third for each
    kept = CompiledGrammars(lambda: TOKENIZER, Measures(resident_bytes=lambda: next(memory)))
    for name in "abcd":
        kept.get(regex_grammar(name))
    assert [kept.find(regex_grammar(name)) is not None for name in "abcd"] == [False, True, True, True]


def test_the_tokens_of_the_model_can_be_read_before_the_first_grammar() -> None:
    is_read = threading.Event()

    def load() -> ModelTokenizer:
        is_read.set()
        return TOKENIZER

    GrammarReader(load).warm_up()
    assert is_read.wait(60.0)


def test_a_grammar_that_takes_a_second_to_read_is_refused_by_name() -> None:
    reader = GrammarReader(lambda: TOKENIZER, Clocks(0.0, itertools.repeat(1.1)).measures)
    with pytest.raises(InvalidRequest, match="more than 1 s to read"):
        reader.compile(NAME)


def test_a_grammar_whose_first_mask_fails_is_refused_before_its_output_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matcher(Mock):
        def compute_bitmask(self) -> None:
            self.is_error.return_value = True

    made = partial(Matcher, is_error=Mock(return_value=False), get_error=lambda: "too many items")
    monkeypatch.setattr(compiled_grammars, "LLMatcher", lambda *_, **__: made())
    with pytest.raises(InvalidRequest, match="too many items"):
        CompiledGrammars(lambda: TOKENIZER, Measures()).get(NAME)


def test_json_may_have_spaces_but_not_without_end() -> None:
    grammar = json_object_grammar()
    assert takes(grammar, '{"a":1}')
    assert takes(grammar, '{\n  "a": [1, {"b": null}],\n  "c": "\u00e9"\n}')
    assert not takes(grammar, "[1]")
    assert not takes(grammar, '{"a":' + " " * 21 + "1}")


# ---- calls of tools

CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
}
TOOLS: list[tuple[str, dict[str, object]]] = [
    ("weather", {**CITY, "additionalProperties": False}),
    ("stop", {"enum": [{}]}),
]
CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
}
TWO = {
    "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n' + CALL["hermes"],
    "llama3_json": '{"name": "stop", "parameters": {}}; ' + CALL["llama3_json"],
    "mistral": '[TOOL_CALLS][{"name": "stop", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]',
}
WRONG = {name: call.replace("city", "town") for name, call in CALL.items()}


@pytest.mark.parametrize("form", CALL)
def test_required_calls_begin_at_once_and_have_arguments_of_the_schema(form: str) -> None:
    grammar = tool_grammar(form, TOOLS, {}, required=True)
    assert takes(grammar, CALL[form])
    assert takes(grammar, TWO[form])
    assert not takes(grammar, WRONG[form])
    assert not takes(grammar, "It rains.")
    single = tool_grammar(form, TOOLS, {}, required=True, single=True)
    assert takes(single, CALL[form])
    assert not takes(single, TWO[form])


@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_an_automatic_call_is_constrained_from_its_tag(form: str) -> None:
    grammar = tool_grammar(form, TOOLS, {}, required=False)
    assert takes(grammar, "It rains.")
    assert takes(grammar, f"Let me look.\n{CALL[form]}")
    assert takes(grammar, TWO[form])
    assert not takes(grammar, f"Let me look.\n{WRONG[form]}")


def test_an_automatic_call_without_a_tag_is_left_to_the_model() -> None:
    assert tool_grammar("llama3_json", TOOLS, {}, required=False) == ""


@pytest.mark.parametrize("form", CALL)
@pytest.mark.parametrize("other", [json_schema_grammar({"type": "integer"}), choice_grammar(["none"])])
def test_beside_a_format_an_output_is_either_calls_or_of_the_format(form: str, other: str) -> None:
    grammar = tool_grammar(form, TOOLS, {}, required=False, other=other)
    assert takes(grammar, CALL[form])
    assert takes(grammar, "12" if "integer" in other else "none")
    assert not takes(grammar, "It rains.")


def test_a_tag_that_is_a_special_token_is_forced_as_that_token() -> None:
    (text, token_id), *_ = BYTE_SPECIAL_TOKENS.items()
    tags = {"[TOOL_CALLS]": token_id}
    forced = tool_grammar("mistral", TOOLS, tags, required=True)
    assert allowed_after(forced, b"") == {token_id}, text
    body = CALL["mistral"].removeprefix("[TOOL_CALLS]").encode()
    view = view_of(forced, [token_id, *body])
    assert allowed(GrammarRow(view, len(view.token_ids))) == {EOS}
    free = view_of(tool_grammar("mistral", TOOLS, tags, required=False), [*b"So: ", token_id])
    assert allowed(GrammarRow(free, len(free.token_ids))) == {ord("[")}


def test_the_schema_of_a_tool_may_have_its_own_names() -> None:
    """`$defs` of one tool do not meet those of another."""
    tools = [
        (name, {"$ref": "#/$defs/Kind", "$defs": {"Kind": {"enum": [value]}}}) for name, value in (("a", 1), ("b", 2))
    ]
    grammar = tool_grammar("hermes", tools, {}, required=True)
    assert takes(grammar, '<tool_call>\n{"name": "b", "arguments": 2}\n</tool_call>')
    assert not takes(grammar, '<tool_call>\n{"name": "b", "arguments": 1}\n</tool_call>')


def test_notes_leave_a_schema_and_properties_with_their_names_stay() -> None:
    note: dict[str, Any] = {"title": "a note", "description": "a note"}
    title: dict[str, Any] = {
        "type": "array",
        "items": {"type": "integer", **note},
        "default": [{"const": note}],
        **note,
    }
    schema: dict[str, Any] = {"type": "object", "properties": {"title": title}, "required": ["title"], **note}
    grammar = tool_grammar("hermes", [("a", schema)], {}, required=True)
    assert "a note" not in grammar
    assert takes(grammar, '<tool_call>\n{"name": "a", "arguments": {"title": [1]}}\n</tool_call>')
    assert not takes(grammar, '<tool_call>\n{"name": "a", "arguments": {"title": 1}}\n</tool_call>')


# ---- guesses


def proposal(grammar: str, output: bytes, *guesses: bytes) -> tuple[bytes, list[bool]]:
    """The reader's proposal behind `output`, and for each of its tokens whether the grammar forces it.

    `guesses`: what `guess` returns at its first call, its second call, and so on.
    """
    view, left = view_of(grammar, list(output)), list(guesses)
    assumed: list[bytes] = []

    def guess(row: GrammarRow) -> Proposal:
        assumed.append(bytes(row.drafts))
        return Proposal.copied(tuple(left.pop(0)) if left else (), 3)

    (found,) = READER.propose([GrammarRow(view, len(view.token_ids))], guess)
    assert all(bytes(found.token_ids).startswith(prefix) for prefix in assumed)
    again = allowed(GrammarRow(view, len(view.token_ids)))
    assert again == allowed(GrammarRow(view, len(view.token_ids)), GrammarReader(lambda: TOKENIZER)), "guesses are left"
    return bytes(found.token_ids), [match == FORCED for match in found.matches]


@pytest.mark.parametrize(
    ("output", "guesses", "proposed", "forced"),
    [
        (b"", [], b'{"name": "', "f" * 10),
        (b"", [b"bob"], b'{"name": "bob', "f" * 10 + "g" * 3),
        (b"", [b"bob5", b'", "is": true'], b'{"name": "bob", ', "f" * 10 + "g" * 6),
        (b'{"name": "', [b"bobs5"], b'bobs", "is": ', "g" * 4 + "f" * 9),
        (b'{"name": "bob", "is": ', [b"tr"], b"true}", "ggfff"),
        (b'{"name": "bob", "is": ', [b"no"], b"", ""),
    ],
)
def test_forced_tokens_and_guesses_take_turns(
    output: bytes, guesses: list[bytes], proposed: bytes, forced: str
) -> None:
    found, is_forced = proposal(NAME, output, *guesses)
    assert found == proposed[:MAX_DRAFTS]
    assert "".join("gf"[each] for each in is_forced) == forced[:MAX_DRAFTS]


@pytest.mark.parametrize("tokens", [[*b"x"], [*b"a", EOS]], ids=["breaks its grammar", "has ended"])
def test_a_text_that_breaks_its_grammar_or_has_ended_gets_no_proposal(tokens: list[int]) -> None:
    view = view_of(choice_grammar(["a"]), tokens)
    (found,) = READER.propose([GrammarRow(view, len(view.token_ids))], lambda _: Proposal.copied((ord("a"),), 1))
    assert found.token_ids == ()


# ---- The patterns that one text must match at once are counted by place, and too many are refused.

MANY = MAX_PATTERNS + 1


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"x{number}"}


def has(name: str, child: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: child}}


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", **pattern(i)} for i in range(MANY)} | {f"d{MANY}": {"type": "string"}}
NAMED = {f"d{i}": {"$id": f"http://e.x/d{i}", "$ref": f"http://e.x/d{i + 1}", "pattern": f"x{i}"} for i in range(MANY)}
PATTERNS = [pattern(number) for number in range(MANY)]
TOO_MANY: dict[str, Any] = {
    "allOf": {"allOf": PATTERNS},
    "allOf in allOf": {"allOf": [{"allOf": PATTERNS[:7]}, {"allOf": PATTERNS[7:]}]},
    "a property": {"allOf": [has("a", has("b", each)) for each in PATTERNS]},
    "any property": {
        "allOf": [*(has("a", each) for each in PATTERNS[:7]), *({"additionalProperties": p} for p in PATTERNS[7:])]
    },
    "items": {"allOf": [*({"prefixItems": [each]} for each in PATTERNS[:7]), *({"items": p} for p in PATTERNS[7:])]},
    "a chain of $ref": {"$defs": CHAIN, "$ref": "#/$defs/d0"},
    "an escaped $ref": {"$defs": {"a/b": {"allOf": PATTERNS}}, "items": {"$ref": "#/%24defs/a~1b"}},
    "names": {"$defs": NAMED, "$ref": "http://e.x/d0"},
    "beside alternatives": {"allOf": PATTERNS[:-1], "anyOf": PATTERNS[-1:]},
    "formats": {"allOf": [*PATTERNS[:-1], {"format": "email"}]},
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_patterns_of_one_text_are_refused(name: str) -> None:
    grammar = json_schema_grammar(TOO_MANY[name])
    lark = f"start: %json {json.dumps(TOO_MANY[name])}"
    tools = tool_grammar("hermes", [("call", TOO_MANY[name])], {}, required=False, other=json_schema_grammar(True))
    for each in (grammar, lark, tools):
        with pytest.raises(ValueError, match=f"at most {MAX_PATTERNS} patterns and formats .*here"):
            check_limits(each)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS[:-1]},
        {"anyOf": PATTERNS},
        {"type": "object", "properties": {f"p{i}": each for i, each in enumerate(PATTERNS)}},
        {"anyOf": [has("id", each) for each in PATTERNS]},
        {"properties": {"a": {"allOf": PATTERNS[:7]}, "b": {"allOf": PATTERNS[7:]}}},
        {"properties": {f"p{i}": {"additionalProperties": each} for i, each in enumerate(PATTERNS)}},
        {"$defs": {"node": {"allOf": [*PATTERNS[:5], has("next", {"$ref": "#/$defs/node"})]}, "unused": {
            "allOf": PATTERNS}}, "$ref": "#/$defs/node"},
        {"properties": {"pattern": {"const": "pattern"}, "format": {}}, "enum": ["pattern"] * MANY},
    ],
)  # fmt: skip
def test_patterns_of_different_texts_are_not_counted_together(schema: dict[str, Any]) -> None:
    check_limits(json_schema_grammar(schema))


def test_regular_expressions_that_a_lark_grammar_joins_are_counted() -> None:
    regexes = [f"/.*x{number}.*/" for number in range(MANY)]
    check_limits('start: A "&&&&&&&&&&&&&&&&" /&{20}&&&&&&&&&&&&&/ // &&&&&&&&&&&&&&\nA: ' + " & ".join(regexes[1:]))
    check_limits('start: "' + '\\"' * 99 + "&" * 99)  # a text that is not closed: llguidance refuses it
    with pytest.raises(ValueError, match="regular expressions joined by &, here 13"):
        check_limits('start: A\nA: /\n"/ & ' + " & ".join(regexes[1:]) + ' # "')
    with pytest.raises(ValueError, match="regular expressions joined by &, here 13"):
        check_limits("start: A\nA: B & " + " & ".join(regexes[:7]) + "\nB: " + " & ".join(regexes[7:]))


def test_places_and_depth_have_a_limit_too() -> None:
    """Each level doubles the number of places."""
    defs = {f"d{i}": {"properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}} for i in range(40)}
    wide = {"$defs": {**defs, "d40": {"allOf": PATTERNS}}, "$ref": "#/$defs/d0"}
    with pytest.raises(ValueError, match=f"at most {MAX_PLACES} values"):
        check_limits(json_schema_grammar(wide))
    many = {"items": {"properties": {f"p{i}": pattern(i) for i in range(MAX_GENERAL + 1)}}}
    with pytest.raises(ValueError, match=f"at most {MAX_GENERAL} values inside items"):
        check_limits(json_schema_grammar(many))
    deep = {f"d{i}": has("a", {"$ref": f"#/$defs/d{i + 1}"}) for i in range(2000)}
    with pytest.raises(ValueError, match="deep"):
        check_limits(json_schema_grammar({"$defs": {**deep, "d2000": {"allOf": PATTERNS}}, "$ref": "#/$defs/d0"}))


@pytest.mark.parametrize("grammar", ["{", "{}", '{"grammars": 3}', '{"grammars": [3, {}]}', "start: %json {", "", "["])
def test_what_is_no_grammar_is_left_to_llguidance(grammar: str) -> None:
    check_limits(grammar)
