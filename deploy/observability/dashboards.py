#!/usr/bin/env python3
"""Writes the Grafana dashboards from the table of metrics, so that each metric is on its panel.

    ditfleet config metrics --json | deploy/observability/dashboards.py [FOLDER]

A dashboard begins with a row of figures (STATS). Below, a panel shows each of its metrics with a default query: the rate
of a counter, the sum of a gauge, percentiles of a histogram. QUERIES has those that need another one, ROWS the titles
under which panels stand. Without FOLDER, writes dashboards/ next to this file.
"""
import json
import pathlib
import re
import sys

TITLES = {"fleet": "Fleet", "latency": "Latency", "compile": "Compilation and kernel cache", "adapters": "Adapters",
          "memory": "Memory", "tenants": "Tenants", "process": "Processes"}
WINDOW = "$__rate_interval"
# The unit of a value, and of its rate. A number that is not here counts: its rate is in ops/s.
UNITS = {"seconds": "s", "bytes": "bytes", "watts": "watt", "joules": "joule"}
RATES = {"seconds": "suffix: GPUs", "bytes": "Bps", "joules": "watt"}
METRIC_UNITS = {"process_cpu_seconds_total": "suffix: cores", "ditfleet_http_requests_total": "reqps",
                "process_start_time_seconds": "s", "ditfleet_build_info": "short"}

# Metric → [(query, legend)].
QUERIES = {
    "ditfleet_scheduler_leading": [("sum(ditfleet_scheduler_leading)", "leading coordinators")],
    "ditfleet_worker_speed_ratio": [("min by (worker) (ditfleet_worker_speed_ratio)", "{{worker}}")],
    "ditfleet_scheduler_epoch": [("max(ditfleet_scheduler_epoch)", "epoch")],
    "ditfleet_oldest_ready_timestamp_seconds": [
        ("(time() - max(ditfleet_oldest_ready_timestamp_seconds > 0)) or vector(0)", "oldest wait")],
    "ditfleet_worker_unwell": [("max by (worker, state) (ditfleet_worker_unwell) > 0", "{{worker}} {{state}}")],
    "ditfleet_objective_jobs_total": [
        (f'sum by (class) (rate(ditfleet_objective_jobs_total{{result="missed"}}[{WINDOW}]))'
         f" / (sum by (class) (rate(ditfleet_objective_jobs_total[{WINDOW}])) > 0)", "missed, {{class}}")],
    "ditfleet_prediction_ratio": [
        (f"sum by (class) (rate(ditfleet_prediction_ratio_sum[{WINDOW}]))"
         f" / (sum by (class) (rate(ditfleet_prediction_ratio_count[{WINDOW}])) > 0)", "actual to predicted, {{class}}")],
    "ditfleet_kernel_cache_lookups_total": [
        ('sum by (tier) (ditfleet_kernel_cache_lookups_total{result="hit"})'
         " / (sum by (tier) (ditfleet_kernel_cache_lookups_total) > 0)", "hits since start, {{tier}}")],
    "ditfleet_region_program_seconds": [
        ("sum by (backend, source) (ditfleet_region_program_seconds_sum)"
         " / (sum by (backend, source) (ditfleet_region_program_seconds_count) > 0)",
         "mean since start, {{backend}}, {{source}}")],
    "ditfleet_kernel_cache_breaker_open": [("max by (instance) (ditfleet_kernel_cache_breaker_open)", "{{instance}}")],
    "ditfleet_boot_seconds": [("max by (instance, part) (ditfleet_boot_seconds)", "{{instance}}, until {{part}}")],
    "ditfleet_certificate_expiry_timestamp_seconds": [
        ("min by (instance) (ditfleet_certificate_expiry_timestamp_seconds) - time()", "{{instance}}")],
    "ditfleet_build_info": [("count by (version, revision) (ditfleet_build_info)", "{{version}}, {{revision}}")],
    "process_start_time_seconds": [("time() - max by (instance) (process_start_time_seconds)", "{{instance}}")],
    "process_cpu_seconds_total": [(f"sum by (instance) (rate(process_cpu_seconds_total[{WINDOW}]))", "{{instance}}")],
}
# Gauges that are not added over instances.
LARGEST = {"ditfleet_memory_predicted_bytes", "ditfleet_memory_observed_bytes", "ditfleet_lora_swap_seconds",
           "ditfleet_model_load_seconds", "ditfleet_warmup_seconds", "ditfleet_worker_speed_ratio",
           "ditfleet_redis_append_only", "ditfleet_redis_evicts", "ditfleet_redis_clock_held",
           "ditfleet_redis_used_memory_bytes", "ditfleet_redis_max_memory_bytes"}
