"""Workers that crash, hang or fail while they run one job, by faults in the test family (tests/test_family). The fault
costs that job at most; all other jobs succeed."""
import tempfile
import time
import unittest
from pathlib import Path

from api import Client
from fleet import Fleet, until
from video_model import write_video_model

folder = tempfile.TemporaryDirectory(prefix="ditfleet-faults-")
FOLDER = Path(folder.name)
MODEL = FOLDER / "video"
write_video_model(MODEL)
SLOW = "fault step sleep"  # 200 ms per step


def tearDownModule():
    folder.cleanup()


class TestFaults(unittest.TestCase):
    def fleet(self, sets=()):
        sets = ["queue.lease_ms=1500", "queue.renew_ms=300", *sets]  # a unit of a dead worker waits for its lease
        fleet = self.enterContext(Fleet(workers=2, models={"video": MODEL}, sets=sets))
        self.client = Client(fleet.url, timeout=120)
        return fleet

    def submit(self, prompt, **fields):
        return self.client.submit(prompt=prompt, **fields)

    def events(self, id):
        with self.client.events(id) as stream:
            return list(stream)  # of a job that has ended

    def succeeds(self, id):
        job = self.client.wait(id)
        self.assertEqual(job["state"], "succeeded", job)
        return job

    def test_a_job_that_kills_its_worker_before_it_starts_is_buried_alone(self):
        self.fleet()
        slow = [self.submit(SLOW, num_inference_steps=40) for _ in range(3)]
        until(lambda: any(self.client.job(id)["state"] == "running" for id in slow), "a long job runs")
        poison = self.submit("fault text crash")
        job = self.client.wait(poison)
        self.assertEqual(job["state"], "failed", job)
        lapses = [e for e in self.events(poison) if e.type == "ready" and e.data.get("reason") == "lease lapsed"]
        self.assertLessEqual(len(lapses), 4, lapses)  # the fifth fails it
        for id in slow:
            self.succeeds(id)

    def test_a_job_that_kills_its_worker_while_it_runs_is_buried_alone(self):
        self.fleet()
        slow = [self.submit(SLOW, num_inference_steps=40) for _ in range(3)]
        poison = self.submit("fault step crash")
        job = self.client.wait(poison)
        self.assertEqual(job["state"], "failed", job)
        for id in slow:
            self.succeeds(id)

    def test_a_stage_that_hangs_costs_its_worker_and_the_unit_runs_elsewhere(self):
        self.fleet(sets=["worker.stuck_ms=1000"])
        for stage in ("text", "step", "decode"):
            self.succeeds(self.submit("a job of the same class"))  # so that its time is known on one worker
            with self.subTest(stage=stage):
                once = FOLDER / f"once-{stage}"
                once.touch()
                id = self.submit(f"fault {stage} hang {once}")
                until(lambda: not once.exists(), "the stage hangs")
                began = time.monotonic()
                self.succeeds(id)
                # At most five times the bound until it is noticed, and 15 s until it has run elsewhere.
                self.assertLess(time.monotonic() - began, 5 + 15)

    def test_a_worker_that_fails_every_job_fast_harms_none(self):
        self.fleet()
        busy = self.submit(SLOW, num_inference_steps=50)
        owner = self.client.wait_event(busy, "started") and self.client.job(busy)["unit_records"][0]["worker"]
        sick = FOLDER / "sick"
        sick.mkdir()
        for worker in self.client.get("/v1/workers").json()["workers"]:
            if worker["name"] != owner:
                (sick / str(worker["pid"])).touch()
        jobs = [self.submit(f"fault text memory {sick}", seed=i) for i in range(60)]
        for id in [busy, *jobs]:
            self.succeeds(id)


if __name__ == "__main__":
    unittest.main()
