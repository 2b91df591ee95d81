"""Three faults hidden in a load: a worker whose disk is slow, one whose denoising is slow, and one that compiles again for
each size. For each, its alert fires in a real Prometheus, and the list of slow jobs and the job page name phase and worker.

DITFLEET_TROUBLE_JOBS sets the number of jobs (default 120)."""
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import unittest

import browser
from api import Client
from browser import Browser
from fleet import BIN, Background, Fleet, clean_environment, cli, need, start, until

need(shutil.which("prometheus") and shutil.which("promtool"), "prometheus is not installed (tests/packages.txt)")
need(shutil.which("prometheus-alertmanager"), "prometheus-alertmanager is not installed (tests/packages.txt)")
need(os.environ.get("DITFLEET_SLOW_DISK"), "DITFLEET_SLOW_DISK does not name the library that makes a disk slow")
from prometheus_test import Servers, free_ports  # noqa: E402: it needs Prometheus

JOBS = int(os.environ.get("DITFLEET_TROUBLE_JOBS", 120))
SIZE = {"width": 128, "height": 128, "num_inference_steps": 80, "max_sequence_length": 16}
OTHER_SIZES = ((32, 32), (48, 32), (64, 32))


class Slowed(Background):
    """Stops a process three quarters of the time."""

    def __init__(self, process):
        super().__init__()
        self.process = process

    def run(self):
        while not self.done.is_set() and self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.05)


