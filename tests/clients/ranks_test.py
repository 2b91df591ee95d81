"""A worker whose ranks share each unit: it draws what one process draws, shows its ranks, and a rank that dies or hangs
costs an attempt at most. DITFLEET_RANK_FAULTS: how many faults (6, of as many kinds); DITFLEET_RANK_SEED: their order.
DITFLEET_RANK_EVERY=1: faults of each rank of four too."""
import json
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import unittest
import zlib
from pathlib import Path

from adapters import BYTES
from api import Client, ENDED
from fleet import alive, BIN, cli, Fleet, MODELS, ROOT, run, start, until
from hang_test import at, Hang

WORKER = BIN / "ditfleet-worker"
WAN = ROOT / "tests/fixtures/wan"
NAMES = ["a", "b"]
# What happens to which ranks of a worker, or to one rank of each worker.
KINDS = [(signal.SIGKILL, [0]), (signal.SIGKILL, [1]), (signal.SIGKILL, [0, 1]), (signal.SIGKILL, "one of each"),
         (signal.SIGSTOP, [0]), (signal.SIGSTOP, [1])]
FAULTS = int(os.environ.get("DITFLEET_RANK_FAULTS", "6"))
SEED = int(os.environ.get("DITFLEET_RANK_SEED", "1"))

EVERY = os.environ.get("DITFLEET_RANK_EVERY") == "1"
HANG = "hang"  # of the thread "device"
# Seconds, besides two steps, until a rank that is stopped or hangs is noticed; and one that is killed.
NOTICED = {signal.SIGSTOP: 3, HANG: 3, signal.SIGKILL: 1}

SMALL = {"model": "flux", "width": 64, "height": 48, "num_inference_steps": 4, "max_sequence_length": 16, "seed": 5}

folder = tempfile.TemporaryDirectory(prefix="ditfleet-ranks-")
FOLDER = Path(folder.name)


def setUpModule():
    four_heads(MODELS / "dev/model", FOLDER / "flux")
    four_heads(WAN / "one/model", FOLDER / "wan")


def tearDownModule():
    folder.cleanup()


def four_heads(model, copy):
    """Copies a folder of a transformer with two heads and splits each of them."""
    shutil.copytree(model, copy)
    path = copy / "transformer/config.json"
    config = json.loads(path.read_text())
    assert config["num_attention_heads"] == 2
    half = config["attention_head_dim"] // 2
    config.update(num_attention_heads=4, attention_head_dim=half)
    if "axes_dims_rope" in config:
        config["axes_dims_rope"] = [2, 2, half - 4]
    path.write_text(json.dumps(config))
    weights = copy / "transformer/diffusion_pytorch_model.safetensors"
    data = weights.read_bytes()
    size, = struct.unpack("<Q", data[:8])
    head, body = json.loads(data[8:8 + size]), data[8 + size:]
    kept, made = {}, b""
    for name, tensor in sorted(head.items()):
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        if tensor["shape"] == [2 * half]:  # a norm over one head
            tensor["shape"], end = [half], (begin + end) // 2
        kept[name] = {**tensor, "data_offsets": [len(made), len(made) + end - begin]}
        made += body[begin:end]
    text = json.dumps(kept).encode()
    text += b" " * (-len(text) % 8)
    weights.write_bytes(struct.pack("<Q", len(text)) + text + made)


