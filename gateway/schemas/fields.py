"""Fields of OpenAI's and vLLM's requests that have no effect here, and what a request gets that sets one.

A field is ignored only where the answer stays right without it. Where the answer may differ from what the client
expects, the response has a warning header; where it would be wrong, the request is refused. null means "not set".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from core.errors import shortened
from gateway.errors import refused


class Verdict(Enum):
    IGNORE = "accepted without effect"
    WARN = "accepted with a warning"
    REFUSE = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    verdict: Verdict
    reason: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, always accepted


def _ignore(reason: str) -> FieldRule:
    return FieldRule(Verdict.IGNORE, reason)


def _warn(reason: str, *neutral: Any) -> FieldRule:
    return FieldRule(Verdict.WARN, reason, neutral)


def _refuse(reason: str, *neutral: Any) -> FieldRule:
    return FieldRule(Verdict.REFUSE, reason, neutral)


TAGS = "use tools, response_format or a grammar"
RUNNER = "no tool runs inside the gateway"
SAMPLER = "the engine has no such sampling"

# Fields that every route shares.
SHARED: dict[str, FieldRule] = {
    "guided_decoding_backend": _ignore("there is one backend"),
    "guided_whitespace_pattern": _warn("a JSON output has at most 20 spaces between two parts"),
    "safety_identifier": _ignore("names the end user to OpenAI"),
    "prompt_cache_key": _ignore("the router finds cached prefixes by itself"),
    "prompt_cache_options": _ignore("the router finds cached prefixes by itself"),
    "prompt_cache_retention": _ignore("the router finds cached prefixes by itself"),
    "moderation": _refuse("the guardrail of the gateway alone moderates"),
    "prediction": _ignore("only speeds up the output of OpenAI's models"),
    "spaces_between_special_tokens": _ignore("special tokens have no text"),
    "store": _warn("nothing is stored", False),
    "service_tier": _warn("there is one tier", "auto", "default", "standard_only"),
    "use_beam_search": _refuse(SAMPLER, False),
    "length_penalty": _refuse("belongs to beam search, which the engine does not have", 1, 1.0),
    "early_stopping": _refuse("belongs to beam search, which the engine does not have", False),
    "include_stop_str_in_output": _refuse("the output always ends before the stop string", False),
    "skip_special_tokens": _refuse("special tokens have no text in the output", True),
    "prompt_logprobs": _refuse("the engine computes no log-probabilities of the prompt"),
    "truncate_prompt_tokens": _refuse("a prompt is never cut; send fewer tokens"),
    "bad_words": _refuse(SAMPLER, []),
    "allowed_token_ids": _refuse(SAMPLER, []),
    "logits_processors": _refuse(SAMPLER, []),
    "thinking_token_budget": _refuse(SAMPLER),
    "structural_tag": _refuse(TAGS),
    "return_tokens_as_token_ids": _refuse("tokens are named by their text", False),
    "kv_transfer_params": _refuse("the router plans the transfer of KV blocks"),
    "vllm_xargs": _refuse("belongs to extensions of vLLM"),
    "mm_processor_kwargs": _refuse("the models here read text only"),
}

METADATA = _ignore("describes stored answers, and nothing is stored")  # a response repeats it

CHAT: dict[str, FieldRule] = SHARED | {
    "metadata": METADATA,
    "reasoning_effort": _warn("use chat_template_kwargs for the switches of the model's template"),
    "verbosity": _warn("the models here have no such switch"),
    "modalities": _refuse("the models here write text only", ["text"]),
    "audio": _refuse("the models here write text only"),
    "web_search_options": _refuse("the gateway searches nothing"),
    "functions": _refuse("use tools", []),
    "function_call": _refuse("use tool_choice", "none", "auto"),
    "best_of": _refuse("use n", 1),
    "echo": _refuse("the prompt of a chat is not repeated", False),
    "chat_template": _refuse("the template of the model is always used"),
    "add_generation_prompt": _refuse("the answer is always a new message of the assistant", True),
    "continue_final_message": _refuse("the answer is always a new message of the assistant", False),
    "add_special_tokens": _refuse("the template writes the special tokens", False),
    "documents": _refuse("put documents into messages", []),
    "include_reasoning": _ignore("reasoning stays in the text"),
}

COMPLETION: dict[str, FieldRule] = SHARED | {
    "metadata": METADATA,
    "suffix": _refuse("the models here cannot insert text before a suffix", ""),
    "add_special_tokens": _refuse("a text gets the special tokens that the model expects; send token ids", True),
    "prompt_embeds": _refuse("send text or token ids"),
}

RESPONSES: dict[str, FieldRule] = SHARED | {
    "reasoning": _warn("use /v1/chat/completions with chat_template_kwargs", {}, {"effort": None, "summary": None}),
    "truncation": _refuse("a prompt is never cut", "disabled"),
    "previous_response_id": _refuse("nothing is stored; send the earlier messages in input"),
    "conversation": _refuse("nothing is stored; send the earlier messages in input"),
    "background": _refuse("nothing is stored; wait for the answer", False),
    "background_options": _refuse("nothing is stored; wait for the answer"),
    "access_programs": _refuse("belongs to OpenAI's models"),
    "image": _refuse("the models here write text only"),
    "include": _refuse("there is nothing to include", [], ["reasoning.encrypted_content"]),
    "prompt": _refuse("prompt templates are stored nowhere; use instructions and input"),
    "max_tool_calls": _refuse(RUNNER),
    "top_logprobs": _refuse("use /v1/chat/completions", 0),
    "return_token_ids": _refuse("use /v1/chat/completions", False),
    "stream_options": _warn("the stream always ends with the usage", {}),
    "context_management": _refuse("a prompt is never cut", []),
}

# Fields of one chat message. The openai client sends back what it received, with its empty fields.
MESSAGE: dict[str, FieldRule] = {
    "name": _warn("templates know no names of authors"),
    "refusal": _warn("earlier refusals are left out"),
    "reasoning": _warn("earlier reasoning is left out"),
    "reasoning_content": _warn("earlier reasoning is left out"),
    "reasoning_details": _warn("earlier reasoning is left out"),
    "thinking_blocks": _warn("earlier reasoning is left out"),
    "provider_specific_fields": _ignore("are no part of the text"),
    "cache_control": _ignore("the router finds cached prefixes by itself"),
    "parsed": _ignore("is the text once more"),
    "annotations": _ignore("are no part of the text"),
    "audio": _refuse("the models here read text only"),
    "function_call": _refuse("use tool_calls"),
    "status": _ignore("is no part of the text"),
    "id": _ignore("is no part of the text"),
}

# Fields of one item of `input` of a response, which clients send back as they were.
ITEM: dict[str, FieldRule] = {
    "id": _ignore("is no part of the text"),
    "status": _ignore("is no part of the text"),
    "phase": _ignore("is no part of the text"),
    "parsed_arguments": _ignore("are the arguments once more"),
    "refusal": _refuse("earlier refusals are no input"),
    "async": _refuse(RUNNER, False),
    "caller": _refuse(RUNNER, {"type": "direct"}),
    "namespace": _refuse("tools have no namespaces", ""),
}

# Fields of one part of a content, of a call of a tool, and of a tool.
PART: dict[str, FieldRule] = {
    "annotations": _ignore("are no part of the text"),
    "logprobs": _ignore("are no part of the text"),
    "cache_control": _ignore("the router finds cached prefixes by itself"),
    "prompt_cache_breakpoint": _ignore("the router finds cached prefixes by itself"),
}
# Fields of vLLM's `structured_outputs`.
FORMAT: dict[str, FieldRule] = {
    "structural_tag": _refuse(TAGS),
    "disable_any_whitespace": _warn("a JSON output has at most 20 spaces between two parts", False),
    "disable_fallback": _ignore("there is one backend"),
    "disable_additional_properties": _warn("set additionalProperties in the schema", False),
    "whitespace_pattern": _warn("a JSON output has at most 20 spaces between two parts"),
}
CALL: dict[str, FieldRule] = {
    "index": _ignore("calls keep their order"),
    "parsed_arguments": _ignore("are the arguments once more"),
    "provider_specific_fields": _ignore("are no part of the text"),
    "extra_content": _ignore("is no part of the text"),
}
TOOL: dict[str, FieldRule] = {
    "cache_control": _ignore("the router finds cached prefixes by itself"),
    "output_schema": _ignore("the model reads each result as it is"),
    "allowed_callers": _refuse(RUNNER, [], ["direct"]),
    "async": _refuse(RUNNER, False),
    "defer_loading": _refuse("the model sees every tool from the start", False),
}


def check_extra(extra: Mapping[str, Any] | None, rules: Mapping[str, FieldRule], path: str = "") -> list[str]:
    """Warnings about fields that the schema does not have. Raises `ApiError` for a field that is refused or unknown."""
    warnings = []
    for name, value in (extra or {}).items():
        rule = rules.get(name)
        if rule is None:
            raise refused(f"{path}{shortened(name)}", "unknown field", "unknown_parameter")
        if value is None or value in rule.neutral or rule.verdict is Verdict.IGNORE:
            continue
        if rule.verdict is Verdict.REFUSE:
            raise refused(f"{path}{name}", f"is not supported: {rule.reason}", "unsupported_parameter")
        warnings.append(f"{path}{name} has no effect: {rule.reason}")
    return warnings
