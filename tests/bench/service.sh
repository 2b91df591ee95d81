#!/usr/bin/env bash
# Measures the service from outside, by a program of this folder that prints its figures:
#
#   tests/bench/service.sh tracing [BUILD_DIR]   what tracing every job costs a coordinator: its instructions for each job,
#                                                with all spans exported and with none; needs valgrind
#   tests/bench/service.sh s3 [BUILD_DIR]        how much later the link to a video exists with results in S3 than with
#                                                results in a folder; needs the python of DITFLEET_TEST_PYTHON (tests/run.sh)
#
# Appends to results/NAME.csv, or to DITFLEET_BENCH_CSV. BUILD_DIR: build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
name=${1:?which one: tracing or s3}
build=$(cd "${2:-$top/build}" && pwd)
csv=${DITFLEET_BENCH_CSV:-$here/results/$name.csv}
[ "$name" != tracing ] || command -v valgrind >/dev/null || { echo "service.sh: valgrind is not installed" >&2; exit 1; }
[ -x "$build/bin/ditfleet" ] || { echo "service.sh: there is no $build/bin/ditfleet; build the target ditfleet first" >&2; exit 1; }
revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"
[ -s "$csv" ] || echo date,revision,machine,versions,system,scenario,metric,value,unit > "$csv"
PYTHONPATH=$top/tests/clients DITFLEET_BIN_DIR=$build/bin "${DITFLEET_TEST_PYTHON:-python3}" -W ignore -B "$here/$name.py" |
  while read -r metric value unit; do
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$machine,-,ditfleet,$name,$metric,$value,$unit" >> "$csv"
    echo "$metric: $value $unit"
  done
