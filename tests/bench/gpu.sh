#!/usr/bin/env bash
# Takes figures on one GPU, with the peer in the same run. Appends rows to results/NAME_gpu.csv and the output
# of every command to BUILD_DIR/NAME_gpu.log. Exit status 1: a bench failed.
#
#   tests/bench/gpu.sh regions [BUILD_DIR]      compiled FLUX blocks; about 5 minutes (BUILD_DIR: build)
#   tests/bench/gpu.sh lora [BUILD_DIR]         adapters in slots: steps, swaps, 50 random adapters; about 5 minutes
#   tests/bench/gpu.sh precision [BUILD_DIR]    fp8 and NF4: steps, whole images, adapters; about 8 minutes. Goes on where
#                                               an earlier run of this revision and machine stopped.
#   tests/bench/gpu.sh memory [BUILD_DIR]       memory plans: peaks, images and steps; about 7 minutes; goes on likewise
#   tests/bench/gpu.sh wan [BUILD_DIR]          videos in Wan 2.2 A14B's size: forwards, requests, limits; about 25
#                                               minutes; goes on likewise
#   tests/bench/gpu.sh parallel [BUILD_DIR]     several GPUs for one image or video, on 2 and on 4 GPUs of this machine,
#                                               by copy engines and by NCCL; about 14 minutes; goes on likewise
#   tests/bench/gpu.sh families [BUILD_DIR]     pictures in the sizes of Z-Image, FLUX.2-klein-4B, Kontext and Qwen-Image:
#                                               steps, prompt to PNG, limits of memory, two GPUs where there are; about 25
#                                               minutes; goes on likewise
#
#   DITFLEET_BENCH_RESULTS   folder of the CSVs (default: tests/bench/results)
#   DITFLEET_BENCH_PEER=0    skip the peer
#   DITFLEET_BENCH_MODEL     a folder of FLUX.1-dev's size (default: one with random weights, 34 GB); of wan, the folder
#                            that make_wan_size.py wrote
#   DITFLEET_BENCH_PYTHON    Python with torch and diffusers for the peer (default: python3, or BUILD_DIR/bench-venv)
#   DITFLEET_BENCH_REVISION  revision in the rows (default: git describe)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
what=${1:-}
case $what in regions | lora | precision | memory | wan | parallel | families) ;; *) sed -n '2,22s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
build=$(cd "${2:-$top/build}" && pwd)
results=${DITFLEET_BENCH_RESULTS:-$here/results}
mkdir -p "$results"
csv=$results/${what}_gpu.csv
[ "$what" != families ] || csv=$results/families.csv
log=$build/${what}_gpu.log
bench=$build/tests/${what}_gpu_bench
[ -x "$bench" ] || { echo "gpu.sh: $bench does not exist; build the target ${what}_gpu_bench first" >&2; exit 1; }
name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1) || true
[ -n "$name" ] || { echo "gpu.sh: nvidia-smi finds no GPU" >&2; exit 1; }

