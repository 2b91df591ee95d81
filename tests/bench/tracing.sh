#!/usr/bin/env bash
# What tracing every job costs a coordinator: the instructions of its process for each job, from the submission over HTTP
# to the end, with all spans exported and with none. Appends to results/tracing.csv.
#
#   tests/bench/tracing.sh [BUILD_DIR]      (default: build)
#
#   DITFLEET_BENCH_CSV   the file that is appended to (tests/bench/results/tracing.csv)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
csv=${DITFLEET_BENCH_CSV:-$here/results/tracing.csv}
command -v valgrind >/dev/null || { echo "tracing.sh: valgrind is not installed" >&2; exit 1; }
[ -x "$build/bin/ditfleet" ] || { echo "tracing.sh: there is no $build/bin/ditfleet; build the target ditfleet first" >&2; exit 1; }
revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"
[ -s "$csv" ] || echo date,revision,machine,versions,system,scenario,metric,value,unit > "$csv"
row() {  # metric value unit
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$machine,-,ditfleet,tracing,$1,$2,$3" >> "$csv"
}
PYTHONPATH=$top/tests/clients DITFLEET_BIN_DIR=$build/bin python3 -B "$here/tracing.py" | while read -r metric value unit; do
  row "$metric" "$value" "$unit"
  echo "$metric: $value $unit"
done
