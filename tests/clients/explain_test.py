"""`ditfleet explain` and `jobs show` on rare records, such as lost attempts and canceled jobs, from a fake service."""
import http.server
import json
import threading
import time
import unittest

from fleet import clean_environment, cli

ID = "01M834K0X018NZSFETSNC9514T"


def unit(state, **fields):
    return {"unit": 0, "state": state, "attempt": 1, "worker": "w1", "step": 0, "total_steps": 0, "assigned_ms": 0, "started_ms": 0, "ended_ms": 0,
            "phases_us": {}, "waits_for": None, "error": None, "result": None, "attempts": [], "spans": [], "predicted_us": 700000, "actual_us": None,
            "blame": None, "over": [], **fields}


def attempt(worker, reason, assigned_ms, ended_ms=0, back=None):
    return {"worker": worker, "reason": reason, "assigned_ms": assigned_ms, "started_ms": 0, "ended_ms": ended_ms, "back": back}


def spans(**us):
    return [{"name": name.replace("_", " "), "begin_us": 0, "us": value} for name, value in us.items()]


def job(state, record, **fields):
    return {"id": ID, "state": state, "model": "demo", "class": "demo/256x256x1/none/64/fp32", "created_ms": 1000, "ready_ms": 1010, "ended_ms": 0, "cost_us": 700000,
            "progress": 1.0, "error": None, "warnings": [], "spec": {"prompt": "x"}, "unit_records": [record], **fields}


class Pretended(unittest.TestCase):
    def serve(self, record):
        """Sets the record of the only job, which is also its timeline."""
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps(record)
                self.send_response(200 if self.path in (f"/v1/jobs/{ID}", f"/v1/jobs/{ID}/timeline") else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.env = clean_environment(DITFLEET_URL=f"http://127.0.0.1:{server.server_port}")

    def cli(self, *argv):
        done = cli(*argv, env=self.env)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_worker_that_was_lost(self):
        record = job("succeeded", ended_ms=9500, record=unit(
            "succeeded", attempt=3, worker="w2", assigned_ms=9000, started_ms=9010, ended_ms=9500, actual_us=490_000,
            attempts=[attempt("w1", "warm", 2000, 7000, "lease lapsed"), attempt("w3", "cold", 7500, 8000, "retry: out of memory"),
                      attempt("w2", "warm", 9000, 9500)],
            spans=spans(admission=10_000, queue=990_000, tried_before=7_000_000, denoise=490_000),
            over=[{"phase": "tried before", "us": 7_000_000, "median_us": 0, "over_us": 7_000_000},
                  {"phase": "denoise", "us": 490_000, "median_us": 200_000, "over_us": 290_000}]))
        self.serve(record)
        lines = [line.strip() for line in self.cli("explain", ID).splitlines()]
        at = lines.index("assigned to w1: warm")
        self.assertEqual(lines[at:at + 5], ["assigned to w1: warm", "returned to the queue after 5.00 s: lease lapsed", "assigned to w3: cold",
                                            "returned to the queue after 500.0 ms: retry: out of memory", "assigned to w2: warm"])
        self.assertIn("tried before  7.00 s    " + "#" * 40, lines)
        self.assertIn("ran 490.0 ms, predicted 700.0 ms", lines)
        self.assertEqual(lines[-2:], ["tried before took 7.00 s longer than the median of its class",
                                      "denoise took 290.0 ms longer than the median of its class"])
        self.assertEqual(json.loads(self.cli("explain", ID, "--json")), record)

    def test_a_job_that_was_canceled(self):
        self.serve(job("canceled", unit("canceled", assigned_ms=1010, started_ms=1030, ended_ms=6000), ended_ms=6000))
        shown = self.cli("jobs", "show", ID)
        self.assertIn(f"{ID}  canceled\n", shown)  # not 100 %
        self.assertNotIn("0/0", shown)

    def test_a_job_that_waits(self):
        now = int(time.time() * 1000)
        self.serve(job("ready", unit("ready", attempt=0, worker="", waits_for="capacity"), created_ms=now - 60_000, progress=0.0))
        self.assertIn(f"{ID}  ready  0 %\n", self.cli("jobs", "show", ID))
        self.assertIn("  waits for capacity\n", self.cli("explain", ID))


if __name__ == "__main__":
    unittest.main()