class Trouble(unittest.TestCase):
    def start_worker(self, fleet, name, port, *flags, **environment):
        log = open(fleet.folder / f"{name}.log", "w")
        return start([BIN / "ditfleet-worker", "run", "--config", fleet.data / "effective.yaml", "--name", name,
                      "--set", f"worker.metrics_listen=127.0.0.1:{port}", "--set", "worker.threads=1", *flags],
                     stdout=log, env=clean_environment(**environment))

    def test_each_fault_is_named(self):
        # The loader ignores a library that is missing.
        self.assertTrue(os.path.exists(os.environ["DITFLEET_SLOW_DISK"]), "build the target slow_disk")
        names = ("healthy-1", "healthy-2", "slow-disk", "slow-gpu", "compiles")
        gateway, *ports = free_ports(1 + len(names))
        of = dict(zip(names, ports))
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            results = os.path.join(folder, "results")
            os.mkdir(results)
            servers = Servers(folder, [f"127.0.0.1:{port}" for port in (gateway, *ports)], wait="2s")
            stack.callback(servers.stop)
            fleet = stack.enter_context(Fleet(workers=0, listen=f"127.0.0.1:{gateway}", sets=[
                "results.backend=file", f"results.dir={results}", "compile.backend=cpu_jit", "worker.warmup=true"]))
            workers = {name: self.start_worker(fleet, name, of[name]) for name in names[:2]}
            workers["slow-disk"] = self.start_worker(fleet, "slow-disk", of["slow-disk"], SLOW_DISK=results, SLOW_DISK_MS="600",
                                                     LD_PRELOAD=os.environ["DITFLEET_SLOW_DISK"])
            workers["slow-gpu"] = self.start_worker(fleet, "slow-gpu", of["slow-gpu"])
            # Without a cache, which has the program: that of a CPU is the same for every size.
            alone = ("compile.dynamic=false", "cache.memory_bytes=0", "cache.disk_bytes=0", "cache.redis=false")
            workers["compiles"] = self.start_worker(fleet, "compiles", of["compiles"], *(f"--set={one}" for one in alone))
            stack.callback(lambda: [w.wait(60) for w in workers.values()])
            stack.callback(lambda: [w.terminate() for w in workers.values()])
            client = Client(fleet.url)
            until(lambda: sum(w["state"] == "ready" for w in client.get("/v1/workers").json()["workers"]) == len(names),
                  "the workers are ready", 60)
            until(lambda: len(servers.query("up == 1")) == 1 + len(names), "Prometheus scrapes all", 30)
            stack.enter_context(Slowed(workers["slow-gpu"]))
            self.ids = []
            self.load(client)
            self.check(servers, client, of)

    def load(self, client):
        draw = random.Random(7)
        ids = []
        for i in range(JOBS):
            size = dict(SIZE)
            if draw.random() < 0.2:  # sizes for which the last worker compiles again
                size["width"], size["height"] = draw.choice(OTHER_SIZES)
            ids.append(client.submit(seed=i, **size))
        for id in ids:
            self.assertEqual(client.wait(id)["state"], "succeeded")
        self.ids += ids

    def check(self, servers, client, of):
        def firing():
            return {(a["metric"]["alertname"], a["metric"].get("instance"), a["metric"].get("phase"))
                    for a in servers.query('ALERTS{alertstate="firing"}')}
        wanted = {("DiTFleetPhaseSlow", f"127.0.0.1:{of['slow-disk']}", "store"),
                  ("DiTFleetPhaseSlow", f"127.0.0.1:{of['slow-gpu']}", "denoise"),
                  ("DiTFleetRecompile", f"127.0.0.1:{of['compiles']}", None)}
        # The scheduler avoids slow workers, so that a short load may give them too few units to judge.
        judged = lambda: wanted <= firing() and self.speeds(client)["slow-gpu"]
        for _ in range(3):
            with contextlib.suppress(AssertionError):
                until(judged, "the alerts fire", 12)
            if judged():
                break
            print("not yet firing:", *sorted(map(str, wanted - firing())), "speeds:", self.speeds(client))
            self.load(client)
        else:
            counts = [(s["metric"]["instance"], [v for _, v in s["values"]][:40]) for s in servers.query("ditfleet_recompiles_total[3m]")]
            self.fail(f"missing: {wanted - firing()}; firing: {firing()}; recompiles: {counts}; speeds: {self.speeds(client)}")
        print("firing:", *sorted(map(str, firing())), sep="\n  ")
        self.check_the_slow_worker(client)
        # Among many jobs, the slowest ones have waited longest in the queue.
        slowest = client.get("/v1/jobs/slow?limit=5").json()["jobs"]
        self.assertTrue(all(job["blame"] or job["worker_speed"] for job in slowest), slowest)
        blamed = {}
        for id in self.ids:
            for unit in client.get(f"/v1/jobs/{id}/timeline").json()["unit_records"]:
                blamed.update({(unit["worker"], over["phase"]): id for over in unit["over"]})
        # A class of few units has no median of a step: its run is compared with the prediction.
        for worker, phases in (("slow-disk", ["store"]), ("slow-gpu", ["denoise"]), ("compiles", ["denoise", "run"])):
            phase = next((phase for phase in phases if (worker, phase) in blamed), None)
            self.assertIsNotNone(phase, (worker, phases, blamed))
            if not browser.PROGRAM:
                continue
            with Browser() as page:
                page.open(f"http://{client.host}/jobs/{blamed[worker, phase]}")
                page.until(f"['on {worker}', '{phase} took'].every(words => document.body?.innerText.includes(words))")

    def speeds(self, client):
        return {w["name"]: w["speed"] for w in client.get("/v1/workers").json()["workers"]}

    def check_the_slow_worker(self, client):
        """The worker is named in the list of workers and for jobs that ran there."""
        speeds = self.speeds(client)
        print("speeds:", speeds)
        self.assertLess(speeds["slow-gpu"], 0.5)
        named = next(id for id in reversed(self.ids) if client.job(id)["unit_records"][0]["worker"] == "slow-gpu")
        shown = cli("explain", named, env=clean_environment(DITFLEET_URL=f"http://{client.host}"))
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertRegex(shown.stdout, r"slow-gpu runs at 0\.\d\d of the predicted speed")


if __name__ == "__main__":
    unittest.main(verbosity=2)
