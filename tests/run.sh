#!/usr/bin/env bash
# Installs whatever is missing (deploy/setup.sh), builds the tests and runs them.
#   tests/run.sh            all labels except release, tidy and mutants
#   tests/run.sh LABEL…     only tests with these labels; builds only what they need:
#                           unit parity system fault bench gpu   in build/
#                           release    packages, manifests, the demo, scale: what only deploy/ or a release can break
#                           sanitize   unit and service tests under the sanitizers, in build/address and build/thread
#                           fuzz       libFuzzer on each parser of untrusted input, one minute each, in build/fuzz
#                           tidy       clang-tidy over the product's sources; takes half an hour on two cores
#                           mutants    tests/fault/mutants.sh: a test must notice each of 52 wrong lines; takes minutes
#   tests/run.sh trials [--count N] [--seed S]   jobs on real processes that are killed, stopped, cut off; a line for each of
#                                                N trials (20), which takes about seven seconds
# Tests that need something this machine does not have (GPU, Chromium, foreign clients) are skipped with a message.
# The last line is "PASSED passed, FAILED failed, SKIPPED skipped". The exit status is 0 only if nothing failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = trials ]; then
  shift
  deploy/setup.sh --tests --target ditfleet --target ditfleet-worker --target next_format_ditfleet --target next_format_worker
  exec python3 -B tests/clients/trials.py "$@"
fi

kLabels='unit parity system fault bench release gpu sanitize fuzz tidy mutants'
for label in "$@"; do
  case $label in
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *[!a-z]* | '') known=no ;;
    *) case " $kLabels " in *" $label "*) known=yes ;; *) known=no ;; esac ;;
  esac
  [ $known = yes ] || { echo "run: unknown label '$label'; labels: $kLabels" >&2; exit 2; }
