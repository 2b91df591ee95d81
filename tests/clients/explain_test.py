"""`ditfleet explain` and `jobs show` on rare records and events, such as lost attempts and canceled jobs, from a fake
service."""
import http.server
import json
import threading
import time
import unittest

from fleet import clean_environment, cli

ID = "01M834K0X018NZSFETSNC9514T"


def unit(state, **fields):
    return {"unit": 0, "state": state, "attempt": 1, "worker": "w1", "step": 0, "total_steps": 0, "assigned_ms": 0, "started_ms": 0, "ended_ms": 0,
            "phases_us": {}, "waits_for": None, "error": None, "result": None, **fields}


def job(state, record, **fields):
    return {"id": ID, "state": state, "model": "demo", "class": "demo/256x256x1/none/64/fp32", "created_ms": 1000, "ready_ms": 1010, "ended_ms": 0, "cost_us": 700000,
            "progress": 1.0, "error": None, "warnings": [], "spec": {"prompt": "x"}, "unit_records": [record], **fields}


class Pretended(unittest.TestCase):
    def serve(self, record, *events):
        """Sets the record of the only job and its events as (type, fields)."""
        stream = "".join(f"id: {i}-0\nevent: {type}\ndata: {json.dumps({'id': f'{i}-0', 'job': ID, 'type': type, 'unit': 0, **fields})}\n\n"
                         for i, (type, fields) in enumerate(events, 1))
        stream += f'id: 999-0\nevent: {record["state"]}\ndata: {{"id": "999-0", "type": "{record["state"]}", "unit": null}}\n\n'

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body, type = (stream, "text/event-stream") if self.path.endswith("/events") else (json.dumps(record), "application/json")
                self.send_response(200)
                self.send_header("Content-Type", type)
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

    def spans(self):
        return json.loads(self.cli("explain", ID, "--json"))["units"][0]["spans_us"]

    def test_a_worker_that_was_lost(self):
        record = unit("succeeded", attempt=2, worker="w2", assigned_ms=9000, started_ms=9010, ended_ms=9500, phases_us={"denoise": 490000})
        self.serve(job("succeeded", record, ended_ms=9500),
                   ("ready", {"at_ms": 1010}),
                   ("assigned", {"at_ms": 2000, "worker": "w1", "reason": "warm"}),
                   ("started", {"at_ms": 2010}),
                   ("ready", {"at_ms": 7000, "reason": "lease lapsed", "owner": "w1:x"}),
                   ("assigned", {"at_ms": 7500, "worker": "w3", "reason": "cold"}),
                   ("ready", {"at_ms": 8000, "reason": "retry", "not_before_ms": 8500, "code": "unavailable", "message": "out of memory"}),
                   ("ready", {"at_ms": 8500, "reason": "retry is due"}),
                   ("assigned", {"at_ms": 9000, "worker": "w2", "reason": "warm"}))
        self.assertEqual(self.spans(), {"admission": 10_000, "queue": 990_000, "tried before": 7_000_000, "denoise": 490_000, "hand-over": 10_000})
        lines = [line.strip() for line in self.cli("explain", ID).splitlines()]
        at = lines.index("assigned to w1: warm")
        self.assertEqual(lines[at:at + 5], ["assigned to w1: warm", "returned to the queue after 5.00 s: lease lapsed", "assigned to w3: cold",
                                            "returned to the queue after 500.0 ms: retry: out of memory", "assigned to w2: warm"])
        told = json.loads(self.cli("explain", ID, "--json"))["units"][0]["assignments"]
        self.assertEqual([a.get("back") for a in told], ["lease lapsed", "retry: out of memory", None])

    def test_a_job_that_was_canceled(self):
        self.serve(job("canceled", unit("canceled", assigned_ms=1010, started_ms=1030, ended_ms=6000), ended_ms=6000),
                   ("assigned", {"at_ms": 1010, "worker": "w1", "reason": "warm"}))
        self.assertEqual(self.spans(), {"admission": 10_000, "queue": 0, "until started": 20_000, "run": 4_970_000})
        shown = self.cli("jobs", "show", ID)
        self.assertIn(f"{ID}  canceled\n", shown)  # not 100 %
        self.assertNotIn("0/0", shown)

    def test_a_job_that_waits(self):
        now = int(time.time() * 1000)
        self.serve(job("ready", unit("ready", attempt=0, worker=""), created_ms=now - 60_000, ready_ms=now - 60_000, progress=0.0))
        self.assertGreaterEqual(self.spans()["queue"], 60_000_000)  # until now
        self.assertIn(f"{ID}  ready  0 %\n", self.cli("jobs", "show", ID))


if __name__ == "__main__":
    unittest.main()
