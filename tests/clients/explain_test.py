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
            "blame": None, "over": [], "worker_speed": None, "holder": None, **fields}


def attempt(worker, reason, assigned_ms, ended_ms=0, back=None):
    return {"worker": worker, "reason": reason, "assigned_ms": assigned_ms, "started_ms": 0, "ended_ms": ended_ms, "back": back}


def over(phase, us, expected_us, than, worker=None):
    return {"phase": phase, "us": us, "expected_us": expected_us, "over_us": us - expected_us, "than": than, "worker": worker}


def spans(**us):
    return [{"name": name.replace("_", " "), "begin_us": 0, "us": value} for name, value in us.items()]


def job(state, record, **fields):
    return {"id": ID, "state": state, "model": "demo", "class": "demo/256x256x1/none/64/fp32", "created_ms": 1000, "ready_ms": 1010, "ended_ms": 0, "cost_us": 700000,
            "progress": 1.0, "error": None, "warnings": [], "spec": {"prompt": "x"}, "unit_records": [record], **fields}


class Pretended(unittest.TestCase):
    def serve(self, record):
        """Sets the record of the only job, which is also its timeline, or the answer to all requests."""
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.dumps(record)
                self.send_response(200 if "id" not in record or self.path in (f"/v1/jobs/{ID}", f"/v1/jobs/{ID}/timeline") else 404)
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
            spans=spans(admission=10_000, queue=990_000, earlier_attempts=5_500_000, queued_again=1_500_000, denoise=490_000),
            worker_speed=0.121,
            over=[over("earlier attempts", 5_500_000, 0, "the median of its class"),
                  over("denoise", 490_000, 200_000, "the median of its class for 4 steps", "w2")]))
        self.serve(record)
        lines = [line.strip() for line in self.cli("explain", ID).splitlines()]
        at = lines.index("assigned to w1: warm")
        self.assertEqual(lines[at:at + 5], ["assigned to w1: warm", "returned to the queue after 5 s: lease lapsed", "assigned to w3: cold",
                                            "returned to the queue after 500 ms: retry: out of memory", "assigned to w2: warm"])
        self.assertIn("earlier attempts  5.5 s   " + "#" * 40, lines)
        self.assertIn("ran 490 ms, predicted 700 ms", lines)
        self.assertEqual(lines[-3:], ["w2 runs at 0.12 of the predicted speed",
                                      "earlier attempts took 5.5 s longer than the median of its class",
                                      "denoise took 290 ms longer than the median of its class for 4 steps; worker w2 is slow"])
        self.assertEqual(json.loads(self.cli("explain", ID, "--json")), record)

    def test_the_worker_of_a_running_unit(self):
        running = {"attempt": 1, "worker": "w1", "step": 12, "total_steps": 60}
        for holder, lines in (
                ({"state": "silent", "unheard_ms": 4010, "event_ago_ms": 4100, "lease_ms": 990, "others": True},
                 "  step 12/60, reported 4.1 s ago\n  worker w1: silent for 4 s; its lease ends in about 990 ms, then another worker takes the unit\n"),
                ({"state": "silent", "unheard_ms": 4010, "event_ago_ms": 4100, "lease_ms": 990, "others": False}, ", then the unit waits for a worker\n"),
                ({"state": "draining", "unheard_ms": 310, "event_ago_ms": 520, "others": True},
                 "  step 12/60, reported 520 ms ago\n  worker w1: draining, last heartbeat 310 ms ago\n"),
                ({"state": "gone", "others": False}, "  worker w1: gone\n")):
            self.serve(job("running", unit("running", holder={"worker": "w1", **holder}, spans=spans(run=5_320_000), **running)))
            self.assertIn(lines, self.cli("explain", ID))

    def test_a_silent_or_slow_worker_in_lists(self):
        seen = {"pid": 1, "device": "cpu", "precision": "fp32", "models": ["demo"], "jobs": [], "heartbeat_ms": 1}
        self.serve({"workers": [{"name": "w1", "state": "silent", "empty_in_ms": None, "speed": 0.121, **seen},
                                {"name": "w2", "state": "ready", "empty_in_ms": 0, "speed": None, **seen}]})
        header, silent, ready = (line.split() for line in self.cli("workers", "list").splitlines())
        self.assertEqual(header[9:11], ["SPEED", "EMPTY"])
        self.assertEqual(silent[9:11], ["0.12", "–"])
        self.assertEqual(ready[9:11], ["-", "now"])
        slow = {"state": "succeeded", "class": "c", "worker": "w2", "attempts": 1, "total_us": 5_000_000, "ended_ms": 1, "worker_speed": 0.12}
        self.serve({"jobs": [{"id": "named", "blame": over("wait", 2_500_000, 0, "the median of its class", "w2"), **slow},
                             {"id": "waited", "blame": over("queue", 2_500_000, 0, "the median of its class"), **slow},
                             {"id": "alone", "blame": None, **slow}, {"id": "fine", "blame": None, **slow, "worker_speed": None}]})
        rows = self.cli("jobs", "slow").splitlines()
        for row, blamed in zip(rows[1:], ("worker w2 slow: wait  ", "queue  ", "worker w2 slow  ", "-  ")):
            self.assertIn("5 s   " + blamed, row)

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
