"""The job routes and the event stream through curl."""
import base64
import hashlib
import json
import tempfile
import unittest
from pathlib import Path

from fleet import Shared, need, run
from image import describe

need(run("sh", "-c", "command -v curl").returncode == 0, "curl is not installed")
shared = Shared(workers=1)
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = {"prompt": "a red circle", "size": "32x16", "num_inference_steps": 2, "max_sequence_length": 16, "seed": 4}


def curl(path, *arguments):
    """Makes one call and returns (status, body)."""
    done = run("curl", "-sS", "-w", "\n%{http_code}", *arguments, shared.fleet.url + path)
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def post(path, body, *arguments):
    status, text = curl(path, "--json", json.dumps(body), *arguments)
    return status, json.loads(text)


def parse(stream):
    """Parses server-sent events into [(id, event, data)]."""
    out = []
    for block in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" in fields:
            out.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return out


class Curl(unittest.TestCase):
    def test_a_large_image_is_streamed(self):
        _, job = post("/v1/jobs", {**SMALL, "size": "768x768", "num_inference_steps": 1})
        curl(f"/v1/jobs/{job['id']}/events", "-N")
        _, text = curl(f"/v1/jobs/{job['id']}")
        result = json.loads(text)["unit_records"][0]["result"]
        self.assertGreater(result["bytes"], 1 << 20)
        with tempfile.TemporaryDirectory() as folder:
            head, body, rest = (Path(folder) / name for name in ("head", "body", "rest"))
            path = f"/v1/jobs/{job['id']}/results/0"
            self.assertEqual(curl(path, "-I", "-o", head)[0], 200)
            self.assertIn(f"content-length: {result['bytes']}", head.read_text().lower())
            self.assertEqual(curl(path, "-o", body)[0], 200)
            self.assertEqual(hashlib.sha256(body.read_bytes()).hexdigest(), result["sha256"])
            self.assertEqual(curl(path, "-o", rest, "-r", "100-")[0], 206)
            self.assertEqual(rest.read_bytes(), body.read_bytes()[100:])

    def test_a_job_from_submission_to_its_image(self):
        status, job = post("/v1/jobs", SMALL)
        self.assertEqual(status, 202)
        self.assertEqual((job["units"], job["model"]), (1, "tiny"))
        status, stream = curl(f"/v1/jobs/{job['id']}/events", "-N")  # the stream ends when the job has ended
        events = parse(stream)
        self.assertEqual([e[1] for e in events if e[1] != "step"],
                         ["queued", "ready", "assigned", "started", "succeeded", "succeeded"])
        for (id, kind, data) in events:
            self.assertEqual((data["id"], data["type"], data["job"]), (id, kind, job["id"]))
        ids = [tuple(map(int, e[0].split("-"))) for e in events]
        self.assertEqual(ids, sorted(set(ids)))

        for seen in range(len(events)):
            status, rest = curl(f"/v1/jobs/{job['id']}/events", "-N", "-H", f"Last-Event-ID: {events[seen][0]}")
            self.assertEqual(parse(rest), events[seen + 1:])
        self.assertEqual((status, rest), (204, ""))  # no events are left, so a browser stops reconnecting

        status, record = curl("/v1/jobs/" + job["id"])
        record = json.loads(record)
        unit = record["unit_records"][0]
        self.assertEqual((record["state"], record["progress"], unit["step"], unit["total_steps"]), ("succeeded", 1, 2, 2))
        image = shared.fleet.folder / "curl.png"
        done = run("curl", "-sS", "-D", "-", "-o", image, unit["result"]["url"])
        self.assertIn("content-type: image/png", done.stdout.lower())
        self.assertEqual(describe(image.read_bytes()), ("png", 32, 16))
        self.assertEqual(image.stat().st_size, unit["result"]["bytes"])

    def test_cancel(self):
        _, job = post("/v1/jobs", {**SMALL, "size": "128x128", "num_inference_steps": 200})
        status, body = curl("/v1/jobs/" + job["id"], "-X", "DELETE")
        self.assertEqual(status, 202)
        self.assertTrue(json.loads(body)["cancel_requested"])
        _, stream = curl(f"/v1/jobs/{job['id']}/events", "-N")
        self.assertEqual(parse(stream)[-1][1], "canceled")
        status, body = curl("/v1/jobs/" + job["id"], "-X", "DELETE")
        self.assertEqual(status, 409)
        self.assertIn("ended", json.loads(body)["error"]["message"])
        self.assertEqual(json.loads(curl("/v1/jobs/" + job["id"])[1])["state"], "canceled")

    def test_openai_route(self):
        status, body = post("/v1/images/generations", {**SMALL, "response_format": "url"})
        self.assertEqual(status, 200)
        self.assertEqual(list(body["data"][0]), ["url", "seed"])

    def test_openai_stream(self):
        status, stream = curl("/v1/images/generations", "-N", "--json", json.dumps({**SMALL, "stream": True}))
        self.assertEqual(status, 200)
        names = [line[7:] for line in stream.splitlines() if line.startswith("event: ")]
        self.assertEqual(names, ["image_generation.completed"])

    def test_http_1_0(self):
        """No chunks, no interim responses, one connection per request."""
        old = ("--http1.0", "-D", shared.fleet.folder / "head")
        status, body = curl("/v1/images/generations", "--json", json.dumps({**SMALL, "response_format": "b64_json"}), *old)
        head = (shared.fleet.folder / "head").read_text().splitlines()
        self.assertEqual((status, head[0]), (200, "HTTP/1.0 200 OK"))
        self.assertIn(f"Content-Length: {len(body)}", head)
        self.assertEqual(describe(base64.b64decode(json.loads(body)["data"][0]["b64_json"])), ("png", 32, 16))
        status, stream = curl("/v1/images/generations", "-N", "--json", json.dumps({**SMALL, "stream": True}), *old)
        self.assertEqual(status, 200)
        self.assertRegex(stream, r"^: job \S+\n\nevent: image_generation.completed\ndata: {")
        self.assertNotIn("chunked", (shared.fleet.folder / "head").read_text())
        _, job = post("/v1/jobs", SMALL, *old)
        status, stream = curl(f"/v1/jobs/{job['id']}/events", "-N", *old)
        self.assertEqual(parse(stream)[-1][1], "succeeded")
        image = shared.fleet.folder / "old.png"
        done = run("curl", "-sS", "--http1.0", "-o", image, f"{shared.fleet.url}/v1/jobs/{job['id']}/results/0")
        self.assertEqual((done.returncode, describe(image.read_bytes())), (0, ("png", 32, 16)), done.stderr)

    def test_workers(self):
        workers = json.loads(curl("/v1/workers")[1])["workers"]
        self.assertEqual(len(workers), 1)
        self.assertEqual(workers[0]["pid"], shared.fleet.ready["pids"]["workers"][0])
        self.assertEqual((workers[0]["state"], workers[0]["models"]), ("ready", ["tiny"]))
        self.assertIsInstance(workers[0]["jobs"], list)

    def test_probes(self):
        self.assertEqual(curl("/healthz")[0], 200)
        self.assertEqual(curl("/readyz")[0], 200)


if __name__ == "__main__":
    unittest.main(verbosity=2)
