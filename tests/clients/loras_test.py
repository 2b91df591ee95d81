"""The registry of LoRA adapters over HTTP: uploads, refusals, tenant isolation, names in jobs. Needs no worker, because
admission resolves names to digests. One file because all cases share one running service."""
import hashlib
import http.client
import json
import socket
import struct
import threading
import unittest

from adapters import adapter, BYTES, digest, DOWN, raw_file, RegistryCase, safetensors, UP
from api import Client
from fleet import Shared, tiny_model, until

KEYS = {"first": "sk-first", "second": "sk-second", "admin": "sk-admin"}
CONFIG = "keys:\n" + "".join(
    f"  - {{tenant: {name}, sha256: {hashlib.sha256(key.encode()).hexdigest()}, admin: {'true' if name == 'admin' else 'false'}}}\n"
    for name, key in KEYS.items())
MOST = 5 << 20
shared = Shared(workers=0, config=CONFIG + f"default_model: tiny\nloras:\n  max_upload_bytes: {MOST}\n",
                models={"tiny": tiny_model(), "small": tiny_model("dev")})

setUpModule, tearDownModule = shared.start, shared.stop


class Base(RegistryCase):
    def setUp(self):
        self.connect(shared.fleet, **KEYS)

    def pin(self, pinned, name="a", headers=None):
        """Pins or unpins an adapter of the first tenant, as only an administrator may."""
        return self.admin.request("PATCH", f"/v1/loras/{name}?tenant=first", {"pinned": pinned}, headers)


