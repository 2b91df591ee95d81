"""redis-py as producer and reader: XADD to the intake, the submit Function, events and results."""
import hashlib
import json
import time
import unittest
import uuid

from api import ENDED, Client
from fleet import Shared, need
from image import describe

try:
    import redis
except ImportError:
    need(False, "the redis package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")

shared = Shared(workers=1)
setUpModule, tearDownModule = shared.start, shared.stop
SPEC = {"model": "tiny", "prompt": "a red circle", "width": 32, "height": 16, "num_inference_steps": 2, "max_sequence_length": 16}
INTAKE, EVENTS = "df:{0}:in", "df:{0}:events"


class WithRedis(unittest.TestCase):
    def setUp(self):
        self.redis = redis.Redis(unix_socket_path=str(shared.fleet.redis_socket), decode_responses=True)
        self.bytes = redis.Redis(unix_socket_path=str(shared.fleet.redis_socket))
        self.http = Client(shared.fleet.url)
        self.addCleanup(self.redis.close)
        self.addCleanup(self.bytes.close)

    def events(self, job, seconds=30):
        """Returns all events of a job up to the last one, polling whenever the shard's stream grows."""
        keys = [f"df:{{0}}:job:{job}", "df:{0}:open", "df:{0}:last", EVENTS]
        after, seen, out, deadline = "0-0", "0-0", [], time.monotonic() + seconds
        while time.monotonic() < deadline:
            rest, *found = self.redis.fcall_ro("ditfleet_v3_events", len(keys), *keys, job, after, 500)
            self.assertEqual(rest, [])  # short histories need no second call
            for id, event in zip(found[::2], found[1::2]):  # "<type> <unit> <data>"; the last unit's end includes the job's
                if id == after:
                    continue
                after = id
                kind, unit, data = event.split(" ", 2)
                data = json.loads(data)
                job_state = data.pop("job", None)
                job_error = data.pop("job_error", {})
                out.append((kind, int(unit), data))
                if job_state:
                    out.append((job_state, -1, job_error))
            if out and out[-1][0] in ENDED and out[-1][1] == -1:
                return out
            for _, entries in self.redis.xread({EVENTS: max(seen, after)}, block=1000) or []:  # ids of one length
                seen = entries[-1][0]
        self.fail(f"job {job} did not end; events: {out}")

    def image(self, job, unit=0):
        manifest = json.loads(self.redis.hget(f"df:{{0}}:job:{job}", f"m{unit}"))
        data = self.bytes.get(manifest["key"])
        self.assertEqual(hashlib.sha256(data).hexdigest(), manifest["sha256"])
        return data

    def add(self, fields):
        """Returns the id of the job created from an intake entry."""
        entry = self.redis.xadd(INTAKE, fields)
        return fields.get("id") or "x-" + entry

    def submit(self, id, spec, tenant="default", key=None, deadline_ms=0):
        keys = [INTAKE, "df:{0}:jobs", "df:{0}:deadline", "df:{0}:open", "df:{0}:last", "df:{0}:events", f"df:{{0}}:job:{id}",
                f"df:{{0}}:idem:{tenant}:{key}" if key else f"df:{{0}}:job:{id}"]
        sha = hashlib.sha256(spec.encode()).hexdigest()
        return self.redis.fcall("ditfleet_v3_submit", len(keys), *keys, 86_400_000, id, tenant, spec, sha, 1 if key else 0, "",
                                deadline_ms, 1, "")


