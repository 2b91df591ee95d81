#!/usr/bin/env bash
# Every figure of the queue, and the same work through BullMQ in the same run; appends to results/queue.csv.
#
#   tests/bench/queue.sh [BUILD_DIR]      (default: build)
#
#   DITFLEET_BENCH_SECONDS   seconds of each throughput run (60)
#   DITFLEET_BENCH_REPEATS   throughput runs of each system, one after the other in turn; their median counts (3)
#   DITFLEET_BENCH_JOBS      jobs of each run of the peer (10000)
#   DITFLEET_BENCH_PEER=0    without the peer (it needs Python's venv and, the first time, a package index)
#   DITFLEET_BENCH_CSV       the file that is appended to (tests/bench/results/queue.csv)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
bench="$build/tests/queue_bench"
csv=${DITFLEET_BENCH_CSV:-$here/results/queue.csv}
seconds=${DITFLEET_BENCH_SECONDS:-60}
repeats=${DITFLEET_BENCH_REPEATS:-3}
[ -x "$bench" ] || { echo "queue.sh: there is no $bench; build the target queue_bench first" >&2; exit 1; }
mkdir -p "$(dirname "$csv")"

revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"
header=date,revision,machine,versions,system,scenario,metric,value,unit
[ -s "$csv" ] || echo "$header" > "$csv"
first_row=$(($(wc -l < "$csv") + 1))

row() {  # system scenario metric value unit
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$machine,-,$1,$2,$3,$4,$5" >> "$csv"
}
load() { row machine environment "load_average_$1" "$(cut -d' ' -f1 /proc/loadavg)" processes; }
ours() { "$bench" --seconds "$seconds" --csv "$csv" --revision "$revision" --scenario "$1"; }

peer_python() {
  local venv=${DITFLEET_BENCH_VENV:-$build/bench-venv}
  if [ ! -x "$venv/bin/python" ]; then python3 -m venv "$venv"; fi
  if ! "$venv/bin/python" -c 'import bullmq, uvloop' 2>/dev/null; then
    "$venv/bin/pip" -q install bullmq==3.4.4 uvloop >&2
  fi
  echo "$venv/bin/python"
}

python=
if [ "${DITFLEET_BENCH_PEER:-1}" != 0 ]; then python=$(peer_python); fi

load before
ours yardstick
for ((i = 0; i < repeats; i++)); do
  ours throughput
  if [ -n "$python" ]; then
    "$python" "$here/peers/bullmq_peer.py" --jobs "${DITFLEET_BENCH_JOBS:-10000}" --csv "$csv" --revision "$revision" --machine "$machine"
  fi
  ours shards
done
ours latency
ours memory
ours takeover
load after

# instructions JOBS: what Redis executes from start to end for so many jobs, one after the other, by callgrind.
instructions() {
  local dir total
  dir=$(mktemp -d)
  printf '#!/bin/sh\nexec valgrind --tool=callgrind --callgrind-out-file=%s/out %s "$@"\n' \
    "$dir" "$(command -v redis-server)" > "$dir/redis-server"
  chmod +x "$dir/redis-server"
  PATH=$dir:$PATH "$bench" --scenario serial --jobs "$1" >&2
  total=$(sed -n 's/^totals: *//p' "$dir/out")
  rm -r "$dir"
  echo "$total"
}
if command -v valgrind >/dev/null; then
  few=$(instructions 200) many=$(instructions 1200)
  row ditfleet serial redis_instructions_per_job $(((many - few) / 1000)) instructions
fi

# Medians of this run's rows, and what they are compared by.
median() {  # system scenario metric
  tail -n +"$first_row" "$csv" | awk -F, -v s="$1" -v c="$2" -v m="$3" '$5 == s && $6 == c && $7 == m {print $8}' |
    sort -g | awk '{v[NR] = $1} END {if (NR) print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2}'
}
ratio() { awk -v a="$1" -v b="$2" 'BEGIN {if (b > 0) printf "%.2f", a / b}'; }
one=$(median ditfleet throughput jobs_per_s)
two=$(median ditfleet shards jobs_per_s)
echo
echo "medians of $repeats runs of $seconds s (load average now $(cut -d' ' -f1 /proc/loadavg)):"
summary() {  # metric value unit
  [ -n "$2" ] || return 0
  printf '  %-34s %12s %s\n' "$1" "$2" "$3"
  row ditfleet summary "$1" "$2" "$3"
}
summary one_shard_jobs_per_s "$one" jobs/s
summary two_shards_jobs_per_s "$two" jobs/s
summary two_shards_to_one "$(ratio "$two" "$one")" x
cpu=$(median ditfleet throughput redis_cpu_per_job)
call=$(median ditfleet yardstick empty_call)
summary redis_cpu_per_job "$cpu" us
summary redis_cpu_per_job_in_empty_calls "$(ratio "$cpu" "$call")" calls
summary redis_instructions_per_job "$(median ditfleet serial redis_instructions_per_job)" instructions
summary redis_memory_per_finished_job "$(median ditfleet throughput redis_memory_per_finished_job)" bytes
if [ -n "$python" ]; then
  theirs=$(median bullmq throughput jobs_per_s)
  summary bullmq_jobs_per_s "$theirs" jobs/s
  summary ditfleet_to_bullmq "$(ratio "$one" "$theirs")" x
fi
summary submit_to_started_p50 "$(median ditfleet latency submit_to_started_p50)" ms
summary submit_to_started_p99 "$(median ditfleet latency submit_to_started_p99)" ms
summary takeover_with_100000_units "$(median ditfleet takeover first_start_s)" s
summary memory_200000_to_50000 "$(median ditfleet memory ratio)" x