revision=${DITFLEET_BENCH_REVISION:-$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
machine="$name driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1)"
[ -s "$csv" ] || echo "date,revision,machine,versions,system,scenario,metric,value,unit" > "$csv"
work=$(mktemp -d)
trap 'status=$?; [ ! -e "$work/failed" ] || status=1; rm -rf "$work"; exit $status' EXIT
{ echo; date -u; echo "$machine, revision $revision"; nvidia-smi --query-gpu=clocks.max.sm,power.limit,temperature.gpu,memory.total --format=csv; } >> "$log"

# run COMMAND…: appends its rows to the CSV and all of its output to the log.
run() {
  echo "\$ ${*##*/}" >> "$log"
  timeout 200 "$@" --revision "$revision" --machine "$machine" > "$work/out" 2> "$work/err" ||
    { echo "gpu.sh: exit status $? from ${*##*/}" | tee -a "$log" "$work/failed" >&2; }
  cat "$work/out" "$work/err" >> "$log"
  grep -E '^[0-9]{4}-[0-9-]+T[0-9:]+Z,' "$work/out" | tee -a "$csv" || true
}

# sampled COMMAND…: adds rows with the medians of clock and power under load, to show the power limit.
sampled() {
  nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits -lms 250 > "$work/clocks" &
  local sampler=$! column metric unit value
  "$@"
  kill $sampler
  for column in '1 sm_clock MHz' '2 power W'; do
    read -r column metric unit <<< "$column"
    value=$(awk -F, -v column="$column" '$2 > 500 {print $column + 0}' "$work/clocks" | sort -n |
      awk '{v[NR] = $1} END {if (NR) print v[int((NR + 1) / 2)]}')
    [ -z "$value" ] ||
      echo "$(date -u +%Y-%m-%dT%H:%M:%SZ),$revision,$machine,-,machine,environment,$metric,$value,$unit" | tee -a "$csv"
  done
}

peer_python() {
  local python=${DITFLEET_BENCH_PYTHON:-python3}
  if ! "$python" -c 'import torch, diffusers' 2>/dev/null; then
    python=$build/bench-venv/bin/python
    [ -x "$python" ] || python3 -m venv "$build/bench-venv"
    "$python" -c 'import torch, diffusers' 2>/dev/null ||
      "$build/bench-venv/bin/pip" -q install torch==2.11.0 diffusers==0.42.1 torchao==0.18.0 transformers accelerate >&2
  fi
  echo "$python"
}

# has SYSTEM SCENARIO METRIC: whether the CSV has this row of this revision and machine.
has() { grep -F ",$revision,$machine," "$csv" | grep -q ",$1[^,]*,$2,$3,"; }
# once SYSTEM SCENARIO METRIC COMMAND…
once() { has "${@:1:3}" || "${@:4}"; }

if [ "$what" = memory ]; then
  model=${DITFLEET_BENCH_MODEL:-$work/flux}
  [ -n "${DITFLEET_BENCH_MODEL:-}" ] || "$(peer_python)" "$here/make_flux_size.py" "$model" >> "$log" 2>&1
  measure() { once ditfleet "$1" "$2" run "$bench" "$1" --model "$model" --cache "$work/cache"; }
  measure offload_bf16 step_ratio
  measure offload_fp8 step_ratio
  measure offload_nf4 encoders_leave_step_ratio
  measure limit12 prompt_to_png_s
  measure switch ratio
  measure contain throughput_ratio
  for format in bf16 fp8 nf4; do
    # The first run compiles and fills the page cache.
    "$bench" boot_$format --model "$model" --cache "$work/cache" > /dev/null 2>> "$log" || true
    measure boot_$format loaded_s
  done
  exit
fi
if [ "$what" = wan ]; then
  model=${DITFLEET_BENCH_MODEL:-$work/wan}
  peer() { [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || once diffusers "$@"; }
  export TORCHINDUCTOR_CACHE_DIR=$work/inductor
  [ -d "$model/one" ] || "$(peer_python)" "$here/make_wan_size.py" "$model" >> "$log" 2>&1
  once ditfleet forward 81_s sampled run "$bench" forward --model "$model/one" --cache "$work/cold"
  peer forward peak_gb run "$(peer_python)" "$here/peers/wan_diffusers.py" forward
  once ditfleet forward_fp8 81_s run "$bench" forward --quantize fp8 --model "$model/one" --cache "$work/cold8"
  once ditfleet forward_fp8_attention8 81_s run "$bench" forward --quantize fp8 --attention fp8 --model "$model/one" --cache "$work/cold8"
  once ditfleet request peak_gb run "$bench" request --model "$model/two" --cache "$work/cold"
  peer vae decode_81_s run "$(peer_python)" "$here/peers/wan_diffusers.py" vae
  once ditfleet request_fp8 480p_81_frames_4_steps_s run "$bench" request --quantize fp8 --model "$model/two" --cache "$work/cold8"
  for scenario in none limit32 limit16; do
    once ditfleet "$scenario" 81_frames_832x1216_peak_gb run "$bench" "$scenario" --model "$model/two" --cache "$work/cold"
  done
  "$(peer_python)" "$here/make_wan_size.py" "$work/wan" ti2v >> "$log" 2>&1
  once ditfleet ti2v peak_gb run "$bench" ti2v --model "$work/wan/ti2v" --cache "$work/cold"
  peer ti2v decode_121_s run "$(peer_python)" "$here/peers/wan_diffusers.py" ti2v
  for attention in '' '--attention fp8'; do
    once ditfleet request_fp8${attention:+_attention8} 480p_81_frames_40_steps_s run "$bench" cfg --quantize fp8 $attention --model "$model/two" --cache "$work/cold8"
  done
  exit
fi
if [ "$what" = parallel ]; then
  count=$(nvidia-smi -L | wc -l)
  [ "$count" -ge 2 ] || { echo "gpu.sh: this machine has one GPU; parallel needs two" >&2; exit 1; }
  [ -d "$work/flux" ] || "$(peer_python)" "$here/make_flux_size.py" "$work/flux" >> "$log" 2>&1
  measure() {  # SCENARIO METRIC FOLDER
    local gpus
    for gpus in 2 4; do
      [ "$gpus" -le "$count" ] || continue
      once ditfleet "$1" "$2_$gpus" run "$bench" "$1" --gpus $gpus --model "$3" --cache "$work/cache"
      [ $1$gpus != wan2 ] || continue  # each GPU computes one forward of guidance, so nothing is exchanged
      once ditfleet "$1" "$2_${gpus}_nccl" run "$bench" "$1" --gpus $gpus --exchange nccl --model "$3" --cache "$work/cache"
    done
  }
  measure flux 28_steps_ratio "$work/flux"
  rm -rf "$work/flux"
  "$(peer_python)" "$here/make_wan_size.py" "$work/wan" >> "$log" 2>&1
  measure wan step_81_ratio "$work/wan/one"
  exit
fi
if [ "$what" = families ]; then
  [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || python=$(peer_python)
  "${python:-$(peer_python)}" "$here/make_family_size.py" "$work/models" small >> "$log" 2>&1
  export TORCHINDUCTOR_CACHE_DIR=$work/inductor
  for model in z_image klein; do
    steps=8
    [ $model = z_image ] || steps=4
    on() { run "$bench" "$@" --model "$work/models/$model" --name $model --steps $steps; }
    on image --cache "$work/warm" > /dev/null  # brings the libraries' files into memory
    for format in bf16 fp8; do
      quantize=
      [ $format = bf16 ] || quantize='--quantize fp8'
      # shellcheck disable=SC2086
      once ditfleet ${model}_$format back_to_back_s on image --cache "$work/$format" $quantize
      [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || once diffusers ${model}_$format back_to_back_s \
        run "$python" "$here/peers/families_diffusers.py" ${model}_$format --model "$work/models/$model" --steps $steps
    done
    once ditfleet ${model}_fp8_attention8 back_to_back_s on image --cache "$work/fp8" --quantize fp8 --attention fp8
    once ditfleet ${model}_fp8_attention8 image_cosine on gate --cache "$work/fp8" --quantize fp8
    once ditfleet ${model}_bf16_limited back_to_back_s on image --cache "$work/bf16" --limit 12
  done
  for model in klein klein_kv; do
    once ditfleet ${model}_reference_bf16 back_to_back_s run "$bench" image --cache "$work/bf16" --pictures 1 --steps 4 \
      --model "$work/models/$model" --name ${model}_reference
  done
  rm -rf "$work/models/klein"*
  "${python:-$(peer_python)}" "$here/make_flux_size.py" "$work/models/kontext" FluxKontextPipeline >> "$log" 2>&1
  for format in bf16 fp8; do
    quantize=
    [ $format = bf16 ] || quantize='--quantize fp8'
    # shellcheck disable=SC2086
    once ditfleet kontext_$format back_to_back_s run "$bench" image --cache "$work/$format" --pictures 1 --steps 28 \
      --model "$work/models/kontext" --name kontext $quantize
    [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || once diffusers kontext_$format back_to_back_s run "$python" \
      "$here/peers/families_diffusers.py" kontext_$format --model "$work/models/kontext" --steps 28 --pictures 1
  done
  rm -rf "$work/models/kontext"
  "${python:-$(peer_python)}" "$here/make_family_size.py" "$work/models" qwen >> "$log" 2>&1
  qwen() {  # NAME FORMAT OPTION…
    local name=$1 format=$2
    shift 2
    [ $format = bf16 ] || set -- "$@" --quantize $format
    run "$bench" once --model "$work/models/$name" --name $name --cache "$work/$format" --negative ' ' "$@"
  }
  qwen_peer() {
    [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || once diffusers "$1" prompt_to_png_s run "$python" \
      "$here/peers/families_diffusers.py" "$1" --once --negative ' ' --model "$work/models/${1%_*}" "${@:2}"
  }
  for format in bf16 fp8; do
    # torchao's linears refuse fewer than 257 tokens.
    once ditfleet qwen_image_$format new_size_compiles qwen qwen_image $format --size 1328 --steps 6 --words 300
    qwen_peer qwen_image_$format --size 1328 --steps 6 --words 300
  done
  for limit in 24 16; do
    once ditfleet qwen_image_auto_limit$limit new_size_compiles qwen qwen_image auto --size 1328 --steps 6 --words 300 --limit $limit
  done
  once ditfleet qwen_edit_bf16 new_size_compiles qwen qwen_edit bf16 --pictures 1 --steps 40
  qwen_peer qwen_edit_bf16 --pictures 1 --steps 40
  once ditfleet qwen_edit_8_bf16_lora new_size_compiles run "$bench" once --model "$work/models/qwen_edit" --name qwen_edit_8 \
    --cache "$work/bf16" --pictures 1 --steps 8 --lora "$work/models/qwen_image/adapter.safetensors"
  [ "$(nvidia-smi -L | wc -l)" -lt 2 ] || once ditfleet z_image step_1024_ratio_2 \
    run "$build/tests/parallel_gpu_bench" z_image --gpus 2 --model "$work/models/z_image" --cache "$work/bf16"
  exit
fi
if [ "$what" = precision ]; then
  prompts=$top/deploy/demo-model/heldout_prompts.jsonl demo=$top/deploy/demo-model/model
  peers=$here/peers/precision_diffusers.py
  peer() { [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || once diffusers "$@"; }
  [ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || python=$(peer_python)
  export TORCHINDUCTOR_CACHE_DIR=$work/inductor
  "$bench" fp8 --layers 1,1 > /dev/null 2>> "$log" || true  # warm-up, as below
  once ditfleet fp8 image_28_s sampled run "$bench" fp8 --cache "$work/cold"
  peer fp8 image_28_s run "$python" "$peers" fp8
  once ditfleet nf4 step_ratio run "$bench" nf4 --cache "$work/cache"
  once ditfleet gguf_q4_k step_ratio run "$bench" gguf --cache "$work/cache"
  once ditfleet lora_fp8 step_ratio run "$bench" lora_fp8 --cache "$work/cache"
  once ditfleet fp8 trajectory_cosine run "$bench" trajectory --model "$demo" --prompts "$prompts" --cache "$work/cache"
  peer fp8 trajectory_cosine run "$python" "$peers" trajectory --model "$demo" --prompts "$prompts"
  # Whole images need a folder of FLUX.1-dev's size: DITFLEET_BENCH_MODEL, or one with random weights.
  model=${DITFLEET_BENCH_MODEL:-}
  if [ -z "$model" ] && [ "${DITFLEET_BENCH_PEER:-1}" != 0 ] && ! has diffusers bf16 back_to_back_s; then
    model=$work/flux
    "$python" "$here/make_flux_size.py" "$model" >> "$log" 2>&1 || model=
  fi
  if [ -n "$model" ]; then
    once ditfleet fp8 back_to_back_s run "$bench" whole --model "$model" --quantize fp8 --cache "$work/cache"
    once ditfleet fp8_attention8 back_to_back_s run "$bench" whole --model "$model" --quantize fp8 --attention fp8 --cache "$work/cache"
    peer fp8 back_to_back_s run "$python" "$peers" whole_fp8 --model "$model"
    once ditfleet bf16 back_to_back_s run "$bench" whole --model "$model" --cache "$work/cache"
    peer bf16 back_to_back_s run "$python" "$peers" whole_bf16 --model "$model"
  fi
  once ditfleet mixed throughput_ratio run "$bench" mixed --cache "$work/cache"
  exit
fi
if [ "$what" = lora ]; then
  # Warm-up: loads the libraries and fills the kernel cache.
  "$bench" step --layers 1,1 --cache "$work/cache" > /dev/null 2>> "$log" || true
  for i in 1 2; do
    run "$bench" step --cache "$work/cache"
    run "$bench" swap --cache "$work/cache"
  done
  run "$bench" cycle --cache "$work/cache"
  exit
fi
# Warm-up: brings the libraries' files into memory, as on a machine that has served before.
for scenario in cold warm; do "$bench" "$scenario" --layers 1,1 > /dev/null 2>> "$log" || true; done
for i in 1 2 3; do run "$bench" cold --cache "$work/cold$i"; done
for i in 1 2; do run "$bench" shared_cache --cache "$work/cold1"; done  # with programs of another process
sampled run "$bench" warm --cache "$work/cold1"
if [ "${DITFLEET_BENCH_PEER:-1}" != 0 ]; then
  python=$(peer_python)
  export TORCHINDUCTOR_CACHE_DIR=$work/inductor
  run "$python" "$here/peers/flux_diffusers.py" cold
  run "$python" "$here/peers/flux_diffusers.py" shared_cache
fi
run "$bench" warm --cache "$work/cold2" --mode reduce-overhead
run "$bench" warm --cache "$work/cold3" --mode max-autotune
run "$bench" warm --cache "$work/cold1"  # another process has seen all sizes
run "$bench" skip --cache "$work/cold1"
run "$bench" numerics --cache "$work/cold1"
run "$bench" vae --cache "$work/cold1"
[ "${DITFLEET_BENCH_PEER:-1}" = 0 ] || run "$python" "$here/peers/vae_diffusers.py"
