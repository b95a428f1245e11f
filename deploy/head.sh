#!/usr/bin/env bash
# The head: the machine that coordinates the cluster and runs the router. Runs in the foreground.
#
#   deploy/head.sh            then, on the same machine:  tandem serve --address "$NODE_IP:$PORT"
#
# NODE_IP  address of this machine for the other machines (default: found by Ray)
# PORT     port of the cluster (default: 6379)
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0 # Ray's default of 15 gives the cores of a serving worker to any other program
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" # a process that joins can run code here: require the cluster's token
exec ray start --head --block \
    --port "${PORT:-6379}" ${NODE_IP:+--node-ip-address "$NODE_IP"} \
    --include-dashboard=false --object-store-memory 100000000
