"""The cause of an engine that did not start, in logs of vLLM 0.32 as they were, shortened to a few frames."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from vllm_worker.root_cause import MAX_CAUSE_CHARS, root_cause

POINTER = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
AT = "(EngineCore pid=14198) ERROR 11-27 11:48:18 [core.py:1510] "
LOGGED = f"""\
(EngineCore pid=14198) WARNING 11-27 11:48:18 [utils.py:333] Attempted to load weight lm_head.weight
{AT}EngineCore failed to start.
{AT}Traceback (most recent call last):
{AT}  File "/vllm/v1/engine/core.py", line 1482, in run_engine_core
{AT}    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
{AT}                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{AT}KeyError: 'layers.1.mlp.gate.e_score_correction_bias'
"""
PRINTED = """\
Process EngineCore:
Traceback (most recent call last):
  File "/vllm/model_executor/models/deepseek_v2.py", line 1820, in load_weights
    param = params_dict[name]
KeyError: 'layers.1.mlp.gate.e_score_correction_bias'

Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
"""
CAUSE = "KeyError: 'layers.1.mlp.gate.e_score_correction_bias'"


def test_the_cause_stands_in_the_log_of_the_process_and_in_what_it_printed() -> None:
    between_others = "(Worker pid=9) INFO 11-27 11:48:18 [worker.py:1] Loading\n".join(LOGGED.splitlines(keepends=True))
    for log in (LOGGED, PRINTED, LOGGED + PRINTED, between_others):
        assert root_cause(POINTER, log) == CAUSE


def test_an_error_that_names_its_cause_or_a_log_without_one_is_told_as_it_is() -> None:
    assert root_cause(ValueError("no such model"), LOGGED) == "ValueError: no such model"
    assert root_cause(POINTER, "vLLM says nothing") == f"RuntimeError: {POINTER}"


@example("\x80" * 150, [])
@given(
    st.text(max_size=300), st.lists(st.sampled_from([AT, "Traceback (most recent call last)", "\n", " ", "\x1b[2J"]))
)
def test_every_log_gives_one_bounded_line_without_control_characters(text: str, pieces: list[str]) -> None:
    told = root_cause(POINTER, LOGGED.replace("bias", text) + "".join(pieces))
    assert 0 < len(told) <= MAX_CAUSE_CHARS
    assert not re.search(r"[\x00-\x1f\x7f]", told)