PER_INSTANCE = {"ditfleet_gpu_power_watts", "ditfleet_gpu_memory_used_bytes", "ditfleet_gpu_memory_bytes"}
# Metrics of the coordinator that leads. The variable `instance` does not filter them: the leader changes.
OF_LEADER = ("jobs_", "job_", "units_", "unit_run_", "oldest_", "backlog_", "workers", "worker_", "assignments_",
             "revocations_", "scheduler_", "objective_", "queue_wait_", "prediction_", "tenant_", "fairness_")
# Variable → (label, the metric whose values it offers). A dashboard has those that its queries use.
VARIABLES = {"instance": ("Instance", "ditfleet_build_info"), "model": ("Model", "ditfleet_backlog_gpu_seconds"),
             "tenant": ("Tenant", "ditfleet_queue_wait_seconds_count"), "class": ("Class", "ditfleet_unit_run_seconds_count")}

GREEN, YELLOW, RED = "green", "yellow", "red"
# Dashboard → figures: (title, query, unit, thresholds). Thresholds are colours with the value from which each holds.
STATS = {
    "fleet": [
        ("Leader", "sum(ditfleet_scheduler_leading) or vector(0)", "none", [(RED, None), (GREEN, 1), (RED, 2)]),
        ("Ready workers", 'sum(ditfleet_workers{state="ready"}) or vector(0)', "none", [(RED, None), (GREEN, 1)]),
        ("Unwell workers", 'sum(ditfleet_workers{state=~"silent|stuck|overdue|probing"}) or vector(0)', "none",
         [(GREEN, None), (YELLOW, 1)]),
        ("Jobs failed, 1 h", 'sum(rate(ditfleet_jobs_total{state="failed"}[1h]))'
         " / (sum(rate(ditfleet_jobs_total[1h])) > 0) or vector(0)", "percentunit",
         [(GREEN, None), (YELLOW, 0.01), (RED, 0.05)]),
        ("Objective missed, 1 h", 'sum(rate(ditfleet_objective_jobs_total{result="missed"}[1h]))'
         " / (sum(rate(ditfleet_objective_jobs_total[1h])) > 0)", "percentunit", [(GREEN, None), (YELLOW, 0.05), (RED, 0.3)]),
        ("Backlog per ready worker", "sum(ditfleet_backlog_gpu_seconds) / 60"
         ' / clamp_min(sum(ditfleet_workers{state="ready"}) or vector(0), 1)', "m", [(GREEN, None), (YELLOW, 5), (RED, 30)]),
        ("Oldest wait", "(time() - max(ditfleet_oldest_ready_timestamp_seconds > 0)) or vector(0)", "s",
         [(GREEN, None), (YELLOW, 60), (RED, 600)]),
        ("Units that fit no worker", "sum(ditfleet_units_unplaceable)", "none", [(GREEN, None), (RED, 1)]),
        ("GPU use, 5 min", "clamp_max(sum(rate(ditfleet_unit_run_seconds_sum[5m]))"
         ' / clamp_min(sum(ditfleet_workers{state="ready"}) or vector(0), 1), 1)', "percentunit", [(GREEN, None)]),
        ("HTTP 5xx, 5 min", '(sum(rate(ditfleet_http_requests_total{code=~"5..",route!~"/readyz|/healthz"}[5m])) or vector(0))'
         ' / (sum(rate(ditfleet_http_requests_total{route!~"/readyz|/healthz"}[5m])) > 0) or vector(0)', "percentunit",
         [(GREEN, None), (YELLOW, 0.01), (RED, 0.05)]),
    ],
    "latency": [
        ("Job, p50", "histogram_quantile(0.5, sum by (le) (rate(ditfleet_job_seconds_bucket[5m])))", "s", [(GREEN, None)]),
        ("Job, p95", "histogram_quantile(0.95, sum by (le) (rate(ditfleet_job_seconds_bucket[5m])))", "s", [(GREEN, None)]),
        ("Unit, p95", "histogram_quantile(0.95, sum by (le) (rate(ditfleet_unit_run_seconds_bucket[5m])))", "s", [(GREEN, None)]),
        ("Actual to predicted", "sum(rate(ditfleet_prediction_ratio_sum[5m])) / (sum(rate(ditfleet_prediction_ratio_count[5m])) > 0)",
         "none", [(YELLOW, None), (GREEN, 0.75), (YELLOW, 1.33)]),
        ("HTTP, p95", "histogram_quantile(0.95, sum by (le) (rate(ditfleet_http_request_duration_seconds_bucket[5m])))", "s",
         [(GREEN, None), (YELLOW, 1), (RED, 10)]),
    ],
    "compile": [
        ("Recompiles, 15 min", "sum(increase(ditfleet_recompiles_total[15m]))", "none", [(GREEN, None), (YELLOW, 1)]),
        ("From the kernel cache", "1 - (sum(ditfleet_kernel_cache_compiles_total) or vector(0))"
         ' / (sum(ditfleet_kernel_cache_lookups_total{tier="memory"}) > 0)', "percentunit",
         [(YELLOW, None), (GREEN, 0.5)]),
        ("Open breakers", "sum(ditfleet_kernel_cache_breaker_open > bool 0)", "none", [(GREEN, None), (YELLOW, 1)]),
        ("Slowest start", 'max(ditfleet_boot_seconds{part="ready"})', "s", [(GREEN, None)]),
    ],
    "adapters": [
        ("Loads that failed, 1 h", '(sum(rate(ditfleet_lora_loads_total{result!="ok"}[1h])) or vector(0))'
         " / (sum(rate(ditfleet_lora_loads_total[1h])) > 0) or vector(0)", "percentunit",
         [(GREEN, None), (YELLOW, 0.01), (RED, 0.05)]),
        ("Slots in use", "sum(ditfleet_lora_slots_used) / (sum(ditfleet_lora_slots) > 0)", "percentunit", [(GREEN, None)]),
        ("Load, p95", "histogram_quantile(0.95, sum by (le) (rate(ditfleet_lora_load_seconds_bucket[5m])))", "s",
         [(GREEN, None), (YELLOW, 1), (RED, 10)]),
        ("On disk", "sum(ditfleet_lora_cache_bytes)", "bytes", [(GREEN, None)]),
    ],
    "memory": [
        ("Step-downs, 15 min", "sum(increase(ditfleet_memory_step_downs_total[15m]))", "none", [(GREEN, None), (YELLOW, 1)]),
        ("Largest peak", "max(ditfleet_memory_observed_bytes)", "bytes", [(GREEN, None)]),
        ("Fullest GPU", "max(ditfleet_gpu_memory_used_bytes / (ditfleet_gpu_memory_bytes > 0))", "percentunit",
         [(GREEN, None), (YELLOW, 0.95)]),
    ],
    "tenants": [
        ("Tenants that wait", "count(ditfleet_tenant_waiting_units > 0) or vector(0)", "none", [(GREEN, None)]),
        ("Waiting units", "sum(ditfleet_tenant_waiting_units)", "none", [(GREEN, None)]),
        ("Queue wait, p95", "histogram_quantile(0.95, sum by (le) (rate(ditfleet_queue_wait_seconds_bucket[5m])))", "s",
         [(GREEN, None), (YELLOW, 60), (RED, 600)]),
        ("Largest lag", "max(ditfleet_fairness_lag_seconds)", "s", [(GREEN, None)]),
        ("Refusals, 5 min", "sum(rate(ditfleet_quota_refusals_total[5m])) or vector(0)", "ops", [(GREEN, None), (YELLOW, 1)]),
    ],
    "process": [
        ("Processes", "count(ditfleet_build_info)", "none", [(GREEN, None)]),
        ("Builds", "count(count by (version, revision) (ditfleet_build_info))", "none", [(GREEN, None), (YELLOW, 2)]),
        ("Started in the last hour", "count(time() - process_start_time_seconds < 3600) or vector(0)", "none", [(GREEN, None)]),
        ("Most descriptors in use", "max(process_open_fds / (process_max_fds > 0))", "percentunit",
         [(GREEN, None), (YELLOW, 0.7), (RED, 0.9)]),
        ("Largest process", "max(process_resident_memory_bytes)", "bytes", [(GREEN, None)]),
        ("Certificate expires", "min(ditfleet_certificate_expiry_timestamp_seconds) - time()", "s",
         [(RED, None), (YELLOW, 3 * 86400), (GREEN, 14 * 86400)]),
    ],
}
# Panel → a known limit, as a line.
THRESHOLDS = {
    "latency/Prediction": [(YELLOW, None), (GREEN, 0.75), (YELLOW, 1.33)],
    "latency/Objectives": [(GREEN, None), (YELLOW, 0.05), (RED, 0.3)],
    "fleet/Oldest wait": [(GREEN, None), (YELLOW, 60), (RED, 600)],
    "compile/Kernel cache lookups": [(YELLOW, None), (GREEN, 0.5)],
    "process/Certificate expires": [(RED, None), (YELLOW, 3 * 86400), (GREEN, 14 * 86400)],
}
# Dashboard → row → panels. The row without names has all others.
ROWS = {
    "fleet": {"Work": ["Jobs", "Queue", "Oldest wait", "Backlog"],
              "Workers": ["Workers", "Unwell workers", "Speed of workers", "Assignments", "Units returned", "GPU power", "Energy per unit"],
              "Coordinators": []},
    "latency": {"Jobs and units": ["Jobs", "Objectives", "Units", "Prediction"], "Workers": ["Phases", "Device phases", "Denoising steps"], "HTTP": []},
    "compile": {"Start": ["Start of a worker", "Warm-up"], "Programs": []},
    "adapters": {"Adapters": []}, "memory": {"Memory": []}, "tenants": {"By tenant": []}, "process": {"By instance": []},
}


