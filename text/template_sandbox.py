"""The sandbox of chat templates.

The sandbox of jinja gives a template access to plain data only. This sandbox also meters each step of a template, a
loop turn, a call, an operator or a filter, and checks steps that may turn small values into a large one
(`text/template_meter.py`). Its filters are in `text/template_filters.py`. Some methods of texts that widen a text are
missing (center, ljust, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from text.template_filters import bounded_filters, bounded_tests, joined, metered, replaced
from text.template_meter import check_content, check_format, check_operands, counted, meter

UNSAFE_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "encode", "format_map"}


class _Metering(NodeTransformer):
    """Adds metering filters to steps without a hook in jinja: loops, `~`, and slices."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_turns")
        elif isinstance(node, nodes.Compare):
            node.expr = _filtered(node.expr, "_compared")
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, "_compared")
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_counted")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _turns(_: Context, items: Iterable[object]) -> Iterator[object]:
    for item in items:
        meter.get().count(0)
        yield item


def _checked(value: object) -> object:
    """A value that the template writes or compares."""
    check_content(value)
    return value


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote, for training. The text stays."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares the attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self) -> None:
        # The optimizer of jinja would run steps of the template at compile time, without a meter.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], optimized=False,
            finalize=_checked,
        )  # fmt: skip
        steps = {"_joined": metered(joined), "_counted": counted, "_compared": _checked, "_turns": _turns}
        self.filters, self.tests = bounded_filters() | steps, bounded_tests()
        del self.globals["lipsum"]

    def metered(self, source: str) -> nodes.Template:
        parsed: nodes.Template = _Metering().visit(self.parse(source))
        return parsed

    def concat(self, parts: Iterable[str]) -> str:  # of macros and block assignments
        return str(counted(joined(parts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return counted(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        unsafe = isinstance(obj, str | bytes) and attr in UNSAFE_METHODS
        return not unsafe and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(text, (*args, *kwargs.values()), text.count("{") - text.count("{}"))
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            __obj = functools.partial(replaced, owner)
        elif isinstance(owner, str) and name == "join":
            __obj = functools.partial(joined, separator=owner)
        elif isinstance(owner, list | tuple):  # index and count compare
            check_content((owner, args))
        # jinja adds arguments to a call in a loop or a block, and its own `call` takes them away.
        return counted(super().call(__context, __obj, *args, **kwargs))
