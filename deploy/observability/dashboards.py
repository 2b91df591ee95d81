#!/usr/bin/env python3
"""Writes the Grafana dashboards from the table of metrics, so that each metric is on its panel.

    ditfleet config metrics --json | deploy/observability/dashboards.py [FOLDER]

A panel shows each of its metrics with a default query: the rate of a counter, the sum of a gauge, percentiles of a
histogram. QUERIES has those that need another one. Without FOLDER, writes dashboards/ next to this file.
"""
import json
import pathlib
import sys

TITLES = {"fleet": "Fleet", "latency": "Latency", "compile": "Compilation and kernel cache", "adapters": "Adapters",
          "memory": "Memory", "tenants": "Tenants"}
UNITS = {"seconds": "s", "bytes": "bytes", "watts": "watt", "joules": "joule"}
WINDOW = "$__rate_interval"

# Metric → [(query, legend)].
QUERIES = {
    "ditfleet_scheduler_leading": [("sum(ditfleet_scheduler_leading)", "leading coordinators")],
    "ditfleet_scheduler_epoch": [("max(ditfleet_scheduler_epoch)", "epoch")],
    "ditfleet_objective_jobs_total": [
        (f'sum by (class) (rate(ditfleet_objective_jobs_total{{result="missed"}}[{WINDOW}]))'
         f" / sum by (class) (rate(ditfleet_objective_jobs_total[{WINDOW}]))", "missed, {{class}}")],
    "ditfleet_prediction_ratio": [
        (f"sum by (class) (rate(ditfleet_prediction_ratio_sum[{WINDOW}]))"
         f" / sum by (class) (rate(ditfleet_prediction_ratio_count[{WINDOW}]))", "actual to predicted, {{class}}")],
    "ditfleet_kernel_cache_lookups_total": [
        ('sum by (tier) (ditfleet_kernel_cache_lookups_total{result="hit"})'
         " / sum by (tier) (ditfleet_kernel_cache_lookups_total)", "hits since start, {{tier}}")],
    "ditfleet_region_program_seconds": [
        ("sum by (backend, source) (ditfleet_region_program_seconds_sum)"
         " / sum by (backend, source) (ditfleet_region_program_seconds_count)", "mean since start, {{backend}}, {{source}}")],
    "ditfleet_kernel_cache_breaker_open": [("max by (instance) (ditfleet_kernel_cache_breaker_open)", "{{instance}}")],
    "ditfleet_boot_seconds": [("max by (instance, part) (ditfleet_boot_seconds)", "{{instance}}, until {{part}}")],
    "ditfleet_tenant_gpu_seconds_total": [
        (f"sum by (tenant) (rate(ditfleet_tenant_gpu_seconds_total[{WINDOW}]))", "{{tenant}}")],
}
# Gauges that are not added over instances.
LARGEST = {"ditfleet_memory_predicted_bytes", "ditfleet_memory_observed_bytes", "ditfleet_lora_swap_seconds",
           "ditfleet_model_load_seconds", "ditfleet_warmup_seconds"}
PER_INSTANCE = {"ditfleet_gpu_power_watts", "ditfleet_gpu_memory_used_bytes", "ditfleet_gpu_memory_bytes"}


def queries(metric):
    name, labels = metric["name"], metric["labels"]
    if name in QUERIES:
        return QUERIES[name]
    short = name.removeprefix("ditfleet_").removesuffix("_total").replace("_", " ")
    legend = ", ".join("{{%s}}" % label for label in labels)
    by = f" by ({', '.join(labels)})" if labels else ""
    if metric["type"] == "counter":
        return [(f"sum{by} (rate({name}[{WINDOW}]))", f"{short} {legend}".strip())]
    if metric["type"] == "histogram":
        by = ", ".join(["le", *labels])
        return [(f"histogram_quantile({q}, sum by ({by}) (rate({name}_bucket[{WINDOW}])))", f"p{int(q * 100)} {legend}".strip())
                for q in (0.5, 0.95)]
    if name in PER_INSTANCE:
        by, legend = f" by ({', '.join(['instance', *labels])})", ", ".join(filter(None, ["{{instance}}", legend]))
    how = "max" if name in LARGEST or name in PER_INSTANCE else "sum"
    return [(f"{how}{by} ({name})", f"{short} {legend}".strip())]


def panel(title, metrics, number):
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [{"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
               for i, (expr, legend) in enumerate(q for m in metrics for q in queries(m))]
    ratio = all(" / " in t["expr"] for t in targets) and metrics[0]["unit"] == "" and "Prediction" not in title
    defaults = {"unit": "percentunit" if ratio else UNITS.get(metrics[0]["unit"], "short"), "min": 0}
    if any("class" in m["labels"] for m in metrics):
        defaults["links"] = [{"title": "Slowest jobs of the class", "url": "${console}/slow?class=${__field.labels.class}"}]
    return {"id": number, "type": "timeseries", "title": title, "datasource": source, "targets": targets,
            "description": "\n".join(f"{m['name']}: {m['help']}." for m in metrics),
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list", "placement": "bottom"}},
            "gridPos": {"x": (number - 1) % 2 * 12, "y": (number - 1) // 2 * 8, "w": 12, "h": 8}}


def dashboard(key, panels):
    variables = [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                 {"name": "console", "label": "Console", "type": "textbox", "query": "http://localhost:8780",
                  "current": {"text": "http://localhost:8780", "value": "http://localhost:8780"}}]
    links = [{"title": "DiTFleet", "type": "dashboards", "tags": ["ditfleet"], "asDropdown": True, "keepTime": True},
             {"title": "Fleet page", "type": "link", "url": "${console}/fleet"},
             {"title": "Slow jobs", "type": "link", "url": "${console}/slow"}]
    return {"uid": f"ditfleet-{key}", "title": f"DiTFleet: {TITLES[key]}", "tags": ["ditfleet"], "schemaVersion": 39,
            "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "links": links,
            "templating": {"list": variables},
            "panels": [panel(title, metrics, i + 1) for i, (title, metrics) in enumerate(panels.items())]}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "dashboards"
    boards = {key: {} for key in TITLES}
    for metric in json.load(sys.stdin):
        key, title = metric["panel"].split("/", 1)
        boards[key].setdefault(title, []).append(metric)
    for key, panels in boards.items():
        (folder / f"{key}.json").write_text(json.dumps(dashboard(key, panels), indent=1) + "\n")


if __name__ == "__main__":
    main()
