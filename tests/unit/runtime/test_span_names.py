"""Every span and attribute has a meaning, and names of others are used as their owners define them."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv.attributes import http_attributes, url_attributes

from runtime.tracing.span_names import ATTRIBUTE_MEANINGS, SPAN_MEANINGS, Attribute, SpanName

NAMES = [value for key, value in vars(Attribute).items() if key.isupper()]
CONVENTIONS = {
    value
    for module in (error_attributes, gen_ai_attributes, http_attributes, url_attributes)
    for key, value in vars(module).items()
    if key.isupper()
}
# https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
OPENINFERENCE = {
    "openinference.span.kind", "llm.model_name", "llm.token_count.prompt", "llm.token_count.completion",
    "llm.token_count.total", "llm.token_count.prompt_details.cache_read",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_attribute_starts_with_tandem_or_is_a_semantic_convention(name: str) -> None:
    assert name.startswith("tandem.") or name in CONVENTIONS | OPENINFERENCE


def test_every_span_and_every_attribute_has_a_meaning() -> None:
    assert set(SPAN_MEANINGS) == set(SpanName)
    assert set(ATTRIBUTE_MEANINGS) == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
