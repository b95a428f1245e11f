#!/usr/bin/env bash
# A decode machine: joins the cluster and offers places for decode workers, which
# produce tokens: for them, take machines with fast and large memory.
# Stays in the foreground until it is ended; its workers end with it.
#
#   deploy/decode.sh HEAD_IP:6379 [PLACES]
#
# PLACES   decode workers this machine can hold at one time (default: 1)
# NODE_IP  address by which the other machines reach this one (default: found by Ray)
set -euo pipefail
head="${1:?usage: $0 HEAD_IP:PORT [PLACES]}"
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0 # Ray's default of 15 gives the cores of a serving worker to any other program
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # who joins can run code here: only with the cluster's token
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 # a worker is placed by "decode" and still sees the machine's GPUs
exec ray start --block \
    --address "$head" ${NODE_IP:+--node-ip-address "$NODE_IP"} \
    --resources "{\"decode\": ${2:-1}}" --object-store-memory 100000000
