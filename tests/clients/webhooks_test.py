"""Webhooks, as receivers see them: what is sent, how it is signed, and what happens when a receiver fails. Standard Webhooks'
own library checks the signatures."""
import collections
import hashlib
import http.server
import importlib.util
import json
import os
import random
import signal
import threading
import time
import unittest

from adapters import Redis
from api import Client
from fleet import Fleet, need, tiny_model, until

need(importlib.util.find_spec("standardwebhooks"), "the standardwebhooks package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")
from standardwebhooks import Webhook  # noqa: E402

SMALL = {"width": 32, "height": 32, "num_inference_steps": 1}
ENDS = ("job.succeeded", "job.failed", "job.canceled")


class Receiver:
    """`with Receiver() as receiver:` keeps what is posted to receiver.url. answer(path, count) is the status of an answer to
    the id of the event that came `count` times, 0: none comes."""

    def __init__(self, answer=lambda path, count: 200):
        self.answer, self.got, self.lock, self.closing = answer, collections.defaultdict(list), threading.Lock(), threading.Event()

    def __enter__(self):
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                event = {"path": self.path, "headers": dict(self.headers), "body": body, "at": time.monotonic(), **json.loads(body)}
                with receiver.lock:
                    receiver.got[self.headers["webhook-id"]].append(event)
                    count = len(receiver.got[self.headers["webhook-id"]])
                status = receiver.answer(self.path, count)
                if not status:
                    receiver.closing.wait(30)
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", receiver.url + "/moved")
                if self.path == "/huge":
                    self.end_headers()
                    try:
                        while not receiver.closing.is_set():
                            self.wfile.write(b"x" * 65536)
                    except OSError:
                        return
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def of(self, job, type=None):
        with self.lock:
            return [event for events in self.got.values() for event in events if event["data"]["id"] == job and type in (None, event["type"])]

    def wait(self, job, type, count=1, seconds=30):
        return until(lambda: len(self.of(job, type)) >= count and self.of(job, type), f"{type} of {job}", seconds)


def config(**webhooks):
    return json.dumps({"default_model": "tiny", "webhooks": {"allow_private": True, "timeout_ms": 1500, "retry_ms": 100, **webhooks}})


