"""Jobs whose worker is killed, stopped or drained go on where they were, and end as if nothing had happened.
DITFLEET_TEST_RESUMES=200: as often."""
import os
import random
import re
import signal
import unittest

from adapters import Redis
from api import Client
from fleet import ROOT, Fleet, cli, tiny_model, until

COUNT = int(os.environ.get("DITFLEET_TEST_RESUMES", 6))
LONG = {"model": "tiny", "width": 512, "height": 512, "num_inference_steps": 150}
VIDEO = {"model": "video", "width": 256, "height": 256, "frames": 17, "num_inference_steps": 100, "negative_prompt": "b"}
MODELS = {"tiny": tiny_model("dev"), "video": ROOT / "tests/fixtures/wan/two/model"}


class Resumes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.fleet = cls.enterClassContext(Fleet(workers=2, models=MODELS, sets=["worker.checkpoint_ms=200", "queue.lease_ms=1500", "queue.renew_ms=300", "worker.drain_ms=300",
                                                                                "queue.max_crashes=100", "queue.max_attempts=100", "queue.retry_backoff_ms=100"]))
        cls.http = Client(cls.fleet.url)
        cls.redis = Redis(cls.fleet.redis_socket)

    def reached(self, id, step):
        unit = self.http.job(id)["unit_records"][0]
        return unit["step"] >= step and unit

    def result(self, job):
        self.assertEqual(job["state"], "succeeded", job)
        unit, = job["unit_records"]
        return unit["result"]["sha256"], unit["result"]["receipt"]

    def pid_of(self, worker):
        return next(w["pid"] for w in self.http.get("/v1/workers").json()["workers"] if w["name"] == worker)

    def interrupt(self, id, signal_):
        """Ends the attempt at the job, and returns the step that was reported before."""
        unit = until(lambda: self.reached(id, random.randint(20, 60)), "it runs", 60)
        pid = self.pid_of(unit["worker"])
        os.kill(pid, signal_)
        return unit["step"]

    def restore(self):
        """Starts workers that were stopped."""
        if len(self.fleet.ready["pids"]["workers"]) < 2:
            cli("up", "--scale", "2", "--data", self.fleet.data)
        until(lambda: len([w for w in self.http.get("/v1/workers").json()["workers"] if w["state"] == "ready"]) == 2, "two workers are ready", 60)

    def test_interrupted_jobs_end_as_others_do(self):
        wanted, resumed = {}, 0
        for round in range(COUNT):
            fields = [LONG, VIDEO][round % 2]
            if fields["model"] not in wanted:
                wanted[fields["model"]] = self.result(self.http.wait(self.http.submit(seed=3, **fields)))
            how = [signal.SIGKILL, signal.SIGTERM][round // 2 % 2]
            with self.subTest(round=round, how=how.name, model=fields["model"]):
                id = self.http.submit(seed=3, **fields)
                step = self.interrupt(id, how)
                self.assertEqual(self.result(self.http.wait(id)), wanted[fields["model"]])
                log = self.fleet.log.read_text()
                found = re.search(f"unit {id}/0: goes on from the checkpoint after step (\\d+)", log)
                self.assertTrue(found, f"after step {step}: it began again")
                resumed += 1
                if how == signal.SIGTERM:
                    self.assertGreaterEqual(int(found[1]), step, "a worker that leaves stores what it has done")
                until(lambda: not self.redis("KEYS", f"df:{{0}}:checkpoint:{id}:*") and not self.redis("KEYS", f"df:{{0}}:blob:{id}:0:*-*"), "nothing is kept of an ended job")
                self.restore()
        print(f"{resumed} of {COUNT} went on")

    def test_a_checkpoint_that_is_gone_or_damaged_costs_only_progress(self):
        wanted = self.result(self.http.wait(self.http.submit(seed=4, **LONG)))
        for harm in ("gone", "damaged"):
            id = self.http.submit(seed=4, **LONG)
            until(lambda: self.redis("GET", f"df:{{0}}:checkpoint:{id}:0"), "a checkpoint is stored", 60)
            unit = self.http.job(id)["unit_records"][0]
            os.kill(self.pid_of(unit["worker"]), signal.SIGKILL)
            for key in self.redis("KEYS", f"df:{{0}}:blob:{id}:0:*"):
                self.redis("DEL", key) if harm == "gone" else self.redis("SETRANGE", key, "5000", "damage")
            self.assertEqual(self.result(self.http.wait(id)), wanted)
            self.assertRegex(self.fleet.log.read_text(), f"unit {id}/0: begins again: the checkpoint of an earlier attempt cannot be read")
            self.restore()

    def test_short_jobs_store_none(self):
        with Fleet(workers=1, models={"tiny": tiny_model()}) as fleet:
            http = Client(fleet.url)
            self.result(http.wait(http.submit(width=256, height=256, num_inference_steps=20)))
            self.assertEqual(Redis(fleet.redis_socket)("KEYS", "df:{0}:checkpoint:*"), [])


if __name__ == "__main__":
    unittest.main()
