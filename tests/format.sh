#!/usr/bin/env bash
# Checks the layout of all sources; the CTest entry `format`.
#
#   tests/format.sh         check; exit status 1 lists what is wrong, 77 if clang-format 14 is not installed
#   tests/format.sh --fix   format the C++ files in place, then check
#
# C++ is laid out by clang-format 14 and .clang-format. No line of C++ or Lua has more than 120 columns.
# Neither has Markdown prose; tables, headings, code blocks, link targets and URLs do not count.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
fix=no
case ${1:-} in
  '') ;;
  --fix) fix=yes ;;
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "format: unknown argument '$1'; usage: tests/format.sh [--fix]" >&2; exit 2 ;;
esac

# Every source that git does not ignore, or, outside a git checkout, every source that is not in a build folder.
sources() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files --cached --others --exclude-standard
  else
    find . -type d \( -name 'build*' -o -name '.?*' \) -prune -o -type f -printf '%P\n'
  fi | grep -E '\.(cpp|h|lua|md)$' | while read -r file; do [ ! -f "$file" ] || echo "$file"; done
}
files=$(mktemp)
trap 'rm -f "$files"' EXIT
sources >"$files"
cpp() { grep -E '\.(cpp|h)$' "$files" | tr '\n' '\0'; }

status=0
formatter=
for name in clang-format-14 clang-format; do
  if "$name" --version 2>/dev/null | grep -q 'version 14\.'; then formatter=$name; break; fi
done
if [ -z "$formatter" ]; then
  echo "format: clang-format 14 is not installed (Debian 12: apt-get install clang-format-14)"
elif [ $fix = yes ]; then
  cpp | xargs -0 -P "$(nproc)" -n 32 "$formatter" -i
elif ! unformatted=$(cpp | xargs -0 -P "$(nproc)" -n 32 "$formatter" --dry-run -Werror 2>&1); then
  grep -E 'error:' <<<"$unformatted" | cut -d: -f1,2 | sort -t: -k1,1 -u | sed 's/$/: not formatted/'
  echo "format: run tests/format.sh --fix"
  status=1
fi

python3 - "$files" <<'PY' || status=1
import re
import sys

LIMIT = 120


def overlong(path):
    prose = path.endswith(".md")
    fenced = False
    after_blank = True  # an indented code block begins after a blank line
    indented = False
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            if prose:
                fence = line.lstrip().startswith("```")
                indented = line.startswith("    ") and (after_blank or indented)
                code = fence or fenced or indented
                fenced ^= fence
                after_blank = not line.strip()
                if code or line.lstrip().startswith(("|", "#")):
                    continue
                line = re.sub(r"\]\([^)]*\)", "]", line)
                line = re.sub(r"https?://\S+", "", line)
            if len(line) > LIMIT:
                yield number, len(line)


bad = False
with open(sys.argv[1]) as files:
    for path in files.read().splitlines():
        for number, length in overlong(path):
            print(f"{path}:{number}: {length} columns; the limit is {LIMIT}")
            bad = True
if bad:
    print("format: break these lines by hand")
sys.exit(bad)
PY
[ $status = 0 ] || exit 1
[ -n "$formatter" ] || exit 77
