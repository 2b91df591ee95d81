#!/usr/bin/env bash
# coordinator_links_no_pipeline.sh PROGRAM: fails if the coordinator's program links LibTorch, CUDA or the pipeline.
set -euo pipefail
libraries=$(ldd "$1")
grep -q 'libhiredis\|libc\.so' <<<"$libraries" || { echo "unexpected ldd output for $1: $libraries"; exit 1; }
status=0
if grep -E 'libtorch|libc10|libcu(da|dart|blas|blasLt|dnn|pti|fft)[.]|libnvrtc|libnccl' <<<"$libraries"; then
  echo "$1 loads the libraries above"
  status=1
fi
symbols=$(nm --demangle --defined-only "$1")
grep -q 'ditfleet::scheduling::' <<<"$symbols" || { echo "nm finds no coordinator symbols in $1"; exit 1; }
if grep -m 5 -E ' (ditfleet::pipeline|at|c10|torch)::' <<<"$symbols"; then
  echo "$1 contains the symbols above"
  status=1
fi
exit $status
