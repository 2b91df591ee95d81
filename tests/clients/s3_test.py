"""Results in S3, against moto's server: objects, links, uploads and images by s3:// URL, credentials, and a store that
fails. DITFLEET_TEST_S3=500: with as many jobs."""
import base64
import contextlib
import datetime
import hashlib
import http.server
import importlib.util
import json
import logging
import os
import random
import socket
import tempfile
import threading
import time
import unittest
import urllib.request
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from api import Client
from fleet import ROOT, Fleet, Listener, cli, need, tiny_model, until
from image import describe

need(all(map(importlib.util.find_spec, ("moto", "flask"))), "the moto package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AWS_EC2_METADATA_DISABLED": "true"}
os.environ.update(KEYS)
import boto3  # noqa: E402
import botocore.credentials  # noqa: E402
from botocore.auth import S3SigV4QueryAuth  # noqa: E402
from botocore.awsrequest import AWSRequest  # noqa: E402
from moto import settings  # noqa: E402
from moto.core.responses import ActionAuthenticatorMixin  # noqa: E402
from moto.s3.models import s3_backends  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

logging.getLogger("werkzeug").setLevel(logging.ERROR)
SMALL = {"width": 32, "height": 32, "num_inference_steps": 1}
JOBS = int(os.environ.get("DITFLEET_TEST_S3", 40))
PICTURES = ROOT / "tests" / "fixtures" / "pictures"


