#!/usr/bin/env bash
# Measures twenty configurations, which cover every pair of values of compile mode, format, offload and size. Each runs
# in its own process, with an empty kernel cache, and appends one row to the CSV. compare.py finds regressions in it.
#
#   tests/bench/nightly.sh [BUILD_DIR] [CSV]    (BUILD_DIR: build; CSV: results/nightly_cpu.csv or nightly_gpu.csv)
#
# With a GPU: a folder of FLUX.1-dev's size, about 20 minutes. Without one: the demo model, about 30 seconds.
# Needs an idle machine. A row that fails contains the error. Exit status 1: a row failed.
#
#   DITFLEET_BENCH_DEVICE    cpu or cuda (default: cuda if nvidia-smi finds a GPU)
#   DITFLEET_BENCH_MODEL     the model's folder (default on a GPU: random weights, 34 GB in BUILD_DIR/flux_size)
#   DITFLEET_BENCH_PYTHON    Python with torch, diffusers and transformers, which writes that folder (default: python3)
#   DITFLEET_BENCH_TIMEOUT   seconds of one configuration (default: 300)
#   DITFLEET_BENCH_ROWS      how many configurations (default: all)
#   DITFLEET_BENCH_REVISION  revision in the rows (default: git describe)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
bench=$build/tests/nightly_bench
[ -x "$bench" ] || { echo "nightly.sh: $bench does not exist; build the target nightly_bench first" >&2; exit 1; }
device=${DITFLEET_BENCH_DEVICE:-$(if nvidia-smi -L > /dev/null 2>&1; then echo cuda; else echo cpu; fi)}
model=${DITFLEET_BENCH_MODEL:-}
revision=${DITFLEET_BENCH_REVISION:-$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}

# The rows in fp32 run in bf16 on a GPU, where nothing is served in fp32.
if [ "$device" = cpu ]; then
  csv=${2:-$here/results/nightly_cpu.csv}
  wide=fp32 small=128x128 large=256x256 broad=256x192 request=(--steps 4 --text-tokens 32)
  model=${model:-$top/deploy/demo-model/model}
  machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)"
  export OMP_WAIT_POLICY=passive
else
  csv=${2:-$here/results/nightly_gpu.csv}
  wide=bf16 small=512x512 large=1024x1024 broad=1360x768 request=(--steps 28 --text-tokens 512)
  machine=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/, / driver /')
  if [ -z "$model" ]; then
    model=$build/flux_size
    # The script writes model_index.json last.
    [ -e "$model/model_index.json" ] || "${DITFLEET_BENCH_PYTHON:-python3}" "$here/make_flux_size.py" "$model" >&2 ||
      { echo "nightly.sh: cannot write $model; set DITFLEET_BENCH_MODEL or DITFLEET_BENCH_PYTHON" >&2; exit 1; }
  fi
fi

# Each mode has every format and every offload once. Over the first four modes every format meets every offload (a
# Latin square). The first five rows have every value. nightly_test.py checks both.
rows="
default                    nf4   auto  $small
reduce-overhead            bf16  block $small
max-autotune               nf4   model $broad
max-autotune-no-cudagraphs fp8   model $large
eager                      $wide none  $broad
default                    $wide none  $small
default                    bf16  model $broad
default                    fp8   block $large
reduce-overhead            $wide model $large
reduce-overhead            fp8   auto  $broad
reduce-overhead            nf4   none  $large
max-autotune               $wide block $broad
max-autotune               bf16  auto  $large
max-autotune               fp8   none  $small
max-autotune-no-cudagraphs $wide auto  $small
max-autotune-no-cudagraphs bf16  none  $broad
max-autotune-no-cudagraphs nf4   block $small
eager                      bf16  auto  $large
eager                      fp8   block $small
eager                      nf4   model $small
"
[ -z "${DITFLEET_BENCH_ROWS:-}" ] || rows=$(sed -n "2,$((1 + DITFLEET_BENCH_ROWS))p" <<< "$rows")
failed=0
while read -r mode format offload size; do
  [ -n "$mode" ] || continue
  row=("$bench" --csv "$csv" --revision "$revision" --machine "$machine" --device "$device" --model "$model"
    --mode "$mode" --format "$format" --offload "$offload" --size "$size" "${request[@]}")
  status=0
  timeout -k 10 "${DITFLEET_BENCH_TIMEOUT:-300}" "${row[@]}" || status=$?
  case $status in
    0) continue ;;
    1) ;;  # the row contains the error
    124) "${row[@]}" --error "timed out after ${DITFLEET_BENCH_TIMEOUT:-300} s" || true ;;
    *) "${row[@]}" --error "ended with status $status" || true ;;
  esac
  failed=$((failed + 1))
done <<< "$rows"
[ $failed = 0 ] || { echo "nightly.sh: $failed configurations failed; see the column error in $csv" >&2; exit 1; }