class Uploads(Base):
    def test_put_get_list_delete(self):
        data = adapter(1, rank=9, width=40_000)  # 2.9 MB: several chunks
        answer = self.put("style.v1", data)
        self.assertEqual(answer.status, 201, answer)
        lora = answer.json()
        self.assertEqual((lora["name"], lora["tenant"], lora["source"], lora["path"]), ("style.v1", "first", "upload", None))
        self.assertEqual((lora["sha256"], lora["bytes"]), (digest(data), len(data)))
        self.assertEqual((lora["tensors"], lora["rank"], lora["parameters"], lora["dtype"]), (2, 9, 2 * 9 * 40_000, "F32"))
        self.assertEqual(self.first.get("/v1/loras/style.v1").headers["ETag"], answer.headers["ETag"])
        self.assertEqual(self.first.get("/v1/loras/style.v1").json(), lora)
        self.assertEqual(self.first.get("/v1/loras").json()["loras"], [lora])
        self.assertEqual(self.stored(lora["sha256"]), data)
        gone = self.first.request("DELETE", "/v1/loras/style.v1")
        self.assertEqual((gone.status, gone.json()["deleted"]), (200, True))
        self.assertEqual(self.first.get("/v1/loras/style.v1").status, 404)
        self.assertEqual(self.first.request("DELETE", "/v1/loras/style.v1").status, 404)
        self.assertEqual(self.chunk_keys(), [])

    def test_pages(self):
        names = ["A", "a", "a-1", "a.b", "b", "z" * 128]
        for name in names:
            self.put(name, adapter())
        self.put("other", adapter(), self.second)
        self.assertEqual(self.names(), names)
        for limit in (1, 2, 3, 5, 6, 1000):
            found, cursor = [], ""
            while True:
                page = self.first.get(f"/v1/loras?limit={limit}&cursor={cursor}").json()
                self.assertEqual(len(page["loras"]), min(limit, len(names) - len(found)))
                found += [lora["name"] for lora in page["loras"]]
                cursor = page["next_cursor"]
                if not cursor:
                    break
            self.assertEqual(found, names)
        page = self.first.get("/v1/loras?cursor=a").json()
        self.assertEqual(([lora["name"] for lora in page["loras"]], page["next_cursor"]), (names[2:], ""))
        self.first.request("DELETE", "/v1/loras/a")  # the next page starts after a deleted name
        self.assertEqual(self.first.get("/v1/loras?limit=1&cursor=a").json()["loras"][0]["name"], "a-1")
        for query, param in (("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("limit=", "limit"), ("limit=-1", "limit"), ("limit=2.5", "limit"),
                             ("cursor=/", "cursor"), ("page=2", "page")):
            answer = self.first.get("/v1/loras?" + query)
            self.assertEqual((answer.status, answer.error["param"]), (400, param), query)

    def test_a_redis_that_is_full(self):
        self.put("there", adapter(1))
        self.redis("CONFIG", "SET", "maxmemory", "1")
        self.addCleanup(self.redis, "CONFIG", "SET", "maxmemory", "0")
        answer = self.put("more", adapter(2))
        self.assertEqual((answer.status, answer.error["code"]), (429, "resource_exhausted"))
        for word in ("memory limit", "maxmemory", "by path"):
            self.assertIn(word, answer.error["message"])
        self.assertEqual(self.first.request("DELETE", "/v1/loras/there").status, 200)
        self.redis("CONFIG", "SET", "maxmemory", "0")
        self.assertEqual((self.names(), self.chunk_keys()), ([], []))

    def test_a_connection_stays_usable_after_an_upload(self):
        connection = http.client.HTTPConnection(self.first.host, timeout=20)
        headers = {**BYTES, "Authorization": "Bearer " + KEYS["first"]}
        data = adapter(1, width=20_000)
        for body, chunked in ((data, False), (iter([data[:5], data[5:700_000], data[700_000:]]), True)):
            connection.request("PUT", "/v1/loras/a", body, {**headers, **({"Transfer-Encoding": "chunked"} if chunked else {})}, encode_chunked=chunked)
            socket_before = connection.sock
            response = connection.getresponse()
            self.assertEqual((response.status // 100, json.loads(response.read())["sha256"]), (2, digest(data)))
            connection.request("GET", "/v1/loras/a", headers=headers)
            response = connection.getresponse()
            self.assertEqual((response.status, json.loads(response.read())["bytes"]), (200, len(data)))
            self.assertIs(connection.sock, socket_before)
        connection.close()

    def test_replaces(self):
        self.assertEqual(self.put("a", adapter(1)).status, 201)
        self.assertEqual(self.put("a", adapter(2)).status, 200)
        self.assertEqual(self.first.get("/v1/loras/a").json()["sha256"], digest(adapter(2)))
        kept = self.put("a", adapter(3), **{"If-None-Match": "*"})
        self.assertEqual((kept.status, kept.error["code"]), (409, "conflict"))
        self.assertEqual(self.first.get("/v1/loras/a").json()["sha256"], digest(adapter(2)))
        self.assertEqual(self.put("b", adapter(3), **{"If-None-Match": "*"}).status, 201)

    def test_conditions(self):
        one, two = adapter(1), adapter(2)
        absent = self.put("a", one, **{"If-Match": "*"})
        self.assertEqual((absent.status, absent.error["code"]), (412, "precondition_failed"))
        tag = self.put("a", one).headers["ETag"]
        get = lambda tag: self.first.request("GET", "/v1/loras/a", headers={"If-None-Match": tag})
        self.assertEqual((get(tag).status, get(tag).body, get(tag).headers["ETag"]), (304, b"", tag))
        self.assertEqual(get('"nope"').status, 200)
        # The tag covers all displayed fields, the digest only the bytes.
        self.pin(True)
        pinned = get(tag)
        self.assertEqual((pinned.status, pinned.json()["pinned"]), (200, True))
        for stale in ('"nope"', tag, f'W/{pinned.headers["ETag"]}', f'"{digest(two)}"'):
            with self.subTest(stale):
                for answer in (self.put("a", two, **{"If-Match": stale}), self.first.request("DELETE", "/v1/loras/a", headers={"If-Match": stale}),
                               self.pin(False, headers={"If-Match": stale})):
                    self.assertEqual((answer.status, answer.error["code"]), (412, "precondition_failed"), answer)
        self.assertEqual(self.first.get("/v1/loras/a").json(), pinned.json())
        self.assertEqual(len(self.chunk_keys()), 1)
        self.assertEqual(self.put("a", one, **{"If-Match": '"x", ' + pinned.headers["ETag"]}).status, 200)
        self.assertEqual(self.put("a", two, **{"If-Match": f'"{digest(one)}"'}).status, 200)
        self.assertEqual(self.put("a", one, **{"If-Match": "*", "If-None-Match": "*"}).status, 400)
        self.assertEqual(self.first.request("DELETE", "/v1/loras/none", headers={"If-Match": "*"}).status, 404)
        self.assertEqual(self.first.request("DELETE", "/v1/loras/a", headers={"If-Match": "*"}).status, 200)

    def test_a_repeated_upload_restores_bytes_that_redis_lost(self):
        data = adapter(1, rank=9, width=40_000)
        self.put("a", data)
        whole = self.chunk_keys()
        self.assertEqual(len(whole), 3)
        for lost, name, status in ((whole[:1], "a", 200), (None, "b", 201)):
            self.redis("DEL", *(lost or self.chunk_keys()))
            self.assertEqual(self.put(name, data).status, status)
            self.assertEqual(self.stored(digest(data)), data)
            self.assertEqual(len(self.chunk_keys()), 3)
            for key in self.chunk_keys():
                self.assertEqual(self.redis("PTTL", key), -1, "kept for good")

    def test_parameters(self):
        data = adapter()
        lora = self.put("a", data, query=f"?sha256={digest(data)}&model=tiny&model=small&pinned=true&tenant=first", client=self.admin).json()
        self.assertEqual((lora["models"], lora["pinned"]), (["tiny", "small"], True))
        self.assertFalse(self.pin(False).json()["pinned"])
        self.assertTrue(self.pin(True).json()["pinned"])
        self.assertTrue(self.first.get("/v1/loras/a").json()["pinned"])
        self.assertEqual(self.pin(True, "none").status, 404)
        self.assertEqual(self.first.request("PATCH", "/v1/loras/a", {"pinned": True}).status, 403)
        self.assertEqual(self.first.request("PATCH", "/v1/loras/a", {"rank": 4}).error["param"], "rank")
        self.clean()
        self.refused(self.put("a", data, query="?sha256=" + digest(b"")), 400, digest(data), param="sha256")
        self.refused(self.put("a", data, query="?sha256=x"), 400, "64", param="sha256")
        self.refused(self.put("a", data, query="?model=tinny"), 400, "'tiny'", param="model")
        self.refused(self.put("a", data, query="?pinned=1"), 400, param="pinned")
        self.refused(self.put("a", data, query="?pined=true"), 400, "'pinned'", param="pined")
        self.refused(self.put("a", data, query="?weight=1"), 400, "unknown parameter 'weight'; known are sha256, model, pinned, tenant", param="weight")
        self.refused(self.put("a", data, **{"Content-Type": "text/plain"}), 415, "application/octet-stream")
        self.refused(self.put("a", data, **{"If-None-Match": '"x"'}), 400, "*")
        self.refused(self.put("a", data, **{"Content-Encoding": "gzip"}), 415, "gzip")
        self.refused(self.put("a", data, **{"Content-Range": f"bytes 0-9/{len(data)}"}), 400, "Content-Range")
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"pinned": True}), ("PUT", {"path": "x"})):
            self.refused(self.first.request(method, "/v1/loras/a?tenent=first", body), 400, "'tenant'", param="tenent")
        self.refused(self.first.request("PUT", "/v1/loras/a?pinned=true", {"path": "x"}), 400, "'pinned'", param="pinned")
        self.assertEqual(self.chunk_keys(), [])

    def test_one_digest_is_stored_once(self):
        data = adapter()
        for name, client in (("a", self.first), ("b", self.first), ("a", self.second)):
            self.assertEqual(self.put(name, data, client).status, 201)
        self.assertEqual(len(self.chunk_keys()), 1)
        self.first.request("DELETE", "/v1/loras/a")
        self.first.request("DELETE", "/v1/loras/b")
        self.assertEqual(self.stored(digest(data)), data)
        self.second.request("DELETE", "/v1/loras/a")
        self.assertEqual(self.chunk_keys(), [])

    def test_two_uploads_of_one_name_at_once(self):
        datas = [adapter(i, rank=4 + i, width=50_000) for i in range(3)]
        answers = [None] * 3
        together = threading.Barrier(3)

        def send(i):
            connection = http.client.HTTPConnection(self.first.host, timeout=60)
            connection.putrequest("PUT", "/v1/loras/same")
            for name, value in {**BYTES, "Authorization": "Bearer " + KEYS["first"], "Content-Length": len(datas[i])}.items():
                connection.putheader(name, value)
            connection.endheaders()
            half = len(datas[i]) // 2
            connection.send(datas[i][:half])
            together.wait(30)  # all uploads have started
            connection.send(datas[i][half:])
            response = connection.getresponse()
            answers[i] = (response.status, json.loads(response.read()))
            connection.close()
        threads = [threading.Thread(target=send, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(sorted(a[0] for a in answers), [200, 200, 201])
        for (_, lora), data in zip(answers, datas):
            self.assertEqual(lora["sha256"], digest(data), "each client gets the digest of its own bytes")
        winner = self.first.get("/v1/loras/same").json()
        index = [digest(d) for d in datas].index(winner["sha256"])
        self.assertEqual((winner["rank"], winner["bytes"]), (4 + index, len(datas[index])))
        self.assertEqual(self.stored(winner["sha256"]), datas[index])


class Refusals(Base):
    def test_invalid_adapters(self):
        good = adapter()
        entry = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
        cases = [
            ("empty", b"", ["empty"]),
            ("seven bytes", b"1234567", ["too small"]),
            ("torch.save", b"PK\x03\x04" + b"\0" * 100, ["pickle", "safetensors"]),
            ("pickle", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}" + b"." * 100, ["pickle"]),
            ("an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 100, ["safetensors"]),
            ("header beyond the end", struct.pack("<Q", 1 << 20) + b"{}", ["truncated"]),
            ("huge header", struct.pack("<Q", 1 << 40) + b"{}", ["safetensors"]),
            ("no JSON", raw_file(b"{nonsense}"), ["JSON"]),
            ("truncated", good[:-1], ["truncated"]),
            ("a byte too many", good + b"x", ["follow the header"]),
            ("offsets beyond the end", raw_file({DOWN: {**entry, "data_offsets": [4, 8]}}, b"\0" * 4), ["gap"]),
            ("offsets that overlap", raw_file({DOWN: entry, UP: entry}, b"\0" * 8), ["inside the previous tensor"]),
            ("offsets of another shape", raw_file({DOWN: {**entry, "shape": [2, 2]}}, b"\0" * 4), ["takes 16 bytes"]),
            ("no tensors", raw_file({}), ["no LoRA adapter"]),
            ("a whole model", safetensors({"x_embedder.weight": ("F32", [1], b"\0" * 4)}), ["no LoRA adapter", "x_embedder.weight"]),
        ]
        for what, data, words in cases:
            for chunked in (False, True):
                with self.subTest(what, chunked=chunked):
                    body = iter([data[:10], data[10:]]) if chunked else data
                    headers = {"Transfer-Encoding": "chunked"} if chunked else {}
                    connection = http.client.HTTPConnection(self.first.host, timeout=20)
                    connection.request("PUT", "/v1/loras/bad", (c for c in body if c) if chunked else body,
                                       {**BYTES, **headers, "Authorization": "Bearer " + KEYS["first"]}, encode_chunked=chunked)
                    response = connection.getresponse()
                    error = json.loads(response.read())["error"]
                    connection.close()
                    self.assertEqual((response.status, error["code"]), (400, "invalid_argument"), error)
                    if not (chunked and what == "header beyond the end"):
                        for word in words:
                            self.assertIn(word, error["message"])
        self.assertEqual(self.names(), [])
        until(lambda: not self.chunk_keys(), "refused uploads leave nothing")

    def test_too_large(self):
        # Refused by the declared length, before the body is sent.
        with socket.create_connection(self.first.host.split(":"), timeout=20) as s:
            s.sendall(f"PUT /v1/loras/big HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS['first']}\r\nContent-Type: application/octet-stream\r\n"
                      f"Content-Length: {MOST + 1}\r\nExpect: 100-continue\r\n\r\n".encode())
            answer = s.makefile("rb").readline()
        self.assertIn(b" 413 ", answer)
        # Refused by the number of bytes received.
        big = safetensors({DOWN: ("U8", [1, MOST], b"\0" * MOST)})
        with socket.create_connection(self.first.host.split(":"), timeout=20) as s:
            s.sendall(f"PUT /v1/loras/big HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS['first']}\r\nTransfer-Encoding: chunked\r\n"
                      "Connection: close\r\n\r\n".encode())
            for at in range(0, len(big), 1 << 16):
                piece = big[at:at + (1 << 16)]
                s.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            s.sendall(b"0\r\n\r\n")
            answer = s.makefile("rb").read()
        self.assertIn(b" 413 ", answer)
        self.assertIn(b"loras.max_upload_bytes", answer)
        self.assertEqual(self.names(), [])
        until(lambda: not self.chunk_keys(), "refused uploads leave nothing")

    def test_a_client_that_disconnects(self):
        data = adapter(7, width=100_000)
        with socket.create_connection(self.first.host.split(":"), timeout=20) as s:
            s.sendall(f"PUT /v1/loras/half HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS['first']}\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            s.sendall(data[:2 << 20])
            until(self.chunk_keys, "the first chunk is stored")
            for key in self.chunk_keys():
                self.assertGreater(self.redis("PTTL", key), 0, "what is not finished expires")
        until(lambda: not self.chunk_keys(), "what came is dropped")
        self.assertEqual(self.names(), [])

    def test_names(self):
        for name in ("-a", ".a", "_a", "a%20b", "a%2Fb", "%C3%A4", "a" * 129, "a%00"):
            with self.subTest(name):
                answer = self.put(name, adapter())
                self.assertEqual(answer.status, 400, answer)
        self.assertEqual(self.put("A-1_b.c", adapter()).status, 201)
        self.assertEqual(self.put("a" * 128, adapter()).status, 201)
        self.assertEqual(self.first.get("/v1/loras/-a").status, 404)

    def test_methods_and_keys(self):
        self.assertEqual(self.first.request("POST", "/v1/loras", {}).status, 405)
        for method, path in (("GET", "/v1/loras"), ("PUT", "/v1/loras/a"), ("DELETE", "/v1/loras/a"), ("PATCH", "/v1/loras/a")):
            self.assertEqual(Client(shared.fleet.url).request(method, path, b"" if method == "PUT" else None).status, 401, path)


class Tenants(Base):
    def test_names_belong_to_a_tenant(self):
        self.put("style", adapter(1))
        self.assertEqual(self.second.get("/v1/loras/style").status, 404)
        self.assertEqual(self.names(self.second), [])
        self.assertEqual(self.second.request("DELETE", "/v1/loras/style").status, 404)
        self.put("style", adapter(2), self.second)
        self.assertEqual(self.first.get("/v1/loras/style").json()["sha256"], digest(adapter(1)))
        self.assertEqual(self.second.get("/v1/loras/style").json()["sha256"], digest(adapter(2)))
        refused = self.second.request("POST", "/v1/jobs", {"prompt": "x", "loras": [{"name": "style", "sha256": digest(adapter(1))}]})
        self.assertEqual(refused.error["param"], "loras[0].sha256")

    def test_an_administrator_sees_all(self):
        self.put("style", adapter(1))
        self.assertEqual([x["name"] for x in self.admin.get("/v1/loras?tenant=first").json()["loras"]], ["style"])
        self.assertEqual(self.admin.get("/v1/loras/style").status, 404)
        self.assertEqual(self.second.get("/v1/loras?tenant=first").status, 403)
        self.assertEqual(self.second.request("DELETE", "/v1/loras/style?tenant=first").status, 403)
        self.assertEqual(self.put("other", adapter(2), self.admin, "?tenant=first").status, 201)
        self.assertEqual(self.admin.request("DELETE", "/v1/loras/style?tenant=first").status, 200)
        self.assertEqual(self.names(), ["other"])

    def test_workers_list_only_adapters_of_the_asking_tenant(self):
        self.put("mine", adapter(1))
        self.put("theirs", adapter(2), self.second)
        both = sorted(digest(adapter(seed)) for seed in (1, 2))
        info = {"name": "w", "boot": "b", "state": "ready", "models": [], "adapters": both, "host_adapters": both}
        self.addCleanup(self.redis, "FCALL", "ditfleet_v3_deregister", "3", "df:{0}:workers", "df:{0}:worker:w", "df:{0}:mbox:w:b", "w", "b")
        self.redis("FCALL", "ditfleet_v3_heartbeat", "3", "df:{0}:workers", "df:{0}:worker:w", "df:{0}:mbox:w:b", "w", "b", json.dumps(info), "60000", "60000")
        for client, told in ((self.first, [digest(adapter(1))]), (self.second, [digest(adapter(2))]), (self.admin, both)):
            worker, = client.get("/v1/workers").json()["workers"]
            self.assertEqual((sorted(worker["adapters"]), sorted(worker["host_adapters"])), (told, told))


class Jobs(Base):
    SMALL = {"width": 32, "height": 32, "num_inference_steps": 2}

    def submit(self, *uses, client=None, **fields):
        client = client or self.first
        answer = client.request("POST", "/v1/jobs", {"prompt": "x", **self.SMALL, **fields, "loras": [u if isinstance(u, dict) else {"name": u} for u in uses]})
        if answer.status == 202:
            self.addCleanup(client.cancel, answer.json()["id"])
        return answer

    def admitted(self, id, client=None):
        """Returns the adapters in the spec that a worker receives."""
        until(lambda: (client or self.first).job(id)["state"] == "ready", "the job is admitted")
        return json.loads(self.redis("HGET", "df:{0}:specs", id))["loras"]

    def test_names_become_digests(self):
        self.put("ink", adapter(1))
        self.put("oil", adapter(2))
        id = self.submit({"name": "oil", "scale": 0.7}, {"name": "ink", "scale": -0.3}).json()["id"]
        self.assertEqual(self.admitted(id), [{"name": "oil", "scale": 0.7, "sha256": digest(adapter(2))},
                                             {"name": "ink", "scale": -0.3, "sha256": digest(adapter(1))}])
        # A change takes effect immediately, every time.
        for seed in range(10, 16):
            self.put("ink", adapter(seed))
            id = self.submit("ink").json()["id"]
            self.assertEqual(self.admitted(id)[0]["sha256"], digest(adapter(seed)))
        packed = self.redis("HGET", "df:{0}:open", id).decode()
        self.assertTrue(packed.endswith("|" + digest(adapter(15))), "what routing goes by")

    def test_adapters_that_may_not_be_used(self):
        none = self.submit("ink")
        self.assertEqual(none.status, 400)
        self.assertIn("none is registered", none.error["message"])
        self.put("ink", adapter(1), query="?model=small")
        for what, use, words, param in (
                ("misspelt", {"name": "imk"}, "'ink'", "loras[0].name"),
                ("another digest", {"name": "ink", "sha256": digest(b"")}, digest(adapter(1)), "loras[0].sha256"),
                ("another model", {"name": "ink"}, "'small'", "loras[0].name")):
            with self.subTest(what):
                answer = self.submit(use)
                self.assertEqual((answer.status, answer.error["param"]), (400, param), answer)
                self.assertIn(words, answer.error["message"])
        self.assertEqual(self.submit({"name": "ink", "sha256": digest(adapter(1))}, model="small").status, 202)
        image = self.first.request("POST", "/v1/images/generations", {"prompt": "x", "size": "32x32", "loras": [{"name": "imk"}]})
        self.assertEqual((image.status, image.error["param"]), (400, "loras[0].name"))
        self.first.request("DELETE", "/v1/loras/ink")
        self.assertEqual(self.submit("ink", model="small").status, 400)

    def xadd(self, **spec):
        id = self.redis("XADD", "df:{0}:in", "*", "tenant", "second", "spec", json.dumps({"prompt": "x", **self.SMALL, **spec})).decode()
        self.addCleanup(self.second.cancel, "x-" + id)
        return "x-" + id

    def test_intake_entries(self):
        self.put("ink", adapter(1), self.second)
        until(lambda: self.second.get("/v1/jobs").status == 200, "up")
        good, bad = self.xadd(loras=[{"name": "ink"}]), self.xadd(loras=[{"name": "oil"}])
        until(lambda: self.second.get("/v1/jobs/" + bad).status == 200 and self.second.job(bad)["state"] == "rejected", "rejected")
        self.assertIn("'oil'", self.second.job(bad)["error"]["message"])
        self.assertEqual(self.second.job(bad)["error"]["param"], "loras[0].name")
        self.assertEqual(self.admitted(good, self.second)[0]["sha256"], digest(adapter(1)))

    def test_a_repeated_key_is_the_same_job_after_a_replacement(self):
        self.put("ink", adapter(1))
        body = {"prompt": "x", **self.SMALL, "loras": [{"name": "ink"}]}
        first = self.first.request("POST", "/v1/jobs", body, {"Idempotency-Key": "once"}).json()["id"]
        self.addCleanup(self.first.cancel, first)
        self.put("ink", adapter(2))
        again = self.first.request("POST", "/v1/jobs", body, {"Idempotency-Key": "once"})
        self.assertEqual((again.status, again.json()["id"]), (202, first))


if __name__ == "__main__":
    unittest.main()
