"""The flags of `tandem advise`. Those of synthetic requests are the ones of `tandem simulate`."""

from __future__ import annotations

from pathlib import Path

from cli.commands.simulate_flags import SIMULATE_FLAGS, flag_of

BY_HAND = ("input-tokens", "output-tokens", "spread", "prefix-tokens")

ADVISE_FLAGS = (
    flag_of("gpus", None, "GPUs that every shape is built of. Required.", int),
    flag_of("slo-ttft-ms", 1000.0, "Limit of the time to the first token, for nine of ten requests."),
    flag_of("slo-tpot-ms", 50.0, "Limit of the mean time between tokens of a request."),
    flag_of("gpu", "h100", "With --model: names built-in costs."),
    flag_of("model", "8b", "With --gpu: names built-in costs."),
    flag_of("costs", None, "In place of --gpu and --model: a file of `tandem calibrate` for a worker of one GPU.", str),
    flag_of("kv-tokens", 400_000, "Tokens of KV that one GPU has room for."),
    flag_of("requests", 5000, "Most requests of the log to read, the first ones."),
    flag_of("rate", None, "Requests per second that you have now. (default: that of the log)", float),
    flag_of("prometheus", None, "In place of a log: URL of the Prometheus server that scrapes your vLLM.", str),
    flag_of("labels", "", "With --prometheus: selects series, such as 'model_name=\"llama\"'."),
    flag_of("window-s", 3600.0, "With --prometheus: the load is that of so many seconds up to ten seconds ago."),
    flag_of("plot", None, "Draw attainment by rate into this file, .png or .svg; needs the extra plots.", Path),
    *(flag for flag in SIMULATE_FLAGS if flag.name in BY_HAND),
)
