"""Upgrades with open jobs: coordinators and workers of two builds whose records have different formats are changed one by
one under load, up and back; and the jobs that an older version left in Redis."""
import gzip
import hashlib
import http.client
import itertools
import json
import os
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

import redis_dump
from adapters import Redis
from api import ENDED, Client
from fleet import BIN, ROOT, Fleet, free_ports, run, start, tiny_model, until
from video_model import write_video_model

BUILDS = {"this": BIN, "next": BIN.parent / "next_format"}
JOBS = int(os.environ.get("DITFLEET_UPGRADE_JOBS", "120"))


class RollingChange(unittest.TestCase):
    """Two coordinators and three workers on one Redis. Every process is replaced by one of the other build while jobs are
    submitted and run."""

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="ditfleet-upgrade-")))
        write_video_model(self.folder / "video")
        self.socket = self.folder / "redis.sock"
        self.processes = {}
        self.addCleanup(self.end)
        self.processes["redis"] = start(["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", "",
                                         "--dir", self.folder], stdout=subprocess.DEVNULL)
        until(self.socket.exists, "Redis is up")
        (self.folder / "ditfleet.yaml").write_text(
            f"redis: {{url: 'unix://{self.socket}'}}\n"
            f"models: {{video: {{path: {self.folder}/video}}}}\n"
            "queue: {lease_ms: 3000, renew_ms: 300}\n"
            "worker: {threads: 1, device: cpu, warmup: false, heartbeat_ms: 300}\n"
            f"data: {{dir: {self.folder}/data}}\n")
        self.ports = free_ports(2)
        self.clients = [Client(f"http://127.0.0.1:{port}") for port in self.ports]

    def end(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def redis(self, *argv):
        return run("redis-cli", "-s", self.socket, "--raw", *argv).stdout.rstrip("\n")

    def launch(self, name, build):
        """Starts a process in place of the one with this name, which must have ended well."""
        if name in self.processes:
            self.processes[name].terminate()
            self.assertEqual(self.processes[name].wait(60), 0, self.log(name))
        if name.startswith("w"):
            argv = [BUILDS[build] / "ditfleet-worker", "run", "--name", name]
        else:
            port = self.ports[int(name[1])]
            argv = [BUILDS[build] / "ditfleet", "coordinator", "--set", f"gateway.listen=127.0.0.1:{port}"]
        with open(self.folder / f"{name}.log", "a") as log:
            self.processes[name] = start([*argv, "--config", self.folder / "ditfleet.yaml"], stdout=log)
        if name.startswith("w"):
            until(lambda: self.worker_state(name) == "ready", f"{name} is ready", 90)
        else:
            until(lambda: self.is_ready(self.clients[int(name[1])]), f"{name} is ready", 90)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def worker_state(self, name):
        info = self.redis("HGET", f"df:{{0}}:worker:{name}", "info")
        pid = self.processes[name].pid
        return json.loads(info)["state"] if info and json.loads(info)["pid"] == pid else None

    @staticmethod
    def is_ready(client):
        try:
            return client.get("/readyz").status == 200
        except OSError:
            return False

    def submit_all(self):
        """Submits jobs to both gateways in turn, as a client that repeats what was not acknowledged: JOBS at least, and
        as long as processes are changed."""
        for number in itertools.takewhile(lambda number: number < JOBS or self.changing, itertools.count()):
            for client in itertools.cycle(self.clients if number % 2 else self.clients[::-1]):
                try:
                    self.ids.append(client.submit("fault step sleep", {"Idempotency-Key": f"job-{number}"},
                                                  num_inference_steps=1 + number % 3, seed=number))
                    break
                except (OSError, AssertionError, http.client.HTTPException):
                    time.sleep(0.1)
            time.sleep((0.1 if number < JOBS else 0.5) if self.changing else 0)

    def test_no_job_is_lost_failed_or_run_twice(self):
        names = ["c0", "c1", "w0", "w1", "w2"]
        for name in names:
            self.launch(name, "this")
        self.ids, self.changing = [], True
        submitting = threading.Thread(target=self.submit_all, daemon=True)
        submitting.start()
        until(lambda: len(self.ids) >= 10, "jobs are submitted", 30)
        self.assertEqual(self.redis("GET", "df:{0}:format"), "1")
        for name in names:
            self.launch(name, "next")
        self.assertEqual(self.redis("GET", "df:{0}:format"), "2")
        until(lambda: self.redis("HVALS", "df:{0}:open").startswith("2:"), "open jobs have records of the other format")
        for name in reversed(names):
            self.launch(name, "this")
        self.changing = False
        submitting.join(120)
        self.assertGreaterEqual(len(self.ids), JOBS)
        self.assertEqual(len(set(self.ids)), len(self.ids))
        for id in self.ids:
            job = until(lambda: (found := self.clients[0].job(id))["state"] in ENDED and found, f"job {id} ends", 60)
            self.assertEqual(job["state"], "succeeded", job)
            self.assertEqual([unit["attempt"] for unit in job["unit_records"]], [1], job)
            with self.clients[0].events(id) as stream:
                types = [event.type for event in stream if event.type != "step"]
            self.assertEqual(types.count("started"), 1, types)
        listed, cursor = set(), ""
        while cursor is not None:
            page = self.clients[1].get(f"/v1/jobs?limit=100&cursor={cursor}").json()
            listed |= {job["id"] for job in page["jobs"]}
            cursor = page["next_cursor"] or None
        self.assertEqual(listed, set(self.ids))
        for key in ("units", "open", "ready", "delayed", "lease"):
            self.assertEqual(self.redis("EXISTS", f"df:{{0}}:{key}"), "0", key)


class OpenJobsOfAnOlderVersion(unittest.TestCase):
    """What 394b7f0e left in Redis (tests/fixtures/queue): jobs in every state, with its Functions."""

    def test_every_open_job_ends_well_and_every_ended_one_can_be_read(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="ditfleet-upgrade-")))
        write_video_model(folder / "video")
        path = folder / "redis.sock"
        server = start(["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder],
                       stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (server.terminate(), server.wait(20)))
        until(path.exists, "Redis is up")
        redis = self.redis = Redis(path)
        self.addCleanup(redis.close)
        with gzip.open(ROOT / "tests/fixtures/queue/open_jobs.json.gz") as file:
            dumped = json.load(file)
        redis_dump.load(redis, dumped)
        jobs = {name: (redis_dump.moved(job["id"], dumped), job["state"]) for name, job in dumped["jobs"].items()}
        fleet = self.enterContext(Fleet(
            workers=2, models={"video": folder / "video", "tiny": tiny_model(), "i2v": ROOT / "tests/fixtures/wan/i2v/model"},
            flags=["--redis", f"unix://{path}"], wait_for_workers=False, sets=["default_model=video", "queue.lease_ms=2000"]))
        client = Client(fleet.url)
        listed = {job["id"] for job in client.get("/v1/jobs?limit=100").json()["jobs"]}
        self.assertEqual(listed, {id for id, _ in jobs.values()})
        self.assertIn(client.cancel(jobs["queued 0"][0]).status, (200, 202))
        expected = {"canceling": "canceled", "queued 0": "canceled", "adapter that does not fit": "failed"}
        for name, (id, before) in jobs.items():
            with self.subTest(job=name, before=before):
                job = client.wait(id)
                self.assertEqual(job["state"], before if before in ENDED else expected.get(name, "succeeded"), job)
                for unit in job["unit_records"] if job["state"] == "succeeded" else ():
                    result = client.get(unit["result"]["url"])
                    self.assertEqual((result.status, hashlib.sha256(result.body).hexdigest()), (200, unit["result"]["sha256"]))
        self.assertEqual([lora["name"] for lora in client.get("/v1/loras").json()["loras"]], ["ink"])
        again = client.submit(headers={"Idempotency-Key": "key-1"}, model="video", width=32, height=32, frames=5, seed=1)
        self.assertEqual(again, jobs["queued 1"][0])
        for key in ("units", "open", "ready", "delayed", "lease", "in"):
            left = redis("XLEN" if key == "in" else "HLEN" if key in ("units", "open") else "ZCARD", "df:{0}:" + key)
            self.assertEqual(left, 0, key)
        self.assertEqual(redis("XLEN", "df:{0}:dead"), 1, "the adapter that does not fit, from before")


if __name__ == "__main__":
    unittest.main(verbosity=2)