def pixels(png):
    """The samples of a PNG of 8-bit RGB."""
    at, packed = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at:at + 8])
        if kind == b"IHDR":
            width, height = struct.unpack(">II", png[at + 8:at + 16])
        if kind == b"IDAT":
            packed += png[at + 8:at + 8 + length]
        at += 12 + length
    data, rows, last, stride = zlib.decompress(packed), bytearray(), bytes(3 * width), 3 * width
    for y in range(height):
        kind, row = data[y * (stride + 1)], bytearray(data[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for x in range(stride):
            a, b, c = row[x - 3] if x >= 3 else 0, last[x], last[x - 3] if x >= 3 else 0
            pa, pb, pc = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            paeth = a if pa <= pb and pa <= pc else b if pb <= pc else c
            row[x] = (row[x] + [0, a, b, (a + b) // 2, paeth][kind]) & 255
        rows += row
        last = bytes(row)
    return bytes(rows)


def apart(one, other):
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other))


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TestGenerate(unittest.TestCase):
    def draw(self, model, gpus, *flags, video=False, fails=False):
        out = FOLDER / ("out.mp4" if video else "out.png")
        frames = FOLDER / "frames"
        shutil.rmtree(frames, ignore_errors=True)
        done = run(WORKER, "generate", "--model", model, "--prompt", "a red bicycle", "--seed", "3", "--steps", "3",
                   "--out", out, "--device", "cpu", "--set", f"worker.gpus={gpus}", "--set", "worker.threads=1",
                   *(["--frames-dir", frames] if video else []), *flags, seconds=120)
        if fails:
            self.assertNotEqual(done.returncode, 0)
            return done.stderr
        self.assertEqual(done.returncode, 0, done.stderr)
        return [pixels(f.read_bytes()) for f in sorted(frames.iterdir())] if video else [pixels(out.read_bytes())]

    def same(self, model, flags=(), gpus=(2, 4), video=False, limit=1):
        alone = self.draw(model, 1, *flags, video=video)
        for count in gpus:
            with self.subTest(gpus=count, flags=flags):
                shared = self.draw(model, count, *flags, video=video)
                self.assertEqual(len(shared), len(alone))
                for one, other in zip(shared, alone):
                    self.assertLessEqual(apart(one, other), limit)

    def test_ranks_draw_what_one_process_draws(self):
        self.same(FOLDER / "flux", ["--size", "48x80"])
        self.same(FOLDER / "wan", ["--size", "48x32", "--frames", "9", "--guidance", "1"], video=True)

    def test_two_ranks_share_the_forwards_of_guidance_without_a_difference(self):
        guided = ["--size", "80x48", "--true-cfg", "3", "--negative", "rain"]
        self.same(FOLDER / "flux", guided, gpus=(2,), limit=0)
        video = ["--size", "32x48", "--frames", "5", "--guidance", "4"]
        self.same(FOLDER / "wan", video, gpus=(2,), video=True, limit=0)
        self.same(FOLDER / "flux", guided, gpus=(4,))

    def test_adapters_and_formats(self):
        adapters = ROOT / "tests/fixtures/lora/adapters"
        self.same(FOLDER / "flux", ["--size", "64x48", "--lora", f"{adapters / 'attention.safetensors'}:0.8"])
        self.same(FOLDER / "flux", ["--size", "64x48", "--quantize", "transformer=nf4"])
        # fp8 rounds activations: a difference in the last bit becomes one of 6 %.
        self.same(FOLDER / "flux", ["--size", "64x48", "--quantize", "transformer=fp8"], gpus=(2,), limit=4)

    def test_four_ranks_need_no_other_cache_entries(self):
        cache = FOLDER / "cache"
        flags = ["--size", "48x80", "--set", f"cache.dir={cache}"]
        self.draw(FOLDER / "flux", 1, *flags)
        entries = {f.relative_to(cache) for f in cache.rglob("*") if f.is_file()}
        self.assertTrue(entries)
        self.draw(FOLDER / "flux", 4, *flags)
        self.assertEqual({f.relative_to(cache) for f in cache.rglob("*") if f.is_file()}, entries)

    def test_heads_that_cannot_be_shared_are_refused(self):
        message = self.draw(FOLDER / "flux", 3, "--size", "64x48", fails=True)
        self.assertIn("3 GPUs cannot share the model's 4 attention heads; their number must be one of 1, 2, 4", message)

    def test_an_error_of_the_request_is_told_once(self):
        message = self.draw(FOLDER / "flux", 2, "--size", "65x48", fails=True)
        self.assertIn("size", message)
        self.assertNotIn("rank 1", message)


class TestVictims(unittest.TestCase):
    """A rank fails in the middle of a job: the worker stops taking work, ends with all its ranks and is started again, and
    the job goes on where it was and ends as if nothing had happened."""

    def start(self, gpus, workers, fields):
        self.gpus, self.fields = gpus, fields
        self.fleet = self.enterContext(Fleet(
            workers=workers, models={"flux": FOLDER / "flux", "wan": FOLDER / "wan"},
            sets=[f"worker.gpus={gpus}", "worker.threads=1", "worker.checkpoint_ms=100", "queue.lease_ms=1500",
                  "queue.renew_ms=300", "queue.max_crashes=100", "queue.max_attempts=100", "queue.retry_backoff_ms=100"]))
        self.client = Client(self.fleet.url, timeout=120)
        job = self.client.submit(**fields)
        self.slowest = self.longest_wait(job)
        self.wanted = self.result(self.client.job(job))

    def longest_wait(self, job):
        """The longest time between two reports of steps, in seconds: at least that of the slowest step."""
        with self.client.events(job) as stream:
            times = []
            for event in stream:
                if event.type == "step":
                    times.append(at(event))
                if event.ends_job:
                    return max(b - a for a, b in zip(times, times[1:]))

    def result(self, job):
        self.assertEqual(job["state"], "succeeded", job)
        return job["unit_records"][0]["result"]["sha256"]

    def record(self, name):
        return next((w for w in self.client.get("/v1/workers").json()["workers"] if w["name"] == name), {})

    def settled(self):
        """Whether a worker is ready, and none that is gone seems to be."""
        ready = [w for w in self.client.get("/v1/workers").json()["workers"] if w["state"] == "ready"]
        return ready and all(alive(w["pid"]) for w in ready)

    def run_job(self):
        """Submits a job. When its progress is stored and goes on, returns it, its worker, its ranks and the slowest step."""
        until(self.settled, "a worker is ready", 60)
        job, seen = self.client.submit(**self.fields), []
        with self.client.events(job) as stream:
            for event in stream:
                if event.type == "started":
                    name = event.data["worker"]
                if event.type == "step":
                    seen.append((at(event), int(event.data["step"])))
                if len(seen) == 5:
                    break
        steps = [(then - before) / max(1, step - last) for (before, last), (then, step) in zip(seen, seen[1:])]
        pid = self.record(name)["pid"]
        ranks = [pid, *children(pid)]
        self.assertEqual(len(ranks), self.gpus)
        return job, name, ranks, max(steps)

    def strike(self, how, victim):
        with self.subTest(how=how, victim=victim, gpus=self.gpus):
            job, name, ranks, step = self.run_job()
            if how == HANG:
                hang = Hang(ranks[victim], "device")
                self.addCleanup(hang.end)
                if not hang.stopped:
                    self.skipTest("ptrace is not permitted")
            else:
                os.kill(ranks[victim], how)
            # The worker knows the slowest step of the class.
            began, limit = time.time(), NOTICED[how] + 2 * (self.slowest if how == HANG else step)
            if victim > 0:  # else only its lease tells the others
                until(lambda: self.record(name).get("state") != "ready", f"{name} takes no work", 60)
            noticed = time.time() - began
            until(lambda: not any(alive(p) for p in ranks), "no rank is left", 60)
            ended = time.time() - began
            noticed = noticed if victim else ended
            self.assertEqual(self.result(self.client.wait(job)), self.wanted)
            with self.client.events(job) as stream:
                events = []
                for event in stream:
                    events.append(event)
                    if event.ends_job:
                        break
            # A unit may be assigned to a dead rank 0, before and afterwards, until that one's heartbeat is old.
            events = events[next(i for i, e in enumerate(events) if e.type == "started") + 1:]
            back = next(e for e in events if e.data.get("reason") in ("retry", "lease lapsed"))
            again = next(e for e in events if e.type == "started")
            print(f"{getattr(how, 'name', how)} to rank {victim} of {self.gpus}, steps of {step * 1000:.0f} ms: noticed after "
                  f"{noticed:.2f} s (limit {limit:.2f} s), all ended after {ended:.2f} s, the job returned after "
                  f"{at(back) - began:.2f} s and started again after {at(again) - began:.2f} s on "
                  f"{'the same' if again.data['worker'] == name else 'another'} worker", flush=True)
            self.assertLessEqual(noticed, limit)
            self.assertLessEqual(ended, limit + 5)
            self.assertEqual(back.data["crashes"], "1", back)
            self.assertRegex(self.fleet.log.read_text(), f"unit {job}/0: goes on from the checkpoint after step [1-9]")

    def test_two_ranks_of_two_workers(self):
        self.start(2, 2, {**SMALL, "width": 320, "height": 320, "num_inference_steps": 200})
        for how, victim in [(signal.SIGSTOP, 1), (signal.SIGSTOP, 0), (signal.SIGKILL, 1), (signal.SIGKILL, 0)]:
            self.strike(how, victim)
        self.stop_all()

    def stop_all(self):
        """All ranks are stopped for a while, as by a freezer: none is blamed."""
        job, name, ranks, _ = self.run_job()
        for signal_ in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, signal_)
            if signal_ == signal.SIGSTOP:
                time.sleep(4)
        self.assertEqual(self.result(self.client.wait(job)), self.wanted)
        until(lambda: self.record(name).get("state") == "ready", f"{name} is ready")
        self.assertEqual(self.record(name)["pid"], ranks[0])
        self.assertTrue(all(alive(p) for p in ranks))

    def test_four_ranks_of_a_video(self):
        self.start(4, 1, {"model": "wan", "width": 256, "height": 256, "frames": 9, "num_inference_steps": 100,
                          "negative_prompt": "b", "seed": 3})
        faults = [(HANG, 2)]
        if EVERY:  # `ditfleet up` gives up after three quick ends in succession that are not signals to rank 0
            stop, kill = signal.SIGSTOP, signal.SIGKILL
            faults += [(stop, 0), (stop, 1), (stop, 2), (kill, 0), (stop, 3), (kill, 1), (stop, 0), (kill, 2), (kill, 3)]
        for how, victim in faults:
            self.strike(how, victim)


class Service(unittest.TestCase):
    def setUp(self):
        self.fleet = self.enterContext(Fleet(workers=0, models={"flux": FOLDER / "flux", "wan": FOLDER / "wan"},
                                             sets=["queue.lease_ms=1500", "queue.renew_ms=300"]))
        self.client = Client(self.fleet.url, timeout=120)
        self.workers = {}
        self.addCleanup(self.end)

    def end(self):
        for worker in self.workers.values():
            worker.kill()
            worker.wait()

    def launch(self, name, gpus=2, *sets):
        with open(self.fleet.folder / f"{name}.log", "a") as log:
            sets = ["worker.threads=1", f"worker.gpus={gpus}", "worker.stuck_ms=5000", *sets]
            self.workers[name] = start([WORKER, "run", "--config", self.fleet.data / "effective.yaml", "--name", name,
                                        *sum((["--set", one] for one in sets), [])], stdout=log)

    def record(self, name):
        return next((w for w in self.client.get("/v1/workers").json()["workers"] if w["name"] == name), {})

    def wait_ready(self, name):
        # The record may be that of a worker of this name that is dead.
        pid = self.workers[name].pid
        until(lambda: self.record(name).items() >= {"state": "ready", "pid": pid}.items() or
              self.workers[name].poll() is not None, f"{name} is ready", 60)
        self.assertIsNone(self.workers[name].poll(), (self.fleet.folder / f"{name}.log").read_text()[-3000:])

    def image(self, job):
        record = self.client.wait(job)
        self.assertEqual(record["state"], "succeeded", record)
        return pixels(self.client.get(f"/v1/jobs/{job}/results/0").body)


class TestService(Service):
    def test_a_group_is_one_worker(self):
        self.launch("group")
        self.wait_ready("group")
        worker = self.record("group")
        self.assertEqual(worker["gpus"], 2)
        self.assertEqual(len([w for w in self.client.get("/v1/workers").json()["workers"]]), 1)
        self.assertIn("2 × cpu", cli("workers", "--url", self.fleet.url).stdout)
        ranks = children(worker["pid"])
        self.assertEqual(len(ranks), 1)

        job = self.client.submit(**SMALL)
        plain = self.image(job)
        self.assertIn("; 2 GPUs", cli("explain", job, "--url", self.fleet.url).stdout)
        # Adapters reach all ranks; mixed with requests without.
        data = (ROOT / "tests/fixtures/lora/adapters/attention.safetensors").read_bytes()
        self.assertEqual(self.client.request("PUT", "/v1/loras/style", data, BYTES).status, 201)
        styled = {"loras": [{"name": "style", "scale": 3}]}
        jobs = [self.client.submit(**SMALL, **(styled if i % 2 else {})) for i in range(6)]
        drawn = [self.image(job) for job in jobs]
        self.assertTrue(all(one == plain for one in drawn[::2]))
        self.assertTrue(all(one == drawn[1] for one in drawn[1::2]))
        self.assertGreater(apart(plain, drawn[1]), 2)

        job = self.client.submit(**{**SMALL, "partial_images": 2})
        self.assertTrue(self.client.wait_event(job, "preview"))
        self.image(job)

        long = self.client.submit(**{**SMALL, "width": 256, "height": 256, "num_inference_steps": 200})
        self.client.wait_event(long, "started")
        self.client.cancel(long)
        self.assertEqual(self.client.wait(long)["state"], "canceled")
        self.assertEqual(self.image(self.client.submit(**SMALL)), plain)

        # A drain stops the group as a whole, although a terminal signals all its processes.
        for process in [worker["pid"], *ranks]:
            os.kill(process, signal.SIGINT)
        self.assertEqual(self.workers["group"].wait(30), 0)
        until(lambda: not any(alive(p) for p in ranks), "the ranks have ended")

        # One process draws the same.
        self.launch("alone", 1)
        self.assertLessEqual(apart(self.image(self.client.submit(**SMALL)), plain), 1)

    def test_a_class_uses_one_rank_where_that_is_faster_or_wanted(self):
        classes = [{"model": "flux", "width": 64, "height": 48, "max_sequence_length": 16, "gpus": 1},
                   {"model": "wan", "width": 64, "height": 64, "frames": 5}]
        self.launch("group", 2, "worker.warmup_classes=" + json.dumps(classes))
        self.wait_ready("group")
        log = (self.fleet.folder / "group.log").read_text()
        self.assertIn("warmed up 64x48 on one GPU", log)
        self.assertNotIn("warmed up 64x48 on 2 GPUs", log)
        self.assertIn("warmed up 64x64x5 on one GPU", log)
        self.assertIn("warmed up 64x64x5 on 2 GPUs", log)
        other = children(self.workers["group"].pid)[0]
        debugger = Hang(other, "ditfleet-rank1")
        self.addCleanup(debugger.end)
        os.kill(other, signal.SIGSTOP)
        self.image(self.client.submit(**SMALL))  # without the other rank
        self.image(self.client.submit(**{**SMALL, "width": 48}))  # so does a smaller class
        if debugger.stopped:
            time.sleep(3)
            self.assertIsNone(self.workers["group"].poll(), "a rank under a debugger is not silent")
        # An idle group ends with a rank that is stopped.
        debugger.end()
        self.assertEqual(self.workers["group"].wait(10), 1)
        self.assertIn(f"rank 1 (process {other}) has not run for 2000 ms", (self.fleet.folder / "group.log").read_text())
        self.assertFalse(alive(other))

    def test_a_wrong_number_of_gpus_for_a_class(self):
        self.launch("group", 2, 'worker.warmup_classes=[{"width": 64, "height": 48, "gpus": 3}]')
        self.assertEqual(self.workers["group"].wait(30), 2)
        self.assertIn("gpus is 3; it must be 1 or worker.gpus, which is 2",
                      (self.fleet.folder / "group.log").read_text())

    def test_an_idle_group_ends_with_a_rank(self):
        self.launch("group")
        self.wait_ready("group")
        os.kill(children(self.workers["group"].pid)[0], signal.SIGKILL)
        self.assertEqual(self.workers["group"].wait(10), 1)
        self.assertIn("rank 1", (self.fleet.folder / "group.log").read_text())
        self.assertIn("was ended by SIGKILL", (self.fleet.folder / "group.log").read_text())

    def test_a_fault_of_a_rank_costs_a_job_at_most_an_attempt(self):
        chance = random.Random(SEED)
        for name in NAMES:
            self.launch(name)
        seen, kinds = set(), []
        for fault in range(FAULTS):
            for name in NAMES:
                self.wait_ready(name)
            kinds = kinds or chance.sample(KINDS, len(KINDS))
            seen |= self.strike(fault, *kinds.pop(), chance)
        for name in NAMES:
            if self.workers[name].poll() is None:
                seen |= {self.workers[name].pid, *children(self.workers[name].pid)}
                self.workers[name].terminate()
        for name in NAMES:
            self.workers[name].wait(60)
        until(lambda: not any(alive(p) for p in seen), "no process is left")

    def strike(self, fault, kind, victims, chance):
        """One fault while five jobs are under way. Returns the processes of the workers that it ends."""
        others = []
        for i in range(4):
            model = chance.choice([{"model": "flux"}, {"model": "wan", "frames": 5}])
            others.append(self.client.submit(**model, width=64, height=64, num_inference_steps=chance.randint(2, 40),
                                             max_sequence_length=16, seed=fault * 10 + i))
        long = self.client.submit(**{**SMALL, "num_inference_steps": 200, "seed": fault * 10 + 4})
        moment = chance.choice(["assigned", "started", "step"])
        self.client.wait_event(long, moment)
        name = self.client.job(long)["unit_records"][0]["worker"]
        struck = NAMES if victims == "one of each" else [name]
        ranks = {n: until(lambda: self.ranks(n), "the ranks have started") for n in struck}
        pids = [ranks[n][1] for n in NAMES] if victims == "one of each" else [ranks[name][i] for i in victims]
        print(f"fault {fault}: {kind.name} to {victims} of {' and '.join(struck)} at {moment}", flush=True)
        self.faults = list(struck)  # and other ends of workers
        for pid in pids:
            os.kill(pid, kind)
        for n in struck:
            until(lambda: self.workers[n].poll() is not None, f"{n} ends", 60)
            until(lambda: not any(alive(p) for p in ranks[n]), "its ranks have ended")
            self.launch(n)
        for job in [long, *others]:
            self.expect_costs(job, hit=job == long and moment != "assigned")
        return {pid for n in struck for pid in ranks[n]}

    def expect_costs(self, job, hit):
        """The job has succeeded, and each fault has cost it an attempt at most, besides those that had not started when
        the lease lapsed: until its heartbeat is old, a rank 0 that is stopped gets units. `hit`: this fault has cost it one."""
        until(lambda: all(self.ranks(n) for n in NAMES) and self.client.job(job)["state"] in ENDED, "the job ends", 120)
        record, lost, crashed, ends, worker, started = self.client.job(job), [], [], [], None, False
        self.assertEqual(record["state"], "succeeded", record)
        with self.client.events(job) as stream:
            for event in stream:
                worker = event.data.get("worker", worker)
                started = event.type == "started" or started and event.type != "assigned"
                if event.type == "ready" and event.data.get("reason") in ("lease lapsed", "retry"):
                    lost.append(worker)
                    crashed += [worker] if started or event.data["reason"] == "retry" else []
                    self.assertLessEqual(int(event.data["crashes"]), len(crashed), event.data)
                if event.ends_job:
                    ends.append(event.type)
        self.assertEqual(ends, ["succeeded"])
        self.assertEqual(record["unit_records"][0]["attempt"], 1 + len(lost), record)
        for name in NAMES:
            self.assertLessEqual(crashed.count(name), self.faults.count(name), (job, lost, self.faults))
        if hit:
            self.assertTrue(lost, "the fault came too late")

    def ranks(self, name):
        """The processes of a worker. On a busy machine ranks may miss each other; then it is started again."""
        worker = self.workers[name]
        if worker.poll() is not None:
            print(f"{name} has ended:", (self.fleet.folder / f"{name}.log").read_text().splitlines()[-1], flush=True)
            self.faults.append(name)
            self.launch(name)
        found = [worker.pid, *children(worker.pid)] if worker.poll() is None else []
        return found if len(found) == 2 else None


if __name__ == "__main__":
    unittest.main()