class Xadd(WithRedis):
    def test_an_entry_becomes_an_image(self):
        job = self.add({"spec": json.dumps(SPEC)})
        events = self.events(job)
        self.assertEqual([(t, u) for t, u, _ in events if t not in ("queued", "step")],
                         [("ready", 0), ("assigned", 0), ("started", 0), ("succeeded", 0), ("succeeded", -1)])
        steps = [d["step"] for t, _, d in events if t == "step"]  # fast steps are reported together
        self.assertEqual((steps, steps[-1]), (sorted(set(steps)), 2))
        self.assertEqual(describe(self.image(job)), ("png", 32, 16))
        over_http = self.http.get(f"/v1/jobs/{job}/results/0")
        self.assertEqual(over_http.body, self.image(job))

    def test_own_id_tenant_and_trace(self):
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        job = self.add({"spec": json.dumps({**SPEC, "n": 2}), "id": "mine-" + uuid.uuid4().hex, "tenant": "default", "traceparent": trace})
        self.assertEqual(self.events(job)[-1][0], "succeeded")
        record = self.http.job(job)
        self.assertEqual((record["traceparent"].split("-")[1], record["units"]), (trace.split("-")[1], 2))

    def test_idempotency_key_makes_one_job(self):
        key, spec = uuid.uuid4().hex, json.dumps(SPEC)
        first = self.add({"spec": spec, "idempotency_key": key})
        self.events(first)
        second = self.add({"spec": spec, "idempotency_key": key})
        other = self.add({"spec": json.dumps({**SPEC, "seed": 1}), "idempotency_key": key})
        self.assertEqual(self.events(other)[-1][0], "rejected")
        self.assertEqual(self.http.job(second)["id"], first)

    def test_bad_entries_are_rejected_with_the_reason(self):
        good = json.dumps(SPEC)
        cases = [
            ({"spec": "{"}, "JSON"),
            ({"spec": "[1]"}, "object"),
            ({"spec": b"\xff\xfe"}, ""),
            ({"spec": json.dumps({**SPEC, "prompt": None})}, "prompt"),
            ({"spec": json.dumps({**SPEC, "model": "tinny"})}, "tiny"),
            ({"spec": json.dumps({**SPEC, "width": 33})}, "multiple"),
            ({"spec": json.dumps({**SPEC, "stpes": 3})}, "stpes"),
            ({"spec": good.replace("2,", "NaN,", 1)}, ""),
            ({"spec": "[" * 5000}, ""),
            ({"spec": json.dumps({**SPEC, "prompt": "x" * (1 << 20)})}, "bytes"),
            ({"nothing": "here"}, "spec"),
            ({"spec": good, "colour": "red"}, "colour"),
            ({"spec": good, b"\xff\xfe": "?"}, "unknown field"),
            ({"spec": good, "é" * 40 + "x": "?"}, "unknown field"),
            ({"spec": good, "job": "internal"}, "job"),
            ({"spec": good, "tenant": "no such tenant!"}, "tenant"),
            ({"spec": good, "idempotency_key": "k" * 300}, "idempotency_key"),
            ({"spec": good, "deadline_ms": "soon"}, "deadline_ms"),
            ({"spec": good, "deadline_ms": "-5"}, "deadline_ms"),
        ]
        for fields, word in cases:
            with self.subTest(fields=str(fields)[:150]):
                job = self.add(fields)
                last = self.events(job)[-1]
                self.assertEqual(last[0], "rejected")
                self.assertIn(word, last[2]["message"])
                record = self.http.job(job)
                self.assertEqual((record["state"], record["error"]["message"]), ("rejected", last[2]["message"]))
        self.assertEqual(self.redis.xlen(INTAKE), 0)

    def test_a_bad_id_is_rejected_under_the_entry_id(self):
        entry = self.redis.xadd(INTAKE, {"spec": json.dumps(SPEC), "id": "a/b c"})
        self.assertEqual(self.events("x-" + entry)[-1][0], "rejected")

    def test_a_taken_id_does_not_touch_the_other_job(self):
        id = "twice-" + uuid.uuid4().hex
        self.add({"spec": json.dumps(SPEC), "id": id})
        self.events(id)
        before = self.http.job(id)
        entry = self.redis.xadd(INTAKE, {"spec": json.dumps({**SPEC, "seed": 3}), "id": id})
        last = self.events("x-" + entry)[-1]
        self.assertEqual(last[0], "rejected")
        self.assertIn(id, last[2]["message"])
        self.assertEqual(self.http.job(id), before)


class Function(WithRedis):
    def test_submit(self):
        id = "f-" + uuid.uuid4().hex
        spec = json.dumps({**SPEC, "output_format": "webp"})
        self.assertEqual(self.submit(id, spec), "created")
        self.assertEqual(self.submit(id, spec), "existed " + id)
        self.assertEqual(self.events(id)[-1][0], "succeeded")
        self.assertEqual(describe(self.image(id)), ("webp", 32, 16))

    def test_idempotency(self):
        key, spec = uuid.uuid4().hex, json.dumps(SPEC)
        first, second, third = ("f-" + uuid.uuid4().hex for _ in range(3))
        self.assertEqual(self.submit(first, spec, key=key), "created")
        self.assertEqual(self.submit(second, spec, key=key), "existed " + first)
        self.assertEqual(self.submit(third, json.dumps({**SPEC, "seed": 2}), key=key), "mismatch " + first)
        self.events(first)

    def test_deadline_in_the_past_expires(self):
        id = "f-" + uuid.uuid4().hex
        self.assertEqual(self.submit(id, json.dumps({**SPEC, "width": 128, "height": 128, "num_inference_steps": 200}), deadline_ms=1), "created")
        self.assertEqual(self.events(id)[-1][0], "expired")

    def test_bad_calls(self):
        self.assertIn("invalid id", self.submit("a b", json.dumps(SPEC)))
        self.assertIn("invalid tenant", self.submit("f-1", json.dumps(SPEC), tenant="a b"))
        with self.assertRaises(redis.ResponseError):
            self.redis.fcall("ditfleet_v3_submit", 1, INTAKE, 5)

    def test_a_bad_spec_is_rejected(self):
        id = "f-" + uuid.uuid4().hex
        self.assertEqual(self.submit(id, json.dumps({**SPEC, "width": 17})), "created")
        last = self.events(id)[-1]
        self.assertEqual(last[0], "rejected")
        self.assertIn("16", last[2]["message"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
