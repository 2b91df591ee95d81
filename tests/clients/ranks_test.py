"""A worker whose ranks share each unit: it draws what one process draws, shows its ranks, and a rank that dies or hangs
costs an attempt at most. DITFLEET_RANK_FAULTS: how many faults (6)."""
import contextlib
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

WORKER = BIN / "ditfleet-worker"
WAN = ROOT / "tests/fixtures/wan"
FAULTS = int(os.environ.get("DITFLEET_RANK_FAULTS", "6"))
SEED = int(os.environ.get("DITFLEET_RANK_SEED", "1"))

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


class Service(unittest.TestCase):
    def setUp(self):
        self.fleet = self.enterContext(Fleet(workers=0, models={"flux": FOLDER / "flux", "wan": FOLDER / "wan"},
                                             sets=["queue.max_crashes=100", "queue.max_lapses=100",
                                                   "queue.lease_ms=1500", "queue.renew_ms=300"]))
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
        until(lambda: self.record(name).get("state") == "ready" or self.workers[name].poll() is not None,
              f"{name} is ready", 60)
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
        os.kill(other, signal.SIGSTOP)
        self.image(self.client.submit(**SMALL))  # without the other rank
        self.image(self.client.submit(**{**SMALL, "width": 48}))  # so does a smaller class
        # A rank that does not answer is ended, and the worker with it.
        self.assertEqual(self.workers["group"].wait(30), 1)
        self.assertIn("rank 1 has not answered", (self.fleet.folder / "group.log").read_text())
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

    def test_no_fault_of_a_rank_loses_a_job(self):
        chance = random.Random(SEED)
        names = ["a", "b"]
        for name in names:
            self.launch(name)
        for name in names:
            self.wait_ready(name)
        seen, jobs = set(), []
        for fault in range(FAULTS):
            jobs += [self.client.submit(model=chance.choice(["flux", "wan"]), width=64, height=64,
                                        num_inference_steps=chance.randint(2, 40), max_sequence_length=16,
                                        seed=fault * 10 + i)
                     for i in range(4)]
            time.sleep(chance.uniform(0, 0.6))
            name = chance.choice(names)
            ranks = until(lambda: self.ranks(name), "the ranks have started")
            seen |= set(ranks)
            victim, kind = chance.choice(ranks), chance.choice([signal.SIGKILL, signal.SIGSTOP])
            print(f"fault {fault}: {kind.name} to rank {ranks.index(victim)} of {name}", flush=True)
            os.kill(victim, kind)
            if kind == signal.SIGSTOP and victim == ranks[0]:
                # Its lease lapses, and its jobs run elsewhere. When it wakes up, it finds that.
                time.sleep(2)
                os.kill(victim, signal.SIGCONT)
            else:
                # A rank that only hangs is missed once there is work.
                until(lambda: self.workers[name].poll() is not None or self.idle(), "the group ends", 60)
                if self.workers[name].poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGCONT)
                    continue
                self.workers[name].wait()
            until(lambda: not any(alive(p) for p in ranks) or self.workers[name].poll() is None, "its ranks have ended")
            if self.workers[name].poll() is not None:
                self.launch(name)
        for job in jobs:
            until(lambda: self.ended(job, names), "the job ends", 120)
            record = self.client.job(job)
            self.assertEqual(record["state"], "succeeded", record)
            with self.client.events(job) as stream:
                self.assertEqual([e.type for e in stream if e.ends_job], ["succeeded"])
        for name in names:
            if self.workers[name].poll() is None:
                seen |= {self.workers[name].pid, *children(self.workers[name].pid)}
                self.workers[name].terminate()
        for name in names:
            self.workers[name].wait(60)
        until(lambda: not any(alive(p) for p in seen), "no process is left")
        self.assertEqual([f for f in Path("/dev/shm").iterdir() if "ditfleet" in f.name], [])

    def ranks(self, name):
        """The processes of a worker. On a busy machine ranks may miss each other; then it is started again."""
        worker = self.workers[name]
        if worker.poll() is not None:
            print(f"{name} has ended:", (self.fleet.folder / f"{name}.log").read_text().splitlines()[-1], flush=True)
            self.launch(name)
        found = [worker.pid, *children(worker.pid)] if worker.poll() is None else []
        return found if len(found) == 2 else None

    def ended(self, job, names):
        for name in names:
            self.ranks(name)
        return self.client.job(job)["state"] in ENDED

    def idle(self):
        return all(not w["busy_units"] for w in self.client.get("/v1/workers").json()["workers"])


if __name__ == "__main__":
    unittest.main()
