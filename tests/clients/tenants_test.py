"""Keys that are added, rotated and revoked at run time, and the quotas of tenants. Needs no worker."""
import base64
import hashlib
import json
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adapters import adapter, BYTES, DOWN, raw_file, Redis
from api import Client
from fleet import cli, Fleet, tiny_model, until

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
        for i in range(5):
            self.assertEqual(self.b.request("POST", "/v1/jobs", {"prompt": str(i), **SMALL}).status, 202, "B's share")

    def test_a_tenant_may_have_its_own_quotas(self):
        first = self.tiny.submit(n=2, **SMALL)
        refused = self.tiny.request("POST", "/v1/jobs", {"prompt": "x", **SMALL})
        self.assertEqual((refused.status, refused.error["code"]), (429, "resource_exhausted"))
        self.assertIn("tenant 'tiny' has 2 units in open jobs and asks for 1; quotas.queued_units is 2", refused.error["message"])
        never = self.tiny.request("POST", "/v1/jobs", {"prompt": "x", "n": 3, **SMALL})
        self.assertEqual(never.status, 413)
        self.assertNotIn("Retry-After", never.headers)
        listed = cli("tenants", "--url", self.fleet.url, "--key", ROOT_KEY)
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertRegex(listed.stdout, r"tiny +2 of 2 +1024 of 65536 +0 of 2 +0 of 100000 +0 of 1")
        self.tiny.cancel(first)
        self.tiny.submit(**SMALL)

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
