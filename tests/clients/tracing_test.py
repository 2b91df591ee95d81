"""One trace from the caller through gateway, queue and worker, as received by an OpenTelemetry collector."""
import http.server
import json
import shutil
import threading
import unittest

from api import Client
from fleet import Fleet, until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SMALL = {"prompt": "x", "width": 32, "height": 16, "num_inference_steps": 3, "max_sequence_length": 16, "seed": 1}


class Receiver:
    """A collector for OTLP over HTTP with JSON bodies."""

    def __init__(self):
        self.spans, self.wrong = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/json":
                    outer.wrong.append((self.path, dict(self.headers)))
                for resource in json.loads(body)["resourceSpans"]:
                    where = attributes(resource["resource"])
                    for scope in resource["scopeSpans"]:
                        for span in scope["spans"]:
                            outer.spans.append({**span, "resource": where, "attributes": attributes(span)})
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def attributes(holder):
    return {one["key"]: next(iter(one["value"].values())) for one in holder.get("attributes", [])}


class Tracing(unittest.TestCase):
    def of_trace(self, receiver, trace):
        return {s["name"]: s for s in receiver.spans if s["traceId"] == trace}

    def test_one_trace_from_the_caller_to_the_image(self):
        with Receiver() as receiver, Fleet(sets=["telemetry.otlp_endpoint=" + receiver.url, "worker.threads=1"]) as fleet:
            client = Client(fleet.url)
            answer = client.request("POST", "/v1/jobs", SMALL, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
            self.assertEqual(answer.status, 202)
            job = answer.json()["id"]
            client.wait(job)
            wanted = {"POST /v1/jobs", "queue_wait", "unit", "text_encode", "first_step", "steady_steps", "vae_decode", "image_encode",
                      "result_store"}
            spans = until(lambda: wanted <= set(self.of_trace(receiver, TRACE)) and self.of_trace(receiver, TRACE), "all spans arrive")
            gateway, unit = spans["POST /v1/jobs"], spans["unit"]
            self.assertEqual(gateway["parentSpanId"], SPAN)
            self.assertEqual(gateway["kind"], 2)
            self.assertEqual(gateway["resource"]["service.name"], "ditfleet-coordinator")
            self.assertEqual(gateway["attributes"]["http.request.method"], "POST")
            self.assertEqual(gateway["attributes"]["http.route"], "/v1/jobs")
            self.assertEqual(gateway["attributes"]["url.path"], "/v1/jobs")
            self.assertEqual(gateway["attributes"]["http.response.status_code"], "202")
            self.assertEqual(answer.headers["traceparent"].split("-")[1:3], [TRACE, gateway["spanId"]], "the response names the gateway's span")
            self.assertEqual(unit["parentSpanId"], gateway["spanId"])
            self.assertEqual(spans["queue_wait"]["parentSpanId"], gateway["spanId"])
            self.assertEqual(unit["resource"]["service.name"], "ditfleet-worker")
            self.assertEqual(unit["attributes"]["ditfleet.job.id"], job)
            self.assertEqual(unit["attributes"]["gen_ai.request.model"], "tiny")
            self.assertEqual(unit["attributes"]["ditfleet.outcome"], "succeeded")
            phases = ["text_encode", "first_step", "steady_steps", "vae_decode", "image_encode", "result_store"]
            last = 0
            for name in phases:
                span = spans[name]
                self.assertEqual(span["parentSpanId"], unit["spanId"], name)
                start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                self.assertLessEqual(last, start, f"{name} begins after the phase before it")
                self.assertLessEqual(start, end)
                last = end
            self.assertLessEqual(last, int(unit["endTimeUnixNano"]))
            self.assertEqual(spans["steady_steps"]["attributes"]["ditfleet.steps"], "2")

            # Traces that the caller does not sample are not exported, and polling is not traced.
            quiet = "5bf92f3577b34da6a3ce929d0e0e4736"
            self.assertEqual(client.request("POST", "/v1/jobs", SMALL, {"traceparent": f"00-{quiet}-{SPAN}-00"}).status, 202)
            client.get(f"/v1/jobs/{job}")
            # Without a caller's trace the gateway starts one. A failure marks its span.
            answer = client.request("POST", "/v1/jobs", SMALL)
            own = answer.headers["traceparent"].split("-")[1]
            client.wait(answer.json()["id"])
            until(lambda: "result_store" in self.of_trace(receiver, own), "the second trace arrives")
            self.assertNotIn("parentSpanId", self.of_trace(receiver, own)["POST /v1/jobs"])
            self.assertEqual(self.of_trace(receiver, quiet), {})
            self.assertFalse([s for s in receiver.spans if s["name"].startswith("GET")])

            # The worker's start: programs compiled or found in the cache.
            start = next(s for s in receiver.spans if s["name"] == "worker_start")
            below = {s["name"]: s for s in receiver.spans if s["traceId"] == start["traceId"]}
            self.assertNotIn("parentSpanId", start)
            self.assertEqual(below["load_models"]["parentSpanId"], start["spanId"])
            self.assertEqual(below["warm_up"]["parentSpanId"], start["spanId"])
            if shutil.which("c++"):  # blocks are compiled on this machine
                # The compiler's identity is looked up and cached, too.
                lookups = [s for s in receiver.spans if s["name"] == "kernel_cache_lookup" and s["attributes"]["ditfleet.region"] != "compiler"]
                self.assertTrue(lookups)
                self.assertEqual({s["parentSpanId"] for s in lookups}, {below["load_models"]["spanId"]})
                compiles = [s for s in receiver.spans if s["name"] == "region_compile"]
                # Blocks with and without adapter columns share kernels, so one finds them in memory or waits.
                found = [s["attributes"]["ditfleet.kernel_cache.source"] for s in lookups]
                self.assertLessEqual(set(found), {"compiled", "memory", "another_thread"})
                lookups = [s for s, source in zip(lookups, found) if source == "compiled"]
                self.assertEqual(len(compiles), len(lookups))
                self.assertEqual({s["parentSpanId"] for s in compiles}, {s["spanId"] for s in lookups})
                self.assertEqual({s["attributes"]["ditfleet.backend"] for s in compiles}, {"cpu_jit"})
            self.assertEqual(receiver.wrong, [])

    def test_an_unreachable_receiver_fails_no_job(self):
        with Receiver() as receiver:
            url = receiver.url
        with Fleet(sets=["telemetry.otlp_endpoint=" + url, "worker.threads=1"]) as fleet:
            client = Client(fleet.url)
            for _ in range(3):
                self.assertEqual(client.wait(client.submit(**SMALL))["state"], "succeeded")


if __name__ == "__main__":
    unittest.main()
