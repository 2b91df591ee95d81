#!/usr/bin/env bash
# Compares the service's routing policy, with its defaults, with the best of five baselines in the fleet simulator.
# Each baseline is tuned on every trace for the lowest p95. The traces are the three in tests/sim and five generated
# from other seeds. Replaces results/sim.csv: one row per figure, and one per trace for the ratio of p95.
#
#   tests/bench/sim.sh [BUILD_DIR]      (default: build)
#
#   DITFLEET_BENCH_CSV   the file that is written (default: tests/bench/results/sim.csv)
#
# The figures are the same on every machine. Exits with 1 if a figure exceeds its limit.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
csv=${DITFLEET_BENCH_CSV:-$here/results/sim.csv}
[ -x "$build/bin/ditfleet" ] || { echo "sim.sh: no $build/bin/ditfleet; build the target ditfleet first" >&2; exit 1; }
mkdir -p "$(dirname "$csv")"
revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)

DITFLEET=$build/bin/ditfleet TOP=$top REVISION=$revision CSV=$csv python3 - <<'PYTHON'
import json, math, os, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

ditfleet, top, revision, csv = (os.environ[name] for name in ("DITFLEET", "TOP", "REVISION", "CSV"))
costs = f"{top}/tests/sim/h200.json"
baselines = ("llm_d_ladder", "ray_multiplex", "bounded_rendezvous", "round_robin", "least_loaded")
generated = {
    "steps4_seed11": ["--steps", "4", "--seed", "11"],
    "steps28_seed12": ["--steps", "28", "--seed", "12"],
    "mixed_seed13": ["--steps", "4,28", "--burst", "2", "--seed", "13"],
    "mixed_seed14": ["--steps", "4,28", "--burst", "2", "--seed", "14"],
    "many_steps_seed15": ["--steps", "8,20,50", "--seed", "15"],
}


def simulate(trace, policies, *options):
    command = [ditfleet, "sim", "--trace", trace, "--costs", costs, "--json", *options]
    for policy in policies:
        command += ["--policy", policy]
    reports = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    return [{name: figure["value"] for name, figure in report["figures"].items()} for report in reports]


def ratios(trace):
    own = simulate(trace, ["finish"])[0]
    tuned = simulate(trace, baselines, "--tune")
    best = min(tuned, key=lambda report: report["latency_p95"])
    return {
        "p95": own["latency_p95"] / best["latency_p95"],
        "p99": own["latency_p99"] / min(report["latency_p99"] for report in tuned),
        "loads": own["host_misses"] / best["host_misses"],
    }


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


with tempfile.TemporaryDirectory() as folder:
    traces = {name: f"{top}/tests/sim/{name}.csv" for name in ("steps4", "steps28", "mixed")}
    for name, options in generated.items():
        traces[name] = f"{folder}/{name}.csv"
        subprocess.check_call([ditfleet, "sim", "generate", "--costs", costs, "--workers", "16", "--jobs", "4000",
                               *options, "-o", traces[name]])
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(traces, pool.map(ratios, traces.values())))

figures = [  # figure, trace, value, limit
    ("p95_ratio_mean", "all", mean([r["p95"] for r in results.values()]), 1.00),
    ("p99_ratio_mean", "all", mean([r["p99"] for r in results.values()]), 1.03),
    ("p95_ratio_worst", "all", max(r["p95"] for r in results.values()), 1.06),
    ("adapter_loads_ratio_mean", "all", mean([r["loads"] for r in results.values()]), 0.75),
]
figures += [("p95_ratio", name, result["p95"], None) for name, result in results.items()]
with open(csv, "w") as out:
    out.write("revision,figure,trace,value,limit\n")
    for figure, trace, value, limit in figures:
        out.write(f"{revision},{figure},{trace},{value:.3f},{'' if limit is None else f'{limit:.2f}'}\n")
        print(f"{figure:26} {trace:18} {value:.3f}" + ("" if limit is None else f"  (limit {limit:.2f})"))
sys.exit(any(limit is not None and value > limit for _, _, value, limit in figures))
PYTHON
