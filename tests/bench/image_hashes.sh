#!/usr/bin/env bash
# Hashes of fixed seeded images and of program keys: shows whether a change altered any output byte.
#
#   tests/bench/image_hashes.sh [BIN_DIR]             print "NAME SHA256" lines (BIN_DIR: build/bin)
#   tests/bench/image_hashes.sh --write [BIN_DIR]     replace results/image_hashes.csv as well
#   tests/bench/image_hashes.sh --compare [BIN_DIR]   draw again and compare with results/image_hashes.csv
#
#   DITFLEET_BENCH_REVISION   what the CSV calls the revision (default: git's name for it)
#   DITFLEET_BENCH_CSV        the CSV (default: tests/bench/results/image_hashes.csv)
#
# The bytes depend on the processor, LibTorch and the compiler, so compare only on the machine that wrote the CSV.
# Exit status: 0 if all lines match, 1 if a line differs, 2 for a usage error or a failed run.
set -euo pipefail
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }
mode=print
case ${1:-} in
  --write | --compare) mode=${1#--}; shift ;;
  -h | --help) usage; exit 0 ;;
  -*) usage >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
bin=$(cd "${1:-$top/build/bin}" && pwd)
csv=${DITFLEET_BENCH_CSV:-$here/results/image_hashes.csv}
worker=$bin/ditfleet-worker
[ -x "$worker" ] || { echo "image_hashes.sh: $worker does not exist; build the target ditfleet-worker first" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=2  # the number of threads changes the order of sums
fail() { echo "image_hashes.sh: $1" >&2; cat "$work/log" >&2; exit 2; }

# draw NAME MODEL EXTENSION ARGUMENTS…: one line for each image.
draw() {
  local name=$1 model=$2 extension=$3 image
  shift 3
  mkdir -p "$work/$name"
  timeout 300 "$worker" generate --model "$model" --out "$work/$name/image.$extension" --device cpu \
    --set cache.dir="$work/cache" "$@" >"$work/log" 2>&1 || fail "$name failed"
  for image in "$work/$name"/*; do
    image=${image##*/image}
    echo "$name${image%.*} $(sha256sum <"$work/$name/image$image" | cut -d' ' -f1)"
  done
}

demo_model() {
  local model=$top/deploy/demo-model/model loras=$top/deploy/demo-model/loras backend
  local first="a red circle above a blue square"
  local second="a small white ring next to a huge orange dot on a gray background"
  for backend in cpu_jit eager; do
    set -- --set compile.backend=$backend
    draw "demo/$backend/256" "$model" png --prompt "$first" --seed 1 "$@"
    draw "demo/$backend/three" "$model" png --prompt "$second" --seed 7 -n 3 "$@"
    draw "demo/$backend/320x192" "$model" png --prompt "$second" --seed 2 --size 320x192 --steps 7 "$@"
    draw "demo/$backend/192x320" "$model" png --prompt "$first" --seed 3 --size 192x320 --steps 1 \
      --max-sequence-length 64 "$@"
    draw "demo/$backend/negative" "$model" png --prompt "$first" --seed 4 --negative "a green cross" --true-cfg 2.5 "$@"
    draw "demo/$backend/empty_negative" "$model" png --prompt "$first" --seed 4 --negative "" --true-cfg 4 "$@"
    draw "demo/$backend/lora" "$model" png --prompt "$first" --seed 5 --lora "$loras/night.safetensors:0.8" "$@"
    draw "demo/$backend/loras" "$model" png --prompt "$first" --seed 5 --lora "$loras/outline.safetensors" \
      --lora "$loras/pastel.safetensors:-0.4" "$@"
    draw "demo/$backend/bf16" "$model" png --prompt "$first" --seed 1 --dtype bf16 "$@"
  done
  draw demo/jpeg "$model" jpg --prompt "$first" --seed 1
  draw demo/webp "$model" webp --prompt "$first" --seed 1
}

# The sizes are multiples of the coarsest VAE's stride and patch.
fixtures() {
  local folder name backend lora=$top/tests/fixtures/lora/adapters
  for folder in "$top"/tests/fixtures/flux/*/model; do
    name=$(basename "$(dirname "$folder")")
    for backend in cpu_jit eager; do
      set -- --set compile.backend=$backend
      draw "$name/$backend/plain" "$folder" png --prompt "a photo of a cat" --seed 11 --steps 3 --size 64x96 "$@"
      draw "$name/$backend/negative" "$folder" png --prompt "a photo of a cat" --negative "blurry" --true-cfg 3 \
        --guidance 2.5 --seed 12 --steps 2 --size 64x64 --max-sequence-length 40 "$@"
    done
  done
  for backend in cpu_jit eager; do
    draw "dev/$backend/loras" "$top/tests/fixtures/flux/dev/model" png --prompt "a photo of a cat" --seed 13 --steps 3 \
      --size 64x96 --lora "$lora/all.safetensors:0.7" --lora "$lora/clip.safetensors:-0.3" \
      --lora "$lora/t5.safetensors" --set compile.backend=$backend
  done
}

program_keys() {
  timeout 300 "$worker" compile --model "$top/deploy/demo-model/model" --arch cpu,sm_90a --json \
    --set cache.dir="$work/keys" >"$work/programs.json" 2>"$work/log" || fail "compile failed"
  python3 -c 'import json, sys
for p in json.load(sys.stdin)["regions"]: print("program/%s/%s/%s %s" % (p["arch"], p["dtype"], p["name"], p["key"]))' \
    <"$work/programs.json"
}

{ demo_model; fixtures; program_keys; } >"$work/lines"

cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')
libtorch=$(ldd "$worker" | sed -n 's|.*=> .*libtorch-\([^/]*\)/.*libtorch_cpu.so.*|\1|p')
libraries=$(dpkg-query -W -f '${Package} ${Version}; ' libpng16-16 libjpeg62-turbo libwebp7 2>/dev/null || true)
machine="$cpu (family $(sed -n 's/^cpu family[^:]*: //p' /proc/cpuinfo | head -1) model $(sed -n 's/^model[[:space:]]*: //p' /proc/cpuinfo | head -1))"
versions="libtorch ${libtorch:-?}; ${libraries}c++ $(c++ -dumpfullversion)"

case $mode in
  print) cat "$work/lines" ;;
  write)
    revision=${DITFLEET_BENCH_REVISION:-$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)}
    {
      echo "revision,machine,versions,name,sha256"
      while read -r name hash; do echo "$revision,$machine,$versions,$name,$hash"; done <"$work/lines"
    } >"$csv"
    cat "$work/lines" ;;
  compare)
    recorded=$(sed -n '2s/^[^,]*,\([^,]*,[^,]*\),.*/\1/p' "$csv")
    [ "$recorded" = "$machine,$versions" ] ||
      printf 'image_hashes.sh: the CSV is from another machine or other versions\n  CSV:  %s\n  here: %s\n' "$recorded" "$machine,$versions" >&2
    if diff <(tail -n +2 "$csv" | cut -d, -f4,5 --output-delimiter=' ' | sort) <(sort "$work/lines"); then
      echo "$(wc -l <"$work/lines") lines match $csv (revision $(sed -n '2s/,.*//p' "$csv"))"
    else
      echo "image_hashes.sh: the lines above differ ('<' is $csv, '>' is drawn now)" >&2
      exit 1
    fi ;;
esac
