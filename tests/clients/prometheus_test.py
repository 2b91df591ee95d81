"""A real Prometheus scrapes a fleet under load: every query of every panel and recording rule returns data, every metric
of an alert exists, and an alert reaches a real Alertmanager. `promtool test rules` covers each alert."""
import contextlib
import http.server
import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.parse
import urllib.request

import yaml

from adapters import BYTES, DOWN, UP, safetensors
from api import Client
from fleet import Fleet, ROOT, SpanSink, cli, free_port, free_ports, need, run, start, tiny_model, until

need(shutil.which("prometheus") and shutil.which("promtool"), "prometheus is not installed (tests/packages.txt)")
need(shutil.which("prometheus-alertmanager"), "prometheus-alertmanager is not installed (tests/packages.txt)")

OBSERVABILITY = ROOT / "deploy" / "observability"
SIZES = ((32, 16), (16, 32))


def table():
    return {row["name"]: row for row in json.loads(cli("config", "metrics", "--json").stdout)}


# Metrics that a healthy fleet without TLS, or with runs of milliseconds, does not export; scheduler_service_test,
# door_test and trouble_test see them.
SOMETIMES = {"ditfleet_worker_unwell", "ditfleet_worker_speed_ratio", "ditfleet_certificate_expiry_timestamp_seconds"}


