#!/usr/bin/env bash
# coordinator_links_no_pipeline.sh PROGRAM: fails if the coordinator's program loads or holds LibTorch, CUDA or
# the pipeline.
set -euo pipefail
libraries=$(ldd "$1")
grep -q 'libhiredis\|libc\.so' <<<"$libraries" || { echo "ldd says nothing of $1: $libraries"; exit 1; }
status=0
if grep -E 'libtorch|libc10|libcu(da|dart|blas|blasLt|dnn|pti|fft)[.]|libnvrtc|libnccl' <<<"$libraries"; then echo "$1 loads the libraries above"; status=1; fi
symbols=$(nm --demangle --defined-only "$1")
grep -q 'ditfleet::scheduling::' <<<"$symbols" || { echo "nm finds no symbols of the coordinator in $1"; exit 1; }
if grep -m 5 -E ' (ditfleet::pipeline|at|c10|torch)::' <<<"$symbols"; then echo "$1 holds the symbols above"; status=1; fi
exit $status
