"""Each process under a Redis user of its own, with the permissions that `ditfleet redis acl` prints; the default user is off. The
flows of jobs_test, adapters, images, batches, webhooks, drains and the command line run, and Redis logs no refused command."""
import contextlib
import json
import re
import signal
import unittest

import jobs_test
from adapters import BYTES, DOWN, UP, safetensors
from api import Client
from batches_test import ended, send
from fleet import DITFLEET, ROOT, Members, Redis, clean_environment, cli, free_port, run, tiny_model, until
from image_to_video_test import png
from jobs_test import KEYS, SMALL
from webhooks_test import Receiver

ROLES = ("coordinator", "worker", "producer", "observer")


def quiet_adapter(rank):
    """An adapter of the tiny model that changes nothing."""
    return safetensors({DOWN: ("F32", [rank, 40], bytes(rank * 160)), UP: ("F32", [40, rank], bytes(rank * 160))})


class System:
    def start(self):
        self.stack = contextlib.ExitStack()
        self.redis = Redis("--save", "", "--appendonly", "yes", password="root")
        self.stack.callback(self.redis.stop)
        for role in ROLES:
            done = run("sh", "-c", f"{DITFLEET} redis acl --role {role} | redis-cli -p {self.redis.port}", env=clean_environment(REDISCLI_AUTH="root"))
            assert done.stdout == "OK\n", done
            self.redis.cli("acl", "setuser", "ditfleet-" + role, ">" + role)
        self.redis.cli("acl", "setuser", "root", "on", ">root", "~*", "&*", "+@all")
        self.redis.cli("acl", "setuser", "default", "off")
        self.redis.user = "root"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.members = self.stack.enter_context(Members(
            f"gateway.listen=127.0.0.1:{port}", f"models.small.path={tiny_model('dev')}", f"models.kontext.path={ROOT}/tests/fixtures/flux/edit/kontext/model",
            "results.backend=redis", "cache.secret=0123456789abcdef", "worker.checkpoint_ms=200", "queue.lease_ms=2000", "queue.renew_ms=400",
            "queue.retry_backoff_ms=100", "webhooks.allow_private=true", config=jobs_test.CONFIG + "default_model: tiny\n"))
        self.worker("worker0")
        until(lambda: "start a coordinator of this version" in self.members.log("worker0"), "the worker waits for a coordinator to load the Functions", 60)
        self.redis.cli("acl", "log", "reset")
        self.members.start("coordinator", self.as_user("coordinator"))
        self.worker("worker1")
        self.admin = Client(self.url, KEYS["admin"])
        until(lambda: sorted(self.states().values()) == ["ready", "ready"], "the workers are ready", 60)
        jobs_test.shared.fleet = self

    @property
    def ready(self):
        return {"pids": {"workers": [self.members.processes[name].pid for name in ("worker0", "worker1")]}}

    def stop(self):
        self.stack.close()

    def as_user(self, role):
        return f"redis.url=redis://ditfleet-{role}:{role}@127.0.0.1:{self.redis.port}"

    def worker(self, name):
        self.members.start(name, self.as_user("worker"), f"cache.dir={self.members.folder}/{name}")  # so that they share programs through Redis

    def states(self):
        with contextlib.suppress(OSError):
            return {one["name"]: one["state"] for one in self.admin.get("/v1/workers").json()["workers"]}
        return {}


system = System()
setUpModule, tearDownModule = system.start, system.stop


