"""Three faults hidden in a load: a worker whose disk is slow, one whose denoising is slow, and one that compiles again for
each size. For each, its alert fires in a real Prometheus, and the list of slow jobs and the job page name phase and worker.

Denoising is slow by sleeping, with the family that only tests have: how much slower a worker is whose process is stopped
for a part of the time depends on how busy the machine is. Each worker is loaded alone, the others being drained, because
the scheduler avoids slow workers and would give them too few units to be judged."""
import contextlib
import os
import pathlib
import shutil
import tempfile
import unittest

import browser
from api import Client
from browser import Browser
from fleet import BIN, Fleet, clean_environment, cli, free_ports, need, start, tiny_model, until
from video_model import write_video_model

need(shutil.which("prometheus") and shutil.which("promtool"), "prometheus is not installed (tests/packages.txt)")
need(shutil.which("prometheus-alertmanager"), "prometheus-alertmanager is not installed (tests/packages.txt)")
need(os.environ.get("DITFLEET_SLOW_DISK"), "DITFLEET_SLOW_DISK does not name the library that makes a disk slow")
from prometheus_test import Servers  # noqa: E402: it needs Prometheus

UNITS = 6  # on each worker: a speed needs 4, a class' median 5
STEPS = 5
SIZES = ((32, 32), (48, 32), (64, 32))


class Trouble(unittest.TestCase):
    def start_worker(self, fleet, name, port, *flags, **environment):
        log = self.enterContext(open(fleet.folder / f"{name}.log", "w"))
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
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            results, slow = folder / "results", folder / "slow"
            results.mkdir()
            slow.mkdir()
            write_video_model(folder / "video")
            servers = Servers(folder, [f"127.0.0.1:{port}" for port in (gateway, *ports)], wait="2s")
            stack.callback(servers.stop)
            fleet = stack.enter_context(Fleet(
                workers=0, listen=f"127.0.0.1:{gateway}", models={"tiny": tiny_model(), "video": folder / "video"},
                sets=["results.backend=file", f"results.dir={results}", "compile.backend=cpu_jit", "worker.warmup=true"]))
            workers = {name: self.start_worker(fleet, name, of[name]) for name in names[:2]}
            workers["slow-disk"] = self.start_worker(fleet, "slow-disk", of["slow-disk"], SLOW_DISK=str(results),
                                                     SLOW_DISK_MS="600", LD_PRELOAD=os.environ["DITFLEET_SLOW_DISK"])
            workers["slow-gpu"] = self.start_worker(fleet, "slow-gpu", of["slow-gpu"])
            (slow / str(workers["slow-gpu"].pid)).touch()
            # Without a cache, which has the program: that of a CPU is the same for every size.
            alone = ("compile.dynamic=false", "cache.memory_bytes=0", "cache.disk_bytes=0", "cache.redis=false")
            workers["compiles"] = self.start_worker(fleet, "compiles", of["compiles"], *(f"--set={one}" for one in alone))
            stack.callback(lambda: [w.wait(60) for w in workers.values()])
            stack.callback(lambda: [w.terminate() for w in workers.values()])
            self.client = Client(fleet.url)
            until(lambda: self.states() == {name: "ready" for name in names}, "the workers are ready", 120)
            until(lambda: len(servers.query("up == 1")) == 1 + len(names), "Prometheus scrapes all", 30)
            # Healthy workers come first: a unit is judged when it ends, by the units of its class before it.
            self.ids = []
            for name in names:
                images = [{"model": "tiny", "width": width, "height": height, "num_inference_steps": 2,
                           "max_sequence_length": 16} for width, height in SIZES for _ in range(UNITS)]
                videos = [{"model": "video", "prompt": f"fault step slow {slow}", "num_inference_steps": STEPS}] * UNITS
                # Videos last: a worker's speed is that of its last 16 runs.
                self.run_on(name, [*(images if name in ("healthy-1", "compiles") else ()), *videos])
            self.check(servers, of)

    def states(self):
        return {w["name"]: w["state"] for w in self.client.get("/v1/workers").json()["workers"]}

    def run_on(self, name, jobs):
        """Runs jobs on one worker, with all others drained."""
        wanted = {other: "ready" if other == name else "draining" for other in self.states()}
        for other, state in wanted.items():
            act = "resume" if state == "ready" else "drain"
            self.assertEqual(self.client.request("POST", f"/v1/workers/{other}/{act}").status, 202)
        until(lambda: self.states() == wanted, f"only {name} takes units")
        ids = [self.client.submit(seed=i, **job) for i, job in enumerate(jobs)]
        for id in ids:
            job = self.client.wait(id)
            self.assertEqual((job["state"], job["unit_records"][0]["worker"]), ("succeeded", name), job)
        self.ids += ids

    def check(self, servers, of):
        def firing():
            return {(a["metric"]["alertname"], a["metric"].get("instance"), a["metric"].get("phase"))
                    for a in servers.query('ALERTS{alertstate="firing"}')}
        wanted = {("DiTFleetPhaseSlow", f"127.0.0.1:{of['slow-disk']}", "store"),
                  ("DiTFleetPhaseSlow", f"127.0.0.1:{of['slow-gpu']}", "denoise"),
                  ("DiTFleetRecompile", f"127.0.0.1:{of['compiles']}", None)}
        try:
            until(lambda: wanted <= firing(), "the alerts fire", 30)
        except AssertionError:
            means = {tuple(s["metric"].values()): s["value"][1] for s in servers.query("ditfleet:phase_seconds:mean5m")}
            self.fail(f"missing: {wanted - firing()}; firing: {firing()}; means: {means}")
        print("firing:", *sorted(map(str, firing())), sep="\n  ")
        self.check_the_slow_worker()
        # Among many jobs, the slowest ones have waited longest in the queue.
        slowest = self.client.get("/v1/jobs/slow?limit=5").json()["jobs"]
        self.assertTrue(all(job["blame"] or job["worker_speed"] for job in slowest), slowest)
        blamed = {}
        for id in self.ids:
            for unit in self.client.get(f"/v1/jobs/{id}/timeline").json()["unit_records"]:
                blamed.update({(unit["worker"], over["phase"]): id for over in unit["over"]})
        for worker, phase in (("slow-disk", "store"), ("slow-gpu", "denoise"), ("compiles", "denoise")):
            self.assertIn((worker, phase), blamed)
            if not browser.PROGRAM:
                continue
            with Browser() as page:
                page.open(f"http://{self.client.host}/jobs/{blamed[worker, phase]}")
                page.until(f"['on {worker}', '{phase} took'].every(words => document.body?.innerText.includes(words))")

    def check_the_slow_worker(self):
        """The worker is named in the list of workers and for jobs that ran there."""
        speeds = {w["name"]: w["speed"] for w in self.client.get("/v1/workers").json()["workers"]}
        print("speeds:", speeds)
        self.assertLess(speeds["slow-gpu"], 0.5)
        named = next(id for id in reversed(self.ids) if self.client.job(id)["unit_records"][0]["worker"] == "slow-gpu")
        shown = cli("explain", named, env=clean_environment(DITFLEET_URL=f"http://{self.client.host}"))
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertRegex(shown.stdout, r"slow-gpu runs at 0\.\d\d of the predicted speed")


if __name__ == "__main__":
    unittest.main(verbosity=2)
