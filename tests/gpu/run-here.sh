#!/usr/bin/env bash
# Runs on a machine with a GPU what pack.sh packed. Needs no network; runs in this tree's root:
#
#   FOLDER/run-here.sh quick [--gpus N]     every test with the label gpu, one at a time because some fill the GPU's memory,
#                                           and a few benches without peers; under ten minutes. N: GPUs (default: 1)
#   FOLDER/run-here.sh TEST…                only these
#
#   OUT                    folder of the results (default: FOLDER/out): gpu_checks.csv, benches.csv, NAME.log
#   DITFLEET_GPU_SECONDS   stops starting benches after these (default: 540)
#   DITFLEET_GPU_PYTHON    Python with torch (default: python3)
#
# Exit status 1: a test or a bench failed.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd) tree=$PWD
[ $# -gt 0 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=${OUT:-$folder/out} python=${DITFLEET_GPU_PYTHON:-python3} quick= gpus=1 chosen=()
while [ $# -gt 0 ]; do
  case $1 in
    quick) quick=1 ;;
    --gpus) gpus=$2; shift ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1) || true
[ -n "$card" ] || { echo "run-here.sh: nvidia-smi finds no GPU" >&2; exit 1; }
mkdir -p "$out"
if [ ! -e "$folder/pack/made" ]; then
  mkdir -p "$folder/pack"
  "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$folder/pack.tar.xz" "$folder/pack"
fi
cd "$folder/pack"
ln -sfn "$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')/lib" torch
. ./made  # source, revision
# The programs name fixtures by the folder in which they were made.
if [ ! -e "$source" ]; then mkdir -p "$(dirname "$source")" && ln -s "$tree" "$source"; fi

# row NAME RESULT BEGAN: adds a row to gpu_checks.csv.
row() {
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$card,$gpus,$1,$2,$((SECONDS - $3))" | tee -a "$out/gpu_checks.csv"
}
# check NAME SECONDS COMMAND: runs a test.
check() {
  local name=$1 limit=$2 began=$SECONDS status=0 result
  (cd "$source" && PATH=$folder/pack/bin:$PATH && eval "timeout -k 5 $limit $3") > "$out/$name.log" 2>&1 || status=$?
  case $status in 0) result=passed ;; 124 | 137) result='timed out' ;; *) result="failed ($status)" ;; esac
  [ $status != 0 ] || ! grep -q '^\[  SKIPPED \]' "$out/$name.log" ||
    result="passed, $(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$out/$name.log") skipped"
  row "$name" "\"$result\"" "$began"
}
[ -s "$out/gpu_checks.csv" ] || echo "date,revision,machine,gpus,check,result,seconds" > "$out/gpu_checks.csv"
export CUDA_VISIBLE_DEVICES
CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1)))
while read -r name limit command; do
  [ ${#chosen[@]} -eq 0 ] || [[ " ${chosen[*]} " = *" $name "* ]] || continue
  check "$name" "$limit" "$command" < /dev/null
done < tests

# bench NAME COMMAND…: adds its rows to benches.csv.
bench() {
  local name=$1 began=$SECONDS status=0
  [ $SECONDS -lt "${DITFLEET_GPU_SECONDS:-540}" ] || { echo "run-here.sh: no time is left for $name" >&2; return 0; }
  shift
  (cd "$source" && timeout 150 "$folder/pack/bin/$1" "${@:2}" --revision "$revision" --machine "$card") \
    > "$out/$name.log" 2>&1 || status=$?
  grep -E '^[0-9]{4}-[0-9-]+T[0-9:]+Z,' "$out/$name.log" | tee -a "$out/benches.csv" || true
  row "$name" "$([ $status = 0 ] && echo passed || echo "failed ($status)")" "$began"
}
if [ -n "$quick" ] && [ "$gpus" = 1 ]; then
  cache=$(mktemp -d)
  bench regions_cold regions_gpu_bench cold --cache "$cache"
  bench regions_warm regions_gpu_bench warm --cache "$cache"
  bench lora_step lora_gpu_bench step --cache "$cache"
  bench fp8_step precision_gpu_bench fp8 --cache "$cache"
  rm -rf "$cache"
fi
! grep -qE ',"?(failed|timed)' "$out/gpu_checks.csv"