class Service(unittest.TestCase):
    """A fleet with a worker, which sends to this host, and retries soon."""

    @classmethod
    def setUpClass(cls):
        cls.fleet = cls.enterClassContext(Fleet(workers=1, config=config()))
        cls.http = Client(cls.fleet.url)

    def receiver(self, *answer):
        return self.enterContext(Receiver(*answer))

    def submit(self, webhook, **fields):
        made = self.http.request("POST", "/v1/jobs", {"prompt": "a circle", **SMALL, **fields, "webhook": webhook})
        self.assertEqual(made.status, 202, made)
        return made.json()["id"]

    def waiting(self, *jobs):
        return [one for one in self.http.get("/v1/webhooks/deliveries").json()["deliveries"] if one["job"] in jobs]

    def secret(self):
        return self.http.get("/v1/webhooks/secret").json()["secret"]

    def test_the_end_of_a_job_is_sent_signed_and_once(self):
        receiver = self.receiver()
        job = self.submit(receiver.url + "/hooks?a=1")
        event, = receiver.wait(job, "job.succeeded")
        told = Webhook(self.secret()).verify(event["body"], event["headers"])
        self.assertEqual(told["data"], {**self.http.get("/v1/jobs/" + job).json(), **told["data"]})
        self.assertEqual((event["path"], told["data"]["state"], event["headers"]["webhook-id"]), ("/hooks?a=1", "succeeded", job + ".succeeded"))
        self.assertEqual(Client(self.fleet.url).get(told["data"]["unit_records"][0]["result"]["url"]).status, 200)
        self.assertRegex(told["timestamp"], r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
        with self.assertRaises(Exception):
            Webhook(self.secret()).verify(event["body"].replace("circle", "square"), event["headers"])
        time.sleep(1)
        self.assertEqual([event["type"] for event in receiver.of(job)], ["job.succeeded"])
        self.assertEqual(self.waiting(job), [])

    def test_events_that_are_asked_for(self):
        receiver = self.receiver()
        both = self.submit({"url": receiver.url, "events": ["job.started", "job.progress", "job.succeeded"]}, width=256, height=256, num_inference_steps=60, n=2)
        receiver.wait(both, "job.succeeded", seconds=100)
        types = [event["type"] for event in sorted(receiver.of(both), key=lambda event: event["at"])]
        self.assertEqual((types[0], types[-1], types.count("job.started"), types.count("job.succeeded")), ("job.started", "job.succeeded", 1, 1), types)
        seen = receiver.of(both, "job.progress")
        self.assertGreaterEqual(len(seen), 1, types)
        self.assertEqual(len({event["headers"]["webhook-id"] for event in seen}), len(seen))
        times = sorted(event["at"] for event in seen)
        self.assertTrue(all(b - a > 0.8 for a, b in zip(times, times[1:])), times)
        self.assertTrue(all(0 < event["data"]["progress"] < 1 for event in seen))
        none = self.submit({"url": receiver.url, "events": ["job.failed"]})
        self.http.wait(none)
        time.sleep(1)
        self.assertEqual(receiver.of(none), [])
        redis = Redis(self.fleet.redis_socket)
        left = json.dumps([[entry.decode() for entry in fields] for _, fields in redis("XRANGE", "df:{0}:outbox", "-", "+")])
        for job in (both, none):
            self.assertNotIn(job, left)
            self.assertEqual((redis("HEXISTS", "df:{0}:hooked", job), redis("SISMEMBER", "df:{0}:watched", job)), (0, 0))

    def test_jobs_that_are_canceled_or_rejected(self):
        receiver = self.receiver()
        canceled = self.submit(receiver.url, width=256, height=256, num_inference_steps=200, n=8)
        self.http.request("DELETE", "/v1/jobs/" + canceled)
        self.assertEqual(receiver.wait(canceled, "job.canceled")[0]["data"]["state"], "canceled")
        redis = Redis(self.fleet.redis_socket)
        redis("XADD", "df:{0}:in", "*", "id", "broken", "tenant", "default", "spec", json.dumps({"prompt": "x", "width": 7, "webhook": receiver.url}))
        event, = receiver.wait("broken", "job.failed")
        self.assertEqual(event["data"]["state"], "rejected")
        self.assertIn("width", event["data"]["error"]["message"])

    def test_a_failing_receiver_gets_it_again_with_the_same_id(self):
        receiver = self.receiver(lambda path, count: 200 if count > 2 else 500)
        job = self.submit(receiver.url)
        events = receiver.wait(job, "job.succeeded", 3)
        self.assertEqual({event["headers"]["webhook-id"] for event in events}, {job + ".succeeded"})
        for event in events:
            Webhook(self.secret()).verify(event["body"], event["headers"])
        until(lambda: not self.waiting(job), "the delivery is gone", 5)

    def test_odd_answers(self):
        receiver = self.receiver(lambda path, count: 302 if path == "/redirect" and count < 3 else 200)
        huge = self.submit(receiver.url + "/huge")
        moved = self.submit(receiver.url + "/redirect")
        receiver.wait(huge, "job.succeeded")
        receiver.wait(moved, "job.succeeded", 3)
        time.sleep(0.5)
        self.assertEqual(len(receiver.of(huge)), 1, "the head of its answer was enough")
        self.assertEqual({event["path"] for event in receiver.of(moved)}, {"/redirect"}, "a redirect was followed")

    def test_a_receiver_that_hangs_delays_no_other(self):
        hanging = self.receiver(lambda path, count: 0)
        quick = self.receiver()
        hung = [self.submit(hanging.url) for _ in range(40)]
        for _ in range(5):
            job = self.submit(quick.url)
            self.http.wait(job)
            ended = time.monotonic()
            self.assertLess(quick.wait(job, "job.succeeded")[0]["at"] - ended, 2)
        self.assertGreaterEqual(len(hanging.got), 3)
        until(lambda: any("imed out" in one["error"] for one in self.waiting(*hung)), "a delivery waits")

    def test_a_rotated_secret(self):
        receiver = self.receiver()
        old = self.secret()
        made = self.http.request("POST", "/v1/webhooks/secret/rotate").json()["secret"]
        self.assertNotEqual(old, made)
        self.assertEqual(self.secret(), made)
        event, = receiver.wait(self.submit(receiver.url), "job.succeeded")
        for secret in (old, made):
            Webhook(secret).verify(event["body"], event["headers"])
        self.assertEqual(len(event["headers"]["webhook-signature"].split()), 2)

    def test_none_is_lost_when_receivers_fail_and_the_coordinator_is_killed(self):
        chance = random.Random(5)
        receiver = self.receiver(lambda path, count: 503 if chance.random() < 0.3 else 200)
        count = int(os.environ.get("DITFLEET_TEST_WEBHOOKS", 60))
        jobs = []
        for index in range(count):
            jobs.append(until(lambda: self.try_submit(receiver.url), "a job is accepted"))
            if index % 20 == 10:
                os.kill(self.fleet.ready["pids"]["coordinator"], signal.SIGKILL)
        for job in jobs:
            receiver.wait(job, "job.succeeded", seconds=120 + count)
        for job in jobs:
            for event in receiver.of(job):
                Webhook(self.secret()).verify(event["body"], event["headers"])
                self.assertEqual(event["headers"]["webhook-id"], job + ".succeeded")
        until(lambda: not self.waiting(*jobs), "all are delivered", 60)

    def try_submit(self, url):
        try:
            made = self.http.request("POST", "/v1/jobs", {"prompt": "a circle", **SMALL, "webhook": url})
            return made.json()["id"] if made.status == 202 else None
        except OSError:
            return None


class Limits(unittest.TestCase):
    def test_deliveries_that_are_given_up_can_be_replayed(self):
        answers = {"status": 500}
        with Fleet(workers=0, config=config(give_up_ms=1000)) as fleet, Receiver(lambda path, count: answers["status"]) as receiver:
            http = Client(fleet.url)
            job = http.request("POST", "/v1/jobs", {"prompt": "x", "webhook": receiver.url}).json()["id"]
            http.request("DELETE", "/v1/jobs/" + job)
            dead = lambda: [one for one in http.get("/v1/webhooks/deliveries").json()["deliveries"] if one["state"] == "dead"]
            letter, = until(dead, "the delivery is dead")
            self.assertEqual((letter["id"], letter["job"], letter["error"], letter["type"]), (job + ".canceled", job, "the receiver answered 500", "job.canceled"))
            self.assertGreaterEqual(letter["attempts"], 3)
            answers["status"] = 204
            before = len(receiver.of(job))
            self.assertEqual(http.request("POST", f"/v1/webhooks/deliveries/{letter['id']}/replay").status, 200)
            until(lambda: len(receiver.of(job)) == before + 1, "it is sent again")
            until(lambda: not http.get("/v1/webhooks/deliveries").json()["deliveries"], "it is delivered")
            self.assertEqual(http.request("POST", f"/v1/webhooks/deliveries/{letter['id']}/replay").status, 404)
            late = http.submit(webhook=receiver.url, deadline_ms=300)
            self.assertEqual(receiver.wait(late, "job.failed")[0]["data"]["state"], "expired")

    def test_tenants_have_their_own(self):
        keys = [{"tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": name == "ops"} for name in ("ops", "acme", "other")]
        with Receiver() as receiver:
            settings = json.loads(config(give_up_ms=1000))
            settings |= {"keys": keys, "tenants": {"acme": {"webhook_url": receiver.url + "/default", "webhook_hosts": "127.0.0.1"}, "other": {"webhook_hosts": "*.example.com, hooks.test"}}}
            with Fleet(workers=0, config=json.dumps(settings)) as fleet:
                acme, other, ops = (Client(fleet.url, key) for key in ("acme", "other", "ops"))
                job = acme.request("POST", "/v1/jobs", {"prompt": "x"}).json()["id"]
                acme.request("DELETE", "/v1/jobs/" + job)
                event, = receiver.wait(job, "job.canceled")
                self.assertEqual(event["path"], "/default")
                Webhook(acme.get("/v1/webhooks/secret").json()["secret"]).verify(event["body"], event["headers"])
                self.assertNotEqual(acme.get("/v1/webhooks/secret").json()["secret"], other.get("/v1/webhooks/secret").json()["secret"])
                refused = other.request("POST", "/v1/jobs", {"prompt": "x", "webhook": receiver.url})
                self.assertEqual((refused.status, refused.error["param"]), (400, "webhook"))
                self.assertIn("hooks.test", refused.error["message"])
                # By XADD nothing refuses it before it is sent.
                spec = json.dumps({"prompt": "x", "width": 7, "webhook": receiver.url})
                Redis(fleet.redis_socket)("XADD", "df:{0}:in", "*", "id", "raw", "tenant", "other", "spec", spec)
                letter, = until(lambda: other.get("/v1/webhooks/deliveries").json()["deliveries"], "it waits, or is dead")
                self.assertIn("webhooks.hosts", letter["error"])
                self.assertEqual(receiver.of("raw"), [])
                self.assertEqual(acme.get("/v1/webhooks/deliveries").json()["deliveries"], [])
                self.assertEqual(acme.request("POST", f"/v1/webhooks/deliveries/{letter['id']}/replay").status, 404)
                self.assertEqual(len(ops.get("/v1/webhooks/deliveries").json()["deliveries"]), 1)

    def test_private_addresses_are_refused(self):
        names = ["localhost", "127.0.0.1", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "[fd00::1]", "[64:ff9b::7f00:1]", "a.localhost", "LOCALHOST."]
        with Fleet(workers=0, sets=["webhooks.retry_ms=100"], models={"tiny": tiny_model()}) as fleet, Receiver() as receiver:
            http, port = Client(fleet.url), receiver.server.server_port
            for name in names:
                with self.subTest(name):
                    refused = http.request("POST", "/v1/jobs", {"prompt": "x", "webhook": f"http://{name}:{port}/"})
                    self.assertEqual((refused.status, refused.error["param"]), (400, "webhook"))
                    self.assertIn("webhooks.allow_private", refused.error["message"])
            for url, says in (("ftp://app.example/", "http://"), ("app.example", "http://"), ("https://user:pw@app.example/", "user name"), ("https://app.example/a b", "space"), ("", "http://"),
                              ({"url": "https://app.example/", "events": ["job.done"]}, "job.done"), ({"url": "https://app.example/", "events": []}, "empty"), ({"events": ["job.failed"]}, "http://"),
                              ({"url": "https://app.example/", "secret": "x"}, "secret"), (7, "a number"), ("https://app.example/" + "a" * 2048, "2048")):
                with self.subTest(url=url):
                    refused = http.request("POST", "/v1/jobs", {"prompt": "x", "webhook": url})
                    self.assertEqual(refused.status, 400, refused)
                    self.assertIn(says, refused.error["message"])
            # Names are resolved when an event is sent; these are in /etc/hosts.
            for name in ("ip6-localhost", os.uname().nodename):
                job = http.request("POST", "/v1/jobs", {"prompt": "x", "webhook": f"http://{name}:{port}/"}).json()["id"]
                http.request("DELETE", "/v1/jobs/" + job)
                letter = until(lambda: [one for one in http.get("/v1/webhooks/deliveries").json()["deliveries"] if one["job"] == job], "it is not sent")[0]
                self.assertRegex(letter["error"], "not public|[Rr]esolve")
            self.assertIn("not public", json.dumps(http.get("/v1/webhooks/deliveries").json()))
            self.assertEqual(receiver.got, {})


if __name__ == "__main__":
    unittest.main()
