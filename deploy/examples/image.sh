#!/bin/sh
# A picture by curl: waits for it and writes image.png. The native API answers at once and is followed by its URL.
set -eu
url=${DITFLEET_URL:-http://127.0.0.1:8780}
auth="Authorization: Bearer ${DITFLEET_KEY:-none}"
job=$(curl -fsS "$url/v1/jobs" -H "$auth" -H 'Content-Type: application/json' -H "Idempotency-Key: $(cat /proc/sys/kernel/random/uuid)" \
  -d '{"model": "demo", "prompt": "a red circle above a blue square", "seed": 7}' | sed 's/.*"id":"\([^"]*\)".*/\1/')
# The stream of events ends with the job.
curl -fsSN "$url/v1/jobs/$job/events" -H "$auth" | sed -n 's/^event: //p' | tail -1
curl -fsS "$url/v1/jobs/$job/results/0" -H "$auth" -o image.png
echo image.png
