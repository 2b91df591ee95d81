"""Checks responses against /openapi.json, and /metrics against the Prometheus text format."""
import json
import re
import unittest

from api import Client
from fleet import Shared, until

shared = Shared(workers=1)
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = {"width": 32, "height": 16, "num_inference_steps": 2, "max_sequence_length": 16}


class Schema:
    """Validates the subset of JSON Schema that openapi.json uses. Other keywords fail."""

    KNOWN = {"type", "properties", "required", "items", "enum", "const", "minimum", "maximum", "additionalProperties", "$ref", "oneOf",
             "anyOf", "allOf", "nullable", "description", "default", "format", "examples", "example", "maxLength", "minLength", "pattern",
             "maxItems", "minItems", "title", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "contentEncoding", "contentMediaType"}
    TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}

    def __init__(self, root):
        self.root = root

    def resolve(self, schema):
        while "$ref" in schema:
            at = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                at = at[part]
            schema = at
        return schema

    def problems(self, value, schema, where="$"):
        schema = self.resolve(schema)
        unknown = set(schema) - self.KNOWN
        if unknown:
            yield f"{where}: keywords {unknown}"
        for one in schema.get("allOf", []):
            yield from self.problems(value, one, where)
        for name in ("oneOf", "anyOf"):
            if name in schema and not any(not list(self.problems(value, one, where)) for one in schema[name]):
                yield f"{where}: {value!r:.80} fits none of {name}"
        kinds = schema.get("type")
        if kinds and not any(self.is_a(value, k) for k in ([kinds] if isinstance(kinds, str) else kinds)):
            if not (value is None and schema.get("nullable")):
                yield f"{where}: {value!r:.80} is no {kinds}"
            return
        if "enum" in schema and value not in schema["enum"]:
            yield f"{where}: {value!r:.80} is none of {schema['enum']}"
        if "minimum" in schema and isinstance(value, (int, float)) and value < schema["minimum"]:
            yield f"{where}: {value} < {schema['minimum']}"
        if isinstance(value, dict):
            known = schema.get("properties", {})
            for name in schema.get("required", []):
                if name not in value:
                    yield f"{where}: lacks {name}"
            for name, one in value.items():
                if name in known:
                    yield from self.problems(one, known[name], f"{where}.{name}")
                elif known and schema.get("additionalProperties") in (None, False) and not any(k in schema for k in ("allOf", "oneOf", "anyOf")):
                    yield f"{where}: {name} is not described"
                elif isinstance(schema.get("additionalProperties"), dict):
                    yield from self.problems(one, schema["additionalProperties"], f"{where}.{name}")
        if isinstance(value, list) and "items" in schema:
            for i, one in enumerate(value):
                yield from self.problems(one, schema["items"], f"{where}[{i}]")

    def is_a(self, value, kind):
        if kind in ("integer", "number"):
            return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
        return isinstance(value, self.TYPES[kind])