done
wants() {  # LABEL: whether to run it
  local label
  [ ${#asked[@]} -gt 0 ] || return 0
  for label in "${asked[@]}"; do [ "$label" != "$1" ] || return 0; done
  return 1
}
asked=("$@")

[ -n "${HOME:-}" ] || { HOME=$(getent passwd "$(id -u)" | cut -d: -f6); export HOME; }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ditfleet
started=$SECONDS passed=0 failed=0 skipped=0 failures=()
say() { printf '==> %s\n' "$*"; }

finish() {
  local status=$?
  trap - EXIT
  [ "$status" = 0 ] || [ "$failed" -gt 0 ] || { failed=1; failures+=("setup or a build (see its message above)"); }
  say "Took $((SECONDS - started)) s"
  for failure in ${failures[@]+"${failures[@]}"}; do say "Failed: $failure"; done
  echo "$passed passed, $failed failed, $skipped skipped"
  [ "$failed" = 0 ] || status=1
  exit "$status"
}
trap finish EXIT

# count PATTERN FILE: counts CTest's result lines that match.
count() { grep -cE "^ *[0-9]+/[0-9]+ Test +#[0-9]+: .*$1" "$2" || true; }

# run_ctest NAME FOLDER ARGUMENTS…: runs the tests of one build and adds up the results.
run_ctest() {
  local name=$1 folder=$2 log=$2/ctest.log status=0 bad
  shift 2
  say "Running $name"
  export DITFLEET_SKIPS=$PWD/$folder/skips
  : >"$DITFLEET_SKIPS"
  # Two tests more than there are cores, because most of them wait.
  ${launcher[@]+"${launcher[@]}"} ctest --test-dir "$folder" -j $(($(nproc) + 2)) --output-on-failure --no-tests=error "$@" 2>&1 | tee "$log" || status=$?
  bad=$(count '(\*\*\*(Failed|Timeout|Exception|Not Run)|Subprocess aborted)' "$log")
  [ "$status" = 0 ] || [ "$bad" -gt 0 ] || bad=1
  [ "$bad" = 0 ] || failures+=("$name: $(sed -n '/(Skipped)$/d; s/^[[:space:]]*[0-9]* - \([^ ]*\) (.*/\1/p' "$log" | tr '\n' ' ')")
  passed=$((passed + $(count '[.]+ +Passed' "$log")))
  sed 's/^/==> Skipped: /' "$DITFLEET_SKIPS"
  skipped=$((skipped + $(count '\*\*\*Skipped' "$log") + $(wc -l <"$DITFLEET_SKIPS")))
  failed=$((failed + bad))
}
launcher=()

# Installs the foreign clients into a virtual environment that all checkouts share.
foreign_clients() {
  local venv work
  venv=$cache/test-clients-$(sha256sum tests/requirements.txt | cut -c 1-12)
  if [ ! -x "$venv/bin/python" ]; then
    say "Foreign clients: installing $(grep -c '^[a-z]' tests/requirements.txt) packages of tests/requirements.txt"
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/.partial-clients-XXXXXX")
    if python3 -m venv "$work" && "$work/bin/python" -m pip --disable-pip-version-check install --quiet \
        --only-binary :all: -r tests/requirements.txt </dev/null; then
      mv -T "$work" "$venv"
    else
      rm -rf "$work"
      say "Foreign clients: not installed (see pip's message above); their tests are skipped"
      return 0
    fi
  fi
  export DITFLEET_TEST_PYTHON=$venv/bin/python
}

# --- the tests of build/ ---------------------------------------------------------------------------------
selected=() targets=()
for label in unit parity system fault bench release gpu; do
  if wants $label && { [ $label != release ] || [ ${#asked[@]} -gt 0 ]; }; then selected+=("$label"); targets+=(--target "tests_$label"); fi
done
if [ ${#selected[@]} -gt 0 ]; then
  selection=(-L "^($(IFS='|'; echo "${selected[*]}"))\$")
  deploy/setup.sh --tests ${targets[@]+"${targets[@]}"}
  if [[ " ${selected[*]} " =~ \ (system|release)\  ]] && [ -f tests/requirements.txt ]; then foreign_clients; fi
  if ! nvidia-smi -L >/dev/null 2>&1; then
    if wants gpu; then say "Skipped: label gpu (no GPU found)"; fi
    selection+=(-LE '^gpu$')
  fi
  command -v chromium >/dev/null || say "Skipped: console tests in a browser (chromium is not installed)"
  # Compiled blocks, which all tests and checkouts share: tests/programs.h says why that hides nothing.
  DITFLEET_TEST_PROGRAMS=$cache/test-programs-$(cat pipeline/region/compile/* | sha256sum | cut -c 1-12)
  export DITFLEET_TEST_PROGRAMS
  if [ "${selected[*]}" != gpu ] || nvidia-smi -L >/dev/null 2>&1; then
    run_ctest "${selected[*]}" build "${selection[@]}"
  fi
fi

# --- sanitizers ------------------------------------------------------------------------------------------
# Both builds leave out LibTorch. The thread sanitizer runs the tests that use threads: queue, worker and scheduler
# on a real Redis.
if wants sanitize; then
  deploy/setup.sh --tests --into build/address -DDITFLEET_SANITIZE=address -DDITFLEET_PIPELINE=OFF \
    --target tests_sanitize_address
  run_ctest "address and undefined-behaviour sanitizers" build/address -L '^sanitize_address$'
  deploy/setup.sh --tests --into build/thread -DDITFLEET_SANITIZE=thread -DDITFLEET_PIPELINE=OFF \
    --target tests_sanitize_thread
  # GCC 12's thread sanitizer fails under the kernel's full address space randomization.
  if setarch "$(uname -m)" -R true 2>/dev/null; then launcher=(setarch "$(uname -m)" -R); fi
  run_ctest "thread sanitizer" build/thread -L '^sanitize_thread$'
  launcher=()
fi

# --- fuzz ------------------------------------------------------------------------------------------------
if wants fuzz; then
  if command -v clang++-16 >/dev/null; then
    deploy/setup.sh --tests --into build/fuzz -DDITFLEET_FUZZ=ON -DCMAKE_CXX_COMPILER=clang++-16 --target all
    run_ctest "fuzz targets" build/fuzz
  else
    say "Skipped: label fuzz (clang++-16 is not installed)"
    skipped=$((skipped + 1))
  fi
fi

# --- clang-tidy ------------------------------------------------------------------------------------------
# Only if asked for by name: it takes longer than all tests together and tests no behaviour.
if [ ${#asked[@]} -gt 0 ] && wants tidy; then
  deploy/setup.sh --tests --target tests_tidy  # configures build/ for compile_commands.json
  say "Running clang-tidy"
  status=0
  tests/tidy.sh || status=$?
  case $status in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) failures+=("tidy") ;;
  esac
fi

# --- mutants ---------------------------------------------------------------------------------------------
# Only if asked for by name: it changes sources.
if [ ${#asked[@]} -gt 0 ] && wants mutants; then
  deploy/setup.sh --tests --target tests_mutants  # only configures build/
  say "Running mutants"
  if tests/fault/mutants.sh; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1)) failures+=("mutants")
  fi
fi
