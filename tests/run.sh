#!/usr/bin/env bash
# Sets the machine up, builds everything with the tests and runs them.
#   tests/run.sh            all of them
#   tests/run.sh LABEL…     those of some labels: unit parity system fault
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh --tests
labels=()
if [ $# -gt 0 ]; then
  pattern=$(IFS='|'; echo "$*")
  labels=(-L "^($pattern)\$")
fi
nvidia-smi -L >/dev/null 2>&1 || { echo "==> tests labelled gpu are skipped: no GPU here"; labels+=(-LE '^gpu$'); }
log=build/ctest.log
status=0
ctest --test-dir build --output-on-failure --no-tests=error "${labels[@]}" 2>&1 | tee "$log" || status=$?
total=$(sed -n 's/.*tests failed out of \([0-9]*\).*/\1/p' "$log" | tail -n 1)
failed=$(sed -n 's/.*, \([0-9]*\) tests failed out of.*/\1/p' "$log" | tail -n 1)
[ -n "$total" ] && echo "$((total - failed)) passed, $failed failed"
exit "$status"
