#!/bin/sh
# Three pictures in one call by curl: waits for the batch and writes batch-1.png, batch-2.png and batch-3.png.
# `ditfleet batch FILE -o FOLDER` does the same.
set -eu
url=${DITFLEET_URL:-http://127.0.0.1:8780}
auth="Authorization: Bearer ${DITFLEET_KEY:-none}"
batch=$(curl -fsS "$url/v1/batches" -H "$auth" -H 'Content-Type: application/jsonl' --data-binary @- <<'LINES' | sed 's/.*"id":"\([^"]*\)".*/\1/'
{"model": "demo", "prompt": "a red circle"}
{"model": "demo", "prompt": "a green square"}
{"custom_id": "blue", "body": {"model": "demo", "prompt": "a blue triangle", "seed": 7}}
LINES
)
until curl -fsS "$url/v1/batches/$batch" -H "$auth" | grep -q '"status":"completed"'; do sleep 1; done
# The results are JSON lines, too. Job n of the batch has the id BATCH-n.
for line in 1 2 3; do
  curl -fsS "$url/v1/jobs/$batch-$line/results/0" -H "$auth" -o "batch-$line.png"
  echo "batch-$line.png"
done
