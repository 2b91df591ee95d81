"""A Redis that is not fit for a queue, and a network that swallows bytes: what /readyz, submissions, metrics and the log of a
coordinator report. No worker runs."""
import contextlib
import re
import shutil
import socket
import tempfile
import threading
import unittest
from pathlib import Path

from api import Client
from fleet import DITFLEET, Listener, Redis, free_port, free_ports, start, tiny_model, until

JOB = {"prompt": "a red circle", "width": 16, "height": 16, "num_inference_steps": 1}


class Proxy(Listener):
    """Forwards to a port. deafen(): no byte passes any more on connections that have subscribed."""

    def __init__(self, port):
        self.port, self.deaf, self.subscribed = port, set(), set()
        super().__init__()
        self.url = "redis://" + self.address

    def serve(self, client):
        server = socket.create_connection(("127.0.0.1", self.port))
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self.forward, args=(client, source, sink), daemon=True).start()

    def forward(self, client, source, sink):
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                if b"SUBSCRIBE" in data:
                    self.subscribed.add(client)
                if client in self.deaf:
                    continue
                sink.sendall(data)
            if client not in self.deaf:
                sink.shutdown(socket.SHUT_WR)

    def deafen(self):
        self.deaf |= self.subscribed


class Unfit(unittest.TestCase):
    def serve(self, redis, *sets, url=None):
        """Starts a coordinator, and returns its client once it listens."""
        listen = f"127.0.0.1:{free_port()}"
        folder = tempfile.mkdtemp(prefix="ditfleet-")
        self.log = Path(folder) / "log"
        words = [DITFLEET, "coordinator"]
        for one in (f"redis.url={url or redis.url}", f"gateway.listen={listen}", f"models.tiny.path={tiny_model()}",
                    f"data.dir={folder}", *sets):
            words += ["--set", one]
        with open(self.log, "w") as log:
            process = start(words, stdout=log)
        self.addCleanup(shutil.rmtree, folder)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)
        http = Client("http://" + listen)

        def answers():
            self.assertIsNone(process.poll(), self.log.read_text())
            with contextlib.suppress(OSError):
                return http.get("/healthz").status == 200
        until(answers, "the coordinator answers", 60)
        return http

    def redis(self, *options):
        redis = Redis(*options)
        self.addCleanup(redis.stop)
        return redis

    def until_ready(self, http, status=200):
        until(lambda: http.get("/readyz").status == status, f"/readyz is {status}", 40)
        return http.get("/readyz").json()

    def accepted(self, http):
        response = http.request("POST", "/v1/jobs", JOB)
        self.assertEqual(response.status, 202, f"{response.body}\n{self.log.read_text()}")

    def metric(self, http, name):
        return float(re.search(f"^{name} (.*)$", http.get("/metrics").body.decode(), re.M)[1])

    def test_a_redis_that_deletes_jobs_is_refused(self):
        redis = self.redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "yes")
        http = self.serve(redis)
        until(lambda: "allkeys-lru" in str(http.get("/readyz").json()["reasons"]), "/readyz names the policy", 40)
        refused = http.request("POST", "/v1/jobs", JOB)
        self.assertEqual(refused.status, 503, refused)
        for text in (refused.error["message"], self.log.read_text()):
            self.assertIn("redis-cli CONFIG SET maxmemory-policy noeviction", text)
        self.assertEqual(redis.cli("exists", "df:{0}:leader", "df:{0}:in"), "0")
        self.assertEqual(self.metric(http, "ditfleet_redis_evicts"), 1)
        redis.cli("config", "set", "maxmemory-policy", "noeviction")
        self.assertEqual(self.until_ready(http)["warnings"], [])
        self.accepted(http)
        self.assertEqual(self.metric(http, "ditfleet_redis_max_memory_bytes"), 100 << 20)

    def test_what_may_lose_less_is_a_warning(self):
        redis = self.redis("--maxmemory-policy", "volatile-lru")
        http = self.serve(redis)
        warnings = self.until_ready(http)["warnings"]
        self.assertIn("volatile-lru", warnings[0])
        self.assertIn("redis-cli CONFIG SET appendonly yes", warnings[1])
        self.assertIn(warnings[1], self.log.read_text())
        self.assertEqual(self.metric(http, "ditfleet_redis_append_only"), 0)
        self.accepted(http)

    def test_eviction_may_be_accepted(self):
        redis = self.redis("--maxmemory-policy", "allkeys-random")
        http = self.serve(redis, "redis.allow_eviction=true")
        self.assertIn("allkeys-random", self.until_ready(http)["warnings"][0])
        self.accepted(http)

    def test_it_is_not_ready_before_it_knows_the_keys(self):
        redis = self.redis("--appendonly", "yes")
        redis.cli("acl", "setuser", "some", "on", ">secret", "&*", "+@all", "~df:{0}:*", "~df:{lora}:*")
        http = self.serve(redis, url=f"redis://some:secret@127.0.0.1:{redis.port}")
        until(lambda: "the API keys" in str(http.get("/readyz").json()["reasons"]), "/readyz names the keys", 40)
        self.assertIn("the keys were not read", http.request("POST", "/v1/jobs", JOB).error["message"])
        redis.cli("acl", "setuser", "some", "allkeys")
        self.until_ready(http)
        self.accepted(http)

    def test_a_deaf_feed_is_reported_and_replaced(self):
        redis = self.redis("--appendonly", "yes")
        proxy = Proxy(redis.port)
        self.addCleanup(proxy.listening.close)
        http = self.serve(redis, url=proxy.url)
        self.until_ready(http)
        proxy.deafen()
        until(lambda: "events" in str(http.get("/readyz").json()["reasons"]), "/readyz says that no events arrive", 12)
        self.until_ready(http)
        self.assertIn("do not come back", self.log.read_text())

    def test_a_cluster_must_have_all_keys_on_one_node(self):
        buses = [str(port) for port in free_ports(3)]  # by default in the range from which clients get ports
        nodes = [self.redis("--appendonly", "yes", "--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", bus)
                 for bus in buses]
        nodes[0].cli("cluster", "addslotsrange", "0", "16383")
        http = self.serve(nodes[0])
        self.until_ready(http)
        self.accepted(http)
        for node in nodes[1:]:
            node.cli("cluster", "meet", "127.0.0.1", str(nodes[0].port), buses[0])
        until(lambda: all(node.cli("cluster", "nodes").count(" connected") == 3 and "state:ok" in node.cli("cluster", "info") for node in nodes),
              "the nodes know each other", 30)
        # df:{lora}:version and the first slots move to another node while the coordinator is connected.
        names = [node.cli("cluster", "myid") for node in nodes]
        moved = nodes[0].cli("cluster", "keyslot", "df:{lora}:version")
        for slot, name in ((moved, names[1]), ("0", names[2])):
            for node in nodes:
                node.cli("cluster", "setslot", slot, "node", name)
        until(lambda: all("cluster_size:3" in node.cli("cluster", "info") for node in nodes), "three nodes have slots", 30)
        self.until_ready(http, 503)
        for node in nodes[:2]:
            self.serve(node)
            until(lambda: "is a node of a Redis Cluster with several shards" in self.log.read_text() and "redis+sentinel://" in self.log.read_text(),
                  "the log says what to do", 30)

    def test_a_job_is_acknowledged_once_replicas_have_it(self):
        redis, replica = self.redis("--appendonly", "yes"), self.redis()
        http = self.serve(redis, "queue.wait_replicas=1")
        self.until_ready(http)
        key = {"Idempotency-Key": "k"}
        refused = http.request("POST", "/v1/jobs", JOB, key)
        self.assertEqual(refused.status, 503, refused)
        self.assertIn("0 of 1 replicas", refused.error["message"])
        replica.cli("replicaof", "127.0.0.1", str(redis.port))
        until(lambda: "state=online" in redis.cli("info", "replication"), "the replica is connected", 30)
        accepted = http.request("POST", "/v1/jobs", JOB, key)
        self.assertIn(accepted.status, (200, 202), accepted)
        self.assertEqual(redis.cli("hlen", "df:{0}:open"), "1", "the repeated request made no other job")
        self.assertEqual(replica.cli("hexists", "df:{0}:open", accepted.json()["id"]), "1")


if __name__ == "__main__":
    unittest.main(verbosity=2)