class Gate(Listener):
    """A port before the store's. fault(method, path) is the fault of a request: "500", "503", "full", "cut": no byte of it
    passes; "unanswered": it is executed; "half": half of the answer passes; a number: it waits as many seconds; "": none."""

    def __init__(self, port):
        self.port, self.fault, self.requests = port, lambda method, path: "", []
        super().__init__()
        self.url = "http://" + self.address

    def serve(self, client):
        with client, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                more = client.recv(65536)
                if not more:
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            method, path = head.decode().split()[:2]
            self.requests.append((method, path))
            fault = self.fault(method, path)
            if fault in ("500", "503", "full"):
                status, code = {"500": ("500 Internal Server Error", "InternalError"), "503": ("503 Slow Down", "SlowDown"),
                                "full": ("507 Insufficient Storage", "XMinioStorageFull")}[fault]
                text = f"<Error><Code>{code}</Code><Message>as the test wants</Message></Error>"
                client.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode())
            if fault in ("500", "503", "full", "cut"):
                return
            if isinstance(fault, (int, float)):
                time.sleep(fault)
            length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
            while len(body) < length:
                body += client.recv(65536)
            with socket.create_connection(("127.0.0.1", self.port)) as server:
                server.sendall(head.replace(b"\r\nHost:", b"\r\nConnection: close\r\nHost:") + b"\r\n\r\n" + body)
                answer = b""
                while more := server.recv(65536):
                    answer += more
            if fault != "unanswered":
                client.sendall(answer[:len(answer) // 2] if fault == "half" else answer)


class Store:
    """moto's server with the bucket `results`, and a gate before it."""

    def __enter__(self):
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.direct = "http://127.0.0.1:%d" % self.server.get_host_and_port()[1]
        urllib.request.urlopen(self.direct + "/moto-api/reset", b"").close()  # servers of a process share their buckets
        self.s3 = boto3.client("s3", endpoint_url=self.direct, region_name="us-east-1")
        self.s3.create_bucket(Bucket="results")
        self.gate = Gate(self.server.get_host_and_port()[1])
        return self

    def __exit__(self, *_):
        self.gate.listening.close()
        self.server.stop()

    def keys(self, prefix="", bucket="results"):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def read(self, key, bucket="results"):
        return self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()

    def age(self, key, days):
        """The object was written so many days ago."""
        versions = s3_backends["123456789012"]["aws"].buckets["results"].keys.getlist(key)
        versions[-1].last_modified = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None) - datetime.timedelta(days=days)

    def check_signatures(self, on):
        """moto then refuses requests whose signature botocore would not make."""
        ActionAuthenticatorMixin.request_count = 0
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0 if on else float("inf")


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.status, answer.headers, answer.read()


def sets(store, *more, bucket="results"):
    return ["default_model=tiny", "results.backend=s3", f"results.s3.bucket={bucket}", f"results.s3.endpoint={store.gate.url}", *more]


class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.store = cls.enterClassContext(Store())

    def setUp(self):
        self.store.gate.fault = lambda method, path: ""

    def fleet(self, *more, **options):
        fleet = self.enterContext(Fleet(sets=sets(self.store, *more), **options))
        return fleet, Client(fleet.url)

    def submit(self, http, **fields):
        made = http.request("POST", "/v1/jobs", {"prompt": "a circle", **SMALL, **fields})
        self.assertEqual(made.status, 202, made)
        return made.json()["id"]

    def result(self, http, id, unit=0):
        job = http.wait(id)
        self.assertEqual(job["state"], "succeeded", job)
        return job["unit_records"][unit]["result"]


class Service(Base):
    """A fleet whose results are below ditfleet/ in the bucket."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.running = cls.enterClassContext(Fleet(sets=sets(cls.store, "results.s3.prefix=/ditfleet", "quotas.inputs=10"), models={"tiny": tiny_model(), "dev": tiny_model("dev")},
                                                  config=json.dumps({"tenants": {"default": {"s3_inputs": "s3://photos/2026/, s3://results/ditfleet"}}})))
        cls.http = Client(cls.running.url)
        cls.store.s3.create_bucket(Bucket="photos")
        for key in ("2026/photo one.png", "2025/photo.png", "2026-secret/photo.png"):
            cls.store.s3.put_object(Bucket="photos", Key=key, Body=(PICTURES / "photo.png").read_bytes())

    def test_a_result_is_an_object_with_a_link(self):
        id = self.submit(self.http, n=2)
        for unit in range(2):
            result = self.result(self.http, id, unit)
            key, = self.store.keys(f"ditfleet/results/default/{id}/{unit}.")
            self.assertRegex(key, rf"/{unit}\.[0-9a-f]+\.png$")
            self.assertTrue(result["url"].startswith(f"{self.store.gate.url}/results/{key}?X-Amz-Algorithm=AWS4-HMAC-SHA256"), result["url"])
            status, headers, picture = fetch(result["url"])
            self.assertEqual((status, headers["Content-Type"], describe(picture)), (200, "image/png", ("png", 32, 32)))
            whole = self.http.get(f"/v1/jobs/{id}/results/{unit}")
            self.assertEqual((whole.status, whole.body), (200, picture))
            part = self.http.request("GET", f"/v1/jobs/{id}/results/{unit}", headers={"Range": "bytes=10-19"})
            self.assertEqual((part.status, part.body), (206, picture[10:20]))
        self.assertEqual(len(self.store.keys(f"ditfleet/results/default/{id}/")), 2)

    def test_a_link_is_signed_as_by_botocore(self):
        link = self.result(self.http, self.submit(self.http))["url"]
        query = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
        at = datetime.datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
        auth = S3SigV4QueryAuth(botocore.credentials.Credentials(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]), "s3", "us-east-1", int(query["X-Amz-Expires"]))
        request = AWSRequest("GET", link.split("?")[0])
        with mock.patch("botocore.auth.get_current_datetime", lambda *_, **__: at.replace(tzinfo=None)):
            auth.add_auth(request)
        self.assertEqual(parse_qs(urlsplit(request.url).query), parse_qs(urlsplit(link).query))

    def test_openai_answers_have_links_or_bytes(self):
        body = {"prompt": "a circle", "size": "32x32", "num_inference_steps": 1, "seed": 5}
        link = self.http.request("POST", "/v1/images/generations", {**body, "response_format": "url"}).json()["data"][0]["url"]
        inline = self.http.request("POST", "/v1/images/generations", {**body, "response_format": "b64_json"}).json()["data"][0]["b64_json"]
        self.assertTrue(link.startswith(self.store.gate.url), link)
        self.assertEqual(fetch(link)[2], base64.b64decode(inline))

    def test_a_vanished_object_is_gone(self):
        id = self.submit(self.http)
        self.result(self.http, id)
        key, = self.store.keys(f"ditfleet/results/default/{id}/")
        self.store.s3.delete_object(Bucket="results", Key=key)
        self.assertEqual(self.http.get(f"/v1/jobs/{id}/results/0").status, 410)

    def test_damage_is_found(self):
        id = self.submit(self.http)
        self.result(self.http, id)
        key, = self.store.keys(f"ditfleet/results/default/{id}/")
        for wrong in (self.store.read(key)[:-1], self.store.read(key)[:-1] + b"x"):
            self.store.s3.put_object(Bucket="results", Key=key, Body=wrong)
            answer = self.http.get(f"/v1/jobs/{id}/results/0")
            self.assertEqual(answer.status, 500, answer)

    def test_uploads_are_objects(self):
        photo = (PICTURES / "photo.png").read_bytes()
        id = self.http.request("POST", "/v1/uploads", photo, {"Content-Type": "image/png"}).json()["id"]
        key = "ditfleet/inputs/" + id
        self.assertEqual(self.store.read(key), photo)
        self.store.age(key, 1)
        self.result(self.http, self.submit(self.http, model="dev", image=id))
        self.assertGreater(self.store.s3.head_object(Bucket="results", Key=key)["LastModified"], datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(hours=1))
        self.assertEqual(self.http.request("DELETE", "/v1/uploads/" + id).status, 200)
        self.assertEqual(self.store.keys(key), [])

    def test_images_by_s3_url(self):
        sha256 = self.http.request("POST", "/v1/uploads", (PICTURES / "photo.png").read_bytes(), {"Content-Type": "image/png"}).json()["id"]
        made = self.http.job(self.submit(self.http, model="dev", image="s3://photos/2026/photo one.png"))
        self.assertEqual(made["spec"]["image"], sha256)
        self.result(self.http, made["id"])
        self.store.s3.put_object(Bucket="photos", Key="2026/text.png", Body=b"not a picture")
        self.store.s3.put_object(Bucket="photos", Key="2026/huge.png", Body=bytes((20 << 20) + 1))
        for url, status, right in (("s3://photos/2026-secret/photo.png", 400, "in no place that you may use; these are s3://photos/2026/"),
                                   ("s3://photos/2025/photo.png", 400, "in no place that you may use"),
                                   ("s3://photos/2026/../2025/photo.png", 400, "name the object itself"),
                                   ("s3://photos", 400, "is not an object's URL"), ("s3://photos/2026/none.png", 400, "does not exist"),
                                   ("s3://photos/2026/text.png", 400, "is not a PNG"), ("s3://photos/2026/huge.png", 413, "results.input_max_bytes"),
                                   ("https://photos.example/a.png", 400, "no URL is fetched")):
            with self.subTest(url):
                refused = self.http.request("POST", "/v1/jobs", {"prompt": "x", "model": "dev", **SMALL, "image": url})
                self.assertEqual((refused.status, refused.error["param"]), (status, "image"), refused)
                self.assertIn(right, refused.error["message"])

    def test_pages_may_show_the_store(self):
        policy = self.http.get("/").headers["Content-Security-Policy"]
        self.assertIn(f"img-src 'self' blob: data: {self.store.gate.url}; media-src 'self' {self.store.gate.url};", policy)

    def test_the_command_line_fetches_from_the_gateway(self):
        out = self.running.folder / "one.png"
        done = cli("generate", "a circle", "--url", self.running.url, "--size", "32x32", "--steps", "1", "--out", out)
        self.assertEqual((done.returncode, describe(out.read_bytes())), (0, ("png", 32, 32)), done)


class Expiry(Base):
    def test_old_objects_are_deleted(self):
        old, kept, foreign = "results/default/gone/0.a.png", "results/default/new/0.b.png", "theirs/old.png"
        unused = "inputs/" + "0" * 64
        for key in (old, kept, foreign, unused):
            self.store.s3.put_object(Bucket="results", Key=key, Body=b"x")
        for key in (old, foreign, unused):
            self.store.age(key, 30)
        self.fleet(workers=0, wait_for_workers=False)
        until(lambda: self.store.keys() == [kept, foreign], "old objects of this service are gone")

    def test_or_kept_for_the_buckets_rules(self):
        old, unused = "results/default/gone/0.a.png", "inputs/" + "0" * 64
        for key in (old, unused):
            self.store.s3.put_object(Bucket="results", Key=key, Body=b"x")
            self.store.age(key, 30)
        self.fleet("results.s3.delete_expired=false", workers=0, wait_for_workers=False)
        until(lambda: unused not in self.store.keys(), "the unused image is gone")
        self.assertIn(old, self.store.keys())

    def test_without_links_the_gateway_sends_results(self):
        fleet, http = self.fleet("results.s3.links=false")
        id = self.submit(http)
        url = self.result(http, id)["url"]
        self.assertTrue(url.startswith(fleet.url + f"/v1/jobs/{id}/results/0"), url)
        self.assertEqual(describe(fetch(url)[2]), ("png", 32, 32))


class Faults(Base):
    def test_no_job_is_lost_whatever_the_store_does(self):
        fleet, http = self.fleet("results.s3.prefix=all", workers=2)
        chance = random.Random(7)
        lock = threading.Lock()
        down = threading.Event()

        def fault(method, path):
            with lock:
                if down.is_set():
                    return "cut"
                return chance.choice(["", "", "", "500", "503", "full", "cut", "unanswered", "half", 0.3])
        self.store.gate.fault = fault
        ids = [self.submit(http, n=1, seed=i) for i in range(JOBS)]
        until(lambda: http.job(ids[JOBS // 4])["state"] == "succeeded", "a quarter has ended", 300)
        down.set()
        time.sleep(60 if JOBS >= 500 else 13)
        down.clear()
        jobs = [http.wait(id) for id in ids]
        self.assertEqual({job["state"] for job in jobs}, {"succeeded"}, [job for job in jobs if job["state"] != "succeeded"][:3])
        self.assertEqual({unit["attempt"] for job in jobs for unit in job["unit_records"]}, {1})
        self.store.gate.fault = lambda method, path: ""
        by_job = {}
        for key in self.store.keys("all/"):
            by_job.setdefault(key.split("/")[3], []).append(key)
        self.assertEqual(sorted(by_job), sorted(ids))
        for job in jobs:
            key, = by_job[job["id"]]
            self.assertEqual(hashlib.sha256(self.store.read(key)).hexdigest(), job["unit_records"][0]["result"]["sha256"])
        for id in ids:
            with http.events(id) as stream:
                self.assertEqual([event.type for event in stream if event.ends_job], ["succeeded"])

    def test_a_result_is_read_though_the_store_fails(self):
        _, http = self.fleet()
        id = self.submit(http)
        self.result(http, id)
        for fault in ("500", "cut", "half"):
            seen = []
            self.store.gate.fault = lambda method, path: fault if not seen and not seen.append(1) else ""
            self.assertEqual(describe(http.get(f"/v1/jobs/{id}/results/0").body), ("png", 32, 32))
        self.store.gate.fault = lambda method, path: "503"
        answer = http.get(f"/v1/jobs/{id}/results/0")
        self.assertEqual(answer.status, 503, answer)
        self.assertIn("answered 503 SlowDown", answer.error["message"])

    def test_a_job_says_what_is_wrong_with_the_store(self):
        self.store.s3.create_bucket(Bucket="vanishing")
        with Fleet(sets=sets(self.store, "queue.max_attempts=1", bucket="vanishing")) as fleet:
            http = Client(fleet.url)
            self.result(http, self.submit(http))
            for key in self.store.keys(bucket="vanishing"):
                self.store.s3.delete_object(Bucket="vanishing", Key=key)
            self.store.s3.delete_bucket(Bucket="vanishing")
            job = http.wait(self.submit(http))
            self.assertEqual(job["state"], "failed")
            self.assertIn("the bucket 'vanishing' does not exist", job["error"]["message"])
            self.assertIn("create it, or set results.s3.bucket", job["error"]["message"])

    def test_wrong_names_are_refused_at_the_start(self):
        for one, right in (("results.s3.bucket=", "needs results.s3.bucket"), ("results.s3.bucket=a/b", "a bucket's name has 3 to 63"),
                           ("results.s3.prefix=a b", "results.s3.prefix is 'a b'"), ("results.s3.endpoint=minio:9000", "http:// nor https://"),
                           ("results.s3.addressing=host", "auto, path, virtual")):
            words = [word for name in sets(self.store, one) for word in ("--set", name)]
            done = cli("coordinator", "--set", "redis.url=redis://127.0.0.1:1", "--set", f"models.tiny.path={tiny_model()}", *words)
            self.assertNotEqual(done.returncode, 0, one)
            self.assertIn(right, done.stderr + done.stdout)


class Metadata:
    """The service that gives a container, or an instance, the credentials of its role."""

    def __init__(self, life_s):
        self.asked, metadata = [], self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, text):
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_PUT(self):
                metadata.asked.append((self.path, None))
                self.answer("the token")

            def do_GET(self):
                metadata.asked.append((self.path, self.headers["X-aws-ec2-metadata-token"] or self.headers["Authorization"]))
                if self.path.endswith("/security-credentials/"):
                    return self.answer("worker-role")
                ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=life_s)
                self.answer(json.dumps({"Code": "Success", "AccessKeyId": "ASIAROLE%d" % len(metadata.asked), "SecretAccessKey": "secret", "Token": "session/token+", "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}))

            def log_message(self, *_):
                pass
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Credentials(Base):
    """Where they come from. moto checks the signatures of requests here."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        iam = boto3.client("iam", endpoint_url=cls.store.direct, region_name="us-east-1")
        iam.create_user(UserName="ditfleet")
        made = iam.create_access_key(UserName="ditfleet")["AccessKey"]
        cls.keys = {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"], "Resource": "*"}]}
        iam.put_user_policy(UserName="ditfleet", PolicyName="results", PolicyDocument=json.dumps(policy))

    def environment(self, **names):
        """Without credentials but these."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        self.enterContext(mock.patch.dict(os.environ, {**kept, **names}, clear=True))

    def serve(self, *more):
        self.store.check_signatures(True)
        self.addCleanup(self.store.check_signatures, False)
        return self.fleet("queue.max_attempts=1", *more)

    def test_signatures_are_those_of_the_keys(self):
        self.environment(**self.keys)
        _, http = self.serve("results.s3.prefix=a.b/c_d")
        id = self.submit(http)
        self.result(http, id)
        self.assertEqual(describe(http.get(f"/v1/jobs/{id}/results/0").body), ("png", 32, 32))

    def test_a_profile_of_the_file(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "credentials").write_text("[other]\naws_access_key_id = {AWS_ACCESS_KEY_ID}\naws_secret_access_key = {AWS_SECRET_ACCESS_KEY}\n".format(**self.keys))
        self.environment(AWS_SHARED_CREDENTIALS_FILE=str(folder / "credentials"), AWS_PROFILE="other")
        _, http = self.serve()
        self.result(http, self.submit(http))

    def test_wrong_keys_are_named(self):
        for keys, right in (({**self.keys, "AWS_SECRET_ACCESS_KEY": "anotherSecretKey"}, "SignatureDoesNotMatch"), ({**self.keys, "AWS_ACCESS_KEY_ID": "AKIANOBODY"}, "InvalidAccessKeyId")):
            with self.subTest(right):
                self.environment(**keys)
                fleet, http = self.serve()
                job = http.wait(self.submit(http))
                self.assertEqual(job["state"], "failed")
                self.assertIn(right, job["error"]["message"])
                self.assertIn("correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", job["error"]["message"])
                self.assertNotIn(keys["AWS_SECRET_ACCESS_KEY"], fleet.tail(10000))

    def test_none_says_where_they_may_be(self):
        self.environment(HOME="/nonexistent", AWS_EC2_METADATA_DISABLED="true")
        _, http = self.fleet("queue.max_attempts=1")
        job = http.wait(self.submit(http))
        self.assertIn("there are no credentials for S3; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", job["error"]["message"])

    def test_a_role_is_renewed(self):
        for kind in ("container", "instance"):
            with self.subTest(kind):
                metadata = Metadata(life_s=4)
                if kind == "container":
                    self.environment(HOME="/nonexistent", AWS_CONTAINER_CREDENTIALS_FULL_URI=metadata.url + "/role", AWS_CONTAINER_AUTHORIZATION_TOKEN="the token")
                else:
                    self.environment(HOME="/nonexistent", AWS_EC2_METADATA_SERVICE_ENDPOINT=metadata.url)
                _, http = self.fleet()
                until(lambda: len(metadata.asked) > 6, "it is renewed")
                self.assertEqual({token for path, token in metadata.asked if "token" not in path}, {"the token"})
                query = self.result(http, self.submit(http))["url"].split("?")[1]
                self.assertIn("X-Amz-Security-Token=session%2Ftoken%2B", query)
                self.assertRegex(query, "X-Amz-Credential=ASIAROLE[0-9]+%2F")

    def test_a_wrong_clock_is_corrected(self):
        refused = []
        real = self.store.gate.serve

        def serve(client):
            # The store names its own time.
            head = client.recv(65536, socket.MSG_PEEK)
            if b"x-amz-date: 2027" not in head:
                refused.append(client.recv(65536))
                text = "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message></Error>"
                client.sendall(f"HTTP/1.1 403 Forbidden\r\nDate: Mon, 29 Nov 2027 00:00:00 GMT\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode())
                client.close()
                return
            real(client)
        with mock.patch.object(self.store.gate, "serve", serve):
            _, http = self.fleet()
            link = self.result(http, self.submit(http))["url"]
        self.assertRegex(link, "X-Amz-Date=20271129T")
        self.assertEqual(len(refused), 2)  # the first of each process


if __name__ == "__main__":
    unittest.main()
