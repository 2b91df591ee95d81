"""One trace from the caller through gateway, queue and worker, as received by an OpenTelemetry collector."""
import base64
import http.server
import json
import re
import shutil
import tempfile
import threading
import unittest
from pathlib import Path

try:
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
except ImportError:
    ExportTraceServiceRequest = None

from adapters import BYTES, DOWN, UP, safetensors
from api import Client
from fleet import Fleet, need, until
from video_model import write_video_model

need(ExportTraceServiceRequest, "the Python package opentelemetry-proto is not installed")
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SMALL = {"prompt": "x", "width": 32, "height": 16, "num_inference_steps": 3, "max_sequence_length": 16, "seed": 1}


def with_base64_ids(value, key=""):
    """Returns the JSON as protobuf's parser wants it. OTLP has ids in hexadecimal, all other JSON of protobuf in base64."""
    if isinstance(value, dict):
        return {k: with_base64_ids(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [with_base64_ids(v) for v in value]
    if key in ("traceId", "spanId", "parentSpanId"):
        digits = 32 if key == "traceId" else 16
        assert re.fullmatch(f"[0-9a-f]{{{digits}}}", value) and int(value, 16), (key, value)
        return base64.b64encode(bytes.fromhex(value)).decode()
    return value


def decode(body):
    """Decodes a request with OpenTelemetry's own classes, and returns its spans. An unknown field or a wrong type fails."""
    request = json_format.ParseDict(with_base64_ids(json.loads(body)), ExportTraceServiceRequest())
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


class Receiver:
    """A collector for OTLP over HTTP with JSON bodies. `answer`: status and body of each response, or None to hang."""

    def __init__(self, answer=(200, b"{}")):
        self.spans, self.wrong, self.decoded, self.end = [], [], [], threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v1/traces" or self.headers["Content-Type"] != "application/json":
                    outer.wrong.append((self.path, dict(self.headers)))
                try:
                    outer.decoded += decode(body)
                except Exception as problem:
                    outer.wrong.append(problem)
                for resource in json.loads(body)["resourceSpans"]:
                    where = attributes(resource["resource"])
                    for scope in resource["scopeSpans"]:
                        for span in scope["spans"]:
                            outer.spans.append({**span, "resource": where, "attributes": attributes(span)})
                if answer is None:
                    outer.end.wait(60)
                    return
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

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
        self.end.set()
        self.server.shutdown()
        self.server.server_close()


def attributes(holder):
    return {one["key"]: next(iter(one["value"].values())) for one in holder.get("attributes", [])}


class Tracing(unittest.TestCase):
    def of_trace(self, receiver, trace):
        return {s["name"]: s for s in receiver.spans if s["traceId"] == trace}

    def test_one_trace_from_the_caller_to_the_image(self):
        with Receiver() as receiver, Fleet(sets=["telemetry.otlp_endpoint=" + receiver.url, "worker.threads=1", "cache.dir="]) as fleet:
            client = Client(fleet.url)
            answer = client.request("POST", "/v1/jobs", SMALL, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
            self.assertEqual(answer.status, 202)
            job = answer.json()["id"]
            client.wait(job)
            wanted = {"POST /v1/jobs", "queue_wait", "route", "unit", "text_encode", "first_step", "steady_steps", "vae_decode", "image_encode",
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
            self.assertEqual(spans["route"]["parentSpanId"], gateway["spanId"])
            self.assertTrue(spans["route"]["attributes"]["ditfleet.route.reason"])
            self.assertEqual(spans["route"]["attributes"]["ditfleet.attempt"], "1")
            self.assertEqual({k: v for k, v in unit["attributes"].items() if k.startswith("gen_ai.")},
                             {"gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "ditfleet",
                              "gen_ai.output.type": "image", "gen_ai.request.model": "tiny", "gen_ai.request.seed": "1"})
            self.assertNotIn("links", unit)
            self.assertEqual(unit["resource"]["service.name"], "ditfleet-worker")
            self.assertEqual(unit["attributes"]["ditfleet.job.id"], job)
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
            until(lambda: {"POST /v1/jobs", "result_store"} <= set(self.of_trace(receiver, own)), "the second trace arrives")
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

    def test_a_job_with_an_adapter(self):
        sets = ["worker.threads=1", "log.format=json", "log.level=debug"]
        with Receiver() as receiver, Fleet(sets=[*sets, "telemetry.otlp_endpoint=" + receiver.url]) as fleet:
            client = Client(fleet.url)
            file = safetensors({DOWN: ("F32", [1, 40], bytes(160)), UP: ("F32", [40, 1], bytes(160))})
            self.assertEqual(client.request("PUT", "/v1/loras/mine", file, BYTES).status, 201)
            answer = client.request("POST", "/v1/jobs", {**SMALL, "loras": [{"name": "mine"}]})
            self.assertEqual(answer.status, 202, answer.body)
            trace = answer.headers["traceparent"].split("-")[1]
            client.wait(answer.json()["id"])
            spans = until(lambda: {"POST /v1/jobs", "unit"} <= set(found := self.of_trace(receiver, trace)) and found, "the job's spans arrive")
            unit = spans["unit"]
            self.assertEqual(spans["adapter_load"]["parentSpanId"], unit["spanId"], spans)
            self.assertEqual(unit["attributes"]["ditfleet.outcome"], "succeeded", unit)
            self.assertEqual({s.trace_id.hex() for s in receiver.decoded if s.name == "adapter_load"}, {trace})
            self.assertEqual(receiver.wrong, [])
            # The log's lines of the job name its spans, in both processes.
            lines = [line.partition(" | ")[2] for line in fleet.log.read_text().splitlines()]
            lines = [json.loads(line) for line in lines if line.startswith("{")]
            lines = [line for line in lines if line.get("trace_id") == trace]
            self.assertIn(("ditfleet-worker", unit["spanId"]), {(one["program"], one["span_id"]) for one in lines})
            self.assertIn(("ditfleet", spans["POST /v1/jobs"]["spanId"]), {(one["program"], one["span_id"]) for one in lines})

    def test_at_rate_0_only_failed_and_retried_jobs_are_sent(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="ditfleet-tracing-")))
        write_video_model(folder / "video")
        sick = folder / "sick"
        sick.mkdir()
        sets = ["worker.threads=1", "telemetry.sample_rate=0", "queue.retry_backoff_ms=0", "queue.max_attempts=2"]
        with Receiver() as receiver, Fleet(models={"video": folder / "video"}, sets=[*sets, "telemetry.otlp_endpoint=" + receiver.url]) as fleet:
            client = Client(fleet.url)

            def outcome(prompt):
                answer = client.request("POST", "/v1/jobs", {"prompt": prompt})
                flags = answer.headers["traceparent"].split("-")
                self.assertEqual(flags[3], "00")
                return client.wait(answer.json()["id"])["state"], flags[1]

            state, fast = outcome("x")
            self.assertEqual(state, "succeeded")
            state, failed = outcome("fault step memory")
            self.assertEqual(state, "failed")
            units = until(lambda: len(found := [s for s in receiver.spans if s["traceId"] == failed and s["name"] == "unit"]) == 2 and found,
                          "both attempts arrive")
            units.sort(key=lambda s: s["attributes"]["ditfleet.attempt"])
            first, second = units
            self.assertNotIn("links", first)
            self.assertEqual(second["links"], [{"traceId": failed, "spanId": first["spanId"]}])
            self.assertNotEqual(first["spanId"], second["spanId"])
            self.assertEqual(first["status"]["code"], 2)
            self.assertEqual(first["attributes"]["error.type"], "out_of_memory")
            parents = {s["parentSpanId"] for s in receiver.spans if s["name"] == "first_step" and s["traceId"] == failed}
            self.assertEqual(parents, {first["spanId"], second["spanId"]})
            self.assertEqual(self.of_trace(receiver, fast), {})
            # A caller's sampled trace stays sampled.
            answer = client.request("POST", "/v1/jobs", {"prompt": "x"}, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
            client.wait(answer.json()["id"])
            until(lambda: "unit" in self.of_trace(receiver, TRACE), "the sampled trace arrives")
            self.assertEqual(self.of_trace(receiver, fast), {})
            self.assertEqual(receiver.wrong, [])

    def test_slow_jobs_are_sent_at_rate_0(self):
        sets = ["worker.threads=1", "telemetry.sample_rate=0", "telemetry.slow_s=0.001"]
        with Receiver() as receiver, Fleet(sets=[*sets, "telemetry.otlp_endpoint=" + receiver.url]) as fleet:
            client = Client(fleet.url)
            answer = client.request("POST", "/v1/jobs", SMALL)
            client.wait(answer.json()["id"])
            trace = answer.headers["traceparent"].split("-")[1]
            until(lambda: {"unit", "result_store"} <= set(self.of_trace(receiver, trace)), "the slow job's spans arrive")
            self.assertEqual(receiver.wrong, [])

    def test_a_receiver_that_is_dead_or_hangs_or_answers_nonsense_fails_no_job(self):
        with Receiver() as dead:
            pass
        with Receiver(answer=None) as hanging, Receiver(answer=(200, b"\xff{nonsense")) as nonsense, Receiver(answer=(418, b"<html>")) as refusing:
            for receiver in (dead, hanging, nonsense, refusing):
                with Fleet(sets=["telemetry.otlp_endpoint=" + receiver.url, "worker.threads=1"]) as fleet:
                    client = Client(fleet.url)
                    for _ in range(3):
                        self.assertEqual(client.wait(client.submit(**SMALL))["state"], "succeeded")


if __name__ == "__main__":
    unittest.main()
