#!/usr/bin/env bash
# Compares compiled regions with eager on a CPU. Appends rows to results/regions_cpu.csv. Needs an idle machine.
#
#   tests/bench/regions_cpu.sh [BUILD_DIR]      (BUILD_DIR: build)
#
#   DITFLEET_BENCH_ROUNDS  alternating runs of each pair (default: 41)
#   DITFLEET_BENCH_CSV     the CSV (default: tests/bench/results/regions_cpu.csv)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
csv=${DITFLEET_BENCH_CSV:-$here/results/regions_cpu.csv}
bench=$build/tests/regions_cpu_bench
[ -x "$bench" ] || { echo "regions_cpu.sh: $bench does not exist; build the target regions_cpu_bench first" >&2; exit 1; }
revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"
[ -s "$csv" ] || echo "date,revision,machine,versions,system,scenario,metric,value,unit" > "$csv"
load() {
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$machine,-,machine,environment,load_average_$1,$(
    cut -d' ' -f1 /proc/loadavg),processes" >> "$csv"
}
load before
OMP_WAIT_POLICY=passive "$bench" --model "$top/deploy/demo-model/model" --rounds "${DITFLEET_BENCH_ROUNDS:-41}" \
  --revision "$revision" --machine "$machine" | tee -a "$csv"
load after
