#!/usr/bin/env bash
# A prefill machine: joins the cluster and offers places for prefill workers. Prefill
# workers compute prompts; use machines with much compute.
# Runs in the foreground. The workers of this machine end with the script.
#
#   deploy/prefill.sh HEAD_IP:6379 [PLACES]
#
# PLACES   prefill workers that this machine has room for (default: one for each GPU, else 1)
# NODE_IP  address of this machine for the other machines (default: found by Ray)
set -euo pipefail
head="${1:?usage: $0 HEAD_IP:PORT [PLACES]}"
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0 # Ray's default of 15 gives the cores of a serving worker to any other program
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # a process that joins can run code here: require the cluster's token
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep --count '^GPU ' || true)
places="${2:-$((gpus > 0 ? gpus : 1))}"
exec ray start --block \
    --address "$head" ${NODE_IP:+--node-ip-address "$NODE_IP"} \
    --resources "{\"prefill\": $places}" --object-store-memory 100000000
