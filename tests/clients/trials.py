"""Trials on real processes: a redis-server, two coordinators, two workers, each behind a network of its own, with jobs of
images, videos, uploaded images and adapters, while processes are killed and stopped, connections are cut, held and silent,
Redis is killed, stopped and full, a disk is full, and members are replaced by another build, whose records have another format.

  trials.py [--count N] [--seed S] [--rows FILE]    N trials (20) from seed S (1) on; a line each

A seed decides jobs and faults: `--count 1 --seed S` tries them again, though times differ. The exit status is 0 if none was
broken. `tests/run.sh trials` builds and runs it."""
import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from adapters import BYTES
from api import ENDED, Client
from fleet import BIN, ROOT, Background, Listener, Redis, clean_environment, free_port, start, tiny_model, until

GROUP = 10  # trials of one fleet
UNREACHABLE = (OSError, http.client.HTTPException, ValueError, AssertionError)  # what a request ends with that is cut off
BUILDS = [BIN, BIN / "next_format"]
MODELS = {"tiny": tiny_model("dev"), "video": ROOT / "tests/fixtures/wan/two/model", "i2v": ROOT / "tests/fixtures/wan/i2v/model"}
OPTIONS = ["queue.lease_ms=1500", "queue.renew_ms=300", "queue.max_crashes=100", "queue.max_lapses=100", "queue.max_attempts=100",
           "queue.retry_backoff_ms=100", "queue.retry_backoff_max_ms=500", "worker.drain_ms=1000", "worker.checkpoint_ms=100",
           "worker.heartbeat_ms=500", "scheduler.leader_ttl_ms=1000", "worker.device=cpu", "worker.threads=1", "webhooks.allow_private=true"]
IMAGE = {"model": "tiny", "width": 64, "height": 64}
VIDEO = {"model": "video", "width": 64, "height": 64, "frames": 5, "negative_prompt": "b"}
FROM_IMAGE = {"model": "i2v", "width": 48, "height": 32, "frames": 5, "image": "rgb.png"}  # a file of tests/fixtures/images


