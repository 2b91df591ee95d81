#!/bin/sh
# An adapter by curl: registers a file under a name, draws with it and writes adapter.png.
set -eu
url=${DITFLEET_URL:-http://127.0.0.1:8780}
auth="Authorization: Bearer ${DITFLEET_KEY:-none}"
file=${1:-$(dirname "$0")/../demo-model/loras/outline.safetensors}
curl -fsS -X PUT "$url/v1/loras/outline" -H "$auth" -H 'Content-Type: application/octet-stream' --data-binary "@$file" >/dev/null
curl -fsS "$url/v1/images/generations" -H "$auth" -H 'Content-Type: application/json' \
  -d '{"model": "demo", "prompt": "a red circle", "loras": [{"name": "outline", "scale": 0.8}], "response_format": "b64_json"}' |
  sed 's/.*"b64_json":"\([^"]*\)".*/\1/' | base64 -d > adapter.png
echo adapter.png
