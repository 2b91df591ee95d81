#!/usr/bin/env bash
# Builds the Debian packages ditfleet and ditfleet-worker.
#   deploy/package.sh [FOLDER]   writes both .deb files to FOLDER; default: build/packages
# Runs deploy/setup.sh, whose environment variables apply.
set -euo pipefail
out=$(realpath -m -- "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/packages}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh --target ditfleet --target ditfleet-worker
work=$(mktemp -d build/.packages-XXXXXX)
trap 'rm -rf "$work"' EXIT
cpack --config build/CPackConfig.cmake -B "$PWD/$work" >"$work/log" 2>&1 || { tail -n 25 "$work/log" >&2; echo "package: CPack failed (see its message above)" >&2; exit 1; }
mkdir -p "$out"
mv "$work"/*.deb "$out"
ls "$out"/ditfleet*.deb
