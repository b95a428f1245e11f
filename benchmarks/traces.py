"""Where the traces of requests are that benchmarks replay.

conversation_trace.jsonl is `FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake (Apache-2.0).
"""

from __future__ import annotations

from pathlib import Path

TRACES = Path("../shared/traces")
CONVERSATION = Path("mooncake") / "conversation_trace.jsonl"
