"""Keys that are added, rotated and revoked at run time, the quotas of tenants, and whose images are whose."""
import base64
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from adapters import adapter, BYTES, DOWN, raw_file, Redis
from api import Client
from fleet import ROOT, DITFLEET, Fleet, cli, start, tiny_model, until

SMALL = {"width": 32, "height": 32, "num_inference_steps": 1}
ROOT_KEY = "sk-root"


def config(**more):
    key = hashlib.sha256(ROOT_KEY.encode()).hexdigest()
    return json.dumps({"keys": [{"tenant": "ops", "sha256": key, "admin": True}], "default_model": "tiny", **more})


class Keys(unittest.TestCase):
    """A fleet without configured keys, and a second gateway on its Redis."""

    @classmethod
    def setUpClass(cls):
        cls.fleet = cls.enterClassContext(Fleet(workers=0))
        cls.other = cls.enterClassContext(Fleet(workers=0, flags=["--redis", f"unix://{cls.fleet.redis_socket}"]))

    def client(self, key=None, fleet=None):
        return Client((fleet or self.fleet).url, key)

    def test_the_life_of_keys(self):
        anyone = self.client()
        self.assertEqual(anyone.get("/v1/jobs").status, 200)
        refused = anyone.request("POST", "/v1/keys", {"tenant": "acme"})
        self.assertEqual((refused.status, refused.error["param"]), (400, "admin"))
        self.assertIn("first key must be an administrator's", refused.error["message"])

        added = cli("keys", "add", "ops", "--admin", "--url", self.fleet.url)
        self.assertEqual(added.returncode, 0, added.stderr)
        root_key = added.stdout.split()[-1]
        root = self.client(root_key)
        self.assertEqual(anyone.get("/v1/jobs").status, 401)
        until(lambda: self.client(fleet=self.other).get("/v1/jobs").status == 401, "the other gateway knows the key", 5)
        self.assertEqual(self.client(root_key, self.other).get("/v1/jobs").status, 200)

        made = root.request("POST", "/v1/keys", {"tenant": "acme"})
        self.assertEqual(made.status, 200, made)
        acme_key, acme_id = made.json()["key"], made.json()["id"]
        acme = self.client(acme_key)
        self.assertEqual(acme.submit(**SMALL) in acme.get("/v1/jobs").body.decode(), True)
        for method, path in (("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/" + acme_id), ("GET", "/v1/tenants"), ("GET", "/v1/history")):
            refused = acme.request(method, path, {"tenant": "x"} if method == "POST" else None)
            self.assertEqual(refused.status, 403, (method, path))
            self.assertIn("administrator's key", refused.error["message"])

        listed = cli("keys", "list", "--url", self.fleet.url, "--key", root_key)
        self.assertIn("acme", listed.stdout)
        self.assertNotIn(hashlib.sha256(acme_key.encode()).hexdigest(), root.get("/v1/keys").body.decode())

        rotated = root.request("POST", f"/v1/keys/{acme_id}/rotate").json()
        self.assertEqual((rotated["id"], rotated["tenant"]), (acme_id, "acme"))
        self.assertEqual(acme.get("/v1/jobs").status, 401)
        acme = self.client(rotated["key"], self.other)
        until(lambda: acme.get("/v1/jobs").status == 200, "the other gateway knows the rotated key", 5)
        self.assertEqual(cli("keys", "revoke", acme_id, "--url", self.fleet.url, "--key", root_key).returncode, 0)
        until(lambda: acme.get("/v1/jobs").status == 401, "the key is revoked on the other gateway", 5)
        self.assertEqual(root.request("DELETE", "/v1/keys/" + acme_id).status, 404)

        root_id = root.get("/v1/keys").json()["keys"][0]["id"]
        last = root.request("DELETE", "/v1/keys/" + root_id)
        self.assertEqual(last.status, 409)
        self.assertIn("last administrator's key", last.error["message"])

        log = (self.fleet.data / "logs" / "coordinator.log").read_text()
        for act in ("added", "rotated", "revoked"):
            self.assertRegex(log, f"audit: key {root_id} of tenant 'ops' {act} key {acme_id} of tenant 'acme'")
        for secret in (root_key, acme_key, rotated["key"]):
            self.assertNotIn(secret, log)
        # Redis loses its data: the keys stay.
        redis = Redis(self.fleet.redis_socket)
        redis("DEL", "df:{keys}")
        until(lambda: "keys in Redis are gone" in (self.fleet.data / "logs" / "coordinator.log").read_text(), "the loss is logged", 5)
        self.assertEqual((anyone.get("/v1/jobs").status, root.get("/v1/jobs").status), (401, 200))
        self.assertEqual(root.request("POST", "/v1/keys", {"tenant": "acme"}).status, 400, "it would be the only stored one")
        redis.close()
        # A gateway that restarts does not know them any more, and refuses everybody.
        for fleet in (self.fleet, self.other):
            self.restart(fleet)
            self.assertEqual(self.client(fleet=fleet).get("/healthz").status, 200)
            for key in (None, root_key):
                refused = self.client(key, fleet).get("/v1/jobs")
                self.assertEqual(refused.status, 401, refused)
                for words in ("Redis has lost the keys", "configure an administrator's key", f"delete '{fleet.data}/keys-required'"):
                    self.assertIn(words, refused.error["message"])
        (self.fleet.data / "keys-required").unlink()
        self.restart()
        self.assertEqual(anyone.get("/v1/jobs").status, 200, "as the message says")

    def restart(self, fleet=None):
        """Kills a coordinator and waits for the next one."""
        fleet = fleet or self.fleet
        killed = fleet.ready["pids"]["coordinator"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: fleet.ready["pids"]["coordinator"] not in (None, killed), "a new coordinator", 30)
        def serves():
            try:
                return self.client(fleet=fleet).get("/v1/jobs").status in (200, 401)
            except OSError:
                return False
        until(serves, "it knows whether there are keys", 30)

    def coordinator(self, *sets):
        """Starts a gateway of its own on the fleet's Redis, and returns a client without a key."""
        flags = [word for one in (f"models.tiny.path={tiny_model()}", *sets) for word in ("--set", one)]
        process = start([DITFLEET, "coordinator", "--json", "--listen", "127.0.0.1:0", "--redis", f"unix://{self.fleet.redis_socket}", *flags],
                        stderr=subprocess.DEVNULL)
        self.addCleanup(lambda: (process.kill(), process.wait(), process.stdout.close()))
        return Client(json.loads(process.stdout.readline())["gateway"])

    def test_a_key_is_added_only_if_that_can_be_remembered(self):
        client = self.coordinator("data.dir=/proc/ditfleet")
        refused = client.request("POST", "/v1/keys", {"tenant": "ops", "admin": True})
        self.assertEqual(refused.status, 503, refused)
        for words in ("cannot remember outside Redis that keys are required", "/proc/ditfleet", "data.dir", "gateway.require_keys"):
            self.assertIn(words, refused.error["message"])
        self.assertEqual(client.get("/v1/keys").json()["keys"], [])

    def test_keys_may_be_required_from_the_beginning(self):
        client = self.coordinator("gateway.require_keys=true", "data.dir=/proc/ditfleet")
        for method, path, body in (("GET", "/v1/jobs", None), ("POST", "/v1/keys", {"tenant": "x", "admin": True})):
            refused = client.request(method, path, body)
            self.assertEqual(refused.status, 401)
            self.assertIn("gateway.require_keys", refused.error["message"])


