"""What an acknowledged job survives (deploy/RUNBOOK.md): a crash of Redis, a power failure, and a failover, with each setting. A power
failure is a SIGKILL after which the append-only file ends where Redis last synced it (synced_size.cpp)."""
import contextlib
import os
import signal
import time
import unittest

from api import Client
from fleet import Members, Redis, free_port, need, until

SHIM = os.environ.get("DITFLEET_SYNCED_SIZE")
need(SHIM, "DITFLEET_SYNCED_SIZE does not name the library that records what has reached the disk")
JOB = {"prompt": "a red circle", "width": 16, "height": 16, "num_inference_steps": 1}


class Acknowledged(unittest.TestCase):
    def redis(self, *options):
        redis = Redis("--save", "", *options, env={"LD_PRELOAD": SHIM})
        self.addCleanup(redis.stop)
        return redis

    @contextlib.contextmanager
    def coordinator(self, redis, *sets):
        port = free_port()
        with Members(f"redis.url={redis.url}", f"gateway.listen=127.0.0.1:{port}", "results.backend=redis", *sets) as members:
            self.http = Client(f"http://127.0.0.1:{port}")
            members.start("coordinator")
            self.until_ready()
            yield members

    def until_ready(self):
        def ready():
            with contextlib.suppress(OSError):
                return self.http.get("/readyz").status == 200
        until(ready, "the coordinator is ready", 30)

    def submit(self, seconds):
        """Submits jobs for so long. Returns (when it was acknowledged, its id) of each."""
        end, made = time.monotonic() + seconds, []
        while time.monotonic() < end:
            id = self.http.submit(**JOB)
            made.append((time.monotonic(), id))
            time.sleep(0.02)
        return made

    def lost(self, made):
        status = {id: self.http.get("/v1/jobs/" + id).status for _, id in made}
        self.assertLessEqual(set(status.values()), {200, 404})
        return [(at, id) for at, id in made if status[id] == 404]

    def lose_power(self, redis, half_written=False):
        """Returns how many bytes had not reached the disk."""
        redis.kill()
        file, = (redis.folder / "appendonlydir").glob("*.incr.aof")
        synced = file.with_name(file.name + ".synced")
        kept, whole = int(synced.read_text()) if synced.exists() else 0, file.stat().st_size
        os.truncate(file, (kept + whole) // 2 if half_written else kept)
        redis.start()
        return whole - kept

    def test_always(self):
        redis = self.redis("--appendonly", "yes", "--appendfsync", "always")
        with self.coordinator(redis):
            made = self.submit(1.5)
            self.lose_power(redis)
            self.until_ready()
            self.assertEqual(self.lost(made), [])
            print(f"always: {len(made)} jobs, none lost", end="; ")

    def test_everysec(self):
        redis = self.redis("--appendonly", "yes", "--appendfsync", "everysec")
        with self.coordinator(redis) as members:
            members.start("worker")
            made, failed = self.submit(4), time.monotonic()
            missing = self.lose_power(redis, half_written=True)
            self.until_ready()
            lost = self.lost(made)
            self.assertGreater(missing, 0)
            self.assertEqual([failed - at for at, _ in lost if failed - at > 2], [])
            for id in {id for _, id in made} - {id for _, id in lost}:
                self.assertEqual(self.http.wait(id)["state"], "succeeded")
                with self.http.events(id) as events:
                    self.assertEqual(sum(event.ends_job for event in events), 1)
                self.assertEqual(self.http.get(f"/v1/jobs/{id}/results/0").status, 200)
            print(f"everysec: {len(made)} jobs, {len(lost)} of the last {max([failed - at for at, _ in lost], default=0):.2f} s lost", end="; ")

    def test_no(self):
        redis = self.redis("--appendonly", "yes", "--appendfsync", "no")
        with self.coordinator(redis):
            made = self.submit(1)
            self.lose_power(redis)
            self.until_ready()
            self.assertEqual(self.lost(made), made)
            print(f"no: {len(made)} jobs, all lost", end="; ")

    def test_a_crash_alone_loses_nothing(self):
        for policy in ("everysec", "no"):
            with self.subTest(policy):
                redis = self.redis("--appendonly", "yes", "--appendfsync", policy)
                with self.coordinator(redis):
                    made = self.submit(0.5)
                    redis.kill()
                    redis.start()
                    self.until_ready()
                    self.assertEqual(self.lost(made), [])

    def test_without_a_file_a_restart_loses_everything(self):
        redis = self.redis("--appendonly", "no")
        with self.coordinator(redis):
            made = self.submit(0.5)
            self.assertIn("appendonly", str(self.http.get("/readyz").json()["warnings"]))
            redis.kill()
            redis.start()
            self.until_ready()
            self.assertEqual(self.lost(made), made)

    def test_a_failover_to_a_replica_that_is_behind(self):
        """wait_replicas 0 acknowledges a job that the replica does not have, 1 does not."""
        redis = self.redis("--appendonly", "yes")
        replica = self.redis("--appendonly", "yes", "--replicaof", f"127.0.0.1 {redis.port}")
        until(lambda: "state=online" in redis.cli("info", "replication"), "the replica is connected", 30)
        with self.coordinator(redis, "queue.wait_replicas=1"):
            confirmed = self.http.submit(**JOB)
            os.kill(replica.process.pid, signal.SIGSTOP)
            refused = self.http.request("POST", "/v1/jobs", JOB)
            self.assertEqual(refused.status, 503, refused)
        with self.coordinator(redis):
            alone = self.http.submit(**JOB)
        replica.kill()
        replica.argv = replica.argv[:replica.argv.index("--replicaof")]
        replica.start()
        with self.coordinator(replica):
            self.assertEqual(self.http.get("/v1/jobs/" + confirmed).status, 200)
            self.assertEqual(self.http.get("/v1/jobs/" + alone).status, 404)


if __name__ == "__main__":
    unittest.main(verbosity=2)
