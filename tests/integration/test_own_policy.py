"""A policy of one's own: the example of docs/routing.md serves a request; a wrong name is an error of the config."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cli.compose import load_policy
from core.config import RouterConfig
from core.errors import ConfigError
from tandem_client.stubs import inference_pb2
from tests.support.deployment import deploy, tiny_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "routing.md"


async def test_the_policy_of_the_document_serves_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    (tmp_path / "own_policy.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(policy="own_policy:make")
    assert type(load_policy(config.router)).__name__ == "FewestRequests"
    async with deploy(config, num_prefill=1, num_decode=1) as deployment:
        answer = await deployment.generate(text="Hello", max_tokens=4)
    assert answer.finished.path == inference_pb2.REQUEST_PATH_LOCAL, "the built-in policy may not choose it here"
    assert len(answer.token_ids) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:make", r"\[router\] policy: cannot import no_such_module"),
        ("json:no_such_function", "json has no function no_such_function"),
        ("builtins:repr", "builtins:repr must return a Policy, its object has no compared"),
    ],
)
def test_a_wrong_name_is_an_error_of_the_config(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(replace(RouterConfig(), policy=name))
