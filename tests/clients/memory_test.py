"""Workers with little device memory: jobs that are too large, models that do not fit together, offloaded weights."""
import glob
import json
import os
import unittest

from api import Client
from fleet import BIN, Fleet, ROOT, run, until

DEMO = ROOT / "deploy" / "demo-model" / "model"
VIDEO = ROOT / "tests" / "fixtures" / "wan" / "two" / "model"
GIB = 1 << 30
SLOTS = "worker.lora.slots=1"  # the demo model's weights are smaller than four slots


def worker_plan(*argv):
    return run(str(BIN / "ditfleet-worker"), "plan", "--device", "cpu", "--model", DEMO, *argv)


def plan(*argv):
    """What `plan --json` prints, and its exit code."""
    done = worker_plan("--json", "--set", SLOTS, *argv)
    return json.loads(done.stdout), done.returncode, done.stderr


class Plan(unittest.TestCase):
    def test_plans(self):
        resident, code, _ = plan("--size", "256x256")
        self.assertEqual((code, resident["plan"]["name"], resident["rejected"]), (0, "resident", []))
        self.assertIsNone(resident["available_bytes"])
        peak = resident["plan"]["peak_bytes"]
        less, code, _ = plan("--size", "256x256", "--memory-limit", str((peak - (1 << 20)) / GIB))
        self.assertEqual((code, less["plan"]["name"]), (0, "model"))
        self.assertEqual([one["plan"] for one in less["rejected"]], ["resident"])
        self.assertLess(less["plan"]["peak_bytes"], less["available_bytes"])
        self.assertEqual(less["plan"]["copied_bytes_per_request"],
                         less["bytes"]["text_encoders"] + less["bytes"]["modulation"])
        block, code, _ = plan("--size", "256x256", "--memory-limit", str((peak - (20 << 20)) / GIB))
        self.assertEqual((code, block["plan"]["name"]), (0, "block"))
        self.assertGreater(block["plan"]["copied_bytes_per_step"], 0)
        none, code, message = plan("--size", "1024x1024", "--memory-limit", "0.1")
        self.assertEqual((code, none["plan"], len(none["rejected"])), (1, None, 3))
        self.assertIn("does not fit into 102.4 MiB", message)

    def test_what_each_number_of_frames_takes(self):
        done = run(str(BIN / "ditfleet-worker"), "plan", "--json", "--device", "cpu", "--model", VIDEO, "--frames", "61",
                   "--size", "64x64", "--set", "compile.mode=default",
                   "--set", "compile.rules=[{max_frames: 49, mode: reduce-overhead}, {min_frames: 81, mode: none}]")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)["by_frames"]
        self.assertEqual([(row["frames"], row["mode"]) for row in rows],
                         [(1, "reduce-overhead"), (25, "reduce-overhead"), (49, "reduce-overhead"), (61, "default"),
                          (81, "none"), (121, "none")])
        peaks = [row["plan"]["peak_bytes"] for row in rows]
        self.assertEqual(peaks, sorted(peaks))
        self.assertLess(peaks[0], peaks[-1])

    def test_wrong_usage(self):
        for flags, words in ((["--size", "100x100"], "not a multiple of 16"),
                             (["--size", "64x64", "--memory-limit", "-1"], "must be a number from 0"),
                             (["--size", "64x64", "--offload", "disk"], "one of auto, none, model, block")):
            done = worker_plan(*flags)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(words, done.stderr)


class Fleets(unittest.TestCase):
    def test_a_job_that_no_worker_can_hold(self):
        with Fleet(models={"demo": DEMO}, sets=[SLOTS], flags=["--memory-limit", "0.25"]) as fleet:
            client = Client(fleet.url)
            limits = client.get("/v1/workers").json()["workers"][0]["memory"]["demo"]["limits"]
            self.assertEqual([one["plan"] for one in limits], ["resident", "model", "block"])
            small = client.wait(client.submit(width=128, height=128, num_inference_steps=2))
            self.assertEqual(small["state"], "succeeded")
            refused = client.wait(client.submit(width=2048, height=2048, num_inference_steps=2))
            self.assertEqual(refused["state"], "rejected", refused)
            self.assertRegex(refused["error"]["message"], r"at most [0-9,]+ pixels fit")
            later = client.wait(client.submit(width=64, height=64, num_inference_steps=2))
            self.assertEqual(later["state"], "succeeded")

    def test_two_models_that_do_not_fit_together(self):
        with Fleet(models={"a": DEMO, "b": DEMO}, sets=["memory.limit=0.12", SLOTS]) as fleet:
            client = Client(fleet.url)
            for i in range(10):
                ids = [client.submit(model=model, width=64, height=64, num_inference_steps=2, seed=7) for model in "ab"]
                self.assertEqual([client.wait(id)["state"] for id in ids], ["succeeded"] * 2)
            memory = client.get("/v1/workers").json()["workers"][0]["memory"]
            self.assertEqual(set(memory), {"a", "b"})

    def test_workers_share_the_host_copies(self):
        def copies():
            return set(glob.glob(f"/dev/shm/ditfleet-{os.geteuid()}-*"))

        before = copies()
        counts = []
        for workers in (1, 2):
            with Fleet(workers=workers, models={"demo": DEMO}, sets=["memory.offload=block", SLOTS]) as fleet:
                client = Client(fleet.url)
                ids = [client.submit(width=64, height=64, num_inference_steps=2) for _ in range(4)]
                self.assertEqual([client.wait(id)["state"] for id in ids], ["succeeded"] * 4)
                counts.append(len(copies() - before))
            until(lambda: not copies() - before, "the last worker removes the copies", 10)
        self.assertGreater(counts[0], 0)
        self.assertEqual(counts[0], counts[1])


if __name__ == "__main__":
    unittest.main(verbosity=2)
