"""The formats in which models write calls of tools, each shown by a chat template (`ChatTemplate.tool_format`).

    hermes       <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>, one a line
    llama3_json  {"name": NAME, "parameters": ARGUMENTS}; several with ";" between them
    mistral      [TOOL_CALLS][{"name": NAME, "arguments": ARGUMENTS}, ...]

The grammar (text/tool_grammar.py) forces the exact texts. The parser (text/tool_calls.py) takes other spaces, too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    tag: str  # opens a call or a list of calls
    before_name: str  # from behind the tag
    before_arguments: str
    after: str  # behind the arguments
    separator: str  # between two calls
    end: str = ""  # behind a call or a list of calls, for the parser
    bare: str = ""  # opens a call without tag, at the start of the output
    needs_tag: bool = True  # else the tag is optional, and never written when calls are required
    needs_arguments: bool = True  # else an object with a name alone is a call
    is_list: bool = False
    has_short_ids: bool = False  # the chat template refuses ids of other than 9 letters and digits


FORMATS = {
    "hermes": ToolFormat(
        "<tool_call>", '\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", end="</tool_call>",
        needs_arguments=False,
    ),
    "llama3_json": ToolFormat(
        "<|python_tag|>", '{"name": ', ', "parameters": ', "}", "; ", bare="{", needs_tag=False
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", '{"name": ', ', "arguments": ', "}", ", ", end="]", bare="[", is_list=True, has_short_ids=True
    ),
}  # fmt: skip
