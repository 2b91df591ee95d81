#!/usr/bin/env bash
# Packs the tests and benches with the label gpu, and the libraries that they need beside LibTorch, for a machine with a
# GPU, this tree and Python's torch of the same version, but without a network:
#
#   tests/gpu/pack.sh [BUILD_DIR] [FOLDER]    (build, BUILD_DIR/gpu)
#
# There, FOLDER/run-here.sh runs them. FFmpeg's libraries are replaced by empty functions: a test that writes a video
# ends. Needs patchelf, and icupkg of libicu-dev.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
folder=${2:-$build/gpu}
for tool in patchelf icupkg xz; do
  command -v $tool >/dev/null || { echo "pack.sh: $tool is not installed (tests/packages.txt)" >&2; exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/pack/bin" "$work/pack/lib" "$folder"

# A line for each test: its name, seconds and command.
ctest --test-dir "$build" -N -L '^gpu$' --show-only=json-v1 | python3 -c '
import json, os, shlex, sys
for test in json.load(sys.stdin)["tests"]:
    of = {p["name"]: p["value"] for p in test["properties"]}
    program, *options = test["command"]
    print(test["name"], int(of["TIMEOUT"]), shlex.join(["env", *of.get("ENVIRONMENT", []),
          os.path.basename(program), *options]))' > "$work/pack/tests"
[ -s "$work/pack/tests" ] || { echo "pack.sh: $build has no test with the label gpu" >&2; exit 1; }
for name in $(grep -oE '[a-z0-9_]+_test\b' <(cut -d' ' -f 3- "$work/pack/tests") | sort -u) $(cd "$build/tests" && echo *_gpu_bench); do
  [ -x "$build/tests/$name" ] || { echo "pack.sh: $build/tests/$name is missing; build the target tests_gpu" >&2; exit 1; }
  strip -o "$work/pack/bin/$name" "$build/tests/$name"
done

# What every Linux with Python's torch has is left out.
present='^(libc|libm|libdl|libpthread|librt|ld-linux-x86-64|libgcc_s|libstdc\+\+|libgomp|libz|libssl|libcrypto|libtorch|libtorch_cpu|libc10)\.so'
needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vE "$present" || true; }
take() {  # FILE: the libraries that it needs, and theirs
  local name path
  for name in $(needed "$1"); do
    [ ! -e "$work/pack/lib/$name" ] || continue
    case $name in
      libav*.so.* | libsw*.so.*) stub "$name"; continue ;;
      libicudata.so.*) icu_data "$name"; continue ;;
    esac
    path=$(ldconfig -p | sed -n "s/^\s*$name (libc6,x86-64).* => //p" | head -1)
    [ -n "$path" ] || { echo "pack.sh: $name, which $(basename "$1") needs, is not installed" >&2; exit 1; }
    strip -o "$work/pack/lib/$name" "$path"
    take "$path"
  done
}
stub() {  # NAME: libavcodec.so.59 with the symbols of version LIBAVCODEC_59 that the programs use
  local version
  version=$(sed 's/\.so\./_/' <<<"${1^^}" | sed 's/\.SO\./_/')
  nm -D --undefined-only "$work"/pack/bin/* | sed -n "s/.* U \([a-z0-9_]*\)@$version$/void \1(void) { __builtin_trap(); }/p" |
    sort -u > "$work/stub.c"
  echo "$version { global: *; };" > "$work/stub.map"
  cc -shared -fno-builtin -w -o "$work/pack/lib/$1" -Wl,-soname,"$1" -Wl,--version-script="$work/stub.map" "$work/stub.c"
}
icu_data() {  # NAME: only what tokenizers use: normalization, and boundaries between characters
  local version=${1##*.}
  local path=/usr/lib/x86_64-linux-gnu/$1 data=$work/icudt${1##*.}l.dat
  # The package begins at its only symbol and has no end of its own.
  tail -c +$((0x$(nm -D "$path" | sed -n 's/ . icudt.*_dat$//p' | head -1) + 1)) "$path" > "$data"
  icupkg -tl -l "$data" | grep -vE '^(brkitr/(root\.res|.*\.(brk|dict))|.*\.nrm)$' > "$work/unused.txt"
  icupkg -tl -r "$work/unused.txt" "$data" "$work/small.dat"
  printf '.section .rodata\n.global icudt%s_dat\n.balign 16\nicudt%s_dat: .incbin "%s"\n.section .note.GNU-stack,"",@progbits\n' \
    "$version" "$version" "$work/small.dat" > "$work/icu.s"
  cc -shared -nostdlib -o "$work/pack/lib/$1" -Wl,-soname,"$1" "$work/icu.s"
}
for program in "$work"/pack/bin/*; do take "$program"; done

# run-here.sh makes `torch` a link to the machine's LibTorch.
for file in "$work"/pack/bin/* "$work"/pack/lib/*; do patchelf --set-rpath '$ORIGIN/../lib:$ORIGIN/../torch' "$file"; done
{
  echo "source=$top"
  echo "revision=$(git -C "$top" describe --always --dirty --abbrev=12)"
} > "$work/pack/made"
tar -C "$work/pack" --sort=name --mtime=@0 --owner=0 --group=0 -c . | xz -T2 --lzma2=preset=6,dict=128MiB > "$folder/pack.tar.xz"
cp "$here/run-here.sh" "$folder/"
echo "$folder: $(wc -l < "$work/pack/tests") tests, $(($(stat -c %s "$folder/pack.tar.xz") / 1000000)) MB"
