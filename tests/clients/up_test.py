"""`ditfleet up`: ready file, shutdown, restarts and refusals, and a service without Redis.

One file because all cases share the helpers that start and stop the service."""
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from api import Client
from fleet import BIN, DITFLEET, Fleet, alive, clean_environment, cli, free_port, run, start, tiny_model, until

SMALL = {"width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 16}
LONG = {"width": 256, "height": 256, "num_inference_steps": 200, "max_sequence_length": 16}  # some seconds


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        self.addCleanup(shutil.rmtree, self.folder, True)


class Life(WithFolder):
    def test_ready_file(self):
        with Fleet(workers=2) as fleet:
            ready = fleet.ready
            self.assertEqual(list(ready), ["gateway", "redis", "pids"])
            self.assertEqual(list(ready["pids"]), ["redis", "coordinator", "workers"])
            self.assertRegex(ready["gateway"], r"^http://127\.0\.0\.1:\d+$")
            self.assertTrue(ready["redis"].startswith("unix://"))
            self.assertEqual(Client(fleet.url).get("/readyz").status, 200)
            names = [Path(f"/proc/{p}/comm").read_text().strip() for p in fleet.pids()]
            self.assertEqual(names, ["redis-server", "ditfleet", "ditfleet-worker", "ditfleet-worker"])
            file = fleet.ready_file
            fleet.stop()
            self.assertFalse(file.exists(), "a ready file of a service that has ended")

    def test_ctrl_c_lets_running_jobs_finish(self):
        with Fleet(data=self.folder / "data") as fleet:
            client = Client(fleet.url)
            running = client.submit(**{**LONG, "width": 64, "height": 64, "num_inference_steps": 150})
            client.wait_event(running, "step")
            waiting = client.submit(n=20, **LONG)
            began = time.monotonic()
            fleet.stop(signal.SIGINT)
            self.assertLess(time.monotonic() - began, 30)
        with Fleet(data=self.folder / "data", workers=0) as fleet:  # read from the append-only file
            client = Client(fleet.url)
            self.assertEqual(client.job(running)["state"], "succeeded")
            # A unit that was just being assigned returns to the queue when its worker's lease ends.
            until(lambda: client.job(waiting)["state"] in ("ready", "running"), "it waits again")
            self.assertEqual(client.job(waiting)["unit_records"][19]["state"], "ready")

    def test_a_second_ctrl_c_stops_at_once(self):
        with Fleet(data=self.folder / "data") as fleet:
            client = Client(fleet.url)
            job = client.submit(**{**LONG, "width": 512, "height": 512})  # runs for a minute
            client.wait_event(job, "step")
            pids = fleet.pids()
            fleet.process.send_signal(signal.SIGINT)
            until(lambda: "stopping:" in fleet.tail(), "it ends")
            began = time.monotonic()
            fleet.process.send_signal(signal.SIGINT)
            fleet.process.wait(20)
            self.assertLess(time.monotonic() - began, 5)
            self.assertEqual([p for p in pids if alive(p)], [])
        with Fleet(data=self.folder / "data", workers=0) as fleet:
            client = Client(fleet.url)
            self.assertNotIn(client.job(job)["state"], ("failed", "canceled", "succeeded"))  # another worker will take it
            self.assertEqual(client.cancel(job).status, 202)

    def test_sigterm_stops_it_too(self):
        with Fleet() as fleet:
            fleet.stop(signal.SIGTERM)

    def test_a_closed_terminal_stops_it_except_under_nohup(self):
        with Fleet() as fleet:
            fleet.stop(signal.SIGHUP)
        fleet = Fleet()
        fleet.argv = ["nohup", *fleet.argv]
        with fleet:
            for pid in [fleet.process.pid, *fleet.pids()]:
                os.kill(pid, signal.SIGHUP)
            client = Client(fleet.url)
            self.assertEqual(client.wait(client.submit(width=64, height=64, num_inference_steps=1))["state"], "succeeded")
            self.assertNotIn("stopping:", fleet.tail())

    def test_no_process_is_left_when_up_is_killed(self):
        with Fleet() as fleet:
            pids = fleet.pids()
            fleet.process.kill()
            fleet.process.wait()
            until(lambda: not any(map(alive, pids)), "every process has ended")

    def test_crashed_processes_are_restarted(self):
        with Fleet(workers=2) as fleet:
            client = Client(fleet.url)
            ready = fleet.ready
            first = ready["pids"]["workers"][0]
            os.kill(first, signal.SIGKILL)
            until(lambda: first not in fleet.ready["pids"]["workers"] and len(fleet.ready["pids"]["workers"]) == 2, "a new worker's pid")
            until(lambda: {w["pid"] for w in client.get("/v1/workers").json()["workers"] if w["state"] == "ready"}
                  >= set(fleet.ready["pids"]["workers"]), "the new worker serves", 60)

            coordinator = ready["pids"]["coordinator"]
            os.kill(coordinator, signal.SIGKILL)
            until(lambda: fleet.ready["pids"]["coordinator"] not in (None, coordinator), "a new coordinator's pid")
            self.assertEqual(fleet.url, ready["gateway"])  # the address stays the same
            until(lambda: answers(client), "the coordinator is ready again")

            redis = ready["pids"]["redis"]
            os.kill(redis, signal.SIGKILL)
            until(lambda: fleet.ready["pids"]["redis"] not in (None, redis), "a new Redis' pid")
            until(lambda: answers(client), "ready on the new Redis")
            self.assertEqual(client.wait(client.submit(**SMALL))["state"], "succeeded")


    def test_a_worker_that_is_stopped_stays_stopped(self):
        with Fleet(workers=2, sets=["worker.name=w"]) as fleet:
            stopped = cli("workers", "stop", "w-1", "--wait", "--url", fleet.url)
            self.assertEqual((stopped.returncode, stopped.stdout), (0, "w-1: stopped\n"), stopped)
            until(lambda: "worker-1 was stopped" in fleet.log.read_text(), "up says so")
            time.sleep(0.5)  # longer than the pause before a restart
            self.assertEqual(len(fleet.ready["pids"]["workers"]), 1)
            self.assertEqual(fleet.ready_workers(), ["w-2"])

    def test_workers_are_started_and_sent_away_while_it_runs(self):
        with Fleet(workers=1, sets=["worker.name=w"]) as fleet:
            client = Client(fleet.url)
            first, = fleet.ready_workers()
            data = ["--data", fleet.data]
            self.assertEqual(cli("workers", "stop", first, "--wait", "--url", fleet.url).returncode, 0)
            until(lambda: "worker-1 was stopped" in fleet.log.read_text(), "up says so")
            self.assertEqual(cli("workers", "start", *data).returncode, 0)
            until(lambda: fleet.ready_workers() == [first], "the stopped one runs again", 60)
            self.assertEqual(cli("up", "--scale", "3", *data).returncode, 0)
            until(lambda: sorted(fleet.ready_workers()) == sorted([first, "w-2", "w-3"]), "two more", 60)
            self.assertEqual(len(fleet.ready["pids"]["workers"]), 3)
            ids = [client.submit(**SMALL) for _ in range(20)]
            self.assertEqual(cli("up", "--scale", "1", *data).returncode, 0)
            until(lambda: "worker-2 was stopped" in fleet.log.read_text() and "worker-3 was stopped" in fleet.log.read_text(), "two are sent away", 60)
            self.assertEqual({client.wait(id)["state"] for id in ids}, {"succeeded"})
            until(lambda: fleet.ready_workers() == [first], "one is left")
            self.assertEqual(len(fleet.ready["pids"]["workers"]), 1)
            self.assertIn("scaled to 1 worker\n", fleet.log.read_text())
        for command in (["up", "--scale", "2"], ["workers", "start"]):
            nobody = cli(*command, *data)
            self.assertEqual(nobody.returncode, 1)
            self.assertIn("no `ditfleet up` runs with the data folder", nobody.stderr)

    def test_a_worker_that_cannot_restart_does_not_stop_the_others(self):
        model = self.folder / "model"
        shutil.copytree(tiny_model(), model)
        weights_away = weights(model).with_suffix(".away")
        with Fleet(workers=2, models={"tiny": model}) as fleet:
            client = Client(fleet.url)
            broken, healthy = fleet.ready["pids"]["workers"]
            weights(model).rename(weights_away)
            os.kill(broken, signal.SIGKILL)
            until(lambda: "the other workers continue" in fleet.log.read_text(), "the failure is logged", 60)
            self.assertIn("worker-1 exited with status 1 repeatedly", fleet.log.read_text())
            self.assertIsNone(fleet.process.poll(), fleet.tail())
            self.assertEqual(client.wait(client.submit(**SMALL))["unit_records"][0]["state"], "succeeded")
            self.assertTrue(alive(healthy))
            weights_away.rename(weights_away.with_suffix(".safetensors"))
            until(lambda: len([w for w in client.get("/v1/workers").json()["workers"] if w["state"] == "ready"]) == 2, "it is back", 60)


def answers(client, path="/readyz"):
    try:
        return client.get(path).status == 200
    except OSError:
        return False


class ResultFiles(WithFolder):
    def test_a_data_folder_error_is_not_reported_as_a_redis_error(self):
        with Fleet(sets=["results.backend=file"]) as fleet:
            client = Client(fleet.url)
            job = client.submit(**SMALL)
            client.wait(job)
            image = next(p for p in (fleet.data / "results" / "results").rglob(f"{job}*") if p.is_file())
            image.unlink()
            self.assertEqual(client.get(f"/v1/jobs/{job}/results/0").status, 410)
            image.symlink_to("/etc/hostname")
            answer = client.get(f"/v1/jobs/{job}/results/0")
            self.assertEqual(answer.status, 503, answer)
            self.assertIn(str(image), answer.error["message"])
            self.assertNotIn("Redis", answer.error["message"])


class Refusals(WithFolder):
    def up(self, *flags, code=1, data=None):
        argv = ["up", "--data", data or self.folder / "data", "--model", f"tiny={tiny_model()}"]
        if "--listen" not in flags:
            argv += ["--listen", "127.0.0.1:0"]
        done = cli(*argv, *flags)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stderr

    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            told = self.up("--listen", f"127.0.0.1:{port}")
            self.assertIn(f"127.0.0.1:{port}", told)
            self.assertIn("in use", told)
            alone = cli("coordinator", "--redis", "redis://127.0.0.1:9", "--listen", f"127.0.0.1:{port}")
            self.assertEqual(alone.returncode, 1)
            self.assertIn("another program listens on it", alone.stdout + alone.stderr)

    def test_flags(self):
        for flags, word in ((["--listen", "8780"], "HOST:PORT"), (["--listen", "127.0.0.1:99999"], "HOST:PORT"),
                            (["--workers", "-1"], "range 0 to 256"), (["--workers", "two"], "--workers"), (["--model", "tiny"], "NAME=DIR"),
                            (["--model", "m=/a", "--model", "m=/b"], "has the name 'm' twice"),
                            (["--redis", "http://x"], "redis://"), (["--device", "tpu"], "cuda"), (["--dtype", "fp8"], "bf16"),
                            (["--set", "worker.cuont=2"], "worker.count"), (["--set", "nonsense"], "key=value")):
            with self.subTest(flags):
                self.assertIn(word, self.up(*flags, code=2))
        self.assertEqual(cli("up", "--data", self.folder, "--model", "a=/no/such", env=clean_environment()).returncode, 1)

    def test_the_same_data_folder_twice(self):
        with Fleet(workers=0) as fleet:
            told = self.up(data=fleet.data)
            self.assertIn(str(fleet.process.pid), told)
            self.assertIn("--data", told)
        (self.folder / "file").write_text("")
        self.assertIn("data folder", self.up(data=self.folder / "file" / "below"))

    def test_a_ready_file_that_cannot_be_written(self):
        told = self.up("--ready-file", self.folder / "no" / "such" / "f", "--workers", "0")
        self.assertIn("--ready-file", told)


# (fault of the folder, how to make it, words of the message)
def no_folder(m): shutil.rmtree(m)
def no_index(m): (m / "model_index.json").unlink()
def broken_index(m): (m / "model_index.json").write_text("{")
def other_pipeline(m): edit(m / "model_index.json", _class_name="StableDiffusionPipeline")
def no_config(m): (m / "transformer/config.json").unlink()
def no_vae_channels(m): edit(m / "vae/config.json", block_out_channels=[])
def no_weights(m): weights(m).unlink()
def empty_weights(m): weights(m).write_bytes(b"")
def truncated(m): weights(m).write_bytes(weights(m).read_bytes()[:-100])
def truncated_header(m): weights(m).write_bytes(weights(m).read_bytes()[:40])
def header_too_long(m): weights(m).write_bytes(struct.pack("<Q", 1 << 62) + weights(m).read_bytes()[8:])
def header_no_json(m): weights(m).write_bytes(weights(m).read_bytes()[:8] + b"x" + weights(m).read_bytes()[9:])
def lying_offsets(m): header(m, lambda t: t.update(data_offsets=[t["data_offsets"][0], t["data_offsets"][1] + 8]))
def lying_shape(m): header(m, lambda t: t.update(shape=[s * 2 for s in t["shape"]]))
def huge_shape(m): header(m, lambda t: t.update(shape=[1 << 40, 1 << 40]))
def lying_dtype(m): header(m, lambda t: t.update(dtype="F64"))
def unknown_dtype(m): header(m, lambda t: t.update(dtype="Q7"))
def other_width(m): edit(m / "transformer/config.json", attention_head_dim=16, axes_dims_rope=[4, 6, 6])
def more_layers(m): edit(m / "transformer/config.json", num_layers=9)
def no_tokenizer(m): shutil.rmtree(m / "tokenizer_2")


def weights(model):
    return next((model / "transformer").glob("*.safetensors"))


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def header(model, change):
    """Changes the header entry of the first two-dimensional tensor."""
    data = weights(model).read_bytes()
    size, = struct.unpack("<Q", data[:8])
    head = json.loads(data[8:8 + size])
    change(next(t for n, t in head.items() if n != "__metadata__" and len(t["shape"]) == 2))
    text = json.dumps(head).encode()
    weights(model).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])


