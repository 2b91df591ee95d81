#!/usr/bin/env bash
# Prepares a fresh Debian 12 machine: installs whatever is missing of the system packages and LibTorch, and builds.
# Safe to run again: it repeats no finished step, and then needs no network.
#
#   deploy/setup.sh            build the two programs, build/bin/{ditfleet,ditfleet-worker}
#   deploy/setup.sh --tests    also install the packages that tests need, and build all tests
#   deploy/setup.sh --no-build install packages and LibTorch only
# Options for other builds (tests/run.sh uses them):
#   --into FOLDER              build in FOLDER instead of build/
#   --target NAME              build this target instead; may be repeated
#   -DNAME=VALUE               pass a definition to CMake
#
# Environment:
#   DITFLEET_LIBTORCH   an existing LibTorch 2.11 (the folder with include/ and lib/)
#   DITFLEET_FLAVOUR    slim (no GPU) or full (with CUDA's libraries); default: full if nvidia-smi finds a GPU
#   DITFLEET_SKIP_PACKAGES=1   do not touch system packages (for other distributions)
#   XDG_CACHE_HOME      LibTorch is stored in $XDG_CACHE_HOME/ditfleet (~/.cache/ditfleet) and shared by all checkouts
#   JOBS                parallel compiler processes; default: the number of cores, or fewer if memory is short
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kTorch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' deploy/libtorch/slim.txt)
with_tests=no build=yes folder=build with_libtorch=yes targets=() defines=()
while [ $# -gt 0 ]; do
  case $1 in
    --tests) with_tests=yes ;;
    --no-build) build=no ;;
    --into | --target)
      [ -n "${2:-}" ] || { echo "setup: $1 needs a value" >&2; exit 2; }
      if [ "$1" = --into ]; then folder=$2; else targets+=("$2"); fi
      shift ;;
    -D?*=*) defines+=("$1") ;;
    -h | --help) sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "setup: unknown argument '$1'; see deploy/setup.sh --help" >&2; exit 2 ;;
  esac
  case $1 in -DDITFLEET_PIPELINE=OFF | -DDITFLEET_FUZZ=ON) with_libtorch=no ;; esac
  shift
done

started=$SECONDS
say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
[ -t 1 ] || say() { printf '==> %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
# need_space FOLDER MEGABYTES WHAT
need_space() {
  local free
  free=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$2" ] ||
    die "$3 needs about $2 MB under $1, but only $free MB are free; free some space or set ${4:-XDG_CACHE_HOME} to another disk"
}

[ "$(uname -m)" = x86_64 ] || die "unsupported architecture $(uname -m); LibTorch and the build need x86_64"
[ -n "${HOME:-}" ] || { HOME=$(getent passwd "$(id -u)" | cut -d: -f6); export HOME; }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ditfleet
mkdir -p "$cache" || die "cannot create $cache; set XDG_CACHE_HOME to a writable folder"

# --- 1. system packages ----------------------------------------------------------------------------------
# missing_packages FILE: prints the packages in FILE that are not installed.
missing_packages() {
  local name
  while read -r name; do
    case $name in '' | '#'*) continue ;; esac
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] || printf '%s ' "$name"
  done <"$1"
}
as_root() { if [ "$(id -u)" = 0 ]; then env DEBIAN_FRONTEND=noninteractive "$@"; else sudo env DEBIAN_FRONTEND=noninteractive "$@"; fi; }
apt_install() {
  as_root apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -qq update </dev/null &&
    as_root apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 install -y -qq --no-install-recommends "$@" </dev/null
}

if [ "${DITFLEET_SKIP_PACKAGES:-}" = 1 ]; then
  say "[1/4] System packages: skipped (DITFLEET_SKIP_PACKAGES=1)"
else
  command -v dpkg-query >/dev/null ||
    die "this is not Debian; install the equivalents of deploy/packages.txt, then run with DITFLEET_SKIP_PACKAGES=1"
  missing=$(missing_packages deploy/packages.txt)
  if [ -n "$missing" ]; then
    # shellcheck disable=SC1091
    release=$(. /etc/os-release && echo "${ID:-?} ${VERSION_ID:-?}")
    [ "$release" = "debian 12" ] ||
      die "this is $release, but deploy/packages.txt is for Debian 12; install the equivalents of these, then run with DITFLEET_SKIP_PACKAGES=1: $missing"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
      die "packages are missing, and installing them needs root or sudo; run as root: apt-get install -y --no-install-recommends $missing"
    need_space /usr 1500 "installing packages" TMPDIR
    say "[1/4] System packages: installing $missing"
    # shellcheck disable=SC2086
    apt_install $missing || die "apt-get failed to install the packages (see its message above); is the network up?"
  else
    say "[1/4] System packages: all installed"
  fi
  if [ $with_tests = yes ]; then
    missing=$(missing_packages tests/packages.txt)
    if [ -n "$missing" ]; then
      say "      For the tests: installing $missing"
      # shellcheck disable=SC2086
      apt_install $missing || say "      Could not install all of them; tests that need them are skipped"
    fi
  fi
fi

