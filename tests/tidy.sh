#!/usr/bin/env bash
# Runs clang-tidy 14 with .clang-tidy over the product's sources, one process per core.
#
#   tests/tidy.sh [FOLDER…]   default: coordinator pipeline shared worker; about 15 s per source file
#
# Needs a configured build/ (deploy/setup.sh). Exit status 1 lists the findings, 77 if clang-tidy 14 is not installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
[ $# -gt 0 ] || set -- coordinator pipeline shared worker
command -v clang-tidy-14 >/dev/null || { echo "tidy: clang-tidy 14 is not installed (Debian 12: apt-get install clang-tidy-14)"; exit 77; }
[ -f build/compile_commands.json ] || { echo "tidy: build/compile_commands.json does not exist; run deploy/setup.sh first" >&2; exit 1; }

# compiled FOLDER…: the sources in these folders that the build compiles.
compiled() {
  python3 - "$@" <<'PY'
import json, pathlib, sys
top = pathlib.Path.cwd()
folders = [(top / name).resolve() for name in sys.argv[1:]]
for command in json.load(open("build/compile_commands.json")):
    file = pathlib.Path(command["directory"], command["file"]).resolve()
    if any(folder in file.parents for folder in folders):
        print(file.relative_to(top), end="\0")
PY
}
sources=$(compiled "$@" | tr '\0' '\n' | sort -u)
[ -n "$sources" ] || { echo "tidy: the build compiles no source in $*" >&2; exit 1; }
found=$(mktemp)
trap 'rm -f "$found"' EXIT
status=0
# Headers are read with many sources; each finding is printed once.
tr '\n' '\0' <<<"$sources" | xargs -0 -P "$(nproc)" -n 1 clang-tidy-14 -p build --quiet >"$found" 2>&1 || status=1
awk 'BEGIN { shown = 1 } /^[0-9]+ warnings? / { next } /: (error|warning): / { shown = !seen[$0]++ } shown' "$found"
[ $status = 0 ] || echo "tidy: $(grep -E ': (error|warning): ' "$found" | sort -u | wc -l) findings in $(wc -l <<<"$sources") files"
exit $status
