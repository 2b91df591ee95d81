"""Tables of invalid requests: the request, and the expected status and words of the message.
After each request the service must be unchanged: no job created, and the next valid request served."""
import hashlib
import json
import re
import socket
import time
import unittest

from api import Client
from fleet import Shared, alive, tiny_model, until

KEY = "sk-only"
CONFIG = f"""keys:
  - {{tenant: only, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}
gateway:
  max_body_bytes: 65536
"""
shared = Shared(workers=1, config=CONFIG, models={"tiny": tiny_model(), "small": tiny_model("dev")})
GOOD = {"model": "tiny", "prompt": "a red circle", "width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 16}
before = {}


def setUpModule():
    shared.start()
    before["pids"] = shared.fleet.pids()


def tearDownModule():
    try:
        assert shared.fleet.pids() == before["pids"], "a process ended and was started again"
        assert all(map(alive, before["pids"]))
    finally:
        shared.stop()


class Base(unittest.TestCase):
    def setUp(self):
        self.client = Client(shared.fleet.url, KEY)

    def jobs(self):
        return len(self.client.get("/v1/jobs?limit=200").json()["jobs"])

    def check(self, response, status, words, param=None):
        self.assertEqual(response.status, status, response)
        error = response.error
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        for word in words:
            self.assertIn(word, error["message"])
        if param:
            self.assertEqual(error["param"], param)
        response.body.decode()  # responses are UTF-8 even if the request was not


# (case, fields that replace those of GOOD, words of the message, param if it is not the only field)
FIELDS = [
    ("unknown model", {"model": "tinny"}, ["'tinny'", "small, tiny"]),
    ("no model where there is no default", {"model": None}, ["small, tiny"]),
    ("width not a multiple", {"width": 33}, ["multiple of 8", "32 or 40"]),
    ("height not a multiple", {"height": 47}, ["multiple of 8", "40 or 48"]),
    ("width too small", {"width": 1}, ["2048"]),
    ("width too large", {"width": 1 << 20}, ["16384"]),
    ("width of zero", {"width": 0}, ["1 to"]),
    ("negative width", {"width": -32}, ["-32"]),
    ("width a text", {"width": "wide"}, ["a string", "integer"]),
    ("width with a fraction", {"width": 32.5}, ["32.5", "integer"]),
    ("huge width", {"width": 10**30}, ["integer"]),
    ("size and no size", {"width": None, "height": None, "size": "big"}, ["size"]),
    ("size of one side", {"width": None, "height": None, "size": "32"}, ["size"]),
    ("size with a space", {"width": None, "height": None, "size": "32 x 32"}, ["size"]),
    ("size with a sign", {"width": None, "height": None, "size": "-32x32"}, ["size"]),
    ("size beside width", {"size": "48x48"}, ["size"]),
    ("n of zero", {"n": 0}, ["1 to 64"]),
    ("n negative", {"n": -1}, ["1 to 64"]),
    ("n too large", {"n": 65}, ["1 to 64"]),
    ("n a fraction", {"n": 1.5}, ["integer"]),
    ("n true", {"n": True}, ["a boolean"]),
    ("no steps", {"num_inference_steps": 0}, ["1 to"]),
    ("too many steps", {"num_inference_steps": 201}, ["1 to 200"]),
    ("absurdly many steps", {"num_inference_steps": 10**15}, ["1 to"]),
    ("guidance negative", {"guidance_scale": -0.5}, ["0 to 100"]),
    ("guidance too large", {"guidance_scale": 101}, ["0 to 100"]),
    ("guidance beyond a double", {"guidance_scale": 10**400}, []),
    ("guidance a text", {"guidance_scale": "3.5"}, ["a string", "number"]),
    ("true CFG negative", {"true_cfg_scale": -1}, ["0 to 100"]),
    ("text too long for T5", {"max_sequence_length": 513}, ["512"]),
    ("text of no tokens", {"max_sequence_length": 0}, ["1 to 1024"]),
    ("seed negative", {"seed": -1}, ["0 to"]),
    ("seed beyond 2^63", {"seed": 2**63}, ["9223372036854775807"]),
    ("seed + n beyond 2^63", {"seed": 2**63 - 1, "n": 2}, ["seed + i"], "seed"),
    ("prompt missing", {"prompt": None}, ["prompt", "missing"]),
    ("prompt a number", {"prompt": 5}, ["a number", "string"]),
    ("prompt a list", {"prompt": ["a"]}, ["an array"]),
    ("negative prompt a number", {"negative_prompt": 5}, ["string"]),
    ("priority too high", {"priority": 101}, ["-100 to 100"]),
    ("deadline gone", {"deadline_ms": 0}, ["1 to"]),
    ("deadline in years", {"deadline_ms": 10**13}, ["604800000"]),
    ("format unknown", {"output_format": "bmp"}, ["png, jpeg, webp or mp4"]),
    ("compression above 100", {"output_compression": 101}, ["0 to 100"]),
    ("too many previews", {"partial_images": 4}, ["0 to 3"]),
    ("loras no list", {"loras": {"name": "a"}}, ["array"]),
    ("lora without a name", {"loras": [{"scale": 1}]}, ["name"]),
    ("lora with a wild scale", {"loras": [{"name": "a", "scale": 1e9}]}, ["-100 to 100"]),
    ("lora with a field too many", {"loras": [{"name": "a", "weight": 1}]}, ["weight"]),
    ("unknown field", {"stpes": 4}, ["unknown field 'stpes'"]),
    ("unknown field, near a known one", {"num_inference_step": 4}, ["num_inference_steps"]),
    ("unknown field, cut between characters", {"x" + "é" * 50: 4}, ["unknown field"]),
    ("user too long", {"user": "u" * 600}, ["512"]),
]


class NativeFields(Base):
    def test_table(self):
        count = self.jobs()
        for what, fields, words, *param in FIELDS:
            with self.subTest(what):
                answer = self.client.request("POST", "/v1/jobs", {k: v for k, v in {**GOOD, **fields}.items() if v is not None})
                status = 404 if what == "unknown model" else 400
                self.check(answer, status, words, param[0] if param else next(iter(fields)) if len(fields) == 1 and "lora" not in what
                           and "cut" not in what and "beyond a double" not in what else None)
        self.assertEqual(self.jobs(), count)

    def test_openai_route_too(self):
        count = self.jobs()
        base = {"model": "tiny", "prompt": "x", "size": "32x32"}
        cases = [
            ("unknown model", {"model": "tinny"}, 404, ["small, tiny"], "model"),
            ("not a multiple", {"size": "33x32"}, 400, ["multiple of 8"], "size"),
            ("too large", {"size": "4096x32"}, 400, ["2048"], "size"),
            ("no size", {"size": "x"}, 400, ["1024x1024"], "size"),
            ("half a size", {"size": "32x"}, 400, ["1024x1024"], "size"),
            ("overflowing size", {"size": "99999999999x32"}, 400, ["1024x1024"], "size"),
            ("size a number", {"size": 32}, 400, ["must be a string"], "size"),
            ("stream a text", {"stream": "yes"}, 400, ["true or false"], "stream"),
            ("quality unknown", {"quality": "best"}, 400, ["high"], "quality"),
            ("style unknown", {"style": "baroque"}, 400, ["vivid"], "style"),
            ("unknown field", {"promt": "x"}, 400, ["'promt'"], "promt"),
            ("prompt missing", {"prompt": None}, 400, ["prompt"], "prompt"),
            ("steps", {"num_inference_steps": 999}, 400, ["200"], "num_inference_steps"),
        ]
        for what, fields, status, words, param in cases:
            with self.subTest(what):
                self.check(self.client.request("POST", "/v1/images/generations", {**base, **fields}), status, words, param)
        self.assertEqual(self.jobs(), count)


class Bodies(Base):
    def post(self, body, path="/v1/jobs", **headers):
        return self.client.request("POST", path, body, {"Content-Type": "application/json", **headers})

    def test_broken(self):
        good = json.dumps(GOOD)
        cases = [
            ("nothing", b"", ["JSON"]),
            ("not JSON", b"prompt=x", ["JSON"]),
            ("cut off", good.encode()[:-1], ["JSON"]),
            ("more after the end", (good + "x").encode(), ["JSON"]),
            ("two objects", (good + good).encode(), ["JSON"]),
            ("a list", b"[]", ["object"]),
            ("a text", b'"x"', ["object"]),
            ("null", b"null", ["object"]),
            ("NaN", good.replace("32", "NaN", 1).encode(), ["JSON"]),
            ("Infinity", good.replace("32", "Infinity", 1).encode(), ["JSON"]),
            ("a number beyond a double", good.replace("32", "1e400", 1).encode(), ["JSON", "1.8e308"]),
            ("a comment", b"{/* */}", ["JSON"]),
            ("deep nesting", b"[" * 30000, ["JSON"]),
            ("deep objects", b'{"a":' * 6000, ["JSON"]),
            ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', ["UTF-8"]),
            ("UTF-8 cut off", b'{"prompt": "\xe9\x9b"}', ["UTF-8"]),
            ("overlong UTF-8", b'{"prompt": "\xc0\xaf"}', ["UTF-8"]),
            ("a surrogate in UTF-8", b'{"prompt": "\xed\xa0\x80"}', ["UTF-8"]),
            ("half a surrogate pair escaped", b'{"prompt": "\\ud800"}', ["JSON"]),
            ("zero bytes", b"\0" * 100, ["JSON"]),
            ("UTF-16", good.encode("utf-16"), []),
            ("a control character in a string", b'{"prompt": "a\x01b"}', ["JSON"]),
        ]
        count = self.jobs()
        for path in ("/v1/jobs", "/v1/images/generations"):
            for what, body, words in cases:
                with self.subTest(what, path=path):
                    self.check(self.post(body, path), 400, words)
        self.assertEqual(self.jobs(), count)

    def test_too_large(self):
        self.check(self.post(b'{"tenant": "' + b"x" * 65536 + b'"}', "/v1/keys"), 413, ["65536 bytes (gateway.max_body_bytes)"])
        for path in ("/v1/jobs", "/v1/images/generations", "/v1/videos"):  # images may be in these
            self.check(self.post(b'{"prompt": "' + b"x" * 65536 + b'"}', path), 400, ["prompt has 65536 bytes; at most 16384"])
        # A declared length is refused before the body is sent.
        with socket.create_connection(tuple_of(self.client.host), 10) as s:
            s.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
            self.assertIn(b" 413 ", s.recv(4096))

    def test_other_types(self):
        self.check(self.post(b"prompt=x", **{"Content-Type": "application/x-www-form-urlencoded"}), 415, ["application/json"])
        self.check(self.post(b"x", **{"Content-Type": "multipart/form-data; boundary=x"}), 415, ["application/json"])
        good = self.post(json.dumps(GOOD), **{"Content-Type": "application/json; charset=utf-8"})
        self.assertEqual(good.status, 202)


class Prompts(Base):
    """Empty and over-long prompts are accepted; a warning names the part that the encoders ignore."""

    def test_empty(self):
        job = self.client.wait(self.client.submit(**{**GOOD, "prompt": ""}))
        self.assertEqual((job["state"], job["spec"]["prompt"], job["warnings"]), ("succeeded", "", []))

    def test_over_long(self):
        job = self.client.wait(self.client.submit(**{**GOOD, "prompt": "circle " * 2000}))
        self.assertEqual(job["state"], "succeeded")
        self.assertTrue(any("CLIP" in w for w in job["warnings"]), job["warnings"])
        self.assertTrue(any("T5" in w for w in job["warnings"]), job["warnings"])

    def test_any_text(self):
        for prompt in ("</s> <pad> <|endoftext|>", "e\u0301\u0301 \u200d\u202e 雪🐎👨‍👩‍👧", "\u0000 nul", "\t\r\n \u00a0", "a" * 10000):
            with self.subTest(prompt[:12]):
                job = self.client.wait(self.client.submit(**{**GOOD, "prompt": prompt}))
                self.assertEqual((job["state"], job["spec"]["prompt"]), ("succeeded", prompt))


class Routes(Base):
    def test_wrong_method(self):
        for method, path, allow in (
                ("GET", "/v1/images/generations", "POST, OPTIONS"), ("DELETE", "/v1/jobs", "POST, GET, HEAD, OPTIONS"),
                ("POST", "/v1/models", "GET, HEAD, OPTIONS"), ("PUT", "/v1/jobs/x", "GET, HEAD, DELETE, OPTIONS"),
                ("POST", "/", "GET, HEAD, OPTIONS"), ("PATCH", "/healthz", "GET, HEAD, OPTIONS"),
                ("POST", "/v1/jobs/x/events", "GET, HEAD, OPTIONS"), ("BREW", "/v1/workers", "GET, HEAD, OPTIONS")):
            with self.subTest(method=method, path=path):
                answer = self.client.request(method, path)
                self.check(answer, 405, [method, allow])
                self.assertEqual(answer.headers["Allow"], allow)

    def test_no_such_path(self):
        for path in ("/v1", "/v1/job", "/v2/jobs", "/v1/jobs/x/y", "/v1/jobs/", "/../etc/passwd", "/%2e%2e/x", "//", "/v1/jobs/x/results"):
            with self.subTest(path):
                self.check(self.client.get(path), 404, [])

    def test_no_such_job(self):
        for id in ("01ABCDEFGHJKMNPQRSTVWXYZ00", "x", "a%20b", "%7Bx%7D", "..", "x" * 500, "%C3%A9" * 60):
            for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/results/0"), ("GET", "/previews/1-0")):
                with self.subTest(id=id[:20], method=method, rest=rest):
                    self.check(self.client.request(method, f"/v1/jobs/{id}{rest}"), 404, ["not found"])

    def test_no_such_result(self):
        id = self.client.submit(**GOOD)
        self.client.wait(id)
        for index in ("1", "-1", "x", "99999999999999999999", "0x0", "%00"):
            with self.subTest(index):
                answer = self.client.get(f"/v1/jobs/{id}/results/{index}")
                self.check(answer, 400 if index == "%00" else 404, [])

    def test_ids_out_of_range(self):
        id = self.client.submit(**GOOD)
        self.client.wait(id)
        for far in ("18446744073709551616-0", "0-18446744073709551616", "99999999999999999999", "9" * 400, "18446744073709551616"):
            with self.subTest(far[:30]):
                self.check(self.client.get(f"/v1/jobs/{id}/previews/{far}"), 404, ["event id"])
                self.check(self.client.get(f"/v1/jobs/{id}/events", **{"Last-Event-ID": far}), 400, ["event id"])
                self.check(self.client.get(f"/v1/jobs/{id}/events?last_event_id={far}"), 400, ["event id"])
                self.check(self.client.get(f"/v1/jobs?cursor={far}:{id}"), 400, ["is not a cursor"], "cursor")
                self.check(self.client.get(f"/v1/jobs?cursor={far}"), 400, ["is not a cursor"], "cursor")
                self.check(self.client.get(f"/v1/videos?after={far}:{id}"), 400, ["is not a cursor"], "after")
        last = "18446744073709551615-18446744073709551615"  # in range, and after all events
        self.check(self.client.get(f"/v1/jobs/{id}/previews/{last}"), 404, ["does not exist"])
        self.assertEqual(self.client.get(f"/v1/jobs/{id}/events", **{"Last-Event-ID": last}).status, 204)

    def test_requests_are_logged_with_the_job_or_the_reason(self):
        self.client.request("POST", "/v1/jobs", {"prompt": "x", "stpes": 4})
        id = self.client.submit(**GOOD)
        for line in (r"POST /v1/jobs 400 [^\n]* error=\"unknown field 'stpes'", rf"POST /v1/jobs 202 [^\n]* job={id}\b"):
            until(lambda: re.search(line, (shared.fleet.data / "logs" / "coordinator.log").read_text()), line)
        self.client.wait(id)

    def test_bad_urls(self):
        for path in ("/%", "/%zz", "/v1/jobs?limit=%f", "/%ff"):
            with self.subTest(path):
                self.check(self.client.get(path), 400, [])

    def test_wrong_key(self):
        answer = Client(shared.fleet.url, "sk-other").get("/v1/jobs")
        self.check(answer, 401, [])
        self.assertEqual(answer.headers["WWW-Authenticate"], "Bearer")


def tuple_of(host):
    name, port = host.split(":")
    return name, int(port)


class Bytes(Base):
    """Malformed HTTP."""

    def talk(self, data, wait=5):
        with socket.create_connection(tuple_of(self.client.host), wait) as s:
            s.sendall(data)
            try:
                s.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            out = b""
            while chunk := s.recv(65536):
                out += chunk
            return out

    def test_answers(self):
        for what, data, status in (
                ("no HTTP", b"hello\r\n\r\n", b"400"),
                ("an old version", b"GET / HTTP/0.9\r\n\r\n", b"505"),
                ("headers without end", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10000, b"431"),
                ("a very long URL", b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\n\r\n", b"431"),
                ("two lengths", b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
                ("a length that is none", b"POST /v1/jobs HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
                ("a broken chunk", b"POST /v1/jobs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
                ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, b"400")):
            with self.subTest(what):
                answer = self.talk(data)
                self.assertTrue(answer.startswith(b"HTTP/1.1 " + status), answer[:200])

    def test_a_chunked_body_is_accepted(self):
        body = json.dumps(GOOD).encode()
        answer = self.talk(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer " + KEY.encode() +
                           b"\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        self.assertTrue(answer.startswith(b"HTTP/1.1 202"), answer[:300])

    def test_a_body_that_never_arrives_does_not_block_other_requests(self):
        slow = [socket.create_connection(tuple_of(self.client.host), 5) for _ in range(20)]
        for s in slow:
            s.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        began = time.monotonic()
        self.assertEqual(self.client.get("/healthz").status, 200)
        self.assertLess(time.monotonic() - began, 2)
        for s in slow:
            s.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