class Flows(unittest.TestCase):
    def setUp(self):
        self.http, self.redis = Client(system.url, KEYS["first"]), system.redis

    def cli(self, *words):
        done = cli(*words, env=clean_environment(DITFLEET_URL=system.url, DITFLEET_KEY=KEYS["admin"]))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def end(self, id, state="succeeded"):
        self.assertEqual(self.http.wait(id)["state"], state, self.http.job(id))
        return self.http.job(id)

    def test_adapters(self):
        for seed in (1, 2):
            put = self.http.request("PUT", "/v1/loras/ink", quiet_adapter(seed), BYTES)
            self.assertIn(put.status, (200, 201), put)
            self.end(self.http.submit(**SMALL, loras=[{"name": "ink"}]))
        self.assertEqual(self.http.request("DELETE", "/v1/loras/ink").status, 200)
        self.assertIn("ink", self.cli("loras", "add", "ink", self.file(quiet_adapter(3))))
        self.cli("loras", "pin", "ink")
        self.cli("loras", "remove", "ink")

    def file(self, data):
        path = system.members.folder / "adapter.safetensors"
        path.write_bytes(data)
        return path

    def test_images(self):
        upload = self.http.request("POST", "/v1/uploads", png(32, 32), {"Content-Type": "image/png"}).json()["id"]
        self.end(self.http.submit(model="kontext", images=[upload], num_inference_steps=2, size="32x32", max_sequence_length=16))
        self.assertEqual(self.http.get("/v1/uploads").json()["data"][0]["id"], upload)
        self.assertEqual(self.http.get(f"/v1/uploads/{upload}/content").body, png(32, 32))
        until(lambda: self.http.request("DELETE", f"/v1/uploads/{upload}").status in (200, 204), "the image is removed")

    def test_batches_and_webhooks(self):
        with Receiver() as receiver:
            hook = {"url": receiver.url, "events": ["job.started", "job.progress", "job.succeeded"]}
            job = self.http.submit(**{**SMALL, "num_inference_steps": 30}, webhook=hook)
            receiver.wait(job, "job.succeeded")
            self.assertEqual(self.http.get("/v1/webhooks/secret").status, 200)
            self.assertIn(self.http.request("POST", "/v1/webhooks/secret/rotate").status, (200, 404))
        made = send(self.http, [{"prompt": "a", **SMALL}, {"prompt": "b", **SMALL}])
        self.assertEqual(made.status, 202, made)
        self.assertEqual(ended(self.http, made.json()["id"])["request_counts"]["completed"], 2)
        id = send(self.http, [{"prompt": "c", **jobs_test.LONG}]).json()["id"]
        self.http.request("POST", f"/v1/batches/{id}/cancel")
        ended(self.http, id)

    def test_workers_that_are_drained_or_lost(self):
        self.cli("workers", "drain", "worker1")
        until(lambda: system.states()["worker1"] == "draining", "the worker is drained")
        job = self.http.submit(**jobs_test.LONG)
        self.http.wait_event(job, lambda event: event.type == "step" and event.data["step"] > 20)
        self.cli("workers", "resume", "worker1")
        system.members.processes["worker0"].send_signal(signal.SIGKILL)
        system.members.processes.pop("worker0").wait()
        self.end(job)
        self.assertIn("goes on from the checkpoint after step", system.members.log("worker1"))
        system.worker("worker0")
        until(lambda: list(system.states().values()).count("ready") == 2, "both workers are ready", 60)
        self.assertEqual(self.http.request("POST", f"/v1/jobs/{job}/retry").status, 202)

    def test_the_command_line_and_the_pages(self):
        job = self.http.submit(**SMALL)
        self.end(job)
        until(lambda: self.redis.cli("xlen", "df:{0}:history") != "0", "the history has a job")
        for words in (["jobs", "list"], ["jobs", "show", job], ["explain", job], ["workers"], ["tenants"], ["history", "export"],
                      ["keys", "add", "new"], ["keys", "list"]):
            self.cli(*words)
        for path in ("/readyz", "/metrics", "/v1/scaling?seconds=60", "/v1/usage", "/v1/models"):
            self.assertEqual(system.admin.get(path).status, 200, path)
        for command in ("stats", "list", "verify", "purge"):
            tier = ["--tier", "redis"] if command != "stats" else []
            done = cli("cache", command, *system.members.flags(system.as_user("coordinator")), *tier)
            self.assertEqual(done.returncode, 0, (command, done.stderr))

    def test_old_jobs_are_removed(self):
        job = self.http.submit(**SMALL)
        self.end(job)
        system.members.stop("coordinator")
        system.members.start("coordinator", system.as_user("coordinator"), "queue.retention_ms=1000")
        until(lambda: self.redis.cli("exists", f"df:{{0}}:job:{job}") == "0", "the job is removed")
        system.members.stop("coordinator")
        system.members.start("coordinator", system.as_user("coordinator"))
        until(lambda: sorted(system.states().values()) == ["ready", "ready"], "the coordinator is back", 30)

    def test_producers_and_observers(self):
        def call(role, *words):
            return self.redis.cli(*words, user="ditfleet-" + role, password=role)
        entry = call("producer", "xadd", "df:{0}:in", "*", "spec", json.dumps({"prompt": "a", **SMALL}), "tenant", "first")
        job = "x-" + entry
        self.assertEqual(call("producer", "wait", "0", "1"), "0")
        for role in ("producer", "observer"):
            until(lambda role=role: call(role, "hget", f"df:{{0}}:job:{job}", "state") == "succeeded", "the job ends")
            events = call(role, "fcall_ro", "ditfleet_v3_events", "4", f"df:{{0}}:job:{job}", "df:{0}:open", "df:{0}:last", "df:{0}:events", job, "0-0", "500")
            self.assertIn("succeeded 0", events)
            self.assertIn("succeeded", call(role, "fcall_ro", "ditfleet_v3_job", "7", f"df:{{0}}:job:{job}", *(f"df:{{0}}:{key}" for key in ("in", "units", "open", "specs", "last", "events")), job))
            self.assertTrue(call(role, "xread", "count", "1", "streams", "df:{0}:events", "0"))
        manifest = json.loads(call("producer", "hget", f"df:{{0}}:job:{job}", "m0"))
        self.assertEqual(call("producer", "strlen", manifest["key"]), str(manifest["bytes"]))
        self.assertIn("worker1", call("observer", "fcall_ro", "ditfleet_v3_workers", "2", "df:{0}:workers", "df:{0}:open", "0"))
        self.assertIn("used_memory", call("observer", "info", "memory"))
        self.assertRegex(call("observer", "xlen", "df:{0}:dead"), r"^\d+$")