class Gate(Listener):
    """A network before Redis. mode: "pass"; "hold": bytes wait; "silent": those of open connections are lost for ever, and no
    connection is made."""

    def __init__(self, port):
        self.port, self.mode, self.open = port, "pass", set()
        super().__init__()
        self.url = "redis://" + self.address

    def serve(self, client):
        if self.mode == "silent":
            return time.sleep(30)
        try:
            server = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        except OSError:
            return client.close()
        server.settimeout(None)
        pair = (client, server)
        self.open.add(pair)
        for source, sink in (pair, pair[::-1]):
            threading.Thread(target=self.forward, args=(pair, source, sink), daemon=True).start()

    def forward(self, pair, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while self.mode == "hold":
                    time.sleep(0.01)
                if pair in self.open:
                    sink.sendall(data)
        if pair in self.open:
            self.cut(pair)

    def cut(self, pair):
        self.open.discard(pair)
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut_all(self):
        for pair in list(self.open):
            self.cut(pair)


class Hooks(Background):
    """Receives webhooks: `seen` has the types of the events of each job."""

    def __init__(self):
        import http.server
        self.seen, outer = {}, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.seen.setdefault(event["data"]["id"], []).append(event["type"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        super().__init__()

    def run(self):
        self.server.serve_forever()


class Process:
    """A coordinator or a worker, which is started again when it has ended."""

    def __init__(self, trial_fleet, name, program, words):
        self.name, self.program, self.build = name, program, 0
        self.words, self.log = words, trial_fleet.folder / f"{name}.log"
        self.gate = Gate(trial_fleet.redis.port)
        self.ended = False
        self.start()

    def start(self):
        with open(self.log, "a") as log:
            self.process = start([BUILDS[self.build] / self.program, *self.words, "--set", f"redis.url={self.gate.url}"], stdout=log)

    def replace(self):
        self.build = 1 - self.build
        self.signal(signal.SIGTERM)

    def keep(self):
        if not self.ended and self.process.poll() is not None:
            self.start()

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class TrialFleet:
    """What a group of trials shares."""

    def __init__(self, chance):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-trials-"))
        self.redis = Redis("--appendonly", "yes", "--appendfsync", "always", "--save", "")
        self.hooks = Hooks()
        self.hooks.thread.start()
        sets = [*OPTIONS, *(f"models.{n}.path={p}" for n, p in MODELS.items()), f"data.dir={self.folder}"]
        if chance.random() < 0.5:
            results = self.folder / "results"
            results.mkdir()
            sets += ["results.backend=file", f"results.dir={results}"]
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", results], capture_output=True).returncode == 0:
                self.disk = results  # root alone can fill one
        if programs := os.environ.get("DITFLEET_TEST_PROGRAMS"):
            sets.append(f"cache.dir={programs}")
        flags = [word for one in sets for word in ("--set", one)]
        self.ports = [free_port(), free_port()]
        self.coordinators = [Process(self, f"coordinator{i}", "ditfleet", ["coordinator", *flags, "--set", f"gateway.listen=127.0.0.1:{port}"])
                             for i, port in enumerate(self.ports)]
        self.workers = [Process(self, f"worker{i}", "ditfleet-worker", ["run", "--name", f"worker{i}", *flags]) for i in range(2)]
        self.processes = self.coordinators + self.workers
        self.done = threading.Event()
        self.supervisor = threading.Thread(target=self.supervise, daemon=True)
        self.supervisor.start()
        self.wanted = {}

    def __enter__(self):
        try:
            self.until(lambda: self.ready() == 2, "two workers are ready", 90)
            registered = self.http(0).request("PUT", "/v1/loras/red", (ROOT / "tests/fixtures/lora/adapters/attention.safetensors").read_bytes(), BYTES)
            assert registered.status == 201, registered
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def supervise(self):
        while not self.done.wait(0.2):
            for one in self.processes:
                one.keep()
            if self.redis.process.poll() is not None and not self.redis_down:
                self.redis.process = start(self.redis.argv, stdout=subprocess.DEVNULL, env=clean_environment())

    redis_down, disk = False, None

    def until(self, condition, what, seconds):
        def holds():
            with contextlib.suppress(*UNREACHABLE, KeyError):
                return condition()
        return until(holds, what, seconds)

    def http(self, i):
        return Client(f"http://127.0.0.1:{self.ports[i]}", timeout=5)

    def ready(self):
        return len([w for w in self.http(0).get("/v1/workers").json()["workers"] if w["state"] == "ready"])

    def result(self, job):
        assert job["state"] == "succeeded", job
        return [unit["result"]["sha256"] for unit in job["unit_records"]]

    def submit(self, i, fields, **more):
        if name := fields.get("image"):
            upload = self.http(i).request("POST", "/v1/uploads", (ROOT / "tests/fixtures/images" / name).read_bytes(), BYTES)
            assert upload.status == 201, upload
            fields = {**fields, "image": upload.json()["id"]}
        return self.http(i).submit(**fields, **more)

    def undisturbed(self, fields):
        """The results of such a job, made once without a fault."""
        key = json.dumps(fields, sort_keys=True)
        if key not in self.wanted:
            id = self.submit(0, fields)
            self.wanted[key] = self.result(self.until(lambda: (job := self.http(0).job(id))["state"] in ENDED and job, "it ends", 60))
        return self.wanted[key]

    def stop(self):
        self.done.set()
        self.supervisor.join()
        for one in self.processes:
            one.ended = True
            one.signal(signal.SIGCONT)
            one.signal(signal.SIGKILL)
            one.process.wait()
        self.redis.stop()
        self.hooks.server.shutdown()
        if self.disk:
            subprocess.run(["umount", "-l", self.disk], check=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Trial:
    def __init__(self, fleet, seed):
        self.fleet, self.random = fleet, random.Random(seed)
        self.jobs, self.faults = [], []
        self.kinds = [kind for kind in ("kill", "stop", "drain", "cut", "hold", "silent", "kill redis", "stop redis", "fill redis", "fill disk", "replace") if self.random.random() < 0.5]
        if not fleet.disk:
            self.kinds = [kind for kind in self.kinds if kind != "fill disk"]

    def job(self):
        base = self.random.choices([IMAGE, VIDEO, FROM_IMAGE], [6, 2, 2])[0]
        fields = dict(base, seed=self.random.randint(1, 3), num_inference_steps=self.random.choice([2, 4, 12]))
        if fields["model"] == "tiny" and self.random.random() < 0.3:
            fields["loras"] = [{"name": "red"}]
        if self.random.random() < 0.2:
            fields["n"] = 2
        return fields

    def submit(self, at, fields, hooked):
        time.sleep(at)
        key = f"{self.random.random()}-{at}"
        extra = {"webhook": {"url": self.fleet.hooks.url}} if hooked else {}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(*UNREACHABLE):
                id = self.fleet.submit(self.random.randint(0, 1), fields, headers={"Idempotency-Key": key}, **extra)
                self.jobs.append((id, fields, hooked))
                return
            time.sleep(0.2)

    def fault(self, at, kind, lasts):
        time.sleep(at)
        one = self.random.choice(self.fleet.processes)
        self.faults.append(f"{at:.1f} s: {kind} {'' if 'redis' in kind or 'disk' in kind else one.name} {lasts:.1f} s")
        redis = self.fleet.redis
        if kind == "kill":
            one.signal(signal.SIGKILL)
        elif kind == "drain":
            one.signal(signal.SIGTERM)
        elif kind == "replace":
            one.replace()
        elif kind == "stop":
            process = one.process
            process.send_signal(signal.SIGSTOP)
            time.sleep(lasts)
            process.send_signal(signal.SIGCONT)
        elif kind == "cut":
            one.gate.cut_all()
        elif kind in ("hold", "silent"):
            one.gate.mode = kind
            if kind == "silent":
                one.gate.open.clear()  # what is open carries nothing any more
            time.sleep(lasts)
            one.gate.mode = "pass"
        elif kind == "kill redis":
            self.fleet.redis_down = True
            redis.kill()
            time.sleep(lasts)
            self.fleet.redis_down = False
        elif kind == "stop redis":
            redis.process.send_signal(signal.SIGSTOP)
            time.sleep(lasts)
            redis.process.send_signal(signal.SIGCONT)
        elif kind == "fill disk":
            filler = self.fleet.disk / f"filler {at}"
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(16 << 20))
            time.sleep(lasts)
            filler.unlink()
        elif kind == "fill redis":
            redis.cli("CONFIG", "SET", "maxmemory", "1mb")
            time.sleep(lasts)
            redis.cli("CONFIG", "SET", "maxmemory", "0")

    def run(self):
        jobs = [(self.random.uniform(0, 3), self.job(), self.random.random() < 0.5) for _ in range(self.random.randint(2, 6))]
        faults = [(self.random.uniform(0.2, 4), self.random.choice(self.kinds), self.random.uniform(0.05, 3)) for _ in range(self.random.randint(1, 4))] if self.kinds else []
        for _, fields, _ in jobs:
            self.fleet.undisturbed(fields)
        threads = [threading.Thread(target=self.submit, args=one) for one in jobs] + [threading.Thread(target=self.fault, args=one) for one in faults]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(self.jobs) == len(jobs), "not all jobs were acknowledged within a minute"
        for id, fields, hooked in self.jobs:
            ended = self.fleet.until(lambda: (job := self.fleet.http(0).job(id))["state"] in ENDED and job, f"job {id} ends", 60)
            assert self.fleet.result(ended) == self.fleet.undisturbed(fields), f"job {id} has other results"
            with self.fleet.http(0).events(id) as stream:
                types = [event.type for event in stream if event.data.get("unit") is None]
            assert types == ["queued", "succeeded"], f"the events of job {id} are {types}"
        for id, _, hooked in self.jobs:
            if hooked:
                self.fleet.until(lambda: "job.succeeded" in self.fleet.hooks.seen.get(id, []), f"the webhook of {id}", 60)
        self.nothing_is_left()

    def nothing_is_left(self):
        redis = self.fleet.redis
        for key in ("units", "open", "specs", "ready", "delayed", "lease", "deadline", "use"):
            self.fleet.until(lambda: redis.cli("EXISTS", f"df:{{0}}:{key}") == "0", f"{key} is empty", 20)
        self.fleet.until(lambda: not redis.cli("KEYS", "df:{0}:checkpoint:*"), "no checkpoint is left", 20)
        self.fleet.until(lambda: self.fleet.ready() == 2, "two workers are ready", 60)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--rows")
    options = options.parse_args()
    broken, fleet = 0, None
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for nth, seed in enumerate(range(options.seed, options.seed + options.count)):
            if nth % GROUP == 0 or fleet is None:
                stack.close()
                fleet = stack.enter_context(TrialFleet(random.Random(seed)))
            trial, since = Trial(fleet, seed), time.monotonic()
            try:
                trial.run()
                verdict = "as it must be"
            except (*UNREACHABLE, KeyError) as e:
                broken += 1
                verdict = f"BROKEN: {str(e)[:600]}"
            line = f"seed {seed}: {len(trial.jobs)} jobs, {time.monotonic() - since:.1f} s; {'; '.join(trial.faults) or 'no fault'}: {verdict}"
            print(line, flush=True)
            if options.rows:
                with open(options.rows, "a") as rows:
                    rows.write(line + "\n")
            if verdict != "as it must be":
                kept = f"/tmp/ditfleet-trial-{seed}"
                shutil.copytree(fleet.folder, kept, ignore=shutil.ignore_patterns("results"), dirs_exist_ok=True)
                print(f"  its logs are in {kept}", flush=True)
                fleet = None
    print(f"{options.count} trials, {broken} broken, in {time.monotonic() - began:.0f} s")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