class OpenApi(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = Client(shared.fleet.url)
        cls.document = cls.client.get("/openapi.json").json()
        cls.schema = Schema(cls.document)

    def served(self, method, path, template, body=None, headers=None):
        """Makes a request and checks status and body against the document."""
        answer = self.client.request(method, path, body, headers)
        operation = self.document["paths"][template][method.lower()]
        self.assertIn(str(answer.status), operation["responses"], (method, template, answer))
        described = self.schema.resolve(operation["responses"][str(answer.status)])
        kind = (answer.headers["Content-Type"] or "").split(";")[0]
        if answer.body:
            self.assertTrue(set(described["content"]) & {kind, "image/*", "*/*"}, (kind, described["content"].keys()))
        if kind == "application/json" and kind in described.get("content", {}):
            problems = list(self.schema.problems(answer.json(), described["content"][kind].get("schema", {})))
            self.assertEqual(problems, [], (method, template, answer.status))
        return answer

    def test_the_document_itself(self):
        self.assertRegex(self.document["openapi"], r"^3\.")
        self.assertTrue(self.document["info"]["title"] and self.document["info"]["version"])
        ids = []
        for path, item in self.document["paths"].items():
            named = set(re.findall(r"\{(\w+)\}", path))
            for method, operation in item.items():
                if method == "parameters":
                    continue
                ids.append(operation.get("operationId"))
                given = {self.schema.resolve(p)["name"] for p in operation.get("parameters", []) + item.get("parameters", [])
                         if self.schema.resolve(p)["in"] == "path"}
                self.assertEqual(given, named, path)
                self.assertTrue(operation["responses"])
        self.assertEqual(len(ids), len(set(ids)))
        refs = set(re.findall(r'"\$ref":\s*"([^"]+)"', json.dumps(self.document)))
        for ref in refs:
            self.schema.resolve({"$ref": ref})  # KeyError: dangling reference

    def test_exactly_the_described_routes_are_served(self):
        for path, item in self.document["paths"].items():
            real = re.sub(r"\{\w+\}", "x", path)
            allow = self.client.request("OPTIONS", real).headers["Allow"]
            described = {m.upper() for m in item if m != "parameters"}
            served = set(allow.split(", ")) - {"HEAD", "OPTIONS"}
            self.assertEqual(described, served, path)

    def test_responses_match_the_document(self):
        for path in ("/", "/fleet", "/slow", "/alerts", "/docs", "/v1/fleet", "/v1/jobs/slow", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/models", "/v1/workers"):
            self.assertEqual(self.served("GET", path, path).status, 200)
        until(lambda: self.client.get("/v1/scaling").status == 200, "the leader has published")
        self.served("GET", "/v1/scaling", "/v1/scaling")
        self.served("GET", "/v1/scaling?seconds=no", "/v1/scaling")
        worker = self.client.get("/v1/workers").json()["workers"][0]["name"]
        for act in ("drain", "resume"):
            self.assertEqual(self.served("POST", f"/v1/workers/{worker}/{act}", f"/v1/workers/{{name}}/{act}").status, 202)
        self.served("POST", "/v1/workers/none/stop", "/v1/workers/{name}/stop")
        self.served("GET", "/v1/models/tiny", "/v1/models/{model}")
        self.served("GET", "/v1/models/x", "/v1/models/{model}")
        body = {"prompt": "a red circle", **SMALL, "partial_images": 1, "n": 2}
        job = self.served("POST", "/v1/jobs", "/v1/jobs", body).json()["id"]
        self.client.wait(job)
        self.served("GET", f"/v1/jobs/{job}", "/v1/jobs/{id}")
        self.served("GET", f"/v1/jobs/{job}/timeline", "/v1/jobs/{id}/timeline")
        self.served("GET", f"/jobs/{job}", "/jobs/{id}")
        self.assertIn(job, [j["id"] for j in self.served("GET", "/v1/jobs/slow", "/v1/jobs/slow").json()["jobs"]])
        self.assertEqual(self.served("GET", "/v1/jobs/slow?limit=x", "/v1/jobs/slow").status, 400)
        for file in ("page.css", "page.js", "x"):
            self.served("GET", f"/assets/{file}", "/assets/{file}")
        self.served("GET", "/v1/jobs", "/v1/jobs")
        self.served("GET", "/v1/jobs?limit=x", "/v1/jobs")
        self.served("GET", f"/v1/jobs/{job}/events", "/v1/jobs/{id}/events")
        self.served("GET", f"/v1/jobs/{job}/results/0", "/v1/jobs/{id}/results/{index}")
        self.served("GET", f"/v1/jobs/{job}/results/7", "/v1/jobs/{id}/results/{index}")
        self.assertEqual(self.served("DELETE", f"/v1/jobs/{job}", "/v1/jobs/{id}").status, 409)
        waiting = self.client.submit(**{**SMALL, "width": 128, "height": 128, "num_inference_steps": 200})
        self.assertEqual(self.served("DELETE", f"/v1/jobs/{waiting}", "/v1/jobs/{id}").status, 202)
        self.served("GET", "/v1/jobs/none", "/v1/jobs/{id}")
        self.served("POST", "/v1/jobs", "/v1/jobs", {"prompt": 5})
        self.served("POST", "/v1/jobs", "/v1/jobs", {"prompt": "x", "model": "none"})
        image = {"prompt": "x", "size": "32x16", "num_inference_steps": 2}
        for extra in ({}, {"response_format": "b64_json"}, {"stream": True}, {"size": "wide"}, {"model": "none"}):
            self.served("POST", "/v1/images/generations", "/v1/images/generations", {**image, **extra})
        self.served("GET", "/v1/videos", "/v1/videos")
        self.served("GET", "/v1/videos?order=up", "/v1/videos")
        self.assertEqual(self.served("POST", "/v1/videos", "/v1/videos", {"prompt": "x", "seconds": "1"}).status, 400)
        self.served("POST", "/v1/videos", "/v1/videos", {"prompt": "x", "model": "none"})
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):  # of an image
            self.assertEqual(self.served(method, f"/v1/videos/{job}{path}", "/v1/videos/{id}" + path).status, 404)
        self.served("POST", "/v1/jobs", "/v1/jobs", body, {"Idempotency-Key": "k"})
        self.assertEqual(self.served("POST", "/v1/jobs", "/v1/jobs", {**body, "seed": 5}, {"Idempotency-Key": "k"}).status, 422)
        self.served("POST", "/v1/jobs", "/v1/jobs", "prompt=x", {"Content-Type": "text/plain"})

    def test_the_schema_accepts_what_the_service_accepts(self):
        """A request with every field is valid for both the document and the service."""
        request = self.document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        full = {"model": "tiny", "prompt": "x", "webhook": {"url": "https://app.example/", "events": ["job.failed"]}, "negative_prompt": "y", "n": 1, "width": 32, "height": 16, "seed": 1, "num_inference_steps": 2,
                "guidance_scale": 1.5, "true_cfg_scale": 2.0, "max_sequence_length": 16,
                "cache": {"mode": "first_block", "threshold": 0.5}, "loras": [], "priority": 1, "deadline_ms": 600_000,
                "output_format": "webp", "output_compression": 50, "partial_images": 1, "user": "u", "remixed_from": "v"}
        self.assertEqual(list(self.schema.problems(full, request)), [])
        other_families = {"frames": 5, "fps": 8, "guidance_scale_2": 2, "image": "0" * 64, "images": ["0" * 64, "1" * 64], "mask": "0" * 64,
                          "strength": 0.5, "auto_resize": True, "preset": "fast", "flow_shift": 5,
                          "sampler": "euler", "sigmas": "1, 0.5", "cfg_normalization": 1, "cfg_truncation": 0.5}
        self.assertEqual(set(full) | {"size", "pause_after_steps", "resume_from"} | set(other_families), set(self.schema.resolve(request)["properties"]))
        self.client.wait(self.client.submit(**full))
        for field, value in other_families.items():
            refused = self.client.request("POST", "/v1/jobs", {**full, field: value})
            self.assertEqual((refused.status, refused.error["param"]), (400, field), refused)
        for wrong in ({"n": 0}, {"n": "1"}, {"stpes": 1}, {"output_format": "gif"}, {"loras": 3}, {"priority": "high"},
                      {"cache": "first_block"}, {"cache": {"mode": "x"}}, {"cache": {"mode": "first_block", "threshold": 0}}):
            self.assertTrue(list(self.schema.problems({**full, **wrong}, request)), wrong)
            self.assertEqual(self.client.request("POST", "/v1/jobs", {**full, **wrong}).status, 400)


class Metrics(unittest.TestCase):
    def scrape(self):
        """Parses metrics into {family: (type, {labels: value})} and asserts that every line is valid."""
        answer = Client(shared.fleet.url).get("/metrics")
        self.assertTrue(answer.headers["Content-Type"].startswith("text/plain; version=0.0.4"))
        families, helped, current = {}, set(), None
        text = answer.body.decode()
        self.assertTrue(text.endswith("\n"))
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name, words = line[7:].split(" ", 1)
                self.assertNotIn(name, helped)
                self.assertTrue(words.strip())
                helped.add(name)
            elif line.startswith("# TYPE "):
                current, kind = line[7:].split(" ")
                self.assertIn(kind, ("counter", "gauge", "histogram"))
                self.assertIn(current, helped)
                families[current] = (kind, {})
            else:
                found = re.fullmatch(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)', line)
                self.assertTrue(found, line)
                name, labels, value = found.groups()
                kind = families[current][0]
                if kind == "histogram":
                    self.assertIn(name, {current + s for s in ("_bucket", "_sum", "_count")})
                else:
                    self.assertEqual(name, current)
                key = (name, labels or "")
                self.assertNotIn(key, families[current][1])
                families[current][1][key] = float(value)
        for name, (kind, _) in families.items():
            self.assertRegex(name, "^(ditfleet|process)_")
            self.assertEqual(name.endswith("_total"), kind == "counter", name)
            if kind == "histogram":
                self.assertRegex(name, "_(seconds|ratio|joules)$")
        return families

    def value(self, families, name, *labels):
        """The sum of the series that have these labels, such as 'state="ready"'."""
        family = name if name in families else re.sub("_(count|sum)$", "", name)
        return sum(value for (sample, given), value in families.get(family, ("", {}))[1].items()
                   if sample == name and set(labels) <= set(given.split(",")))

    def test_metrics_count_events(self):
        client = Client(shared.fleet.url)
        before = self.scrape()
        for _ in range(3):
            client.wait(client.submit(**SMALL))
        canceled = client.submit(**{**SMALL, "width": 128, "height": 128, "num_inference_steps": 200})
        client.wait_event(canceled, "step")
        client.cancel(canceled)
        client.wait(canceled)
        client.request("POST", "/v1/jobs", "{", {"Content-Type": "application/json"})
        client.get("/made/up/path")
        client.request("BREW", "/v1/jobs")
        until(lambda: self.value(self.scrape(), "ditfleet_jobs_total", 'state="canceled"')
              > self.value(before, "ditfleet_jobs_total", 'state="canceled"'), "the cancel is counted")
        after = self.scrape()

        def grown(name, *labels):
            return self.value(after, name, *labels) - self.value(before, name, *labels)
        self.assertEqual(grown("ditfleet_jobs_total", 'state="succeeded"'), 3)
        self.assertEqual(grown("ditfleet_jobs_total", 'state="canceled"'), 1)
        self.assertEqual(grown("ditfleet_http_requests_total", 'code="202"', 'method="POST"', 'route="/v1/jobs"'), 4)
        self.assertEqual(grown("ditfleet_http_requests_total", 'code="400"', 'method="POST"', 'route="/v1/jobs"'), 1)
        self.assertEqual(grown("ditfleet_http_requests_total", 'code="404"', 'method="GET"', 'route="none"'), 1)
        self.assertEqual(grown("ditfleet_http_requests_total", 'code="405"', 'method="other"', 'route="/v1/jobs"'), 1)
        self.assertEqual(grown("ditfleet_queue_wait_seconds_count"), 4)
        # No unit of its class has run to its end, so that a client cannot make labels by canceling.
        self.assertEqual(grown("ditfleet_job_seconds_count", 'state="canceled"', 'class="other"'), 1)
        self.assertEqual(grown("ditfleet_job_seconds_count", 'state="succeeded"'), 3)
        self.assertEqual(grown("ditfleet_unit_run_seconds_count"), 3)
        self.assertGreater(grown("ditfleet_tenant_gpu_seconds_total", 'tenant="default"'), 0)
        self.assertGreater(grown("ditfleet_job_seconds_sum", 'state="succeeded"'), 0)
        self.assertEqual(self.value(after, "ditfleet_scheduler_leading"), 1)
        until(lambda: self.value(self.scrape(), "ditfleet_http_event_streams") == 0, "the streams are closed")
        until(lambda: self.value(self.scrape(), "ditfleet_workers", 'state="ready"') == 1, "the worker is counted")
        until(lambda: self.value(self.scrape(), "ditfleet_jobs_open") == 0 and self.value(self.scrape(), "ditfleet_units_held") == 0,
              "the gauges are back to nothing")

    def test_histograms_add_up(self):
        for name, (kind, samples) in self.scrape().items():
            if kind != "histogram":
                continue
            series = {}
            for (sample, labels), value in samples.items():
                rest = ",".join(p for p in labels.split(",") if not p.startswith("le="))
                if sample.endswith("_bucket"):
                    series.setdefault(rest, []).append((float(re.search(r'le="([^"]+)"', labels)[1]), value))
            for rest, buckets in series.items():
                buckets.sort()
                counts = [c for _, c in buckets]
                self.assertEqual(counts, sorted(counts), name)
                self.assertEqual(buckets[-1], (float("inf"), samples[(name + "_count", rest)]))

    def test_client_input_creates_no_labels(self):
        client = Client(shared.fleet.url)
        for i in range(20):
            client.get(f"/v1/jobs/made-up-{i}")
            client.get(f"/nowhere/{i}")
        routes = {labels for (_, labels) in self.scrape()["ditfleet_http_requests_total"][1]}
        self.assertFalse([r for r in routes if "made-up" in r or "nowhere" in r])


if __name__ == "__main__":
    unittest.main(verbosity=2)