EARLY = [(no_folder, ["diffusers"]), (no_index, ["model_index.json", "diffusers"]), (broken_index, ["model_index.json", "JSON"]),
         (other_pipeline, ["FluxPipeline"]), (no_config, ["transformer/config.json"]), (no_vae_channels, ["block_out_channels"])]
LATE = [(no_weights, ["transformer"]), (empty_weights, ["transformer"]), (truncated, ["transformer"]), (truncated_header, ["header"]),
        (header_too_long, ["header"]), (header_no_json, ["start with '{'"]), (lying_offsets, ["bytes"]), (lying_shape, ["shape"]),
        (huge_shape, []), (lying_dtype, ["F64"]), (unknown_dtype, ["Q7"]), (other_width, []), (more_layers, []),
        (no_tokenizer, ["tokenizer_2"])]


class ModelFolders(WithFolder):
    def broken(self, make):
        model = self.folder / make.__name__
        shutil.copytree(tiny_model("dev"), model)
        make(model)
        return model

    def test_faults_that_up_detects(self):
        for make, words in EARLY:
            with self.subTest(make.__name__):
                done = cli("up", "--data", self.folder / "data", "--listen", "127.0.0.1:0", "--model", f"m={self.broken(make)}")
                self.assertEqual(done.returncode, 1)
                for word in words:
                    self.assertIn(word, done.stderr)
                self.assertFalse((self.folder / "data" / "redis").exists(), "it started something")

    def test_faults_that_a_worker_detects(self):
        for make, words in LATE:
            with self.subTest(make.__name__):
                done = run(BIN / "ditfleet-worker", "generate", "--model", self.broken(make), "--prompt", "x", "--size", "32x32",
                           "--steps", "1", "--out", self.folder / "x.png", "--device", "cpu")
                told = done.stdout + done.stderr
                self.assertEqual(done.returncode, 1, told)
                self.assertIn(make.__name__, told)  # the message names the model's folder
                for word in words:
                    self.assertIn(word, told)
                self.assertFalse((self.folder / "x.png").exists())

    def test_up_exits_if_a_worker_cannot_load_its_model(self):
        done = cli("up", "--data", self.folder / "data", "--listen", "127.0.0.1:0", "--device", "cpu", "--model",
                   f"m={self.broken(truncated)}", seconds=90)
        self.assertEqual(done.returncode, 1)
        last = done.stderr[done.stderr.rindex("ditfleet up:"):]
        self.assertIn("worker-1", last)
        self.assertIn("worker-1.log", last)
        self.assertIn("truncated/transformer", done.stderr)


