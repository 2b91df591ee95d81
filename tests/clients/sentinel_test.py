"""Redis with Sentinel: while jobs arrive, the master is killed, both coordinators and both workers are restarted one by one, and
the next master hangs. Every acknowledged job ends once."""
import contextlib
import itertools
import json
import os
import signal
import tempfile
import threading
import time
import unittest
from pathlib import Path

from api import Client
from fleet import Background, Members, Redis, cli, free_port, free_ports, run, until

JOB = {"prompt": "a red circle", "width": 16, "height": 16, "num_inference_steps": 1}
PASSWORD, WATCH = "queue-password", "watch-password"
LONGEST = 15.0  # seconds from the loss of a master to the end of a job that was submitted afterwards


class Load(Background):
    """Submits jobs until the block ends, each with a key of its own until it is acknowledged, at whichever coordinator replies."""

    def __init__(self, urls):
        super().__init__()
        self.clients = [Client(url, timeout=5) for url in urls]
        self.acknowledged = []  # (when the job was first submitted, its id)
        self.refused = 0
        self.name = f"{time.time():.3f}"

    def run(self):
        threads = [threading.Thread(target=self.submit, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def submit(self, thread):
        for number in itertools.count():
            if self.done.wait(0.15):
                return
            began, key = time.monotonic(), {"Idempotency-Key": f"{self.name}-{thread}-{number}"}
            for client in itertools.cycle(self.clients):
                with contextlib.suppress(OSError):
                    answer = client.request("POST", "/v1/jobs", JOB, key)
                    if answer.status in (200, 202):
                        self.acknowledged.append((began, answer.json()["id"]))
                        break
                    assert answer.status == 503, answer
                self.refused += 1
                if self.done.wait(0.05):
                    return


class Sentinels(unittest.TestCase):
    def test_a_server_that_is_no_longer_the_master_is_left(self):
        """Sentinels that cannot reach it cannot demote it: it still replies."""
        before, after = self.redis(), self.redis()
        sentinel = self.sentinel(before)
        url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{sentinel.port}/queue"
        ports = free_ports(2)
        with Members(f"redis.sentinel_password={WATCH}") as members:
            for name, where, port in (("coordinator0", url, ports[0]), ("coordinator1", url.replace("queue", "other"), ports[1])):
                members.start(name, f"redis.url={where}", f"gateway.listen=127.0.0.1:{port}")
            until(lambda: before.cli("exists", "df:{0}:leader") == "1", "a coordinator leads", 30)
            until(lambda: f"127.0.0.1:{sentinel.port}: it monitors no service 'other'" in members.log("coordinator1"), "the log names the sentinel", 30)
            sentinel.cli("sentinel", "remove", "queue")
            sentinel.cli("sentinel", "monitor", "queue", "127.0.0.1", str(after.port), "1")
            until(lambda: after.cli("exists", "df:{0}:leader") == "1", "it leads at the new master", 10)
            self.assertIn(f"name redis://127.0.0.1:{after.port} as the new master", members.log("coordinator0"))

    def redis(self, *options, **more):
        redis = Redis("--save", "", "--appendonly", "yes", "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0", *options, password=PASSWORD, **more)
        self.addCleanup(redis.stop)
        return redis

    def sentinel(self, master):
        port = free_port()
        conf = master.folder / f"sentinel-{port}.conf"
        conf.write_text(f"sentinel monitor queue 127.0.0.1 {master.port} 2\nsentinel auth-pass queue {PASSWORD}\n"
                        "sentinel down-after-milliseconds queue 1000\nsentinel failover-timeout queue 5000\n"
                        f"sentinel sentinel-pass {WATCH}\n")
        sentinel = Redis("--sentinel", conf=conf, port=port, password=WATCH)
        self.addCleanup(sentinel.stop)
        return sentinel

    def test_tls_with_client_certificates(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="ditfleet-")))
        cert, key, ports = folder / "cert.pem", folder / "key.pem", free_ports(2)
        made = run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                   "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", cert)
        self.assertEqual(made.returncode, 0, made.stderr)
        (folder / "sentinel.conf").write_text("sentinel resolve-hostnames yes\nsentinel announce-hostnames yes\n"
                                              f"sentinel monitor queue localhost {ports[0]} 1\n")
        options = ["--port", "0", "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "yes",
                   "--tls-replication", "yes"]
        servers = [Redis(*more, *options, "--tls-port", port, port=port, conf=conf, cli=("--tls", "--cacert", cert, "--cert", cert, "--key", key))
                   for port, conf, more in ((ports[0], None, ["--save", "", "--appendonly", "yes"]), (ports[1], folder / "sentinel.conf", ["--sentinel"]))]
        for server in servers:
            self.addCleanup(server.stop)
        with Members(f"redis.url=rediss+sentinel://localhost:{ports[1]}/queue", f"redis.tls_ca_file={cert}", f"redis.tls_cert_file={cert}",
                     f"redis.tls_key_file={key}") as members:
            members.start("coordinator", f"gateway.listen=127.0.0.1:{free_port()}")
            until(lambda: servers[0].cli("exists", "df:{0}:leader") == "1", "a coordinator leads", 30)

    def master(self):
        """The port that a majority of the sentinels names."""
        named = sorted(one.cli("sentinel", "get-master-addr-by-name", "queue").split()[-1] for one in self.sentinels)
        return int(named[1])

    def until_job_ends(self, members, urls, since):
        """Returns how long after `since` a job had ended that was submitted afterwards."""
        def ended():
            for _, job in [one for one in self.load.acknowledged if one[0] > since]:
                for url in urls:
                    with contextlib.suppress(OSError, AssertionError):
                        if Client(url, timeout=2).job(job)["state"] == "succeeded":
                            return True
        until(ended, "a job that was submitted after the failure ends", LONGEST)
        return time.monotonic() - since

    def test_jobs_survive_two_failovers_and_a_rolling_restart(self):
        first = self.redis()
        servers = [first, *(self.redis("--replicaof", f"127.0.0.1 {first.port}") for _ in range(2))]
        self.sentinels = [self.sentinel(first) for _ in range(3)]
        until(lambda: all("num-other-sentinels\n2\n" in one.cli("sentinel", "master", "queue") and
                          "num-slaves\n2\n" in one.cli("sentinel", "master", "queue") for one in self.sentinels), "the sentinels know each other", 30)
        nodes = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        ports = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with Members(f"redis.url=redis+sentinel://:{PASSWORD}@{nodes}/queue", f"redis.sentinel_password={WATCH}", "queue.wait_replicas=1",
                     "results.backend=redis", "cache.secret=0123456789abcdef") as members:
            def start(name):
                members.start(name, *([f"gateway.listen=127.0.0.1:{ports[int(name[-1])]}"] if name.startswith("c") else []))

            def ready(url):
                with contextlib.suppress(OSError):
                    return Client(url).get("/readyz").status == 200
            for name in ("coordinator0", "coordinator1", "worker0", "worker1"):
                start(name)
            for url in urls:
                until(lambda url=url: ready(url), "the coordinator is ready", 30)
            until(lambda: len(Client(urls[0]).get("/v1/workers").json()["workers"]) == 2, "the workers are registered", 30)
            self.load = Load(urls)
            with self.load:
                until(lambda: len(self.load.acknowledged) > 10, "jobs are acknowledged")
                old, since = self.master(), time.monotonic()
                [first] = [one for one in servers if one.port == old]
                first.kill()
                killed = self.until_job_ends(members, urls, since)
                new = until(lambda: self.master() != old and self.master(), "the sentinels name another master")

                first.argv += ["--replicaof", f"127.0.0.1 {new}"]
                first.start()
                for name in ("coordinator0", "worker0", "coordinator1", "worker1"):
                    members.stop(name)
                    start(name)
                    if name.startswith("c"):
                        until(lambda name=name: ready(urls[int(name[-1])]), f"{name} is ready again", 30)
                    else:
                        until(lambda name=name: "ready" in [one["state"] for one in Client(urls[0]).get("/v1/workers").json()["workers"]
                                                            if one["name"] == name], f"{name} is ready again", 30)

                def whole():  # on a slow host the sentinels may have chosen another one meanwhile
                    return [one for one in servers if one.port == self.master() and one.cli("info", "replication").count("state=online") == 2]
                [second] = until(whole, "both replicas are connected to the master", 30)
                until(lambda: all("num-slaves\n2\n" in one.cli("sentinel", "master", "queue") for one in self.sentinels), "the sentinels know both", 30)
                since = time.monotonic()
                os.kill(second.process.pid, signal.SIGSTOP)
                hung = self.until_job_ends(members, urls, since)
            jobs = [job for _, job in self.load.acknowledged]
            http = Client(urls[0])
            for job in jobs:
                record = http.wait(job)
                self.assertEqual(record["state"], "succeeded", record)
                with http.events(job) as events:
                    self.assertEqual(sum(one.ends_job for one in events), 1, job)
                self.assertEqual(http.get(f"/v1/jobs/{job}/results/0").status, 200)
            self.assertEqual(len(set(jobs)), len(jobs))
            cache = cli("cache", "stats", "--json", *members.flags())
            self.assertEqual(cache.returncode, 0, cache.stderr)
            self.assertEqual(json.loads(cache.stdout)["redis"]["endpoint"], f"redis+sentinel://{nodes}/queue")
            print(f"jobs went on {killed:.1f} s after SIGKILL and {hung:.1f} s after SIGSTOP of the master; "
                  f"{len(jobs)} jobs acknowledged, {self.load.refused} requests refused")


if __name__ == "__main__":
    unittest.main(verbosity=2)
