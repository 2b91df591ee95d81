"""Scaling by hand: workers that are drained, resumed and stopped under load, and the numbers for an autoscaler."""
import json
import os
import re
import signal
import time
import unittest

from api import Client
from fleet import BIN, DITFLEET, Fleet, cli, clean_environment, start, until

# About a second on a core.
UNIT = {"width": 256, "height": 256, "num_inference_steps": 30, "max_sequence_length": 16}


class Service(unittest.TestCase):
    """A fleet without workers and a second coordinator; each test starts its own workers."""

    def setUp(self):
        self.fleet = self.enterContext(Fleet(workers=0))
        self.client = Client(self.fleet.url)
        self.processes = {}
        self.addCleanup(self.end_processes)

    def end_processes(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(60)

    def launch(self, name, *argv):
        path = self.fleet.folder / f"{name}.log"
        with open(path, "a") as log:
            self.processes[name] = start(argv, stdout=log, env=clean_environment())
        self.processes[name].path = path
        return self.processes[name]

    def start_worker(self, name):
        return self.launch(name, BIN / "ditfleet-worker", "run", "--config", self.fleet.data / "effective.yaml", "--name", name,
                           "--set", "worker.threads=1")

    def start_coordinator(self):
        process = self.launch("coordinator-2", DITFLEET, "coordinator", "--config", self.fleet.data / "effective.yaml",
                              "--set", "gateway.listen=127.0.0.1:0")
        found = until(lambda: re.search(r"serving at (http://\S+?)[,;]?\s", process.path.read_text()), "it serves", 60)
        second = Client(found[1])
        until(lambda: second.get("/readyz").status == 200, "it is ready")
        return second

    def workers(self, client=None):
        return {w["name"]: w for w in (client or self.client).get("/v1/workers").json()["workers"]}

    def state(self, name):
        return self.workers().get(name, {}).get("state")

    def wait_for(self, name, state):
        until(lambda: self.state(name) == state or self.processes[name].poll() is not None, f"{name} is {state}", 60)
        self.assertEqual(self.state(name), state, self.processes[name].path.read_text()[-2000:])

    def scaling(self, client=None):
        answer = (client or self.client).get("/v1/scaling?seconds=5")
        self.assertEqual(answer.status, 200, answer)
        return answer.json()

    def cli(self, *argv, code=0):
        done = cli("workers", *argv, "--url", self.fleet.url)
        self.assertEqual(done.returncode, code, done)
        return done

    def post(self, client, name, act):
        answer = client.request("POST", f"/v1/workers/{name}/{act}")
        self.assertEqual(answer.status, 202, answer)
        return answer.json()

    def busy(self, name, seconds=0.0):
        """Whether a unit runs whose predicted end is more than that away."""
        worker = self.workers().get(name, {})
        return worker.get("busy_units") and worker["empty_in_ms"] and worker["empty_in_ms"] > 1000 * seconds

    def empty(self, name, client, act):
        """Drains the worker in the middle of a unit. Prints the time until it is empty beside the prediction."""
        until(lambda: self.busy(name, 0.5), f"{name} is in the middle of a unit", 60)
        began = time.monotonic()
        predicted = self.post(client, name, act)["empty_in_ms"] / 1000

        def is_empty():
            worker = self.workers().get(name)
            return worker is None or (worker["state"] == "draining" and not worker["busy_units"])
        until(is_empty, f"{name} is empty", 60)
        print(f"{act} {name}: empty after {time.monotonic() - began:.2f} s, {predicted:.2f} s predicted")

    def attempts(self, ids):
        jobs = [self.client.wait(id) for id in ids]
        self.assertEqual({job["state"] for job in jobs}, {"succeeded"}, jobs)
        return [unit["attempt"] for job in jobs for unit in job["unit_records"]]


class Scale(Service):
    def test_out_to_four_and_in_to_one_under_load(self):
        second = self.start_coordinator()
        self.assertIn("ditfleet_scheduler_leading 0", second.get("/metrics").body.decode())
        ids = [self.client.submit(n=4, seed=1, **UNIT) for _ in range(8)]
        until(lambda: self.scaling()["units"] == 32, "all units are counted, with no worker")
        cold = self.scaling()
        self.assertEqual(cold["ready_workers"], 0)
        self.assertGreater(cold["backlog_gpu_seconds"], 0)
        self.assertGreaterEqual(cold["workers_needed"], 1)
        names = [f"w{i}" for i in range(4)]
        for name in names:
            self.start_worker(name)
        for name in names:
            self.wait_for(name, "ready")
        until(lambda: self.scaling()["ready_workers"] == 4, "the four are counted")
        until(lambda: all(self.busy(name) for name in names), "all work", 60)
        # Every gateway answers, from the same numbers.
        ours, theirs = self.scaling(), self.scaling(second)
        self.assertEqual(set(ours), set(theirs))
        self.assertEqual(theirs["ready_workers"], 4)
        self.assertGreater(theirs["models"]["tiny"]["backlog_gpu_seconds"], 0)
        self.assertRegex(self.client.get("/metrics").body.decode(), r'ditfleet_backlog_gpu_seconds\{model="tiny"\} [1-9]')
        self.assertIn('ditfleet_backlog_gpu_seconds{model="tiny"} 0\n', second.get("/metrics").body.decode(),
                      "a coordinator that does not lead counts nothing")

        until(lambda: self.scaling()["units"] <= 24, "runs have been observed", 120)
        for name, client, act in (("w1", self.client, "drain"), ("w2", second, "drain"), ("w3", self.client, "stop")):
            self.empty(name, client, act)
        self.assertGreater(self.scaling()["units"], 0, "the fleet was under load")
        self.assertEqual(self.processes["w3"].wait(30), 0, "a worker that is stopped ends with status 0")
        until(lambda: self.scaling()["ready_workers"] == 1, "one is left")
        self.assertEqual(set(self.attempts(ids)), {1}, "no unit was lost or tried again")
        for name in ("w1", "w2"):
            self.assertEqual(self.workers()[name]["busy_units"], 0)
        until(lambda: self.scaling()["backlog_gpu_seconds"] == 0 and self.scaling(second)["units"] == 0, "no backlog is left")
        self.assertEqual(self.scaling()["workers_needed"], 0)
        until(lambda: 'ditfleet_backlog_gpu_seconds{model="tiny"} 0\n' in self.client.get("/metrics").body.decode(), "nor in the gauge")

    def test_the_next_leader_publishes_the_numbers(self):
        second = self.start_coordinator()
        id = self.client.submit(**UNIT)
        until(lambda: self.scaling(second)["units"] == 1, "the job is counted")
        pid = self.fleet.ready["pids"]["coordinator"]
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: "ditfleet_scheduler_leading 1" in second.get("/metrics").body.decode(), "the other one leads", 30)
            until(lambda: second.cancel(id).status == 202, "the job is canceled")
            until(lambda: second.get("/v1/scaling").json().get("units") == 0, "the new leader publishes")
        finally:
            os.kill(pid, signal.SIGCONT)


