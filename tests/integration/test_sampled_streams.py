"""The default model's sampled tokens do not tell which path a request took.

`python -m tools.sampled_streams` compares 300 streams, in bfloat16 too.
"""

from __future__ import annotations

from tools.sampled_streams import count_different, make_requests

PATHS = ("resumed", "batches of 32", "chunks of 16 tokens", "preempted", "split")


def test_no_path_changes_a_float32_stream() -> None:
    different = dict(count_different("float32", make_requests(4), num_blocks=13))
    assert different == dict.fromkeys(PATHS, 0)