# Classes of this module, so that the tests of jobs_test run on this system.
class Cancel(jobs_test.Cancel):
    pass


class Deadline(jobs_test.Deadline):
    pass


class Idempotency(jobs_test.Idempotency):
    pass


class Stream(jobs_test.Stream):
    pass


class Unneeded(unittest.TestCase):
    """Runs last: its own commands are refused."""

    @classmethod
    def setUpClass(cls):
        refused = system.redis.cli("acl", "log")
        assert not refused, refused

    def test_every_command_of_the_sources_is_permitted(self):
        named = set()
        for folder in ("shared", "coordinator"):
            for source in (ROOT / folder).rglob("*.*"):
                if source.suffix in (".cpp", ".lua"):
                    named |= set(re.findall(r"""\b(?:p?call|rc|[cC]ommand(?: \w+)?)\(["']([A-Z]+)["']""", source.read_text()))
        permitted = {command.upper() for role in ("coordinator", "worker")
                     for command in re.findall(r" \+(\w+)", cli("redis", "acl", "--role", role).stdout)}
        self.assertGreater(len(named), 50)
        self.assertEqual(named - permitted, {"AUTH", "HELLO", "SENTINEL"})  # need none, or are for another server

    def test_what_a_role_does_not_need_is_refused(self):
        everybody = (["flushall"], ["config", "get", "*"], ["keys", "*"], ["scan", "0"], ["get", "df:{1}:epoch"], ["acl", "list"], ["shutdown"],
                     ["replicaof", "no", "one"], ["client", "list"], ["monitor"], ["publish", "other", "x"],
                     ["eval", "return redis.call('FLUSHALL')", "0"], ["function", "delete", "ditfleet_v3"])
        load = ["function", "load", "replace", "#!lua name=ditfleet_v3\nredis.register_function('x', function() end)"]
        alone = {"coordinator": [],
                 "worker": [load, ["hgetall", "df:{keys}"], ["get", "df:{0}:leader"], ["hgetall", "df:{0}:hook_secrets"], ["get", "df:{0}:links:1"],
                            ["set", "df:{lora}:version", "1"], ["xadd", "df:{0}:in", "*", "spec", "{}"], ["fcall", "ditfleet_v3_lead", "0"],
                            ["set", "df:{0}:input:x", "1"]],
                 "producer": [load, ["hset", "df:{0}:open", "x", "1"], ["xadd", "df:{0}:events", "*", "e", ""], ["fcall", "ditfleet_v3_submit", "0"],
                              ["eval", "return 1", "0"], ["hgetall", "df:{keys}"], ["hgetall", "df:{0}:worker:worker1"], ["del", "df:{0}:in"]],
                 "observer": [load, ["xadd", "df:{0}:in", "*", "spec", "{}"], ["hgetall", "df:{keys}"], ["get", "df:{0}:kernel:1:x"], ["set", "df:{0}:format", "1"],
                              ["eval", "return 1", "0"], ["hgetall", "df:{0}:hook_secrets"]]}
        for role, more in alone.items():
            for words in (*everybody, *more):
                with self.subTest(role=role, words=words):
                    answer = system.redis.cli(*words, user="ditfleet-" + role, password=role)
                    self.assertTrue(answer.startswith("NOPERM") or "user executing the script can't" in answer, answer)

    def test_a_refusal_names_the_user_and_the_command(self):
        with Members(system.as_user("worker")) as members:
            members.start("coordinator", f"gateway.listen=127.0.0.1:{free_port()}")
            until(lambda: "NOPERM" in members.log("coordinator") or "can't" in members.log("coordinator"), "the refusal is logged")
            line = next(line for line in members.log("coordinator").splitlines() if "NOPERM" in line or "can't" in line)
            for words in ("`ditfleet redis acl`", "'ditfleet-worker'"):
                self.assertIn(words, line)

    def test_wrong_words(self):
        for words, reply in ((["--role", "king"], "coordinator, worker, producer, observer"), ([], "--role"), (["--role", "worker", "--user", "a b"], "--user")):
            done = cli("redis", "acl", *words)
            self.assertEqual(done.returncode, 2, done)
            self.assertIn(reply, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
