#!/usr/bin/env bash
# From a fresh Debian 12 to a picture:
#   deploy/demo.sh "a red circle above a blue square"          and stays up until Ctrl-C
#   deploy/demo.sh "a red circle above a blue square" --once   and ends, leaving nothing running
# Sets the machine up (deploy/setup.sh), starts the service with the demo model and draws the prompt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prompt='' once=no given=no
for argument in "$@"; do
  case $argument in
    --once) once=yes ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --*) echo "demo: unknown argument '$argument'; known are --once, --help" >&2; exit 2 ;;
    *)
      [ $given = no ] || { echo "demo: give one prompt, in quotes: deploy/demo.sh \"a red circle above a blue square\"" >&2; exit 2; }
      prompt=$argument given=yes ;;
  esac
done
[ $given = yes ] || prompt="a red circle above a blue square"

model=deploy/demo-model/model
[ -f $model/model_index.json ] || { echo "demo: $model is not there; is this a whole checkout?" >&2; exit 1; }
deploy/setup.sh

work=$PWD/build/demo
ready=$work/ready.json
mkdir -p "$work/pictures"
rm -f "$ready"
listen=127.0.0.1:8780
if (exec 3<>/dev/tcp/127.0.0.1/8780) 2>/dev/null; then listen=127.0.0.1:0; fi  # someone else's

up=
finish() {
  trap - EXIT INT TERM
  if [ -n "$up" ]; then
    kill -TERM "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
  fi
  exit "${1:-0}"
}
trap 'finish $?' EXIT
trap 'finish 130' INT
trap 'finish 143' TERM

echo "==> Starting the service"
build/bin/ditfleet up --data "$work/data" --listen "$listen" --model "demo=$model" --ready-file "$ready" >"$work/up.log" 2>&1 &
up=$!
while [ ! -f "$ready" ]; do
  if ! kill -0 "$up" 2>/dev/null; then
    tail -n 20 "$work/up.log" >&2
    echo "demo: the service did not start; its words are above" >&2
    up=
    exit 1
  fi
  sleep 0.1
done
url=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["gateway"])' "$ready")

echo "==> Drawing: $prompt"
name=$(printf '%s' "$prompt" | tr -cs 'A-Za-z0-9' '-' | cut -c 1-60 | sed 's/^-*//; s/-*$//')
picture=$work/pictures/${name:-picture}.png
build/bin/ditfleet generate --url "$url" -o "$picture" -- "$prompt" >/dev/null
echo "==> The picture: $picture"
echo "==> The console: $url"
if [ $once = yes ]; then finish 0; fi
echo "==> Running until Ctrl-C; another picture: build/bin/ditfleet generate --url $url \"…\""
wait "$up" || true
up=
