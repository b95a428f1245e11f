"""vLLM serving requests at their times of arrival: runs in vLLM's own environment and knows nothing of Tandem.

    vllm_replay.py <Hugging Face directory> <float32 or bfloat16>

Reads one JSON object from stdin, {"requests": [{"at": s, "prompt": [ids], "max_tokens": n}, ...], "timeout_s": s}, and
answers with {"times": [[s, ...], ...]}: the times of each request's tokens, on the clock of the arrivals. The object
`{}` before it says that the engine is ready. More than one line on stdin is answered in turn; the prefix cache is
emptied in between.

The engine runs in this process and takes requests between its steps: no server and no client cost it time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process; read at import
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

from vllm import EngineArgs, LLMEngine, SamplingParams

IDLE_S = 0.001


def serve(engine: LLMEngine, requests: list[dict[str, Any]], timeout_s: float) -> list[list[float]]:
    """`requests` in order of arrival. Requests without an end after `timeout_s` keep the tokens that they have."""
    times: list[list[float]] = [[] for _ in requests]
    next_request, start = 0, time.perf_counter()
    while (now := time.perf_counter() - start) < timeout_s:
        while next_request < len(requests) and requests[next_request]["at"] <= now:
            request = requests[next_request]
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(str(next_request), {"prompt_token_ids": request["prompt"]}, sampling)
            next_request += 1
        if engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                known = times[int(output.request_id)]
                known += [now] * (len(output.outputs[0].token_ids) - len(known))
        elif next_request == len(requests):
            break
        else:
            time.sleep(IDLE_S)
    engine.abort_request([str(number) for number in range(next_request)])
    while engine.has_unfinished_requests():
        engine.step()
    return times


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=sys.argv[1], dtype=sys.argv[2], max_model_len=8192, enable_prefix_caching=True,
            skip_tokenizer_init=True, disable_log_stats=True,
        )
    )  # fmt: skip
    print(json.dumps({}), file=answers)  # ready
    for line in sys.stdin:
        command = json.loads(line)
        times = serve(engine, command["requests"], command["timeout_s"])
        engine.reset_prefix_cache()
        print(json.dumps({"times": times}), file=answers)


if __name__ == "__main__":
    main()