class Wishes(Service):
    def test_a_drained_worker_stays_drained_until_it_is_resumed(self):
        self.start_worker("gpu-1")
        self.wait_for("gpu-1", "ready")
        self.assertRegex(self.cli("drain", "gpu-1", "--wait").stdout, "gpu-1: empty")
        self.assertEqual(self.state("gpu-1"), "draining")
        id = self.client.submit(**UNIT)
        until(lambda: self.client.job(id)["state"] == "ready", "the job waits")
        self.assertRegex(self.client.job(id)["unit_records"][0]["waits_for"], "1 is draining")
        for end in ("terminate", "kill"):
            getattr(self.processes["gpu-1"], end)()
            self.assertEqual(self.processes["gpu-1"].wait(30), 0 if end == "terminate" else -9)
            boot = self.workers().get("gpu-1", {}).get("boot")
            self.start_worker("gpu-1")
            until(lambda: self.workers().get("gpu-1", {}).get("boot") not in (None, boot), "it is back", 60)
            self.wait_for("gpu-1", "draining")
        self.assertEqual(self.client.job(id)["state"], "ready")
        self.assertEqual(self.cli("resume", "gpu-1").stdout, "gpu-1: takes units again\n")
        self.assertEqual(self.client.wait(id)["unit_records"][0]["attempt"], 1)

        self.assertEqual(self.cli("stop", "gpu-1", "--wait").stdout, "gpu-1: stopped\n")
        self.assertEqual(self.processes["gpu-1"].wait(30), 0)
        self.start_worker("gpu-1")  # the wish was for the run before
        self.wait_for("gpu-1", "ready")
        self.assertEqual(self.client.wait(self.client.submit(**UNIT))["state"], "succeeded")

    def test_a_drain_that_takes_longer_than_the_timeout(self):
        self.start_worker("gpu-1")
        id = self.client.submit(**{**UNIT, "width": 512, "height": 512, "num_inference_steps": 40})
        self.client.wait_event(id, "step")
        failed = self.cli("drain", "gpu-1", "--wait", "--timeout", "1", code=1)
        self.assertIn("not empty within 1 s: gpu-1", failed.stderr)
        self.assertEqual(self.cli("drain", "gpu-1").returncode, 0, "it may be repeated")
        self.client.cancel(id)
        self.assertIn("gpu-1: empty", self.cli("drain", "gpu-1", "--wait").stdout)

    def test_a_wrong_name(self):
        self.start_worker("gpu-1")
        self.wait_for("gpu-1", "ready")
        self.assertIn("no worker 'gpu-11' is registered; did you mean 'gpu-1'?", self.cli("drain", "gpu-11", code=1).stderr)
        self.assertIn("name", self.cli("drain", code=2).stderr)
        self.assertIn("did you mean '--wait'?", self.cli("drain", "gpu-1", "--wiat", code=2).stderr)
        self.assertIn("did you mean '--json'?", self.cli("drain", "gpu-1", "--jsno", code=2).stderr)
        self.assertEqual(json.loads(self.cli("--json", "resume", "gpu-1").stdout)["workers"][0]["name"], "gpu-1")
        self.assertIn("did you mean 'drain'?", self.cli("drian", "gpu-1", code=2).stderr)
        self.assertEqual(self.cli().stdout.split()[0], self.cli("list").stdout.split()[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
