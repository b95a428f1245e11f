"""A template can neither leave its sandbox nor exceed its limits, and every error of a template is typed."""

from __future__ import annotations

import json
import time

import pytest

from core.errors import ConfigError, InvalidRequest
from text import template_sandbox
from text.chat import Chat
from text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

CHAT = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}BODY{% endfor %}"
NESTED = "{% for a in range(100000) %}{% for b in range(100000) %}BODY{% endfor %}{% endfor %}"

REFUSED = {
    "refuses": "{{ raise_exception('roles must alternate') }}",
    "leaves the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes the messages": "{{ messages.append(1) }}",
    "looks for a message that is not there": "{{ messages[7].content }}",
    "a range too long": "{% for i in range(100000000) %}x{% endfor %}",
    "endless output": "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    "a type error": "{{ 1 + 'a' }}",
    "includes": "{% include 'etc/passwd' %}",
    "divides by zero": "{{ 1 / 0 }}",
    "recurses": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested loops": NESTED.replace("BODY", ""),
    "nested loops over text": "{% set s = 'x' * 100000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "nested loops with comparisons": NESTED.replace("BODY", "{% if a == b %}{% endif %}"),
    "loops in filters": "{% for a in range(100000) %}{{ range(100000) | map('string') | list | length }}{% endfor %}",
    "tests in filters": "{% set s = 'y' * 4000000 %}{{ ('x' * 100000) | select('in', s) | list }}",
    "a long text": "{{ 'x' * 1000000000 }}",
    "a long list": "{{ ([1] * 1000000000) | length }}",
    "a large number": "{{ 10 ** 1000000000 }}",
    "a number that grows": DOUBLING.replace("'xxxxxxxx'", "7").replace("BODY", "{% set ns.s = ns.s * ns.s %}"),
    "doubles by +": DOUBLING.replace("BODY", "{% set ns.s = ns.s + ns.s %}"),
    "doubles by ~": DOUBLING.replace("BODY", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubles by a block": DOUBLING.replace("BODY", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "doubles by a macro": "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}"
    + DOUBLING.replace("BODY", "{% set ns.s = twice(ns.s) %}"),
    "doubles by replace": DOUBLING.replace("BODY", "{% set ns.s = ns.s.replace('x', 'xx') %}"),
    "doubles by the filter replace": DOUBLING.replace("BODY", "{% set ns.s = ns.s | replace('x', 'xx') %}"),
    "multiplies by join": "{% set s = 'x' * 1000000 %}{{ s.join(s.split('') if false else s) | length }}",
    "multiplies by the filter join": "{% set s = 'x' * 1000000 %}{{ s | join(s) | length }}",
    "keeps many slices": "{% set s = 'x' * 4000000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide brace format": "{{ '{:1000000000}'.format(1) }}",
    "a nested brace format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "justifies": "{{ 'x'.ljust(1000000000) }}",
    "indents": "{{ messages | tojson(indent=1000000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_a_template_can_neither_leave_its_sandbox_nor_run_without_bound(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CPU_S", 0.05)
    started_at = time.thread_time()
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(template, {}).render(Chat(CHAT))
    assert time.thread_time() - started_at < 2.0


UNREADABLE = {
    "no template": "{% if %}",
    "an unknown filter": "{{ 'x' | center(9) }}",
    "too deep for Python": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "too deep for the parser": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a number with too many digits": "{{ " + "9" * 5000 + " }}",
    "too long": "x" * (MAX_TEMPLATE_CHARS + 1),
}


@pytest.mark.parametrize("source", UNREADABLE.values(), ids=UNREADABLE)
def test_a_template_that_cannot_be_read_is_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source, {})


def test_the_features_that_templates_of_models_use_work() -> None:
    source = """
{%- macro turn(role, text) -%}<{{ role }}>{{ text | trim }}{%- endmacro -%}
{%- set ns = namespace(last=0, seen=[]) -%}
{%- for message in messages[::-1] %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor -%}
{%- for message in messages %}
{%- set text = message['content'].split('</think>')[-1].lstrip('\\n') %}
{{- turn(message.role, text ~ ' ' ~ loop.index) }}{{ '|' if not loop.last else '.' }}{{ loop.length - loop.revindex }}
{%- endfor -%}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}
{{- messages | tojson(indent=1) | length }}{{ '%02d' % 7 }}{{ '{}-{}'.format(1, 'a') }}{{ 'aXa'.replace('X', '-') }}
{{- bos_token ~ ('x' if add_generation_prompt is defined else 'y') }}"""
    chat = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "<think>no</think>\nyes"}]
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(Chat(chat))
    size = len(json.dumps(chat, indent=1))
    assert rendered == f"<user>hi  1|0<assistant>yes 2.1 hi {size}071-aa-a<s>x"


def test_a_long_chat_stays_within_the_limits() -> None:
    chat = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y" * 2000}] * 250
    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] | trim + '\n' }}{% endfor %}"
    assert len(ChatTemplate(source, {}).render(Chat(chat))) > 1_000_000
