"""The gateway as a door: who is let in, in which form, and what others cannot take away. Also passwords and file modes."""
import hashlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import unittest
from pathlib import Path
from urllib.parse import urlsplit

from api import Client
from fleet import BIN, DITFLEET, Fleet, clean_environment, cli, free_port, run, start, tiny_model, until

JOB = json.dumps({"prompt": "x", "width": 32, "height": 32})
KEYS = """keys:
  - {tenant: first, sha256: %s}
  - {tenant: ops, sha256: %s, admin: true}
""" % tuple(hashlib.sha256(k).hexdigest() for k in (b"first", b"ops"))


def answers(client):
    try:
        return client.get("/readyz").status == 200
    except OSError:
        return False


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        self.addCleanup(shutil.rmtree, self.folder, True)

    def certificate(self, name="cert", days=2):
        """Makes a self-signed certificate for this host; returns its file and its key's."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        made = run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", days,
                   "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", key, "-out", cert)
        self.assertEqual(made.returncode, 0, made.stderr)
        key.chmod(0o600)
        return cert, key


class Room(unittest.TestCase):
    def test_half_sent_requests_shut_out_nobody(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n"
        with Fleet(workers=0, sets=["gateway.max_connections=100"]) as fleet:
            client = Client(fleet.url)
            for sent in (b"", head[:20], head):
                crowd = []
                self.addCleanup(lambda all=crowd: [s.close() for s in all])
                for _ in range(300):
                    crowd.append(socket.create_connection(urlsplit(fleet.url).netloc.split(":")))
                    try:
                        crowd[-1].sendall(sent)
                    except OSError:
                        pass  # it has made room already
                for path in ("/healthz", "/readyz", "/metrics", "/v1/jobs"):
                    self.assertEqual(client.get(path).status, 200, (sent, path))
                self.assertEqual(client.request("POST", "/v1/jobs", json.loads(JOB)).status, 202, sent)


class WithoutKeys(unittest.TestCase):
    def test_foreign_pages_are_refused(self):
        with Fleet(workers=0) as fleet:
            client = Client(fleet.url)
            typed = {"Content-Type": "application/json"}
            for status, headers in ((415, {}), (403, {**typed, "Sec-Fetch-Site": "cross-site"}), (403, {**typed, "Host": "evil.example"}),
                                    (403, {**typed, "Origin": "https://evil.example"}), (202, {**typed, "Origin": fleet.url})):
                answer = client.request("POST", "/v1/jobs", JOB.encode(), headers)
                self.assertEqual(answer.status, status, headers)
            refused = client.get("/v1/jobs", Host="evil.example:8780")
            self.assertEqual(refused.status, 403)
            for word in ("'evil.example'", "gateway.public_url"):
                self.assertIn(word, refused.error["message"])
            self.assertEqual(client.get("/healthz", Host="probe.example").status, 200)
            self.assertEqual(len(client.get("/v1/jobs").json()["jobs"]), 1)

    def test_other_hosts_are_served_only_on_request(self):
        listen = ["--set", "gateway.listen=0.0.0.0:0", "--set", "redis.url=redis://127.0.0.1:9"]
        for argv in (["coordinator"], ["config", "check"], ["up", "--workers", "0", "--model", f"t={tiny_model()}"]):
            with self.subTest(argv):
                done = cli(*argv, *listen, seconds=20)
                self.assertNotEqual(done.returncode, 0)
                for word in ("gateway.listen is '0.0.0.0:0'", "keys", "gateway.open"):
                    self.assertIn(word, done.stdout + done.stderr)
        self.assertEqual(cli("config", "check", *listen, "--set", "gateway.open=true").returncode, 0)
        with Fleet(workers=0, listen="0.0.0.0:0", sets=["gateway.open=true"]) as fleet:
            self.assertEqual(Client(fleet.url).get("/v1/jobs").status, 200)


class WithKeys(WithFolder):
    def test_metrics_are_for_administrators(self):
        port = free_port()
        with Fleet(workers=0, config=KEYS, sets=[f"gateway.metrics_listen=127.0.0.1:{port}"]) as fleet:
            self.assertEqual(Client(fleet.url).get("/metrics").status, 401)
            refused = Client(fleet.url, "first").get("/metrics")
            self.assertEqual(refused.status, 403)
            self.assertIn("gateway.metrics_listen", refused.error["message"])
            self.assertEqual(Client(fleet.url, "ops").get("/metrics").status, 200)
            apart = Client(f"http://127.0.0.1:{port}").get("/metrics")
            self.assertEqual(apart.status, 200)
            self.assertIn(b"ditfleet_http_connections", apart.body)

    def test_pages_of_allowed_origins(self):
        """FlexLLama#30: a page of another site asks first (a preflight), and its browser lets it read what names its origin."""
        page = "http://localhost:3000"
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
        with Fleet(workers=0, config=KEYS, sets=[f"gateway.allowed_origins={page},https://app.example"]) as fleet:
            client = Client(fleet.url)
            answer = client.request("OPTIONS", "/v1/images/generations", None, {"Origin": page, **ask})
            self.assertEqual(answer.status, 204)
            self.assertEqual(answer.headers["Access-Control-Allow-Origin"], page)
            self.assertIn("POST", answer.headers["Access-Control-Allow-Methods"])
            self.assertEqual(answer.headers["Access-Control-Allow-Headers"], ask["Access-Control-Request-Headers"])
            jobs = Client(fleet.url, "first").get("/v1/jobs", Origin=page)
            self.assertEqual((jobs.status, jobs.headers["Access-Control-Allow-Origin"], jobs.headers["Vary"]), (200, page, "Origin"))
            self.assertIn("X-Request-Id", jobs.headers["Access-Control-Expose-Headers"])
            refused = client.get("/v1/jobs", Origin=page)
            self.assertEqual((refused.status, refused.headers["Access-Control-Allow-Origin"]), (401, page))
            for other in ("http://localhost:3001", "https://localhost:3000", "https://evil.example"):
                answer = client.request("OPTIONS", "/v1/jobs", None, {"Origin": other, **ask})
                self.assertNotIn("Access-Control-Allow-Origin", answer.headers)
        with Fleet(workers=0, sets=["gateway.allowed_origins=*"]) as fleet:  # without keys nothing would protect it
            self.assertEqual(Client(fleet.url).get("/v1/jobs", Origin=page).status, 403)
        for wrong in ("app.example", "https://app.example/", "https://a b"):
            done = cli("config", "check", "--set", f"gateway.allowed_origins={wrong}")
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("* or origins, as https://app.example", done.stdout + done.stderr)

    def test_gateways_share_the_secret_of_links(self):
        with Fleet(workers=0, config=KEYS, data=self.folder / "data") as fleet:
            redis = lambda *command: run("redis-cli", "-s", fleet.redis_socket, *command).stdout.strip()
            names = until(lambda: (n := sorted(redis("keys", "df:{0}:links:*").split())) and len(n) > 1 and n, "this and the last period's secrets")
            secrets = lambda: [redis("eval", "return redis.sha1hex(redis.call('get', KEYS[1]))", "1", name) for name in names]
            before = secrets()
            self.assertEqual(len(set(before)), 2)
            for name in names:
                self.assertEqual(redis("strlen", name), "32")
                self.assertGreater(int(redis("ttl", name)), 30 * 86400)
            other = start([DITFLEET, "coordinator", "--redis", fleet.redis_url, "--listen", "127.0.0.1:0",
                           "--config", fleet.folder / "ditfleet.yaml", "--set", f"models.tiny.path={tiny_model()}", "--json"],
                          stderr=subprocess.DEVNULL)
            self.addCleanup(other.kill)
            self.assertIn("gateway", json.loads(other.stdout.readline()))
            self.assertEqual(secrets(), before)


