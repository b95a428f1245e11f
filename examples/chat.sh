#!/usr/bin/env bash
# Stream a chat over HTTP: examples/chat.sh [URL of a gateway]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"

curl --fail-with-body --silent --show-error --no-buffer --max-time 60 "$url/v1/chat/completions" \
    --header "authorization: Bearer ${TANDEM_API_KEY:-none}" \
    --header 'content-type: application/json' \
    --data '{
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_completion_tokens": 24,
        "temperature": 0,
        "stream": true
    }'
