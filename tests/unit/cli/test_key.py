"""`tandem key` prints a key, and lines of a config that admit exactly this key."""

from __future__ import annotations

import io
import re
import tomllib

import pytest
from rich.console import Console

from cli.commands.key import print_new_key
from core.config import from_mapping
from runtime.rpc.api_keys import ApiKeys


def printed(name: str, tenant: str = "") -> str:
    output = io.StringIO()
    print_new_key(name, tenant, Console(file=output, width=40))
    return output.getvalue()


@pytest.mark.parametrize(("name", "tenant"), [("alice", ""), ('al"ice\\', "a [b] team"), ("ålice", "é")])
def test_the_printed_lines_admit_the_printed_key(name: str, tenant: str) -> None:
    text = printed(name, tenant)
    (key,) = re.findall(r"shown only now: (tandem-\S+)", text)
    config = from_mapping(tomllib.loads(text))
    found = ApiKeys(config.api_keys).find([("authorization", f"Bearer {key}")])
    assert found is not None
    assert (found.name, found.effective_tenant) == (name, tenant or name)
    assert text.count(key) == 1
