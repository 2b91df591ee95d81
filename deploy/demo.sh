#!/usr/bin/env bash
# From a fresh Debian 12 to a picture:
#   deploy/demo.sh "a red circle above a blue square"          and stays up until Ctrl-C
#   deploy/demo.sh "a red circle above a blue square" --once   and ends, leaving nothing running
# Sets the machine up (deploy/setup.sh), starts the service with the demo model and draws the prompt.
# Exit 0 ok, 1 failure, 2 usage, 130 when interrupted. Environment, beside that of setup.sh:
#   DITFLEET_DEMO_FOLDER   where data and pictures are kept; by default build/demo
#   DITFLEET_DEMO_PORT     of the console and the API; by default 8780, and 0 is a free one
set -euo pipefail
work=${DITFLEET_DEMO_FOLDER:+$(realpath -m -- "$DITFLEET_DEMO_FOLDER")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { echo "demo: $1; usage: deploy/demo.sh \"a red circle above a blue square\" [--once]" >&2; exit 2; }
prompt='' once=no given=no options=yes
for argument in "$@"; do
  case $options$argument in
    yes--once) once=yes ;;
    yes-h | yes--help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    yes--) options=no ;;
    yes--*) usage "unknown option '$argument' (a prompt that begins so comes after --)" ;;
    *)
      [ $given = no ] || usage "'$argument' is a second prompt; give one, in quotes"
      prompt=$argument given=yes ;;
  esac
done
[ $given = yes ] || usage "there is no prompt"

model=deploy/demo-model/model
[ -f $model/model_index.json ] || { echo "demo: $model is not there; is this a whole checkout?" >&2; exit 1; }

# A process's children, theirs, and so on.
descendants() {
  local child
  # shellcheck disable=SC2013
  for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
    echo "$child"
    descendants "$child"
  done
}
# Why the service is not there, and what it said.
last_words() {
  if [ -f "$run/up.log" ] && [ -s "$run/up.log" ]; then
    tail -n 20 "$run/up.log" >&2
    echo "demo: $1; its last words are above" >&2
  else
    echo "demo: $1, and left no word in $run/up.log; is there room for it? $(df -Ph "$run" | awk 'NR == 2 { print $4 }') are free there" >&2
  fi
}
setup='' up='' temporary='' leaving=130
finish() {
  trap - EXIT INT TERM HUP
  # shellcheck disable=SC2046
  [ -z "$setup" ] || kill -TERM "$setup" $(descendants "$setup") 2>/dev/null || true
  if [ -n "$up" ]; then
    kill -TERM "$up" 2>/dev/null || true
    wait "$up" 2>/dev/null || true
  fi
  [ -z "$temporary" ] || rm -rf "$temporary"
  exit "$1"
}
trap 'finish $?' EXIT
trap 'finish $leaving' INT TERM HUP

# Beside this shell, which would not see a signal before a command that it runs itself has ended.
deploy/setup.sh &
setup=$! status=0
wait "$setup" || status=$?
setup=
[ $status = 0 ] || exit $status

# One demo of a checkout keeps its data; another beside it works in a folder that goes with it, and so does one that
# finds a service on that data.
work=${work:-$PWD/build/demo}
if ! mkdir -p "$work/pictures" || ! : >>"$work/lock"; then
  echo "demo: cannot write to $work (the reason is above); set DITFLEET_DEMO_FOLDER to a folder where that is possible" >&2
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
  port=0  # the first one may not listen yet
elif [ "$port" != 0 ] && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "==> Port $port is in use; the service gets another"
  port=0
fi
echo "==> Starting the service"
# If this shell is killed the service is to end as well, as with Ctrl-C.
with_me=()
! command -v setpriv >/dev/null || with_me=(setpriv --pdeathsig TERM)
${with_me[@]+"${with_me[@]}"} build/bin/ditfleet up --data "$run/data" --listen "127.0.0.1:$port" --model "demo=$model" --ready-file "$ready" >"$run/up.log" 2>&1 9>&- &
up=$!
patience=$((SECONDS + 180))
while [ ! -f "$ready" ]; do
  problem=
  kill -0 "$up" 2>/dev/null || problem="the service did not start"
  [ $SECONDS -lt $patience ] || problem="the service is not ready after 180 s"
  if [ -n "$problem" ]; then
    last_words "$problem"
    exit 1
  fi
  sleep 0.1
done
from_ready() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$ready" "$1"; }
url=$(from_ready gateway) redis=$(from_ready redis)

echo "==> Drawing: $prompt"
name=$(printf '%s' "$prompt" | LC_ALL=C tr -cs 'A-Za-z0-9' '-' | cut -c 1-60 | sed 's/^-*//; s/-*$//')
[ -z "$temporary" ] || name=${name:-picture}-${temporary##*-}  # its own: the same prompt may be drawn beside it
picture=$work/pictures/${name:-picture}.png
build/bin/ditfleet generate --url "$url" --model demo -o "$picture" -- "$prompt" >/dev/null 9>&-
echo "==> The picture: $picture"
echo "==> The console: $url"
echo "==> Redis listens on: ${redis#unix://}"
[ $once = no ] || finish 0
leaving=0
echo "==> Running until Ctrl-C; another picture: build/bin/ditfleet generate --url $url \"…\""
status=0
wait "$up" || status=$?
up=
last_words "the service ended by itself (status $status)"
exit 1