# --- 2. LibTorch -----------------------------------------------------------------------------------------
is_libtorch() { [ -e "$1/include/ATen/ATen.h" ] && [ -e "$1/lib/libtorch_cpu.so" ]; }

libtorch=
if [ $with_libtorch = no ]; then
  say "[2/4] LibTorch: not needed for this build"
elif [ -n "${DITFLEET_LIBTORCH:-}" ]; then
  is_libtorch "$DITFLEET_LIBTORCH" || die "DITFLEET_LIBTORCH is '$DITFLEET_LIBTORCH', which has no include/ATen/ATen.h or lib/libtorch_cpu.so; it must be a LibTorch folder"
  libtorch=$(cd "$DITFLEET_LIBTORCH" && pwd)
  found=$(sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' "$libtorch/include/torch/headeronly/version.h" 2>/dev/null | paste -sd .)
  [ "$found" = "$kTorch" ] || say "      Note: $libtorch is version ${found:-unknown}; only $kTorch is tested"
  say "[2/4] LibTorch: $libtorch (DITFLEET_LIBTORCH)"
else
  flavour=${DITFLEET_FLAVOUR:-}
  if [ -z "$flavour" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then flavour=full; else flavour=slim; fi
  fi
  case $flavour in slim | full) ;; *) die "DITFLEET_FLAVOUR is '$flavour'; it must be slim or full" ;; esac
  find_libtorch() {
    local candidate
    for candidate in "$flavour" full; do
      libtorch=$cache/libtorch-$kTorch-$candidate/torch
      if is_libtorch "$libtorch"; then return 0; fi
    done
    return 1
  }
  if ! find_libtorch; then
    exec 9>"$cache/lock"
    flock -n 9 || { say "[2/4] LibTorch: waiting for another setup that is downloading it"; flock 9; }
    if ! find_libtorch; then
      say "[2/4] LibTorch $kTorch ($flavour): downloading, $([ "$flavour" = full ] && echo "about 2.7 GB" || echo "about 600 MB") (shared by all checkouts)"
      deploy/libtorch/ditfleet-worker-setup --flavour "$flavour" --into "$cache/libtorch-$kTorch-$flavour" ||
        die "LibTorch is not installed (see the message above); DITFLEET_LIBTORCH can name an existing one, XDG_CACHE_HOME another folder"
      find_libtorch || die "LibTorch is not in $cache after its installation; this is a bug"
    fi
    exec 9>&-
  fi
  say "[2/4] LibTorch: $libtorch"
fi

# The service and the tests need the loopback interface. It is down in a new network namespace.
if ! python3 - <<'PY'
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    flags, = struct.unpack_from("H", fcntl.ioctl(s, 0x8913, struct.pack("32s", b"lo")), 16)  # SIOCGIFFLAGS
    if not flags & 1:
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP
PY
then say "      Note: the loopback interface is down; as root, run: ip link set lo up"; fi

# --- 3. configure, 4. build ------------------------------------------------------------------------------
[ $build = yes ] || { say "Ready after $((SECONDS - started)) s (not built)"; exit 0; }
mkdir -p "$folder"
exec 8>"$folder/.setup.lock"
flock -n 8 || { say "Waiting for another setup that is building in $folder/"; flock 8; }

# Settings that require a new configuration. The path is one of them: a moved or copied build folder is unusable.
wanted=$(printf '%s\n' "$PWD" "$libtorch" ${defines[@]+"${defines[@]}"})
if [ -f "$folder/build.ninja" ] && [ "$(cat "$folder/.configured" 2>/dev/null)" = "$wanted" ]; then
  say "[3/4] Configured: $folder/"
else
  need_space "$folder" 3000 "the build" TMPDIR
  say "[3/4] Configuring $folder/"
  rm -rf "$folder/CMakeCache.txt" "$folder/CMakeFiles" "$folder/build.ninja"
  if ! cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DDITFLEET_LIBTORCH=$libtorch" \
      ${defines[@]+"${defines[@]}"} >"$folder/configure.log" 2>&1; then
    tail -n 25 "$folder/configure.log" >&2
    rm -f "$folder/CMakeCache.txt"
    die "CMake could not configure the build; the full log is $folder/configure.log"
  fi
  printf '%s\n' "$wanted" >"$folder/.configured"
fi

if [ -z "${JOBS:-}" ]; then
  JOBS=$(nproc)
  by_memory=$(awk '/MemAvailable/ { print int($2 / 1500000) }' /proc/meminfo)
  [ "$by_memory" -ge 1 ] || by_memory=1
  [ "$JOBS" -le "$by_memory" ] || JOBS=$by_memory
fi
if [ ${#targets[@]} -eq 0 ]; then
  if [ $with_tests = yes ]; then targets=(all); else targets=(ditfleet ditfleet-worker); fi
fi
say "[4/4] Building ${targets[*]} in $folder/ with $JOBS parallel compilers"
NINJA_STATUS='[%f/%t, %es] ' cmake --build "$folder" -j "$JOBS" --target "${targets[@]}" || die "the build failed (see the compiler's message above)"
say "Ready after $((SECONDS - started)) s: $folder/"
