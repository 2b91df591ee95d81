#!/usr/bin/env bash
# Routing policies on traces, in the fleet simulator: the service's router with its defaults against baselines that are
# each tuned on every trace (the lowest p95 of a grid); appends to results/sim.csv.
#
#   tests/bench/sim.sh [BUILD_DIR]      (default: build)
#
#   DITFLEET_BENCH_SIM=small   only the committed traces (seconds; default: also generated ones, up to 1,000 workers: some minutes)
#   DITFLEET_BENCH_CSV         the file that is appended to (tests/bench/results/sim.csv)
#
# Figures but those in µs are the same on every machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
sim="$build/bin/ditfleet"
csv=${DITFLEET_BENCH_CSV:-$here/results/sim.csv}
costs=$top/tests/sim/h200.json
[ -x "$sim" ] || { echo "sim.sh: there is no $sim; build the target ditfleet first" >&2; exit 1; }
mkdir -p "$(dirname "$csv")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"
[ -s "$csv" ] || echo "date,revision,machine,versions,system,scenario,metric,value,unit" > "$csv"

# One row a figure, from `ditfleet sim --json` on stdin; a policy's tunables stand behind its name with blanks between.
rows() {  # scenario
  awk -v date="$(date -u +%Y-%m-%dT%H:%M:%SZ)" -v revision="$revision" -v machine="$machine" -v scenario="$1" '
    {
      match($0, /"policy":"[^"]*"/); policy = substr($0, RSTART + 10, RLENGTH - 11); gsub(",", " ", policy)
      while (match($0, /"[a-z_0-9]+":\{"value":[^,]*,"unit":"[^"]*"\}/)) {
        item = substr($0, RSTART, RLENGTH); $0 = substr($0, RSTART + RLENGTH)
        split(item, part, "\""); value = item; sub(/.*"value":/, "", value); sub(/,.*/, "", value)
        printf "%s,%s,%s,-,%s,%s,%s,%.6g,%s\n", date, revision, machine, policy, scenario, part[2], value, part[8]
      }
    }'
}

# The router against the best baseline of each metric, and its misses also against those of the baseline with the best p95.
factors() {  # scenario, what the baselines are; reads the scenario's rows
  awk -F, -v scenario="$1" -v against="$2" -v date="$(date -u +%Y-%m-%dT%H:%M:%SZ)" -v revision="$revision" -v machine="$machine" '
    {
      if ($5 == "finish") own[$7] = $8
      else if ($5 ~ /^finish/) next
      else all[$5, $7] = $8
      if ($5 != "finish" && (!($7 in best) || ($7 == "slo_attained" ? $8 > best[$7] : $8 < best[$7]))) { best[$7] = $8; who[$7] = $5 }
    }
    function row(metric, value, unit) { printf "%s,%s,%s,-,finish to %s,%s,%s,%.4g,%s\n", date, revision, machine, against, scenario, metric, value, unit }
    function ratio(value, to) { return to > 0 ? value / to : 0 }
    END {
      row("host_misses_ratio", ratio(own["host_misses"], best["host_misses"]), "x")
      row("host_misses_to_best_p95_ratio", ratio(own["host_misses"], all[who["latency_p95"], "host_misses"]), "x")
      row("slot_misses_ratio", ratio(own["slot_misses"], best["slot_misses"]), "x")
      row("latency_p95_ratio", own["latency_p95"] / best["latency_p95"], "x")
      row("latency_p99_ratio", own["latency_p99"] / best["latency_p99"], "x")
      row("latency_p50_ratio", own["latency_p50"] / best["latency_p50"], "x")
      row("slo_attained_difference", own["slo_attained"] - best["slo_attained"], "1")
    }'
}

baselines="llm_d_ladder ray_multiplex bounded_rendezvous round_robin least_loaded"

compare() {  # scenario trace ["order": also baselines in the router's order, and the router without each of its means]
  echo "$1:"
  "$sim" sim --trace "$2" --costs "$costs" --policy all --tune --json > "$scratch/out.json"
  rows "$1" < "$scratch/out.json" > "$scratch/rows.csv"
  factors "$1" "best baseline" < "$scratch/rows.csv" > "$scratch/factors.csv"
  if [ "${3:-}" = order ]; then
    local own=(--policy finish,patience=0 --policy finish,reach=0 --policy finish,yield=0 --policy finish,wait_runs=0) other=()
    for name in $baselines; do other+=(--policy "$name,patience=1.5"); done
    "$sim" sim --trace "$2" --costs "$costs" "${own[@]}" "${other[@]}" --tune --json | rows "$1" > "$scratch/order.csv"
    { grep ',finish,' "$scratch/rows.csv"; cat "$scratch/order.csv"; } | factors "$1" "best baseline in its order" >> "$scratch/factors.csv"
    cat "$scratch/order.csv" >> "$scratch/rows.csv"
  fi
  cat "$scratch/rows.csv" "$scratch/factors.csv" >> "$csv"
  awk -F, '$7 == "latency_p95" || $7 == "host_misses" || $7 == "slo_attained" {v[$5] = v[$5] "  " $7 " " $8} END {for (p in v) printf "  %-40s%s\n", p, v[p]}' "$scratch/rows.csv"
  awk -F, '{printf "  %-45s  %s %s\n", $5, $7, $8}' "$scratch/factors.csv"
}

made() {  # scenario, then options of `ditfleet sim generate`
  local name=$1
  shift
  "$sim" sim generate --costs "$costs" -o "$scratch/$name.csv" "$@"
  compare "$name" "$scratch/$name.csv"
}

for trace in steps4 steps28 mixed; do compare "$trace" "$top/tests/sim/$trace.csv" order; done
[ "${DITFLEET_BENCH_SIM:-all}" != small ] || exit 0

# Other seeds, loads and sizes than those of the committed traces.
for seed in 11 12 13; do made "mixed_16w_seed$seed" --workers 16 --jobs 6000 --steps 4,28 --burst 2 --seed "$seed"; done
made steps4_4w --workers 4 --jobs 3000 --steps 4 --seed 14
made mixed_4w --workers 4 --jobs 3000 --steps 4,28 --burst 2 --seed 15
made steps28_8w_load90 --workers 8 --jobs 3000 --steps 28 --load 0.9 --burst 1 --seed 16
made steps28_16w_load95 --workers 16 --jobs 4000 --steps 28 --load 0.95 --burst 1 --seed 17
made steps4_16w_burst3 --workers 16 --jobs 6000 --steps 4 --burst 3 --seed 18
made many_steps_16w --workers 16 --jobs 6000 --steps 8,20,50 --seed 19
made mixed_16w_load70 --workers 16 --jobs 6000 --steps 4,28 --load 0.7 --seed 20
made steps4_16w_load60 --workers 16 --jobs 6000 --steps 4 --load 0.6 --seed 21
made steps4_16w_load90 --workers 16 --jobs 6000 --steps 4 --load 0.9 --seed 22
made steps28_32w --workers 32 --jobs 6000 --steps 28 --burst 2 --seed 30
made steps4_64w --workers 64 --jobs 20000 --steps 4 --seed 31
made many_steps_100w --workers 100 --jobs 10000 --steps 8,20,50 --seed 32
made mixed_250w_load85 --workers 250 --jobs 20000 --steps 4,28 --load 0.85 --seed 33
made mixed_1000w --workers 1000 --jobs 20000 --steps 4,28 --burst 1.25 --seed 41

# How long a decision takes with 1,000 workers while 130,000 jobs that came at once drain: the router alone.
echo "decisions_1000w:"
"$sim" sim generate --costs "$costs" -o "$scratch/flood.csv" --workers 1000 --jobs 130000 --steps 4 --load 100 --seed 51
"$sim" sim --trace "$scratch/flood.csv" --costs "$costs" --policy finish --warm-up 0 --json | rows decisions_1000w | grep ',decision_' | tee -a "$csv"