class Revoked(unittest.TestCase):
    def test_what_is_open_ends_on_every_gateway(self):
        fleet = self.enterContext(Fleet(workers=0, config=config()))
        other = self.enterContext(Fleet(workers=0, config=config(), flags=["--redis", f"unix://{fleet.redis_socket}"]))
        root = Client(fleet.url, ROOT_KEY)
        keys = [root.request("POST", "/v1/keys", {"tenant": tenant}).json() for tenant in ("gone", "kept")]

        def send(gateway, key, method, path, body, more=b""):
            connection = socket.create_connection(urlsplit(gateway.url).netloc.split(":"), timeout=20)
            self.addCleanup(connection.close)
            kind = "application/octet-stream" if more else "application/json"
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: {kind}\r\n"
                               f"Content-Length: {10**6 if more else len(body)}\r\n\r\n{body}".encode() + more)
            return connection

        image = {"prompt": "y", "size": "32x32"}
        held, uploads, jobs = {}, {}, []
        for key in keys:
            for gateway in (fleet, other):
                client = Client(gateway.url, key["key"])
                until(lambda: client.get("/v1/jobs").status == 200, "the gateway knows the key", 10)
                jobs.append(client.submit(**SMALL))
                held.setdefault(key["tenant"], []).extend((
                    send(gateway, key["key"], "GET", f"/v1/jobs/{jobs[-1]}/events", ""),
                    send(gateway, key["key"], "POST", "/v1/images/generations", json.dumps({**image, "stream": True})),
                    send(gateway, key["key"], "POST", "/v1/images/generations", json.dumps(image))))
                uploads.setdefault(key["tenant"], []).append(send(gateway, key["key"], "PUT", "/v1/loras/large", "", raw_file({})[:9]))
        until(lambda: len(root.get("/v1/jobs?limit=200&state=ready").json()["jobs"]) == 12, "all have submitted their jobs", 30)
        self.assertEqual(root.request("DELETE", "/v1/keys/" + keys[0]["id"]).status, 200)
        limit = time.monotonic() + 30  # a stream that goes on sends keep-alives for ever
        for connection in held["gone"]:
            while connection.recv(65536):
                self.assertLess(time.monotonic(), limit, "it goes on")
        for connection in uploads["gone"]:
            connection.sendall(b" " * (10**6 - 9))  # the rest of the body; the gateway reads it in pieces
            self.assertIn(b" 401 ", connection.recv(65536).split(b"\r\n")[0])
        for job in root.get("/v1/jobs?limit=200&state=ready").json()["jobs"]:
            root.cancel(job["id"])
        for i, connection in enumerate(held["kept"]):
            answer = b""
            while b"canceled" not in answer:
                self.assertTrue(piece := connection.recv(65536), f"the other tenant's stream {i} ended: {answer}")
                answer += piece
        self.assertEqual(uploads["kept"][0].send(b" "), 1)

    def test_gateways_that_change_a_key_at_once_agree(self):
        fleet = self.enterContext(Fleet(workers=0, config=config()))
        other = self.enterContext(Fleet(workers=0, config=config(), flags=["--redis", f"unix://{fleet.redis_socket}"]))
        gateways = (fleet, other)
        path = "/v1/keys/" + Client(fleet.url, ROOT_KEY).request("POST", "/v1/keys", {"tenant": "acme"}).json()["id"]

        def change(i, method="POST", act="/rotate"):
            return Client(gateways[i % 2].url, ROOT_KEY).request(method, path + act)

        def accepted(secrets, gateway):
            return [secret for secret in secrets if Client(gateway.url, secret).get("/v1/jobs").status == 200]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(change, range(24)))
        self.assertLessEqual({answer.status for answer in answers}, {200, 409}, answers)
        secrets = [answer.json()["key"] for answer in answers if answer.status == 200]
        until(lambda: len(accepted(secrets, fleet)) == 1 and accepted(secrets, fleet) == accepted(secrets, other),
              "both accept one of the secrets, the same", 10)

        # Redis does not answer: the revocation fails, and says so.
        pid = fleet.ready["pids"]["redis"]
        os.kill(pid, signal.SIGSTOP)
        try:
            refused = change(0, "DELETE", "")
        finally:
            os.kill(pid, signal.SIGCONT)
        self.assertEqual(refused.status, 503, refused)
        listed = lambda gateway: path.rpartition("/")[2] in Client(gateway.url, ROOT_KEY).get("/v1/keys").body.decode()
        until(lambda: len({listed(gateway) for gateway in gateways}) == 1, "both list it, or none does", 20)

        if listed(fleet):
            with ThreadPoolExecutor(8) as pool:
                rotated = pool.map(change, range(12))
                until(lambda: change(1, "DELETE", "").status == 200, "it is revoked meanwhile", 20)
                secrets += [answer.json()["key"] for answer in rotated if answer.status == 200]
        self.assertEqual(change(0).status, 404, "a rotation does not bring it back")
        until(lambda: not accepted(secrets, fleet) + accepted(secrets, other), "no secret of a revoked key is accepted", 10)