def filtered(expression, metrics):
    """The query with the variables of the dashboard in each of its selectors."""
    def selector(match):
        name, given = match.group(1), match.group(2) or ""
        row = metrics.get(name) or metrics[re.sub("_(bucket|sum|count)$", "", name)]
        wanted = [label for label in VARIABLES if label in row["labels"]]
        if not name.removeprefix("ditfleet_").startswith(OF_LEADER):
            wanted.insert(0, "instance")
        both = [*filter(None, [given.strip("{}")]), *(f'{label}=~"${label}"' for label in wanted)]
        return name + ("{" + ",".join(both) + "}" if both else "")
    return re.sub(r"\b((?:ditfleet|process)_\w+)({[^}]*})?", selector, expression)


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
    process = name.startswith("process_")
    if name in PER_INSTANCE or process:
        by, legend = f" by ({', '.join(['instance', *labels])})", ", ".join(filter(None, ["{{instance}}", legend]))
    how = "max" if name in LARGEST or name in PER_INSTANCE or process else "sum"
    return [(f"{how}{by} ({name})", f"{short} {legend}".strip())]


def unit(metric, expression):
    if metric["name"] in METRIC_UNITS:
        return METRIC_UNITS[metric["name"]]
    if metric["unit"] == "" and " / " in expression:
        return "none" if "prediction" in metric["name"] else "percentunit"
    if metric["type"] == "counter":
        return RATES.get(metric["unit"], "ops")
    return UNITS.get(metric["unit"], "short")


