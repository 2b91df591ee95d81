"""Jobs whose worker is killed, stopped or drained, and jobs that are paused, go on where they were, and end as if nothing
had happened. DITFLEET_TEST_RESUMES=200: as often."""
import os
import random
import re
import signal
import unittest

from adapters import Redis
from api import Client
from fleet import ROOT, Fleet, cli, tiny_model, until

COUNT = int(os.environ.get("DITFLEET_TEST_RESUMES", 4))
SEED = int(os.environ.get("DITFLEET_TEST_SEED", 1))
INTERVAL_MS = 100
LONG = {"model": "tiny", "width": 384, "height": 384, "num_inference_steps": 150}
VIDEO = {"model": "video", "width": 192, "height": 192, "frames": 17, "num_inference_steps": 100, "negative_prompt": "b"}
MODELS = {"tiny": tiny_model("dev"), "video": ROOT / "tests/fixtures/wan/two/model"}


class Resumes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.fleet = cls.enterClassContext(Fleet(workers=2, models=MODELS, sets=[f"worker.checkpoint_ms={INTERVAL_MS}", "queue.lease_ms=1000", "queue.renew_ms=200", "worker.drain_ms=300",
                                                                                "queue.max_crashes=100", "queue.max_attempts=100", "queue.retry_backoff_ms=100"]))
        cls.http = Client(cls.fleet.url)
        cls.redis = Redis(cls.fleet.redis_socket)
        cls.random = random.Random(SEED)
        cls.alone = {}

    def reached(self, id, step):
        unit = self.http.job(id)["unit_records"][0]
        return unit["step"] >= step and unit

    def result(self, job):
        self.assertEqual(job["state"], "succeeded", job)
        unit, = job["unit_records"]
        return unit["result"]["sha256"], unit["result"]["receipt"]

    def undisturbed(self, fields):
        """The result of a job that nobody interrupts, and the time of a step."""
        if fields["model"] not in self.alone:
            job = self.http.wait(self.http.submit(seed=3, **fields))
            self.alone[fields["model"]] = self.result(job), job["unit_records"][0]["phases_us"]["denoise"] / fields["num_inference_steps"] / 1000
        return self.alone[fields["model"]]

    def pid_of(self, worker):
        return next(w["pid"] for w in self.http.get("/v1/workers").json()["workers"] if w["name"] == worker)

    def post(self, id, what, status=202):
        answer = self.http.request("POST", f"/v1/jobs/{id}/{what}")
        self.assertEqual(answer.status, status, answer)
        return answer.json()

    def paused(self, id):
        return until(lambda: (job := self.http.job(id))["state"] == "paused" and job, "it is paused", 60)

    def pause(self, id):
        """Pauses a job that runs, and returns its unit."""
        self.post(id, "pause")
        return self.paused(id)["unit_records"][0]

    def nothing_is_left(self, id, killed=False):
        """A worker that is killed between two commands leaves a state, which expires. The attempt that ended leaves none."""
        def gone():
            names = [key.decode().rsplit(":", 1)[1] for key in self.redis("KEYS", f"df:{{0}}:blob:{id}:0:*")]
            states = [name for name in names if "-" in name]
            own = [name for name in states if not killed or name.split("-")[0] in names]
            return not self.redis("KEYS", f"df:{{0}}:checkpoint:{id}:*") and not own and all(self.redis("PTTL", f"df:{{0}}:blob:{id}:0:{name}") > 0 for name in states)
        until(gone, "an ended job has no checkpoint")

    def interrupt(self, id, how, step):
        """Ends the attempt at the job, and returns the step that was reported before."""
        unit = until(lambda: self.reached(id, step), "it runs", 60)
        if how == "pause":
            unit = self.pause(id)
            self.assertEqual(self.redis("ZCARD", "df:{0}:lease"), 0, "no worker has it")
            self.post(id, "resume")
        else:
            os.kill(self.pid_of(unit["worker"]), how)
            if how == signal.SIGKILL:  # what it has reported last; its lease is still running
                unit = self.http.job(id)["unit_records"][0]
        return unit["step"]

    def restore(self):
        """Starts workers that were stopped."""
        if len(self.fleet.ready["pids"]["workers"]) < 2:
            cli("up", "--scale", "2", "--data", self.fleet.data)
        until(lambda: len([w for w in self.http.get("/v1/workers").json()["workers"] if w["state"] == "ready"]) == 2, "two workers are ready", 60)

    def test_interrupted_jobs_end_as_others_do(self):
        lost, resumed = [], 0
        for round in range(COUNT):
            fields = [LONG, VIDEO][round % 2]
            result, step_ms = self.undisturbed(fields)
            id = self.http.submit(seed=3, **fields)
            step, hows = 0, [["pause", signal.SIGKILL, "pause", signal.SIGTERM][(round + round // 4) % 4]] + ["pause"] * self.random.randint(0, 1)
            for nth, how in enumerate(hows):
                with self.subTest(round=round, how=how, model=fields["model"]):
                    step = self.interrupt(id, how, step + self.random.randint(15, 40))
                    found = until(lambda: re.findall(f"unit {id}/0: (goes on from the checkpoint after step (\\d+)|begins again)", self.fleet.log.read_text())[nth:], "it goes on", 60)
                    self.assertTrue(found[-1][1], f"after step {step}: it began again")
                    resumed += 1
                    if how == signal.SIGKILL:
                        lost.append(max(0, step - int(found[-1][1])) * step_ms)
                    else:
                        self.assertGreaterEqual(int(found[-1][1]), step, "a worker that leaves stores what it has done")
            self.assertEqual(self.result(self.http.wait(id)), result)
            self.nothing_is_left(id)
            self.restore()
        mean = sum(lost) / len(lost)
        print(f"{COUNT} jobs went on {resumed} times; a killed worker lost {mean:.0f} ms of work on average, with worker.checkpoint_ms {INTERVAL_MS}")
        self.assertLessEqual(mean, INTERVAL_MS * (1 if len(lost) >= 10 else 2))

    def test_a_checkpoint_that_is_gone_or_damaged_costs_only_progress(self):
        wanted, _ = self.undisturbed(LONG)
        for harm in ("gone", "damaged"):
            id = self.http.submit(seed=3, **LONG)
            until(lambda: self.redis("GET", f"df:{{0}}:checkpoint:{id}:0"), "a checkpoint is stored", 60)
            self.pause(id)
            for key in self.redis("KEYS", f"df:{{0}}:blob:{id}:0:*"):
                self.redis("DEL", key) if harm == "gone" else self.redis("SETRANGE", key, "5000", "damage")
            self.post(id, "resume")
            self.assertEqual(self.result(self.http.wait(id)), wanted)
            self.assertRegex(self.fleet.log.read_text(), f"unit {id}/0: begins again: the checkpoint of an earlier attempt cannot be read")

    def test_a_paused_job_survives_restarts_and_ends_when_it_is_resumed(self):
        wanted, _ = self.undisturbed(LONG)
        id = self.http.submit(seed=3, **LONG)
        until(lambda: self.reached(id, 20), "it runs", 60)
        step = self.pause(id)["step"]
        self.assertGreaterEqual(step, 20)
        self.assertEqual([j["id"] for j in self.http.get("/v1/jobs?state=paused").json()["jobs"]], [id])
        for pid in self.fleet.ready["pids"]["workers"] + [self.fleet.ready["pids"]["coordinator"]]:
            os.kill(pid, signal.SIGKILL)
        os.kill(self.fleet.ready["pids"]["redis"], signal.SIGTERM)  # killed, it may lose the last second
        other = until(lambda: self.submitted(**LONG | {"num_inference_steps": 2}), "the service is back", 60)
        self.assertEqual(self.http.wait(other)["state"], "succeeded", "the workers are free for others")
        type(self).redis = Redis(self.fleet.redis_socket)
        self.assertEqual(self.http.job(id)["state"], "paused")
        self.assertEqual(cli("jobs", "resume", id, "--url", self.fleet.url).stdout.split()[0], id)
        job = self.http.wait(id)
        self.assertEqual(self.result(job), wanted)
        with self.http.events(id) as stream:
            types = [e.type for e in stream if e.unit == 0 or e.ends_job]
        self.assertEqual([t for t in types if t != "step"][-7:], ["started", "paused", "resumed", "assigned", "started", "succeeded", "succeeded"])
        self.post(id, "pause", 409)
        self.post("nothing", "pause", 404)
        self.nothing_is_left(id)
        self.restore()

    def submitted(self, **fields):
        try:
            return self.http.submit(**fields)
        except (OSError, AssertionError):
            return None

    def test_a_paused_job_is_canceled_with_its_checkpoint(self):
        id = self.http.submit(seed=6, **LONG)
        until(lambda: self.reached(id, 5), "it runs", 60)
        self.assertEqual(cli("jobs", "pause", id, "--url", self.fleet.url).returncode, 0)
        self.paused(id)
        self.assertTrue(self.redis("KEYS", f"df:{{0}}:blob:{id}:0:*"))
        self.assertEqual(self.http.cancel(id).json()["state"], "canceled")
        self.nothing_is_left(id)
        self.assertEqual(self.redis("SMEMBERS", "df:{0}:paused"), [])

    def test_a_job_stops_at_a_step_to_be_looked_at(self):
        fields = {**LONG, "num_inference_steps": 40}
        wanted = self.result(self.http.wait(self.http.submit(seed=7, **fields)))
        id = self.http.submit(seed=7, n=2, pause_after_steps=11, **fields)
        units = self.paused(id)["unit_records"]
        self.assertEqual([u["step"] for u in units], [11, 11], "each image stops there")
        previews = []
        with self.http.events(id) as stream:
            for event in stream:
                if event.type == "preview":
                    previews.append(event.data)
                if len(previews) == 2:
                    break
        self.assertEqual([p["step"] for p in previews], [11, 11])
        self.assertEqual(self.http.get(previews[0]["url"]).status, 200)
        self.post(id, "resume")
        job = self.http.wait(id)
        self.assertEqual(job["state"], "succeeded", job)
        self.assertEqual(job["unit_records"][0]["result"]["sha256"], wanted[0])
        self.nothing_is_left(id)

    def test_branches_of_a_paused_job(self):
        fields = {**LONG, "num_inference_steps": 40}
        wanted = self.result(self.http.wait(self.http.submit(seed=8, **fields)))
        id = self.http.submit(seed=8, pause_after_steps=10, **fields)
        self.paused(id)
        same = self.http.wait(self.http.submit(resume_from=id))
        self.assertEqual(self.result(same)[0], wanted[0], "the same prompt draws the same")
        other = self.http.wait(self.http.submit(prompt="a green square", resume_from=id, guidance_scale=7))
        self.assertNotIn(self.result(other)[0], [wanted[0], self.result(self.http.wait(self.http.submit(prompt="a green square", seed=8, guidance_scale=7, **fields)))[0]])
        self.assertEqual(other["spec"]["seed"], 8)
        for wrong, status, text in [({"resume_from": "nothing"}, 404, "no job"), ({"resume_from": other["id"]}, 409, "has ended"), ({"resume_from": id + "/1"}, 400, "from 0 to 0"),
                                    ({"resume_from": id, "num_inference_steps": 41}, 400, "num_inference_steps differs"), ({"resume_from": id, "width": 256}, 400, "width differs"),
                                    ({"resume_from": id, "model": "video"}, 400, "cannot change the model"), ({"resume_from": id, "n": 2}, 400, "n is 2")]:
            answer = self.http.request("POST", "/v1/jobs", {"prompt": "x", **wrong})
            self.assertEqual(answer.status, status, (wrong, answer))
            self.assertIn(text, answer.error["message"])
        self.assertEqual(self.http.job(id)["state"], "paused", "it is unchanged")
        self.redis("XADD", "df:{0}:in", "*", "id", "raw", "spec", '{"model":"tiny","prompt":"x","resume_from":"%s"}' % id)
        raw = until(lambda: self.http.get("/v1/jobs/raw").status == 200 and self.http.wait("raw"), "it is read")
        self.assertIn("is not stored with this job", raw["error"]["message"])
        self.post(id, "resume")
        self.assertEqual(self.result(self.http.wait(id))[0], wanted[0])
        for job in (id, same["id"], other["id"]):
            self.nothing_is_left(job)
            self.assertEqual(len(self.redis("KEYS", f"df:{{0}}:blob:{job}:*")), 1, "the result")

    def test_short_jobs_store_none_and_paused_ones_keep_theirs_for_longer_than_results(self):
        with Fleet(workers=1, models=MODELS, sets=["queue.retention_ms=3000", "results.backend=file", f"results.dir={self.fleet.folder}/results"]) as fleet:
            http, redis = Client(fleet.url), Redis(fleet.redis_socket)
            short = http.submit(model="tiny", width=256, height=256, num_inference_steps=20)
            self.result(http.wait(short))
            self.assertEqual(redis("KEYS", "df:{0}:checkpoint:*"), [])
            id = http.submit(pause_after_steps=9, **LONG)
            until(lambda: http.job(id)["state"] == "paused", "it is paused", 60)
            self.assertTrue(redis("GET", f"df:{{0}}:checkpoint:{id}:0"))
            ended = http.submit(model="tiny", width=256, height=256, num_inference_steps=2)
            http.wait(ended)
            until(lambda: http.get("/v1/jobs/" + ended).status == 404, "the retention has passed")
            self.assertEqual(http.request("POST", f"/v1/jobs/{id}/resume").status, 202)
            until(lambda: http.job(id)["state"] == "succeeded", "it ends", 60)
            self.assertIn(f"unit {id}/0: goes on from the checkpoint after step 9", fleet.log.read_text())
            until(lambda: not redis("KEYS", "df:{0}:checkpoint:*"), "it has no checkpoint any more")

    def test_a_job_whose_checkpoint_is_too_large_does_not_stop(self):
        with Fleet(workers=1, models={"tiny": tiny_model()}, sets=["results.redis_max_bytes=66000"]) as fleet:
            http = Client(fleet.url)
            job = http.wait(http.submit(width=64, height=64, num_inference_steps=4, pause_after_steps=2))
            self.assertEqual((job["state"], job["warnings"]), ("succeeded", ["pause_after_steps has no effect: [state] the state of the run is too large to be kept"]), job)


if __name__ == "__main__":
    unittest.main()