class Quotas(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        quotas = {"queued_bytes": 65536, "adapters": 2, "adapter_bytes": 100_000}
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory())).resolve()
        cls.fleet = cls.enterClassContext(Fleet(workers=0, config=config(
            queue={"max_queued": 20}, quotas=quotas, gateway={"max_connections": 16}, loras={"folders": str(cls.folder)},
            tenants={"tiny": {"queued_units": 2, "streams": 1}})))
        cls.root = Client(cls.fleet.url, ROOT_KEY)
        cls.keys = {t: cls.root.request("POST", "/v1/keys", {"tenant": t}).json()["key"] for t in ("a", "b", "tiny")}

    def setUp(self):
        self.a, self.b, self.tiny = (Client(self.fleet.url, self.keys[t]) for t in ("a", "b", "tiny"))
        self.addCleanup(self.cancel_all)

    def cancel_all(self):
        for job in self.root.get("/v1/jobs?limit=200&state=ready").json()["jobs"] + self.root.get("/v1/jobs?limit=200&state=queued").json()["jobs"]:
            self.root.cancel(job["id"])

    def test_one_tenant_cannot_fill_the_queue(self):
        answers = [self.a.request("POST", "/v1/jobs", {"prompt": str(i), **SMALL}) for i in range(40)]
        refused = [answer for answer in answers if answer.status == 429]
        self.assertTrue(refused)
        self.assertLessEqual(len(answers) - len(refused), 21)
        for word in ("the queue is full", "tenant 'a'", "share of queue.max_queued is 5"):
            self.assertIn(word, refused[0].error["message"])
        self.assertGreaterEqual(int(refused[0].headers["Retry-After"]), 1)
        self.assertTrue(refused[0].error["message"].startswith("tenant 'a' has"), refused[0])
        limits = {name: refused[-1].headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
        self.assertEqual(limits, {"limit": "5", "remaining": "0", "reset": "5s"})
        for i in range(5):
            self.assertEqual(self.b.request("POST", "/v1/jobs", {"prompt": str(i), **SMALL}).status, 202, "B's share")

    def test_a_tenant_may_have_its_own_quotas(self):
        made = self.tiny.request("POST", "/v1/jobs", {"prompt": "x", "n": 2, **SMALL})
        self.assertEqual(made.headers["x-ratelimit-limit-requests"], "2")
        self.assertIn(made.headers["x-ratelimit-remaining-requests"], ("0", "2"))  # as it was within the last second
        first = made.json()["id"]
        refused = self.tiny.request("POST", "/v1/jobs", {"prompt": "x", **SMALL})
        self.assertEqual((refused.status, refused.error["code"]), (429, "resource_exhausted"))
        self.assertIn("tenant 'tiny' has 2 units in open jobs and asks for 1; quotas.queued_units is 2", refused.error["message"])
        self.assertEqual([refused.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")], ["2", "0"])
        log = self.fleet.data / "logs" / "coordinator.log"  # lines are written after the answer
        for line in (f"POST /v1/jobs 202 .* job={first} ", "POST /v1/jobs 429 .* error=\"tenant 'tiny' has 2 units"):
            until(lambda: re.search(line, log.read_text()), line, 10)
        never = self.tiny.request("POST", "/v1/jobs", {"prompt": "x", "n": 3, **SMALL})
        self.assertEqual(never.status, 413)
        self.assertNotIn("Retry-After", never.headers)
        listed = cli("tenants", "--url", self.fleet.url, "--key", ROOT_KEY)
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertRegex(listed.stdout, r"tiny +2 of 2 +1024 of 65536 +0 of 2 +0 of 100000 +0 of 1")
        self.tiny.cancel(first)
        self.tiny.submit(**SMALL)

    def test_a_retry_is_its_tenants_job(self):
        job = self.a.submit(prompt="once more", seed=5, **SMALL)
        early = self.a.request("POST", f"/v1/jobs/{job}/retry")
        self.assertEqual(early.status, 409, early)
        self.assertIn("has not ended; cancel it first", early.error["message"])
        self.a.cancel(job)
        self.a.wait(job)
        self.assertEqual(self.b.request("POST", f"/v1/jobs/{job}/retry").status, 404)
        for client in (self.a, self.root):
            made = client.request("POST", f"/v1/jobs/{job}/retry")
            self.assertEqual((made.status, made.json()["tenant"]), (202, "a"), made)
            again = self.a.job(made.json()["id"])
            self.assertEqual((again["tenant"], again["spec"]), ("a", self.a.job(job)["spec"]))
        log = self.fleet.data / "logs" / "coordinator.log"
        until(lambda: re.search(f"audit: .* retried job {job} of tenant 'a' as {made.json()['id']}, request", log.read_text()), "the audit line", 10)

    def test_a_job_is_paused_by_its_tenant(self):
        job = self.a.submit(prompt="wait", seed=5, **SMALL)
        for what, state in (("pause", "paused"), ("resume", self.a.job(job)["state"])):
            self.assertEqual(self.b.request("POST", f"/v1/jobs/{job}/{what}").status, 404)
            for client in (self.a, self.root):
                answer = client.request("POST", f"/v1/jobs/{job}/{what}")
                self.assertEqual((answer.status, answer.json()["state"]), (202, state), answer)
        self.root.request("POST", f"/v1/jobs/{job}/pause")
        for client, status, text in ((self.b, 404, "there is no job"), (self.a, 409, "has no checkpoint: it was paused before its first step")):
            refused = client.request("POST", "/v1/jobs", {"prompt": "x", "resume_from": job})
            self.assertEqual((refused.status, refused.error["param"]), (status, "resume_from"), refused)
            self.assertIn(text, refused.error["message"])
        self.a.cancel(job)

    def test_waiting_requests_and_streams_count(self):
        def wait_for_image(stream):
            return self.tiny._send("POST", "/v1/images/generations", {"prompt": "x", "size": "32x32", "stream": stream}, None)
        job = self.tiny.submit(**SMALL)
        with self.tiny.events(job):
            for stream in (False, True):
                connection, response = wait_for_image(stream)
                body = json.loads(response.read())
                self.assertEqual(response.status, 429)
                self.assertIn("tenant 'tiny' has 1 open event streams, waiting image requests and downloads of large results; quotas.streams is 1", body["error"]["message"])
                connection.close()
            self.assertEqual(self.tiny.get(f"/v1/jobs/{job}/events").status, 429)
            with self.a.events(self.a.submit(**SMALL)):
                pass
        connection, response = until(lambda: (lambda c, r: (c, r) if r.status == 200 else c.close())(*wait_for_image(True)), "the place is free")
        self.assertEqual(self.tiny.get(f"/v1/jobs/{job}/events").status, 429, "an image stream counts")
        connection.close()

    def test_adapters(self):
        file = adapter(1, rank=4, width=2000)  # 64 kB
        self.addCleanup(lambda: [self.a.request("DELETE", "/v1/loras/" + lora["name"]) for lora in self.a.get("/v1/loras").json()["loras"]])
        put = lambda name, data, query="", client=self.a: client.request("PUT", f"/v1/loras/{name}{query}", data, BYTES)
        self.assertEqual(put("one", file).status, 201)
        over = put("two", adapter(2, rank=4, width=2000))
        self.assertEqual(over.status, 413, over)
        for word in ("tenant 'a'", "quotas.adapter_bytes is 100000"):
            self.assertIn(word, over.error["message"])
        self.assertEqual(put("one", file).status, 200, "replacing it needs no more")
        self.assertEqual(put("two", adapter(3)).status, 201)
        many = put("three", adapter(4))
        self.assertEqual(many.status, 429)
        self.assertIn("quotas.adapters is 2", many.error["message"])
        # Pins hold memory of all tenants.
        for refused in (put("one", file, "?pinned=true"), self.a.request("PATCH", "/v1/loras/one", {"pinned": True})):
            self.assertEqual((refused.status, refused.error["param"]), (403, "pinned"))
            self.assertIn("administrator's key", refused.error["message"])
        self.assertEqual(self.root.request("PATCH", "/v1/loras/one?tenant=a", {"pinned": True}).status, 200)

    def test_a_tenant_registers_at_most_two_files_at_once(self):
        """Reading a large file takes a while; the readers of the gateway are shared by all tenants."""
        path = self.folder / "large.safetensors"
        count = 1 << 26  # rows of 8 bytes, all in a hole
        header = {DOWN: {"dtype": "BF16", "shape": [4, count], "data_offsets": [0, 8 * count]}}
        with open(path, "wb") as out:
            out.write(raw_file(header))
            out.truncate(out.tell() + 8 * count)
        register = lambda client, name: client.request("PUT", "/v1/loras/" + name, {"path": str(path), "sha256": "0" * 64})
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(register, Client(self.fleet.url, self.keys["a"]), f"large{i}") for i in range(6)]
            until(lambda: any(answer.done() for answer in answers), "one is answered")
            other = register(self.b, "large")
            answers = [answer.result() for answer in answers]
        self.assertEqual(other.status, 400, "another tenant's file is read to its end; its digest differs")
        statuses = sorted(answer.status for answer in answers)
        self.assertEqual(statuses, [400] * 2 + [429] * 4)
        refused = next(answer for answer in answers if answer.status == 429)
        self.assertIn("tenant 'a' registers 2 files at the moment, the maximum", refused.error["message"])
        self.assertEqual(refused.headers["Retry-After"], "1")
        small = self.folder / "small.safetensors"
        small.write_bytes(adapter(7))
        self.assertEqual(self.a.request("PUT", "/v1/loras/small", {"path": str(small)}).status, 201)
        self.assertEqual(self.a.request("DELETE", "/v1/loras/small").status, 200)


VIDEO = {"model": "i2v", "prompt": "a cat", "frames": 5, "size": "48x32", "num_inference_steps": 2, "max_sequence_length": 16}


def picture(megabytes=0):
    """Returns a small PNG, another one each time, with random chunks that readers skip."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    rows = zlib.compress((b"\0" + os.urandom(27)) * 9)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 2, 0, 0, 0)) + chunk(b"IDAT", rows)
            + b"".join(chunk(b"raNd", os.urandom(1 << 20)) for _ in range(megabytes)) + chunk(b"IEND", b""))


class Uploads(unittest.TestCase):
    """A and B share a Redis of 200 MB. A fills what it can."""

    @classmethod
    def setUpClass(cls):
        cls.fleet = cls.enterClassContext(Fleet(
            models={"tiny": tiny_model(), "i2v": ROOT / "tests/fixtures/wan/i2v/model"},
            config=config(redis={"maxmemory": "200mb"}, tenants={"few": {"inputs": 2, "streams": 1}})))
        cls.root = Client(cls.fleet.url, ROOT_KEY)
        cls.keys = {t: cls.root.request("POST", "/v1/keys", {"tenant": t}).json()["key"] for t in ("a", "b", "few")}

    def setUp(self):
        self.a, self.b, self.few = (Client(self.fleet.url, self.keys[t]) for t in ("a", "b", "few"))
        self.redis = Redis(self.fleet.redis_socket)
        self.addCleanup(self.redis.close)

    def tearDown(self):
        for client in (self.a, self.b, self.few):
            for one in client.get("/v1/uploads").json()["data"]:
                until(lambda: client.request("DELETE", "/v1/uploads/" + one["id"]).status == 200, "its jobs have ended")
        probe = until(lambda: (sent := self.upload(self.root, picture())).status == 201 and sent, "Redis has room again")
        self.root.request("DELETE", "/v1/uploads/" + probe.json()["id"])

    def upload(self, client, file):
        return client.request("POST", "/v1/uploads", file, {"Content-Type": "image/png"})

    def use(self, tenant):
        one, = (t for t in self.root.get("/v1/tenants").json()["tenants"] if t["tenant"] == tenant)
        return one["inputs"], one["input_bytes"]

    def run_jobs_of_b(self):
        for body in ({"model": "tiny", "prompt": "x", **SMALL}, {**VIDEO, "image": base64.b64encode(picture()).decode()}):
            job = self.b.request("POST", "/v1/jobs", body)
            self.assertEqual(job.status, 202, job)
            self.assertEqual(self.b.wait(job.json()["id"])["state"], "succeeded")

    def test_an_image_is_its_tenants(self):
        file = picture()
        id = hashlib.sha256(file).hexdigest()
        submit = lambda client, id: client.request("POST", "/v1/jobs", {**VIDEO, "image": id})
        unknown = submit(self.b, "0" * 64)
        self.assertEqual(self.upload(self.a, file).json()["id"], id)
        foreign = submit(self.b, id)
        self.assertEqual((unknown.status, foreign.status), (400, 400))
        self.assertEqual(foreign.body.replace(id.encode(), b"0" * 64), unknown.body)
        self.assertEqual(self.b.request("DELETE", "/v1/uploads/" + id).status, 404)
        self.assertEqual(self.b.get(f"/v1/uploads/{id}/content").status, 404)
        self.assertEqual(self.a.get(f"/v1/uploads/{id}/content").body, file)
        self.assertEqual(self.b.get("/v1/uploads").json()["data"], [])
        self.assertEqual(self.a.get("/v1/uploads").json()["data"], [{"id": id, "object": "upload", "bytes": len(file)}])
        self.assertEqual(self.use("a"), ({"used": 1, "quota": 1000}, {"used": len(file), "quota": 512 << 20}))

        job = self.a.request("POST", "/v1/jobs", {**VIDEO, "image": id, "num_inference_steps": 200, "n": 32}).json()["id"]
        refused = self.a.request("DELETE", "/v1/uploads/" + id)
        self.assertEqual(refused.status, 409)
        self.assertIn("open jobs name the image", refused.error["message"])
        self.a.cancel(job)
        until(lambda: self.a.request("DELETE", "/v1/uploads/" + id).status == 200, "no open job names it")
        self.assertEqual(self.a.request("DELETE", "/v1/uploads/" + id).status, 404)
        self.assertEqual(submit(self.a, id).status, 400)
        self.assertEqual(self.redis("KEYS", "df:{0}:input:*"), [])
        self.assertEqual(self.use("a")[0]["used"], 0)

    def test_the_number_of_images_has_a_quota(self):
        kept = [self.upload(self.few, picture()).json()["id"] for _ in range(2)]
        inline = self.few.request("POST", "/v1/jobs", {**VIDEO, "image": base64.b64encode(picture()).decode()})
        for refused in (self.upload(self.few, picture()), inline):
            self.assertEqual(refused.status, 429, refused)
            for word in ("tenant 'few' has stored 2 images", "quotas.inputs is 2", "DELETE /v1/uploads/{id}"):
                self.assertIn(word, refused.error["message"])
        listed = cli("tenants", "--url", self.fleet.url, "--key", ROOT_KEY)
        self.assertRegex(listed.stdout, r"(?s)IMAGES +IMAGE BYTES +GPU TIME\n.*few .* 2 of 2 +\d+ of 536870912")
        self.assertIn('ditfleet_quota_refusals_total{quota="inputs",tenant="few"} 2', self.root.get("/metrics").body.decode())
        self.assertEqual(self.few.request("DELETE", "/v1/uploads/" + kept[0]).status, 200)
        self.assertEqual(self.upload(self.few, picture()).status, 201)

    def test_a_full_tenant_leaves_the_others_room(self):
        answers = [self.upload(self.a, picture(18)) for _ in range(12)]
        self.assertEqual({answer.status for answer in answers}, {201, 429})
        refused = next(answer for answer in answers if answer.status == 429)
        for word in ("tenant 'a' has stored", "quotas.input_bytes", "DELETE /v1/uploads/{id}"):
            self.assertIn(word, refused.error["message"])
        self.run_jobs_of_b()
        # Whatever else fills Redis: uploads end first, then jobs. Results still have room.
        for i, (name, status) in enumerate((("uploads", 201), ("jobs", 202))):
            self.redis("DEL", "filler")
            used = int(dict(line.split(":", 1) for line in self.redis("INFO", "memory").decode().split("\r\n") if ":" in line)["used_memory"])
            self.redis("SETRANGE", "filler", int((200 << 20) * (0.8, 0.93)[i]) - used, "x")
            self.addCleanup(self.redis, "DEL", "filler")
            over = until(lambda: (lambda r: r.status == 429 and r)(self.upload(self.b, picture())), "uploads are refused")
            self.assertIn("has reached its memory limit", over.error["message"])
            if name == "uploads":
                job = self.b.submit(model="tiny", **SMALL)
            else:
                submit = lambda: self.b.request("POST", "/v1/jobs", {"model": "tiny", "prompt": "x", **SMALL})
                until(lambda: submit().status == 429, "jobs are refused")
            self.assertEqual(self.b.wait(job)["state"], "succeeded")
        self.redis("DEL", "filler")
        self.run_jobs_of_b()  # at once

    def test_half_sent_uploads_leave_the_others_room(self):
        host, port = self.a.host.split(":")
        body = bytes(18 << 20)
        head = "POST /v1/uploads HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"

        def half(tenant):
            sent = socket.create_connection((host, int(port)))
            self.addCleanup(sent.close)
            try:
                sent.sendall((head % (self.a.host, self.keys[tenant], len(body) + 1)).encode() + body)
            except ConnectionError:
                pass  # refused
            return sent
        for _ in range(14):
            half("a")
        self.assertEqual(self.upload(self.b, picture(18)).status, 201)
        open_upload = half("few")
        refused = until(lambda: (lambda r: r.status == 429 and r)(self.upload(self.few, picture())), "it counts as a stream")
        self.assertIn("quotas.streams is 1", refused.error["message"])
        open_upload.close()
        until(lambda: self.upload(self.few, picture()).status == 201, "its client has left")


class LivesOfUploads(unittest.TestCase):
    def test_in_redis(self):
        self.live("redis", lambda fleet, redis: redis("KEYS", "df:{0}:input:*"))

    def test_in_files(self):
        self.live("file", lambda fleet, redis: [p for p in (fleet.data / "results" / "inputs").rglob("*") if p.is_file()])

    def live(self, backend, stored):
        fleet = self.enterContext(Fleet(workers=0, models={"i2v": ROOT / "tests/fixtures/wan/i2v/model"}, config=json.dumps(
            {"default_model": "i2v", "results": {"backend": backend}})))
        other = self.enterContext(Fleet(workers=0, models={"i2v": ROOT / "tests/fixtures/wan/i2v/model"}, config=json.dumps(
            {"default_model": "i2v", "results": {"backend": backend, "dir": str(fleet.data / "results")}}),
            flags=["--redis", f"unix://{fleet.redis_socket}"]))
        redis = Redis(fleet.redis_socket)
        self.addCleanup(redis.close)
        client, second = Client(fleet.url), Client(other.url)
        upload = lambda file: client.request("POST", "/v1/uploads", file, {"Content-Type": "image/png"}).json()["id"]
        ids = [upload(picture()), upload(picture())]
        for id in ids:
            kept_ms = float(redis("ZSCORE", "df:{0}:inputs", "default:" + id)) - 1000 * time.time()
            self.assertAlmostEqual(kept_ms, 3_600_000, delta=60_000)
        job = second.submit(**{**VIDEO, "image": ids[0]})
        redis("ZADD", "df:{0}:inputs", "1", "default:" + ids[0], "1", "default:" + ids[1])  # an hour later
        until(lambda: len(client.get("/v1/uploads").json()["data"]) == 1, "the image that no job names expires")
        self.assertEqual(client.get("/v1/uploads").json()["data"][0]["id"], ids[0])
        until(lambda: len(stored(fleet, redis)) == 1, "its bytes, too")
        self.assertEqual(client.request("DELETE", "/v1/uploads/" + ids[0]).status, 409)
        client.cancel(job)
        until(lambda: not stored(fleet, redis), "the image goes with its job")
        self.assertEqual(second.get("/v1/uploads").json()["data"], [])


class LargeAnswers(unittest.TestCase):
    """100 repeats of a finished request for 64 pictures of 1 MB, read by slow clients: 512 MiB at most."""

    def test_many_slow_readers_of_files_need_little_memory(self):
        def store(fleet, redis, job, picture):
            folder = fleet.data / "results" / "results" / "00"
            folder.mkdir(parents=True)
            (folder / "picture").write_bytes(picture)
            return "results/00/picture"
        self.repeat("file", store)

    def test_many_slow_readers_of_redis_need_little_memory(self):
        def store(fleet, redis, job, picture):
            redis("SET", f"df:{{0}}:blob:{job}:0:x", picture)
            return f"df:{{0}}:blob:{job}:0:x"
        self.repeat("redis", store)

    def repeat(self, backend, store):
        fleet = self.enterContext(Fleet(workers=0, config=config(results={"backend": backend})))
        client, redis = Client(fleet.url, ROOT_KEY), Redis(fleet.redis_socket)
        self.addCleanup(redis.close)
        body = {"prompt": "x", "n": 64, "size": "32x32"}
        key = {"Idempotency-Key": "k"}
        job = client.request("POST", "/v1/jobs", body, key).json()["id"]
        until(lambda: client.job(job)["state"] == "ready", "the job is admitted")
        # What workers would have done.
        picture = bytes(range(256)) * 4096
        manifest = json.dumps({"backend": backend, "key": store(fleet, redis, job, picture), "media_type": "image/png", "bytes": len(picture),
                               "width": 32, "height": 32, "sha256": hashlib.sha256(picture).hexdigest(), "seed": 1, "nonce": "0" * 32})
        fields = ["state", "succeeded", "ended", "1", "o", redis("HGET", "df:{0}:open", job), "spec", redis("HGET", "df:{0}:specs", job)]
        for unit in range(64):
            record = redis("HGET", "df:{0}:units", f"{job}:{unit}").replace(b"ready", b"succeeded", 1) + b"|1|1-0"
            fields += [f"u{unit}", record, f"m{unit}", manifest]
        redis("HSET", "df:{0}:job:" + job, *fields)
        redis("HDEL", "df:{0}:open", job)

        status = lambda: dict(line.split(":", 1) for line in Path(f"/proc/{fleet.ready['pids']['coordinator']}/status").read_text().splitlines())
        megabytes = lambda name: int(status()[name].split()[0]) / 1024
        before = megabytes("VmRSS")
        open_ones = [client._send("POST", "/v1/images/generations", {**body, "response_format": "b64_json"}, key) for _ in range(100)]
        for connection, response in open_ones:
            self.assertEqual(response.status, 200)
            self.assertTrue(response.read(100_000).startswith(b'{"created":'))
            self.addCleanup(connection.close)
        more = megabytes("VmHWM") - before
        print(f"memory of 100 answers from {backend}: {more:.0f} MiB more", flush=True)
        self.assertLess(more, 512)
        data = json.loads(client.request("POST", "/v1/images/generations", {**body, "response_format": "b64_json"}, key).body)["data"]
        self.assertEqual([base64.b64decode(one["b64_json"]) == picture for one in data], [True] * 64)


if __name__ == "__main__":
    unittest.main(verbosity=2)
