#!/usr/bin/env bash
# Install what some tests use beside the Python environment: Debian's Chromium, Prometheus and Alertmanager, kubectl,
# Compose and systemd, which check the files of deploy/, and the Node modules of examples/. Needs root and Debian; without
# these programs the tests that need them are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
for pair in chromium:chromium prometheus:prometheus alertmanager:prometheus-alertmanager kubectl:kubernetes-client \
    docker-compose:docker-compose systemd-analyze:systemd; do
    command -v "${pair%%:*}" prometheus-"${pair%%:*}" >/dev/null 2>&1 || missing+=("${pair##*:}")
done
if [ "${#missing[@]}" -gt 0 ]; then
    # Debian starts a service when it is installed, unless this file forbids it.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# A lock file without addresses: npm takes them from its own configuration.
for package in examples/*/package.json; do
    [ -e "$package" ] || continue
    (cd "$(dirname "$package")" && npm ci --silent --no-audit --no-fund)
done