class RedisAway(WithFolder):
    def setUp(self):
        super().setUp()
        self.port = free_port()
        self.processes = []
        self.addCleanup(self.end)

    def end(self):
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            if process.stdout:
                process.stdout.close()

    def start_redis(self):
        self.processes.append(start(["redis-server", "--port", self.port, "--bind", "127.0.0.1", "--dir", self.folder,
                                     "--appendonly", "yes", "--appendfsync", "always", "--save", ""], stdout=subprocess.DEVNULL))
        return self.processes[-1]

    def start_coordinator(self, *flags):
        listen = free_port()
        with open(self.folder / "coordinator.log", "a") as log:
            self.processes.append(start([DITFLEET, "coordinator", "--redis", f"redis://127.0.0.1:{self.port}", "--listen", f"127.0.0.1:{listen}",
                                         "--set", f"models.tiny.path={tiny_model()}", *flags], stdout=log))
        client = Client(f"http://127.0.0.1:{listen}")
        until(lambda: answers(client, "/healthz"), "it is alive")
        return client

    def start_worker(self, *flags, log="worker.log"):
        with open(self.folder / log, "a") as log:
            self.processes.append(start([BIN / "ditfleet-worker", "run", "--set", f"redis.url=redis://127.0.0.1:{self.port}",
                                         "--set", f"models.tiny.path={tiny_model()}", "--set", "worker.device=cpu", *flags], stdout=log))

    def check_away(self, client, of_invalid_request):
        until(lambda: client.get("/readyz").status == 503, "it says that it is not ready")
        self.assertEqual(client.get("/healthz").status, 200)
        self.assertEqual(client.get("/metrics").status, 200)
        self.assertIn(f"127.0.0.1:{self.port}", " ".join(client.get("/readyz").json()["reasons"]))
        body = {"prompt": "x", **SMALL}
        for method, path, sent in (("POST", "/v1/jobs", body), ("GET", "/v1/jobs", None), ("GET", "/v1/jobs/x", None),
                                   ("DELETE", "/v1/jobs/x", None), ("GET", "/v1/workers", None), ("GET", "/v1/jobs/x/events", None),
                                   ("POST", "/v1/images/generations", {"prompt": "x"})):
            began = time.monotonic()
            answer = client.request(method, path, sent)
            self.assertEqual((answer.status, answer.error["code"]), (503, "unavailable"), (path, answer))
            self.assertIn("Redis", answer.error["message"])
            for word in ("[", "Operation canceled", "lost the connection"):
                self.assertNotIn(word, answer.error["message"])
            self.assertGreaterEqual(int(answer.headers["Retry-After"]), 1)
            self.assertLess(time.monotonic() - began, 6, path)
        self.assertEqual(client.request("POST", "/v1/jobs", {"prompt": 5}).status, of_invalid_request)

    def test_down_at_the_start_and_later(self):
        client = self.start_coordinator()
        self.start_worker()
        self.check_away(client, 503)  # nobody is served before it is known whether there are keys
        redis = self.start_redis()
        until(lambda: answers(client), "ready once Redis is there", 15)
        until(lambda: any(w["state"] == "ready" for w in client.get("/v1/workers").json()["workers"]), "the worker too", 60)
        ended = client.submit(**SMALL)
        self.assertEqual(client.wait(ended)["state"], "succeeded")
        image = client.get(f"/v1/jobs/{ended}/results/0").body
        running = client.submit(**LONG)
        with client.events(running) as stream:
            last = None
            for event in stream:
                last = event.id
                if event.type == "step":
                    break
        redis.kill()
        redis.wait()
        self.check_away(client, 400)
        self.start_redis()
        until(lambda: answers(client), "ready again", 15)
        self.assertEqual(client.get(f"/v1/jobs/{ended}/results/0").body, image)
        with client.events(running, last) as stream:
            self.assertTrue([e for e in stream][-1].ends_job)
        self.assertEqual(client.job(running)["state"], "succeeded")

    def test_two_workers_with_one_name(self):
        self.start_redis()
        for log in ("one.log", "two.log"):
            self.start_worker("--set", "worker.name=twin", log=log)
        for log in ("one.log", "two.log"):
            until(lambda: "another worker has the name 'twin' too" in (self.folder / log).read_text(), "both say so", 30)

    def test_the_log_is_as_configured(self):
        log = self.folder / "coordinator.log"
        self.start_coordinator("--set", "log.format=json", "--set", "log.level=warning")
        until(lambda: "cannot use Redis at" in log.read_text(), "it says that Redis is away")
        for line in log.read_text().splitlines():
            told = json.loads(line)
            self.assertEqual((told["program"], told["level"]), ("ditfleet", "warning"))

    def test_clients_cannot_forge_log_lines(self):
        client = self.start_coordinator()
        self.assertEqual(client.request("POST", "/v1/models/x%0A2026-11-22%20error%20forged%1b%5B31m%C2%9B1m%7F").status, 405)
        log = self.folder / "coordinator.log"
        until(lambda: "forged" in log.read_text(), "the request is in the log")
        line = next(one for one in log.read_text().splitlines() if "forged" in one)
        self.assertIn("POST /v1/models/x\\n2026-11-22 error forged\\x1b[31m\\u009b1m\\x7f 405", line)

    def configure(self, *words):
        self.assertIn(run("redis-cli", "-p", self.port, *words).stdout.strip(), ("OK",))

    def test_it_refuses_for_a_while(self):
        """A full disk, too few replicas or missing rights are not the fault of a job."""
        self.start_redis()
        client = self.start_coordinator("--set", "scheduler.leader_ttl_ms=600")
        self.start_worker()
        until(lambda: answers(client), "ready")
        until(lambda: any(w["state"] == "ready" for w in client.get("/v1/workers").json()["workers"]), "the worker too", 60)
        running = client.submit(**{**LONG, "width": 64, "height": 64, "num_inference_steps": 60})
        client.wait_event(running, "step")
        for refuse, allow, word in ((("config", "set", "min-replicas-to-write", "1"), ("config", "set", "min-replicas-to-write", "0"), "NOREPLICAS"),
                                    (("acl", "setuser", "default", "-fcall"), ("acl", "setuser", "default", "+fcall"), "NOPERM")):
            with self.subTest(word):
                self.configure(*refuse)
                answer = client.request("POST", "/v1/jobs", {"prompt": "x", **SMALL})
                self.assertEqual((answer.status, answer.error["code"]), (503, "unavailable"), answer)
                self.assertIn(word, answer.error["message"])
                self.assertNotIn("not known", answer.error["message"])  # the outcome is known: no job was created
                self.assertIn("Retry-After", answer.headers)
                until(lambda: word in " ".join(client.get("/readyz").json()["reasons"]), "it says why nobody leads", 10)
                self.configure(*allow)
                until(lambda: answers(client), "ready again", 15)
        job = client.wait(running)
        self.assertEqual((job["state"], job["unit_records"][0]["attempt"]), ("succeeded", 1))

    def test_an_image_that_is_finished_while_redis_refuses(self):
        self.start_redis()
        client = self.start_coordinator()
        self.start_worker()
        until(lambda: answers(client), "ready")
        until(lambda: any(w["state"] == "ready" for w in client.get("/v1/workers").json()["workers"]), "the worker too", 60)
        done = self.folder / "worker.log"
        running = client.submit(**LONG)  # runs until after Redis refuses
        client.wait_event(running, "step")
        self.configure("config", "set", "min-replicas-to-write", "1")
        until(lambda: "cannot store the result yet" in done.read_text() or "failed" in done.read_text(), "the image is done", 60)
        self.configure("config", "set", "min-replicas-to-write", "0")
        job = client.wait(running)
        self.assertEqual((job["state"], job["unit_records"][0]["attempt"]), ("succeeded", 1), done.read_text())

    def test_up_waits_for_redis(self):
        ready = self.folder / "ready.json"
        with open(self.folder / "up.log", "a") as log:
            self.processes.append(start([DITFLEET, "up", "--redis", f"redis://127.0.0.1:{self.port}", "--data", self.folder / "data",
                                         "--listen", "127.0.0.1:0", "--workers", "0", "--model", f"tiny={tiny_model()}",
                                         "--ready-file", ready], stdout=log))
        until(lambda: "serving at" in (self.folder / "up.log").read_text(), "it serves")
        self.assertFalse(ready.exists())
        url = re.search(r"serving at (http://\S+?)[,;]?\s", (self.folder / "up.log").read_text())[1]
        self.assertEqual(Client(url).get("/readyz").status, 503)
        self.assertNotIn("/readyz", (self.folder / "up.log").read_text())  # polled ten times a second
        self.start_redis()
        until(ready.exists, "ready")
        told = json.loads(ready.read_text())
        self.assertIsNone(told["pids"]["redis"])
        self.assertEqual(told["redis"], f"redis://127.0.0.1:{self.port}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
