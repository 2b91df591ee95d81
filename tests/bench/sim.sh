#!/usr/bin/env bash
# Compares the service's routing policy, with its defaults, with the best of five baselines in the fleet simulator. Each
# baseline is tuned on every trace for the lowest p95. The traces are the three in tests/sim and five generated from
# other seeds. Replaces results/sim.csv: ratios per trace, and their summary over all traces.
#
#   tests/bench/sim.sh [BUILD_DIR]      (default: build)
#
#   DITFLEET_BENCH_CSV   the file that is written (default: tests/bench/results/sim.csv)
#
# All figures except the time per decision are the same on every machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
build=$(cd "${1:-$top/build}" && pwd)
[ -x "$build/tests/fleet_sim" ] || { echo "sim.sh: no $build/tests/fleet_sim; build it first" >&2; exit 1; }
revision=$(git -C "$top" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)
machine="$(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1 | tr ',' ' ')"

FLEET_SIM=$build/tests/fleet_sim TOP=$top REVISION=$revision MACHINE=$machine \
  CSV=${DITFLEET_BENCH_CSV:-$here/results/sim.csv} python3 - <<'PYTHON'
import datetime, json, os, statistics, subprocess, tempfile
from concurrent.futures import ThreadPoolExecutor

fleet_sim, top, revision, machine, csv = (os.environ[n] for n in ("FLEET_SIM", "TOP", "REVISION", "MACHINE", "CSV"))
costs = f"{top}/tests/sim/h200.json"
baselines = ("llm_d_ladder", "ray_multiplex", "bounded_rendezvous", "round_robin", "least_loaded")
generated = {
    "steps4_seed11": ["--steps", "4", "--seed", "11"],
    "steps28_seed12": ["--steps", "28", "--seed", "12"],
    "mixed_seed13": ["--steps", "4,28", "--burst", "2", "--seed", "13"],
    "mixed_seed14": ["--steps", "4,28", "--burst", "2", "--seed", "14"],
    "many_steps_seed15": ["--steps", "8,20,50", "--seed", "15"],
}
rows = []


def add(scenario, metric, value, unit):
    rows.append((scenario, metric, f"{value:.4g}", unit))
    print(f"{scenario:18} {metric:30} {value:.4g} {unit}")


def generate(path, *options):
    subprocess.check_call([fleet_sim, "generate", "--costs", costs, "-o", path, *options])


def simulate(trace, policies, *options):
    command = [fleet_sim, "--trace", trace, "--costs", costs, *options]
    for policy in policies:
        command += ["--policy", policy]
    reports = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    return [{name: figure["value"] for name, figure in report["figures"].items()} for report in reports]


def compare(trace):
    own = simulate(trace, ["finish"])[0]
    tuned = simulate(trace, baselines, "--tune")
    best = min(tuned, key=lambda report: report["latency_p95"])
    return {
        "latency_p95_ratio": own["latency_p95"] / best["latency_p95"],
        "latency_p99_ratio": own["latency_p99"] / min(report["latency_p99"] for report in tuned),
        "adapter_loads_ratio": own["host_misses"] / best["host_misses"],
        "slo_attained_difference": own["slo_attained"] - max(report["slo_attained"] for report in tuned),
        "fairness_gap": own["fairness_gap"],
    }


with tempfile.TemporaryDirectory() as folder:
    traces = {name: f"{top}/tests/sim/{name}.csv" for name in ("steps4", "steps28", "mixed")}
    for name, options in generated.items():
        traces[name] = f"{folder}/{name}.csv"
        generate(traces[name], "--workers", "16", "--jobs", "4000", *options)
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(traces, pool.map(compare, traces.values())))
    # 130,000 jobs arrive at once and drain.
    generate(f"{folder}/flood.csv", "--workers", "1000", "--jobs", "130000", "--steps", "4", "--load", "100")
    flood = simulate(f"{folder}/flood.csv", ["finish"], "--warm-up", "0")[0]

ratios = ("latency_p95_ratio", "latency_p99_ratio", "adapter_loads_ratio")
for name, result in results.items():
    for metric in ratios:
        add(name, metric, result[metric], "x")
for metric in ratios:
    values = [result[metric] for result in results.values()]
    add("all", f"{metric}_mean", statistics.geometric_mean(values), "x")
    add("all", f"{metric}_worst", max(values), "x")
add("all", "slo_attained_difference_mean", statistics.mean(r["slo_attained_difference"] for r in results.values()), "1")
add("all", "fairness_gap_worst", max(result["fairness_gap"] for result in results.values()), "largest jobs")
add("flood_1000_workers", "decision_p50_at_10000_queued", flood["decision_p50_at_10000_queued"], "us")

date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
os.makedirs(os.path.dirname(os.path.abspath(csv)), exist_ok=True)
with open(csv, "w") as out:
    out.write("date,revision,machine,versions,system,scenario,metric,value,unit\n")
    for row in rows:
        out.write(",".join((date, revision, machine, "-", "finish", *row)) + "\n")
PYTHON