def steps(thresholds):
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in thresholds]}


def source():
    return {"type": "prometheus", "uid": "${source}"}


def targets(expressions, metrics):
    return [{"refId": chr(ord("A") + i), "datasource": source(), "expr": filtered(expr, metrics), "legendFormat": legend}
            for i, (expr, legend) in enumerate(expressions)]


def stat(title, expression, unit_of_it, thresholds, metrics):
    return {"type": "stat", "title": title, "datasource": source(), "targets": targets([(expression, title)], metrics),
            "fieldConfig": {"defaults": {"unit": unit_of_it, "decimals": 1 if unit_of_it in ("m", "percentunit") else None,
                                         "color": {"mode": "thresholds"}, "thresholds": steps(thresholds)}, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}}


def panel(key, title, shown, metrics):
    of_panel = [(m, q) for m in shown for q in queries(m)]
    units = [unit(m, expr) for m, (expr, _) in of_panel]
    made = targets([q for _, q in of_panel], metrics)
    defaults = {"unit": units[0], "min": 0}
    if limits := THRESHOLDS.get(f"{key}/{title}"):
        defaults |= {"thresholds": steps(limits), "custom": {"thresholdsStyle": {"mode": "dashed"}}}
    if any("class" in m["labels"] for m in shown):
        defaults["links"] = [{"title": "Slowest jobs of the class", "url": "${console}/slow?class=${__field.labels.class}"}]
    overrides = [{"matcher": {"id": "byFrameRefID", "options": t["refId"]}, "properties": [{"id": "unit", "value": u}]}
                 for t, u in zip(made, units) if u != units[0]]
    return {"type": "timeseries", "title": title, "datasource": source(), "targets": made,
            "description": "\n".join(f"{m['name']}: {m['help']}." for m in shown),
            "fieldConfig": {"defaults": defaults, "overrides": overrides},
            "options": {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list", "placement": "bottom"}}}


def placed(rows):
    """The panels of (title, panels, height, panels in a line) with their places and numbers."""
    out, y = [], 0
    for title, panels, height, columns in rows:
        out.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for i, p in enumerate(panels):
            width = 24 // columns
            out.append({**p, "gridPos": {"x": i % columns * width, "y": y + i // columns * height, "w": width, "h": height}})
        y += -(-len(panels) // columns) * height
    return [{"id": i + 1, **p} for i, p in enumerate(out)]


def variables(panels):
    listed = [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
              {"name": "console", "label": "Console", "type": "textbox", "query": "http://localhost:8780",
               "current": {"text": "http://localhost:8780", "value": "http://localhost:8780"}}]
    used = "".join(t["expr"] for p in panels for t in p.get("targets", []))
    for name, (label, metric) in VARIABLES.items():
        if f"${name}" in used:
            query = f"label_values({metric}, {name})"
            listed.append({"name": name, "label": label, "type": "query", "datasource": source(), "definition": query,
                           "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
                           "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}})
    return listed


def dashboard(key, panels, metrics):
    stats = [stat(*s, metrics) for s in STATS[key]]
    rows = [("Now", stats, 4, len(stats) if len(stats) <= 6 else -(-len(stats) // 2))]
    listed = {title for titles in ROWS[key].values() for title in titles}
    for title, titles in ROWS[key].items():
        titles = titles or [t for t in panels if t not in listed]
        rows.append((title, [panel(key, t, panels[t], metrics) for t in titles if t in panels], 8, 2))
    placed_panels = placed(rows)
    links = [{"title": "DiTFleet", "type": "dashboards", "tags": ["ditfleet"], "asDropdown": True, "keepTime": True},
             {"title": "Fleet page", "type": "link", "url": "${console}/fleet"},
             {"title": "Slow jobs", "type": "link", "url": "${console}/slow"},
             {"title": "Alerts", "type": "link", "url": "${console}/alerts"}]
    alerts = {"name": "Alerts", "datasource": source(), "enable": True, "iconColor": RED, "step": "60s",
              "expr": 'ALERTS{alertname=~"DiTFleet.*",alertstate="firing"}', "titleFormat": "{{alertname}}",
              "textFormat": "{{severity}} {{instance}} {{worker}} {{class}}", "tagKeys": "severity"}
    return {"uid": f"ditfleet-{key}", "title": f"DiTFleet: {TITLES[key]}", "tags": ["ditfleet"], "schemaVersion": 39,
            "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "links": links,
            "annotations": {"list": [alerts]}, "templating": {"list": variables(placed_panels)}, "panels": placed_panels}


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "dashboards"
    rows = json.load(sys.stdin)
    metrics = {metric["name"]: metric for metric in rows}
    boards = {key: {} for key in TITLES}
    for metric in rows:
        key, title = metric["panel"].split("/", 1)
        boards[key].setdefault(title, []).append(metric)
    for key, panels in boards.items():
        (folder / f"{key}.json").write_text(json.dumps(dashboard(key, panels, metrics), indent=1) + "\n")


if __name__ == "__main__":
    main()
