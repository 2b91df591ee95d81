"""Batches: many jobs in one call by HTTP, and `ditfleet batch`."""
import hashlib
import json
import tempfile
import time
import unittest
from pathlib import Path

from api import Client
from fleet import Fleet, Shared, cli, until
from image import describe

SMALL = {"width": 32, "height": 32, "num_inference_steps": 1}
shared = Shared(workers=1, sets=["default_model=tiny", "queue.max_queued=200000"])
setUpModule, tearDownModule = shared.start, shared.stop


def jsonl(rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


def send(http, rows, query="", **headers):
    return http.request("POST", "/v1/batches" + query, jsonl(rows), {"Content-Type": "application/jsonl", **headers})


def ended(http, id):
    return until(lambda: (batch := http.get("/v1/batches/" + id).json())["status"] in ("completed", "cancelled") and batch, "the batch ends", 60)


def results(http, id):
    answer = http.get(f"/v1/batches/{id}/results")
    assert answer.headers["Content-Type"] == "application/jsonl", answer
    return [json.loads(line) for line in answer.body.decode().splitlines()]


class Batches(unittest.TestCase):
    def setUp(self):
        self.http = Client(shared.fleet.url)

    def test_lines_of_each_form(self):
        image = {"custom_id": "circle", "method": "POST", "url": "/v1/images/generations", "body": {"prompt": "a circle", "size": "48x32"}}
        made = send(self.http, [{"prompt": "a", **SMALL}, "", {"custom_id": "b", "body": {"prompt": "b", "n": 2, **SMALL}}, image])
        self.assertEqual(made.status, 202, made)
        id = made.json()["id"]
        self.assertEqual((made.headers["Location"], made.json()["object"], made.json()["request_counts"]["total"]), ("/v1/batches/" + id, "batch", 3))
        batch = ended(self.http, id)
        self.assertEqual((batch["status"], batch["progress"], batch["request_counts"]), ("completed", 1, {"total": 3, "completed": 3, "failed": 0, "canceled": 0}))
        rows = results(self.http, id)
        self.assertEqual([(row["line"], row["custom_id"], row["state"], row["id"]) for row in rows],
                         [(1, None, "succeeded", id + "-1"), (3, "b", "succeeded", id + "-3"), (4, "circle", "succeeded", id + "-4")])
        self.assertEqual(len(rows[1]["response"]["body"]["unit_records"]), 2)
        picture = self.http.get(rows[2]["response"]["body"]["unit_records"][0]["result"]["url"])
        self.assertEqual(describe(picture.body), ("png", 48, 32))
        self.assertEqual(self.http.job(id + "-3")["spec"]["prompt"], "b")

    def test_a_wrong_line(self):
        rows = [{"prompt": "a", **SMALL}, {"custom_id": "x", "body": {"prompt": "b", "width": 7}}, "{", {"prompt": "c", **SMALL}, {"custom_id": "y", "url": "/v1/videos", "body": {}}]
        before = len(self.http.get("/v1/jobs?limit=200").json()["jobs"])
        refused = send(self.http, rows)
        self.assertEqual(refused.status, 400, refused)
        self.assertRegex(refused.error["message"], "^line 2: width is 7.*3 of 5 lines.*on_error=skip")
        self.assertEqual([(one["line"], one["custom_id"]) for one in refused.json()["errors"]], [(2, "x"), (3, None), (5, "y")])
        self.assertEqual(len(self.http.get("/v1/jobs?limit=200").json()["jobs"]), before)
        made = send(self.http, rows, "?on_error=skip")
        self.assertEqual(made.status, 202, made)
        batch = ended(self.http, made.json()["id"])
        self.assertEqual(batch["request_counts"], {"total": 5, "completed": 2, "failed": 3, "canceled": 0})
        self.assertEqual([(row["line"], row["state"]) for row in results(self.http, batch["id"])],
                         [(2, "refused"), (3, "refused"), (5, "refused"), (1, "succeeded"), (4, "succeeded")])

    def test_bad_requests(self):
        for rows, query, says in (([""], "", "empty"), ([{"prompt": "a"}], "?on_error=maybe", "refuse or skip"), ([{"prompt": "a", "image": "aGk="}], "", "image"),
                                  ([{"prompt": "a", "image": "0" * 64}], "", "image"), ([{"body": {"prompt": "a"}, "method": "GET"}], "", "method"),
                                  ([{"url": "/v1/images/generations", "body": {"prompt": "a", "stream": True}}], "", "stream"), (["[]"], "", "object"), ([{"prompt": "a", "webhook": "http://localhost"}], "", "allow_private")):
            with self.subTest(rows=rows):
                refused = send(self.http, rows, query)
                self.assertEqual(refused.status, 400, refused)
                self.assertIn(says, refused.error["message"])
        self.assertEqual(self.http.request("POST", "/v1/batches", {"prompt": "a"}).status, 415)
        for method, path in (("GET", "/v1/batches/none"), ("POST", "/v1/batches/none/cancel"), ("GET", "/v1/batches/none/results"), ("GET", "/v1/batches/a%20b")):
            self.assertEqual(self.http.request(method, path).status, 404, path)

    def test_the_same_key_is_the_same_batch(self):
        rows = [{"prompt": "once", **SMALL}] * 3
        first, second = (send(self.http, rows, **{"Idempotency-Key": "key-1"}) for _ in range(2))
        self.assertEqual(first.json()["id"], second.json()["id"])
        self.assertEqual(ended(self.http, first.json()["id"])["request_counts"]["completed"], 3)
        third = send(self.http, [{"prompt": "another", **SMALL}] * 3, **{"Idempotency-Key": "key-1"})
        self.assertEqual(third.status, 422, third)
        self.assertEqual(len(results(self.http, first.json()["id"])), 3)

    def test_the_command(self):
        with tempfile.TemporaryDirectory() as folder:
            file, out = Path(folder, "batch.jsonl"), Path(folder, "out")
            file.write_text(jsonl([{"custom_id": "one", "body": {"prompt": "a", **SMALL}}, {"prompt": "b", "n": 2, **SMALL}]) + "\n")
            done = cli("batch", file, "-o", out, "--url", shared.fleet.url)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^batch_\w+: 2 of 2 succeeded\n$")
            self.assertEqual(sorted(path.name for path in out.iterdir()), ["2-1.png", "2-2.png", "one.png"])
            self.assertEqual(describe((out / "one.png").read_bytes()), ("png", 32, 32))
            file.write_text(file.read_text() + '{"prompt": "c", "width": 7}\n')
            refused = cli("batch", file, "--url", shared.fleet.url)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn("line 3: width is 7", refused.stderr)
            skipped = cli("batch", file, "--skip-errors", "--json", "--url", shared.fleet.url)
            self.assertEqual([json.loads(line)["state"] for line in skipped.stdout.splitlines()], ["refused", "succeeded", "succeeded"])
            self.assertEqual(skipped.returncode, 1)
            started = cli("batch", file, "--skip-errors", "--no-wait", "--url", shared.fleet.url)
            self.assertRegex(started.stdout, r"^batch_\w+\n$")


class Many(unittest.TestCase):
    def test_10_000_lines_are_accepted_and_canceled(self):
        keys = [{"tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": False} for name in ("acme", "other")]
        with Fleet(workers=0, config=json.dumps({"keys": keys, "default_model": "tiny", "quotas": {"queued_units": 20000}})) as fleet:
            http, other = Client(fleet.url, "acme", timeout=120), Client(fleet.url, "other")
            rows = [{"custom_id": f"picture {index}", "body": {"prompt": f"a circle {index}", "seed": index}} for index in range(10_000)]
            pid = fleet.ready["pids"]["coordinator"]
            memory = lambda: int(next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))) // 1024
            before, began = memory(), time.monotonic()
            made = send(http, rows)
            took = time.monotonic() - began
            self.assertEqual(made.status, 202, made)
            print(f"10,000 lines: {took:.2f} s, {memory() - before} MiB more at most", flush=True)
            id = made.json()["id"]
            self.assertEqual(made.json()["request_counts"], {"total": 10_000, "completed": 0, "failed": 0, "canceled": 0})
            self.assertEqual(other.get("/v1/batches/" + id).status, 404)
            self.assertEqual(other.request("POST", f"/v1/batches/{id}/cancel").status, 404)
            full = send(http, rows + rows[:1])
            self.assertEqual(full.status, 429, full)
            self.assertIn("quotas.queued_units is 20000", full.error["message"])
            self.assertEqual(send(http, rows * 2 + rows[:1]).status, 413)
            canceled = http.request("POST", f"/v1/batches/{id}/cancel")
            self.assertEqual(canceled.status, 202, canceled)
            batch = ended(http, id)
            self.assertEqual((batch["status"], batch["request_counts"]["canceled"]), ("cancelled", 10_000))
            rows = results(http, id)
            self.assertEqual((len(rows), rows[-1]["custom_id"], rows[-1]["state"]), (10_000, "picture 9999", "canceled"))
            bad = send(http, ['{"prompt": "a"}'] * 99_999 + ['{"prompt": 7}'])
            self.assertEqual(bad.status, 400, bad)
            self.assertRegex(bad.error["message"], "^line 100000: prompt is a number")


if __name__ == "__main__":
    unittest.main()
