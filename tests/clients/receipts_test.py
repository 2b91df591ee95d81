"""What results say of how they were made, `ditfleet replay`, and what tenants have used."""
import json
import time
import unittest

from adapters import Redis
from api import Client
from fleet import Fleet, Shared, cli

SMALL = {"width": 64, "height": 32, "num_inference_steps": 2}
shared = Shared(workers=2, sets=["default_model=tiny"])
setUpModule, tearDownModule = shared.start, shared.stop


class Receipts(unittest.TestCase):
    def setUp(self):
        self.http = Client(shared.fleet.url)

    def run_job(self, **fields):
        return self.http.wait(self.http.submit(**SMALL, **fields))

    def receipts(self, job):
        return [unit["result"]["receipt"] for unit in job["unit_records"]]

    def test_equal_jobs_have_equal_receipts_and_bytes(self):
        first, second = (self.run_job(seed=5, n=2, priority=priority) for priority in (0, 3))
        self.assertEqual(self.receipts(first), self.receipts(second))
        self.assertEqual([unit["result"]["sha256"] for unit in first["unit_records"]], [unit["result"]["sha256"] for unit in second["unit_records"]])
        receipt, other = self.receipts(first)
        self.assertEqual((receipt["seed"], other["seed"], receipt["model"]["name"], receipt["gpus"], receipt["precision"]), (5, 6, "tiny", 1, "fp32"))
        self.assertNotEqual(receipt["id"], other["id"])
        self.assertRegex(receipt["model"]["digest"], "^[0-9a-f]{64}$")
        self.assertIn("every worker", receipt["same_bytes"])
        third = self.run_job(prompt="another", seed=5)
        self.assertNotEqual(self.receipts(third)[0]["id"], receipt["id"])
        self.assertGreater(first["gpu_seconds"], 0)
        self.assertAlmostEqual(first["gpu_seconds"], sum(unit["result"]["gpu_seconds"] for unit in first["unit_records"]))

    def test_a_picture_names_its_receipt(self):
        with Fleet(sets=["default_model=tiny", "results.carry_receipts=true"]) as carrying:
            for fleet, carries in ((carrying, True), (shared.fleet, False)):
                http = Client(fleet.url)
                job = http.wait(http.submit(**SMALL))
                picture = http.get(f"/v1/jobs/{job['id']}/results/0").body
                comment = b"tEXtComment\0DiTFleet receipt " + self.receipts(job)[0]["id"].encode()
                self.assertEqual(comment in picture, carries)
        unit, = job["unit_records"]
        self.assertGreater(unit["result"]["first_step_us"], 0)
        self.assertLessEqual(unit["result"]["first_step_us"], unit["phases_us"]["denoise"])
        self.assertEqual(unit["result"]["compiled"], 0)
        self.assertIn("LibTorch 2.", self.receipts(job)[0]["software"])

    def test_replay(self):
        for count in range(50):
            job = self.run_job(prompt=f"picture {count}", n=1 + count % 2)
            done = cli("replay", job["id"], "--url", shared.fleet.url, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual([unit["same_bytes"] for unit in json.loads(done.stdout)["units"]], [True] * (1 + count % 2))

    def test_a_replay_that_differs(self):
        job = self.run_job(n=2)
        # As if another version had made the second result.
        redis = Redis(shared.fleet.redis_socket)
        manifest = json.loads(redis("HGET", "df:{0}:job:" + job["id"], "m1"))
        manifest["sha256"], manifest["receipt"]["software"] = "0" * 64, "ditfleet 0.0.1"
        redis("HSET", "df:{0}:job:" + job["id"], "m1", json.dumps(manifest))
        done = cli("replay", job["id"], "--url", shared.fleet.url)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, 'unit 0: the same bytes\nunit 1: other bytes: software "ditfleet 0.0.1", now "ditfleet 0.1.0 .*"\n')
        self.assertIn("1 of 2 results", done.stderr)
        queued = self.http.submit(model="tiny", width=256, height=256, num_inference_steps=200)
        self.http.cancel(queued)
        self.assertEqual(cli("replay", queued, "--url", shared.fleet.url).returncode, 2)
        self.assertIn("not found", cli("replay", "none", "--url", shared.fleet.url).stderr)

    def test_usage_by_month(self):
        month = time.strftime("%Y-%m", time.gmtime())
        before = self.http.get("/v1/usage").json()
        self.assertEqual((before["tenant"], before["months"][0]["month"]), ("default", month))
        spent = sum(self.run_job()["gpu_seconds"] for _ in range(3))
        now = self.http.get("/v1/usage").json()["months"][0]["gpu_seconds"]
        self.assertAlmostEqual(now - before["months"][0]["gpu_seconds"], spent, places=3)
        tenant, = self.http.get("/v1/tenants").json()["tenants"]
        self.assertAlmostEqual(tenant["gpu_seconds_this_month"], now, places=3)
        redis = Redis(shared.fleet.redis_socket)
        self.assertGreater(redis("TTL", f"df:{{0}}:usage:{month}"), 300 * 86400)
        redis("HSET", "df:{0}:usage:2026-01", "default", "2500000", "other", "1")
        months = {one["month"]: one["gpu_seconds"] for one in self.http.get("/v1/usage").json()["months"]}
        self.assertEqual(months.get("2026-01", 2.5 if time.gmtime().tm_year > 2026 else None), 2.5)


if __name__ == "__main__":
    unittest.main()
