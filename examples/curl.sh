#!/usr/bin/env bash
# Both endpoints from a shell. Usage: examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
server=${1:-http://127.0.0.1:8000}
json='content-type: application/json'

curl -sS --fail "$server/health" && echo
curl -sS --fail "$server/v1/completions" -H "$json" \
  -d '{"prompt": "the history of ", "max_tokens": 24, "seed": 1, "steps": 12}' && echo
curl -sSN --fail "$server/v1/denoise" -H "$json" \
  -d '{"infill": "the ______ of the river", "schedule": "sandwich:50%", "steps": 8, "seed": 1}'