class Tls(WithFolder):
    def test_https(self):
        cert, key = self.certificate()
        with Fleet(workers=0, sets=[f"gateway.tls_cert_file={cert}", f"gateway.tls_key_file={key}"]) as fleet:
            self.assertRegex(fleet.url, r"^https://127\.0\.0\.1:\d+$")
            trust = ssl.create_default_context(cafile=cert)
            host = urlsplit(fleet.url).netloc
            def connections():
                connection = http.client.HTTPSConnection(host, context=trust, timeout=20)
                connection.request("GET", "/metrics")
                lines = connection.getresponse().read().decode().splitlines()
                connection.close()
                return next(float(l.split()[1]) for l in lines if l.startswith("ditfleet_http_connections "))
            before = connections()  # `ditfleet up` keeps one
            connection = http.client.HTTPSConnection(host, context=trust, timeout=20)
            connection.request("GET", "/metrics")
            expiry = re.search(r"^ditfleet_certificate_expiry_timestamp_seconds (\S+)$", connection.getresponse().read().decode(), re.M)
            connection.close()
            ends = subprocess.run(["openssl", "x509", "-enddate", "-noout", "-in", cert], capture_output=True, text=True, check=True)
            self.assertEqual(float(expiry.group(1)), ssl.cert_time_to_seconds(ends.stdout.strip().removeprefix("notAfter=")))
            connection = http.client.HTTPSConnection(host, context=trust, timeout=20)
            ids = []
            for _ in range(3):  # on one connection
                connection.request("POST", "/v1/jobs", JOB, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                self.assertEqual(answer.status, 202)
                ids.append(json.loads(answer.read()))
            self.assertTrue(ids[0]["urls"]["self"].startswith(fleet.url) if "urls" in ids[0] else fleet.url in json.dumps(ids[0]), ids[0])
            connection.request("PATCH", "/v1/loras/x", "x" * (1 << 20) + "x", {"Content-Type": "application/json"})
            self.assertEqual(connection.getresponse().status, 413)
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.load_verify_locations(cert)
            old.set_ciphers("ALL:@SECLEVEL=0")
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            with self.assertRaises((ssl.SSLError, OSError)):
                old.wrap_socket(socket.create_connection(host.split(":")), server_hostname="localhost")
            # Whoever is in the middle of an event stream or waits for an image may leave.
            for method, path, body in (("GET", f"/v1/jobs/{ids[0]['id']}/events", None), ("POST", "/v1/images/generations", json.dumps({"prompt": "x"}))):
                leaver = http.client.HTTPSConnection(host, context=trust, timeout=20)
                leaver.request(method, path, body, {"Content-Type": "application/json"})
                if body is None:
                    stream = leaver.getresponse()
                    self.assertIn(b"retry", stream.readline())
                    stream.close()
                leaver.close()
            until(lambda: connections() == before, "only the scraper is connected", 30)

            listing = cli("jobs", "list", "--url", fleet.url, "--ca-file", cert)
            self.assertEqual(listing.returncode, 0, listing.stderr)
            self.assertIn(ids[0]["id"], listing.stdout)
            self.assertEqual(cli("jobs", "list", "--url", fleet.url, env=clean_environment(DITFLEET_CA_FILE=str(cert))).returncode, 0)
            refused = cli("jobs", "list", "--url", fleet.url)
            self.assertEqual(refused.returncode, 1)
            self.assertIn("--ca-file", refused.stderr)

            plain = socket.create_connection(host.split(":"), timeout=10)
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.assertNotIn(b"HTTP/1.1 200", plain.recv(1000))
            plain.close()

    def test_half_made_connections_make_room(self):
        cert, key = self.certificate()
        with Fleet(workers=0, sets=[f"gateway.tls_cert_file={cert}", f"gateway.tls_key_file={key}", "gateway.max_connections=20"]) as fleet:
            host = urlsplit(fleet.url).netloc
            crowd = [socket.create_connection(host.split(":")) for _ in range(60)]
            self.addCleanup(lambda: [s.close() for s in crowd])
            connection = http.client.HTTPSConnection(host, context=ssl.create_default_context(cafile=cert), timeout=20)
            connection.request("GET", "/v1/jobs")
            self.assertEqual(connection.getresponse().status, 200)
            connection.close()

    def test_a_configuration_with_its_certificate_beside_it(self):
        self.certificate("tls")
        config = self.folder / "c.yaml"
        config.write_text("gateway: {tls_cert_file: tls.pem, tls_key_file: tls.key}\n")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        with Fleet(workers=0, flags=["--config", "c.yaml"]) as fleet:
            self.assertTrue(fleet.url.startswith("https://"))
        shown = json.loads(cli("config", "show", "--config", "c.yaml", "--json").stdout)
        self.assertEqual(shown["gateway"]["tls_cert_file"], str(self.folder / "tls.pem"))

    def test_config_check_opens_the_files(self):
        cert, key = self.certificate()
        _, other = self.certificate("other")
        check = lambda *sets: cli("config", "check", *(word for one in sets for word in ("--set", one)))
        pair = lambda c, k: (f"gateway.tls_cert_file={c}", f"gateway.tls_key_file={k}")
        soon = check(*pair(cert, key))
        self.assertEqual(soon.returncode, 0, soon.stderr)
        self.assertRegex(soon.stderr, "warning: gateway.tls_cert_file: .* expires in 4[78] h")
        self.assertEqual(check(*pair(*self.certificate("long", days=15))).stderr, "")
        gone = run("openssl", "x509", "-in", cert, "-signkey", key, "-days", "-1", "-out", self.folder / "gone.pem")
        self.assertEqual(gone.returncode, 0, gone.stderr)
        secret = self.folder / "secret"
        secret.write_text("x" * 32)
        secret.chmod(0o644)
        for sets, words in ((pair(self.folder / "none.pem", key), ["gateway.tls_cert_file", "none.pem", "No such file"]), (pair(cert, other), ["gateway.tls_key_file", "mismatch"]),
                            (pair(key, key), ["gateway.tls_cert_file", "not a readable certificate"]), (pair(self.folder / "gone.pem", key), ["has expired"]),
                            ([f"redis.tls_cert_file={cert}", f"redis.tls_key_file={other}"], ["redis.tls_key_file", "mismatch"]),
                            (["redis.tls_ca_file=/none.pem"], ["redis.tls_ca_file: '/none.pem' does not exist"]),
                            ([f"cache.secret_file={secret}"], ["cache.secret_file", "chmod 600"]), (["cache.secret_file=/none"], ["cache.secret_file", "/none"]),
                            ([f"loras.folders={self.folder}:/none"], ["loras.folders: '/none' does not exist"]), (["compile.nvrtc=/none.so"], ["compile.nvrtc"]),
                            ([f"models.a.path={tiny_model()}", "models.a.transformer=/none"], ["models.a.transformer: '/none' does not exist"])):
            with self.subTest(words):
                done = check(*sets)
                self.assertEqual(done.returncode, 1, done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
        self.assertEqual(check(f"redis.tls_ca_file={cert}").returncode, 0)
        alone = check(f"redis.tls_cert_file={cert}")
        self.assertEqual(alone.returncode, 2)
        self.assertIn("only one of redis.tls_cert_file and redis.tls_key_file is set; set both or neither", alone.stderr)
        for program in ([DITFLEET, "coordinator"], [BIN / "ditfleet-worker", "run"]):
            words = [word for one in ("redis.url=rediss://127.0.0.1:1", f"redis.tls_cert_file={cert}", f"redis.tls_key_file={other}",
                                      f"models.tiny.path={tiny_model()}") for word in ("--set", one)]
            refused = run(*program, *words)
            self.assertIn(refused.returncode, (1, 2), refused)
            self.assertIn("redis.tls_key_file", refused.stderr + refused.stdout)

    def test_files_that_do_not_fit(self):
        cert, key = self.certificate()
        _, other = self.certificate("other")
        open_key = self.folder / "open.key"
        shutil.copyfile(key, open_key)
        open_key.chmod(0o644)
        for c, k, words in ((cert, other, ["gateway.tls_key_file", str(other)]), (cert, self.folder / "none", ["gateway.tls_key_file", "none"]),
                            (self.folder / "none", key, ["gateway.tls_cert_file", "none"]), (key, key, ["gateway.tls_cert_file"]),
                            (cert, open_key, ["gateway.tls_key_file", "chmod 600"]), (cert, "", ["gateway.tls_key_file", "both"])):
            with self.subTest(words):
                done = cli("coordinator", "--redis", "redis://127.0.0.1:9", "--listen", "127.0.0.1:0", "--set", f"gateway.tls_cert_file={c}",
                           "--set", f"gateway.tls_key_file={k}", seconds=20)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                for word in words:
                    self.assertIn(word, done.stdout + done.stderr)


class Secrets(WithFolder):
    def redis(self, *flags):
        port = free_port()
        server = start(["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", self.folder, *flags])
        self.addCleanup(lambda: (server.kill(), server.wait()))
        until(lambda: run("redis-cli", "-p", port, "ping").returncode == 0, "Redis listens")
        return port

    def test_the_password_of_redis_is_shown_nowhere(self):
        port = self.redis("--requirepass", "hunter2hunter2")
        url = f"redis://:hunter2hunter2@127.0.0.1:{port}"
        with Fleet(workers=0, flags=["--redis", url, "--json"]) as fleet:
            self.assertEqual(fleet.redis_url, f"redis://127.0.0.1:{port}")
            for pid in [fleet.process.pid, *fleet.pids()]:
                self.assertNotIn(b"hunter2", Path(f"/proc/{pid}/cmdline").read_bytes())
            self.assertNotIn("hunter2", fleet.ready_file.read_text() + fleet.log.read_text())
            for log in (fleet.data / "logs").iterdir():
                self.assertNotIn("hunter2", log.read_text())

    @unittest.skipUnless((BIN / "ditfleet-worker").exists(), "needs ditfleet-worker")
    def test_images_are_private_files(self):
        url, results = f"redis://127.0.0.1:{self.redis()}", self.folder / "results"
        sets = ["--set", "results.backend=file", "--set", f"results.dir={results}", "--redis", url]
        old = os.umask(0o022)
        self.addCleanup(os.umask, old)
        coordinator = start([DITFLEET, "coordinator", "--listen", "127.0.0.1:0", "--json", "--set", f"models.tiny.path={tiny_model()}", *sets],
                            stderr=subprocess.DEVNULL)
        worker = start([BIN / "ditfleet-worker", "run", "--model", f"tiny={tiny_model()}", "--device", "cpu", *sets], stdout=subprocess.DEVNULL)
        for process in (coordinator, worker):
            self.addCleanup(lambda p=process: (p.kill(), p.wait()))
        client = Client(json.loads(coordinator.stdout.readline())["gateway"])
        self.assertEqual(client.wait(client.submit(width=32, height=32, num_inference_steps=1))["state"], "succeeded")
        files = [p for p in results.rglob("*")]
        self.assertTrue([p for p in files if p.is_file()])
        self.assertEqual([p for p in files if p.stat().st_mode & 0o077], [])


class Supervision(unittest.TestCase):
    def test_a_coordinator_that_hangs_is_restarted(self):
        with Fleet(workers=0) as fleet:
            hung = fleet.ready["pids"]["coordinator"]
            os.kill(hung, signal.SIGSTOP)
            until(lambda: fleet.ready["pids"]["coordinator"] not in (None, hung), "a new coordinator", 60)
            self.assertIn("coordinator has not answered /healthz", fleet.log.read_text())
            until(lambda: answers(Client(fleet.url)), "it serves", 30)


if __name__ == "__main__":
    unittest.main(verbosity=2)
