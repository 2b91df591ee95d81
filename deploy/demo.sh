#!/usr/bin/env bash
# Generates an image or a video on a fresh Debian 12 machine.
#   deploy/demo.sh "a red circle above a blue square"          runs until Ctrl-C
#   deploy/demo.sh "a red circle above a blue square" --once   exits after the image is written and stops the service
#   deploy/demo.sh --video "a red circle moves right"          generates a video instead of an image
#   deploy/demo.sh --image FILE "a green circle above a blue square"    draws over a PNG, JPEG or WebP picture
# Runs deploy/setup.sh, starts the service with the demo's models and generates the image or video.
# Exit status: 0 success, 1 failure, 2 usage error, 130 interrupted. Environment, in addition to that of setup.sh:
#   DITFLEET_DEMO_FOLDER   folder of data, images and videos; default: build/demo
#   DITFLEET_DEMO_PORT     port of the console and the API; default: 8780; 0: any free port
set -euo pipefail
work=${DITFLEET_DEMO_FOLDER:+$(realpath -m -- "$DITFLEET_DEMO_FOLDER")}
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { echo "demo: $1; usage: deploy/demo.sh [--video | --image FILE] \"a red circle above a blue square\" [--once]" >&2; exit 2; }
prompt='' once=no given=no options=yes kind=image model=demo extension=png picture='' inputs=()
while [ $# -gt 0 ]; do
  argument=$1
  shift
  case $options$argument in
    yes--once) once=yes ;;
    yes--image)
      [ $# -gt 0 ] || usage "--image needs a file"
      picture=$1
      shift
      ;;
    yes--video) kind=video model=demo-video extension=mp4 ;;
    yes-h | yes--help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    yes--) options=no ;;
    yes--*) usage "unknown option '$argument' (put -- before a prompt that begins with --)" ;;
    *)
      [ $given = no ] || usage "unexpected argument '$argument'; put the prompt in quotes"
      prompt=$argument given=yes ;;
  esac
done
[ $given = yes ] || usage "no prompt given"
if [ -n "$picture" ]; then
  [ $kind = image ] || usage "--image edits a picture; leave --video out"
  case $picture in /*) ;; *) picture=$here/$picture ;; esac
  [ -f "$picture" ] && [ -r "$picture" ] || usage "$picture cannot be read"
  inputs=(--image "$picture")
fi

models=()
for named in demo=deploy/demo-model/model demo-video=deploy/demo-model/video/model; do
  [ -f "${named#*=}/model_index.json" ] || { echo "demo: ${named#*=} has no model; is this a complete checkout?" >&2; exit 1; }
  models+=(--model "$named")
done

# Prints the ids of a process's descendants.
descendants() {
  local child
  # shellcheck disable=SC2013
  for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
    echo "$child"
    descendants "$child"
  done
}
# report_failure WHY: prints why the service is not running, with the end of its log.
report_failure() {
  if [ -f "$run/up.log" ] && [ -s "$run/up.log" ]; then
    tail -n 20 "$run/up.log" >&2
    echo "demo: $1 (see the end of its log above)" >&2
  else
    echo "demo: $1 and its log $run/up.log is empty; is the disk full? $(df -Ph "$run" | awk 'NR == 2 { print $4 }') are free" >&2
  fi
}
setup='' up='' temporary='' signal_status=130
finish() {
  trap - EXIT INT TERM HUP
  # shellcheck disable=SC2046
  [ -z "$setup" ] || kill -TERM "$setup" $(descendants "$setup") 2>/dev/null || true
  up=${up:-${!:-}}  # a signal may come between the start of the service and the assignment
  if [ -n "$up" ]; then
    # A signal between fork and exec is lost: the child still has this shell's traps.
    while [ "$(readlink "/proc/$up/exe")" = "$(readlink "/proc/$$/exe")" ]; do sleep 0.05; done
    kill -TERM "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
  fi
  [ -z "$temporary" ] || rm -rf "$temporary"
  exit "$1"
}
trap 'finish $?' EXIT
trap 'finish $signal_status' INT TERM HUP

# In the background, because the shell handles signals only after a foreground command has ended.
deploy/setup.sh &
setup=$! status=0
wait "$setup" || status=$?
setup=
[ $status = 0 ] || exit $status

# The first demo of a checkout uses the permanent data folder. If another demo or service already uses that folder,
# this one works in a temporary folder.
work=${work:-$PWD/build/demo}
if ! mkdir -p "$work/${kind}s" || ! : >>"$work/lock"; then
  echo "demo: cannot write to $work (see the reason above); set DITFLEET_DEMO_FOLDER to a writable folder" >&2
  exit 1
fi
run=$work
exec 9>"$work/lock"
if ! flock -n 9 || { [ -e "$work/data/up.lock" ] && ! flock -n "$work/data/up.lock" true; }; then
  temporary=$(mktemp -d "$work/beside-XXXXXX") run=$temporary
fi
ready=$run/ready.json
rm -f "$ready"

port=${DITFLEET_DEMO_PORT:-8780}
if [ -n "$temporary" ]; then
  port=0  # the first demo may not listen yet
elif [ "$port" != 0 ] && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "==> Port $port is in use; using a free one instead"
  port=0
fi
echo "==> Starting the service"
# Stops the service if this shell is killed.
dies_with_shell=()
! command -v setpriv >/dev/null || dies_with_shell=(setpriv --pdeathsig TERM)
${dies_with_shell[@]+"${dies_with_shell[@]}"} build/bin/ditfleet up --data "$run/data" --listen "127.0.0.1:$port" "${models[@]}" --set default_model=demo --set webhooks.allow_private=true --ready-file "$ready" >"$run/up.log" 2>&1 9>&- &
up=$!
give_up=$((SECONDS + 180))
while [ ! -f "$ready" ]; do
  problem=
  kill -0 "$up" 2>/dev/null || problem="the service did not start"
  [ $SECONDS -lt $give_up ] || problem="the service is not ready after 180 s"
  if [ -n "$problem" ]; then
    report_failure "$problem"
    exit 1
  fi
  sleep 0.1
done
from_ready() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$ready" "$1"; }
url=$(from_ready gateway) redis=$(from_ready redis)

echo "==> Generating: $prompt"
name=$(printf '%s' "$prompt" | LC_ALL=C tr -cs 'A-Za-z0-9' '-' | cut -c 1-60 | sed 's/^-*//; s/-*$//')
[ -z "$temporary" ] || name=${name:-$kind}-${temporary##*-}  # the other demo may use the same prompt
file=$work/${kind}s/${name:-$kind}${picture:+-edit}.$extension
build/bin/ditfleet generate --url "$url" --model $model ${inputs[@]+"${inputs[@]}"} -o "$file" -- "$prompt" >/dev/null 9>&-
echo "==> ${kind^}: $file"
echo "==> Console: $url"
echo "==> Redis socket: ${redis#unix://}"
[ $once = no ] || finish 0
signal_status=0
echo "==> Running until Ctrl-C; to generate another $kind: build/bin/ditfleet generate --url $url --model $model \"…\""
status=0
wait "$up" || status=$?
up=
report_failure "the service exited with status $status"
exit 1