def names_in(expression):
    """The metrics of a query, without the suffixes of histograms."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\b(?:ditfleet|process)_\w+", expression)}


def boards():
    return {file.stem: json.loads(file.read_text()) for file in sorted((OBSERVABILITY / "dashboards").glob("*.json"))}


def rules(kind):
    """The expressions of recording ("record") or alerting ("alert") rules, by name, as promtool reads them."""
    found = {}
    for file in (OBSERVABILITY / "rules").glob("*.yml"):
        for group in yaml.safe_load(file.read_text())["groups"]:
            found |= {rule[kind]: rule for rule in group["rules"] if kind in rule}
    return found


def consecutive_ports():
    """The first of two free ports: with several workers, each one uses the next port."""
    while True:
        first = free_port()
        try:
            with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 1)):
                return first
        except OSError:
            continue


class Files(unittest.TestCase):
    def test_the_reference_and_the_dashboards_are_those_of_the_table(self):
        made = cli("config", "metrics").stdout
        self.assertEqual((OBSERVABILITY / "METRICS.md").read_text(), made,
                         "run: build/bin/ditfleet config metrics > deploy/observability/METRICS.md")
        with tempfile.TemporaryDirectory() as folder:
            rows = cli("config", "metrics", "--json").stdout
            subprocess.run([OBSERVABILITY / "dashboards.py", folder], input=rows, text=True, check=True)
            for board in pathlib.Path(folder).glob("*.json"):
                self.assertEqual((OBSERVABILITY / "dashboards" / board.name).read_text(), board.read_text(),
                                 "run: build/bin/ditfleet config metrics --json | deploy/observability/dashboards.py")
        shown = set()
        for board in boards().values():
            self.assertEqual([v["name"] for v in board["templating"]["list"]][:2], ["source", "console"])
            ids = [panel["id"] for panel in board["panels"]]
            self.assertEqual(len(ids), len(set(ids)))
            self.assertEqual([p["type"] for p in board["panels"]][:2], ["row", "stat"])
            for panel in board["panels"]:
                for target in panel.get("targets", []):
                    self.check_target(board, panel, target)
                    if panel["type"] == "timeseries":
                        shown |= names_in(target["expr"])
        self.assertEqual(shown, set(table()), "each metric is on a panel")

    def check_target(self, board, panel, target):
        """A query uses variables that the dashboard has, and a rate has the unit of a rate."""
        known = {v["name"] for v in board["templating"]["list"]} | {"__rate_interval"}
        self.assertLessEqual(set(re.findall(r"\$(\w+)", target["expr"])), known)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for override in panel["fieldConfig"]["overrides"]:
            if override["matcher"]["options"] == target["refId"]:
                unit = override["properties"][0]["value"]
        if re.match(r"sum[^/]*\(rate\([^/]*\)$", target["expr"]):
            self.assertIn(unit, ("ops", "reqps", "Bps", "watt", "suffix: GPUs", "suffix: cores"), target["expr"])
        else:
            self.assertNotIn(unit, ("ops", "reqps", "Bps"), target["expr"])

    def test_rules(self):
        known = set(table())
        alerts = rules("alert")
        for name, rule in {**alerts, **rules("record")}.items():
            self.assertLessEqual(names_in(rule["expr"]), known, name)
        for args in (["check", "rules", *map(str, (OBSERVABILITY / "rules").glob("*.yml"))],
                     ["check", "config", OBSERVABILITY / "prometheus.yml"],
                     ["test", "rules", ROOT / "tests" / "clients" / "observability" / "alerts_test.yml"]):
            done = run("promtool", *args, seconds=180)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        tested = (ROOT / "tests" / "clients" / "observability" / "alerts_test.yml").read_text()
        headings = re.findall(r"^## (.*)$", (OBSERVABILITY / "ALERTS.md").read_text(), re.M)
        anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        for name, rule in alerts.items():
            self.assertIn(f'alertname="{name}"', tested, "an alert without a test")
            page, anchor = rule["annotations"]["runbook_url"].split("#")
            self.assertEqual(page, "http://localhost:8780/alerts", "one address, for sed")
            self.assertIn(anchor, anchors, name)


class Servers:
    """Prometheus and Alertmanager on loopback ports, and a receiver of the Alertmanager's notifications."""

    def __init__(self, folder, targets, wait="0s"):
        self.folder, self.alerts = pathlib.Path(folder), []
        port, manager, cluster = free_ports(3)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.alerts += body["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.receiver.serve_forever, daemon=True).start()
        (self.folder / "alertmanager.yml").write_text(json.dumps({
            "route": {"receiver": "hook", "group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"},
            "receivers": [{"name": "hook", "webhook_configs": [{"url": f"http://127.0.0.1:{self.receiver.server_port}/"}]}]}))
        # The rules as they are, but evaluated every second, and alerts that fire after `wait`.
        for file in (OBSERVABILITY / "rules").glob("*.yml"):
            text = file.read_text().replace("interval: 15s", "interval: 1s")
            (self.folder / file.name).write_text(re.sub(r"for: \d+\w", f"for: {wait}", text))
        (self.folder / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.folder / "recording.yml"), str(self.folder / "alerts.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
            "scrape_configs": [{"job_name": "ditfleet", "static_configs": [{"targets": targets}]}]}))
        self.backfill()
        self.url = f"http://127.0.0.1:{port}"
        self.processes = [
            start(["prometheus-alertmanager", f"--config.file={self.folder}/alertmanager.yml", f"--storage.path={self.folder}/am",
                   f"--web.listen-address=127.0.0.1:{manager}", f"--cluster.listen-address=127.0.0.1:{cluster}"],
                  stdout=open(self.folder / "alertmanager.log", "w")),
            start(["prometheus", f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/tsdb",
                   f"--web.listen-address=127.0.0.1:{port}"], stdout=open(self.folder / "prometheus.log", "w"))]
        try:
            until(lambda: self.get("/-/ready"), "Prometheus is ready", 30)
        except BaseException:
            self.stop()
            raise

    def backfill(self):
        """Yesterday's means, which the baselines of regressions read."""
        now, lines = int(time.time()), []
        for series in ('ditfleet:unit_run_seconds:mean10m{class="c"}', 'ditfleet:compile_seconds:mean{backend="b"}'):
            lines += [f"# TYPE {series.split('{')[0]} gauge"]
            lines += [f"{series} 1 {t}" for t in range(now - 4 * 3600, now - 1800, 60)]
        (self.folder / "old.txt").write_text("\n".join([*lines, "# EOF\n"]))
        done = run("promtool", "tsdb", "create-blocks-from", "openmetrics", self.folder / "old.txt", self.folder / "tsdb")
        assert done.returncode == 0, done.stderr

    def get(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.read()
        except OSError:
            return b""

    def query(self, expression):
        """The samples of a query, without those that are NaN."""
        answer = json.loads(self.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        return [s for s in answer["data"]["result"] if "value" not in s or s["value"][1] != "NaN"]

    def stop(self):
        for process in self.processes:
            process.terminate()
            process.wait(20)
        self.receiver.shutdown()
        self.receiver.server_close()


class UnderLoad(unittest.TestCase):
    def load(self, client):
        jobs = []
        for i in range(12):
            width, height = SIZES[i % 2]
            extra = {"loras": [{"name": "ink"}]} if i % 3 == 0 else {"webhook": "https://app.invalid/"} if i % 3 == 1 else {}
            jobs.append(client.submit(width=width, height=height, num_inference_steps=200, max_sequence_length=16, **extra))
        for _ in range(2):  # beyond the quota
            client.request("POST", "/v1/jobs", {"prompt": "x", "n": 16, "width": 16, "height": 16})
        for job in jobs:
            ended = client.wait(job)
            self.assertEqual(ended["state"], "succeeded", ended["error"])

    def test_every_query_returns_data(self):
        metrics = table()
        first = consecutive_ports()
        config = json.dumps({"models": {"tiny": {"path": str(tiny_model()), "objective_s": 60}}})
        sets = [f"worker.metrics_listen=127.0.0.1:{first}", "quotas.queued_units=15", "memory.limit=2"]
        gateway = f"127.0.0.1:{free_port()}"
        with tempfile.TemporaryDirectory() as folder, SpanSink() as sink, contextlib.ExitStack() as stack:
            # Before the fleet, so that it sees the programs that workers compile when they start.
            servers = Servers(folder, [gateway, f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"])
            stack.callback(servers.stop)
            fleet = stack.enter_context(Fleet(workers=2, models={}, config=config, listen=gateway,
                                              sets=[*sets, f"telemetry.otlp_endpoint={sink}", "compile.backend=cpu_jit", "cache.dir="]))
            client = Client(fleet.url)
            zeros = safetensors({DOWN: ("F32", [4, 40], bytes(640)), UP: ("F32", [40, 4], bytes(640))})
            self.assertEqual(client.request("PUT", "/v1/loras/ink", zeros, BYTES).status, 201)
            done, failed = threading.Event(), []

            def keep_loaded():
                try:
                    while not done.is_set():
                        self.load(client)
                        done.wait(1.5)  # less than one refusal a second, which would be a flood
                except BaseException as e:
                    failed.append(e)
            loader = threading.Thread(target=keep_loaded)
            loader.start()
            try:
                until(lambda: len(servers.query("up == 1")) == 3, "Prometheus scrapes all three", 30)
                self.check(servers, metrics)
            finally:
                done.set()
                loader.join()
                self.assertEqual(failed, [])

    def check(self, servers, metrics):
        missing_here = SOMETIMES | {name for name, row in metrics.items() if "(NVML)" in row["help"]}
        queries = {name: (name, []) for name in rules("record")}
        for key, board in boards().items():
            for panel in board["panels"]:
                for target in panel.get("targets", []):
                    if not names_in(target["expr"]) & missing_here:
                        queries[f"{key}/{panel['title']}: {target['expr']}"] = (
                            target["expr"].replace("$__rate_interval", "10s"), board["templating"]["list"])
        missing = dict(queries)

        def values(variable):
            """"All", if Grafana offers any values of the variable."""
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
            return variable["allValue"] if any(s["metric"][label] for s in servers.query(metric)) else "none"

        def all_answered():
            chosen = {}
            for what, (expression, variables) in list(missing.items()):
                for variable in variables:
                    if variable["type"] == "query" and (name := "$" + variable["name"]) in expression:
                        if name not in chosen:
                            chosen[name] = values(variable)
                        expression = expression.replace(name, chosen[name])
                if servers.query(expression):
                    del missing[what]
            return not missing
        try:
            until(all_answered, "all queries return data", 60)
        except AssertionError:
            self.fail("queries without data:\n" + "\n".join(missing))
        print(f"{len(queries)} queries of panels and recording rules returned data")
        for name, rule in rules("alert").items():
            for metric in names_in(rule["expr"]) - missing_here:
                suffixes = ("_count",) if metrics[metric]["type"] == "histogram" else ("",)
                self.assertTrue(any(servers.query(metric + s) for s in suffixes), f"{name} reads {metric}, which nobody exports")
        # Beside other tests, units may really take longer than predicted.
        unexpected = [a for a in servers.alerts if a["labels"]["alertname"] != "DiTFleetPredictionDrift"]
        self.assertEqual(unexpected, [])
        # A second scrape of the coordinator looks like a second leader.
        file = servers.folder / "prometheus.yml"
        config = json.loads(file.read_text())
        config["scrape_configs"].append({**config["scrape_configs"][0], "job_name": "again"})
        file.write_text(json.dumps(config))
        servers.processes[1].send_signal(signal.SIGHUP)  # Prometheus reads it again
        until(lambda: any(a["labels"]["alertname"] == "DiTFleetNoLeader" for a in servers.alerts), "the Alertmanager notifies", 30)
        annotation, = boards()["fleet"]["annotations"]["list"]
        self.assertTrue(servers.query(annotation["expr"]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
