"""Every command of `ditfleet` that talks to a service, and `ditfleet config`: with and without --json, on a terminal and
not, with exit codes 0 (success), 1 (failure) and 2 (usage). One file because all cases share one running service."""
import hashlib
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import unittest
from pathlib import Path

from api import Client
from fleet import DITFLEET, ROOT, Shared, clean_environment, cli, run, start, tiny_model, until
from image import describe

shared = Shared(workers=1)
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = ["--size", "32x16", "--steps", "2", "--max-sequence-length", "16"]
LONG = ["--size", "256x256", "--steps", "200", "--max-sequence-length", "16"]


def jpeg_tables(data):
    """Returns the quantization tables of a JPEG, which encode its quality."""
    at, tables = 2, []
    while data[at + 1] != 0xDA:
        size, = struct.unpack(">H", data[at + 2:at + 4])
        if data[at + 1] == 0xDB:
            tables.append(data[at + 4:at + 2 + size])
        at += 2 + size
    return tables


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = shared.fleet.folder / self.id()
        self.folder.mkdir()
        self.http = Client(shared.fleet.url)

    def cli(self, *argv, code=0, **options):
        done = cli(*argv, cwd=self.folder, env=clean_environment(DITFLEET_URL=shared.fleet.url), **options)
        self.assertEqual(done.returncode, code, f"{argv}: {done.stdout}{done.stderr}")
        if code:
            self.assertEqual(done.stdout, "" if "--json" not in argv else done.stdout)
            self.assertIn("ditfleet", done.stderr)
        return done

    def json(self, *argv, **options):
        """Runs a command with --json and returns the one line that it prints."""
        out = self.cli(*argv, "--json", **options).stdout
        self.assertEqual(out.count("\n"), 1)
        return json.loads(out)

    def submit(self, **fields):
        return self.http.submit(**{"width": 32, "height": 16, "num_inference_steps": 2, "max_sequence_length": 16, **fields})

    def terminal(self, *argv):
        """Runs a command on a terminal of 100 columns and returns its output and exit code."""
        leader, follower = pty.openpty()
        process = start([DITFLEET, *argv], stdin=follower, stdout=follower, stderr=follower, cwd=self.folder,
                        env=clean_environment(DITFLEET_URL=shared.fleet.url, TERM="xterm", COLUMNS="100"))
        os.close(follower)
        out = b""
        while select.select([leader], [], [], 60)[0]:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # EIO: the last writer has closed
                break
            out += chunk
        os.close(leader)
        return out.decode(), process.wait(30)


class Generate(WithFolder):
    def test_one_image(self):
        done = self.cli("generate", "a red circle", "-o", "out.png", *SMALL)
        self.assertEqual((done.stdout, done.stderr), ("out.png\n", ""))
        self.assertEqual(describe((self.folder / "out.png").read_bytes()), ("png", 32, 16))

    def test_three_images_are_numbered(self):
        done = self.cli("generate", "a red circle", "-n", "3", "-o", "out.png", "--seed", "5", *SMALL)
        self.assertEqual(done.stdout.split(), ["out-1.png", "out-2.png", "out-3.png"])
        self.assertEqual(sorted(os.listdir(self.folder)), ["out-1.png", "out-2.png", "out-3.png"])
        self.assertEqual(len({p.read_bytes() for p in self.folder.iterdir()}), 3)
        self.cli("generate", "a red circle", "-o", "again.png", "--seed", "6", *SMALL)
        self.assertEqual((self.folder / "again.png").read_bytes(), (self.folder / "out-2.png").read_bytes())

    def test_formats_and_default_name(self):
        for name, kind in (("a.jpg", "jpeg"), ("a.jpeg", "jpeg"), ("a.webp", "webp")):
            self.cli("generate", "x", "-o", name, *SMALL)
            self.assertEqual(describe((self.folder / name).read_bytes())[0], kind)
        name = self.cli("generate", "x", *SMALL).stdout.strip()
        self.assertRegex(name, r"^[0-9A-Z]{26}\.png$")
        self.assertTrue((self.folder / name).exists())

    def test_jpeg_quality_equals_that_of_ditfleet_worker_generate(self):
        self.cli("generate", "x", *SMALL, "--seed", "1", "-o", "service.jpg")
        done = run(Path(DITFLEET).with_name("ditfleet-worker"), "generate", "--model", tiny_model(), "--prompt", "x", *SMALL, "--seed", "1",
                   "--device", "cpu", "--out", self.folder / "alone.jpg")
        self.assertEqual(done.returncode, 0, done.stderr)
        tables = [jpeg_tables((self.folder / name).read_bytes()) for name in ("service.jpg", "alone.jpg")]
        self.assertTrue(tables[0])
        self.assertEqual(*tables)

    def test_json(self):
        out = self.json("generate", "x", "-n", "2", "-o", "j.png", "--seed", "8", *SMALL)
        self.assertEqual((out["state"], [i["path"] for i in out["images"]], [i["seed"] for i in out["images"]], out["warnings"]),
                         ("succeeded", ["j-1.png", "j-2.png"], [8, 9], []))

    def test_every_flag_reaches_the_job(self):
        out = self.json("generate", "x", "--model", "tiny", "--guidance", "2.5", "--negative", "grey", "--true-cfg", "3", "--seed", "1", *SMALL)
        spec = self.http.job(out["id"])["spec"]
        self.assertEqual([spec[k] for k in ("model", "guidance_scale", "negative_prompt", "true_cfg_scale", "seed", "width", "height",
                                            "num_inference_steps", "max_sequence_length")], ["tiny", 2.5, "grey", 3, 1, 32, 16, 2, 16])

    def test_without_waiting(self):
        argv = ("generate", "x", "--seed", "4", "--priority", "-7", "--deadline", "90.5", "--idempotency-key", self.id(), "--no-wait", *SMALL)
        id = self.cli(*argv).stdout.strip()
        self.assertEqual(self.cli(*argv).stdout.strip(), id, "the same job")
        spec = self.http.wait(id)["spec"]
        self.assertEqual((spec["priority"], spec["deadline_ms"]), (-7, 90500))
        self.assertEqual(self.json(*argv)["id"], id)
        for wrong, told in ((("--no-wait", "-o", "x.png"), "-o needs the result"), (("--idempotency-key", "a\nb"), "visible ASCII"),
                            (("--priority", "101"), "--priority"), (("--deadline", "0"), "--deadline")):
            self.assertIn(told, self.cli("generate", "x", *wrong, code=2).stderr)

    def test_warnings_go_to_stderr(self):
        done = self.cli("generate", "word " * 600, "-o", "w.png", *SMALL)
        self.assertIn("warning: ", done.stderr)
        self.assertEqual(done.stdout, "w.png\n")

    def test_progress_is_shown_on_a_terminal_only(self):
        out, code = self.terminal("generate", "x", "-o", "t.png", "--size", "64x64", "--steps", "40", "--max-sequence-length", "16")
        self.assertEqual(code, 0)
        bars = re.findall(r"\[([#.]{32})\] (\d+)/40", out)
        self.assertGreater(len(bars), 1, out)
        self.assertEqual(bars[-1], ("#" * 32, "40"))
        self.assertTrue(out.rstrip().endswith("t.png"))
        out, code = self.terminal("generate", "x", "-o", "t.png", "-n", "2", "--size", "64x64", "--steps", "40", "--max-sequence-length", "16")
        self.assertEqual(code, 0)
        bars = re.findall(r"\[(#*)\.*\] (\d+)/(\d+) steps, image (\d) of 2", out)
        self.assertEqual({total for _, _, total, _ in bars}, {"80"})  # of both images, from the first step on
        self.assertEqual([b[:1] for b in bars], sorted(b[:1] for b in bars), "the bar falls back")
        self.assertEqual([int(b[1]) for b in bars], sorted(int(b[1]) for b in bars))
        self.assertEqual({image for *_, image in bars}, {"1", "2"})
        quiet = self.cli("generate", "x", "-o", "t.png", *SMALL)
        self.assertNotIn("\r", quiet.stdout + quiet.stderr)
        out, _ = self.terminal("generate", "x", "-o", "t.png", "--json", *SMALL)
        self.assertEqual(out.count("\n"), 1)

    def test_wrong_requests(self):
        for argv, code, words in (
                (["--size", "33x32"], 2, ["multiple"]), (["--size", "wide"], 2, ["size"]), (["--steps", "0"], 2, ["--steps", "num_inference_steps"]),
                (["-n", "0"], 2, ["1 to 64"]), (["--guidance", "nan"], 2, ["guidance"]), (["--guidance", "1e9"], 2, ["0 to 100"]),
                (["--seed", "-1"], 2, ["seed"]), (["--seed", "x"], 2, ["seed"]), (["--model", "tinny"], 1, ["tiny"]),
                (["--lora", "a:b"], 2, ["NAME:SCALE"]), (["--lora", "a:nan"], 2, ["NAME:SCALE"]), (["-o", "x.gif"], 2, [".webp"]), (["-o", "no/such/x.png"], 2, ["folder does not exist"]),
                (["--stpes", "3"], 2, ["--steps"]), (["--negative"], 2, ["--negative"])):
            with self.subTest(argv):
                done = self.cli("generate", "x", *argv, code=code)
                for word in words:
                    self.assertIn(word, done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    def test_no_prompt_and_bad_utf8(self):
        self.assertIn('the prompt is required: ditfleet generate "a red circle"', self.cli("generate", code=2).stderr)
        self.assertIn("put a prompt of several words in quotes", self.cli("generate", "a", "red", "circle", code=2).stderr)
        told = self.cli("generate", "--help").stdout
        for words in ("Generate images or videos", "Examples", 'ditfleet generate "a red circle"', "--image FILE"):
            self.assertIn(words, told)
        for words in ("REQUIRED", "base64", "/v1/uploads"):
            self.assertNotIn(words, told)
        done = subprocess.run([DITFLEET.encode(), b"generate", b"\xff\xfe"], capture_output=True, env=clean_environment(), timeout=30)
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"UTF-8", done.stderr)

    def test_ctrl_c_cancels(self):
        known = {j["id"] for j in self.http.get("/v1/jobs?limit=200").json()["jobs"]}
        process = start([DITFLEET, "generate", "x", "--url", shared.fleet.url, "-o", "c.png", *LONG], cwd=self.folder)
        job = until(lambda: [j["id"] for j in self.http.get("/v1/jobs?state=running&limit=200").json()["jobs"] if j["id"] not in known],
                    "the job runs")[0]
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 130)
        self.assertIn(f"job {job} was canceled", out)
        self.assertEqual(self.http.wait(job)["state"], "canceled")
        self.assertEqual(os.listdir(self.folder), [])

    def test_generate_fails_when_its_job_is_canceled(self):
        known = {j["id"] for j in self.http.get("/v1/jobs?limit=200").json()["jobs"]}
        process = start([DITFLEET, "generate", "x", "--url", shared.fleet.url, *LONG], cwd=self.folder)
        job = until(lambda: [j["id"] for j in self.http.get("/v1/jobs?limit=200").json()["jobs"] if j["id"] not in known], "the job")[0]
        self.http.cancel(job)
        out, _ = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 1)
        self.assertIn("canceled", out)


class Jobs(WithFolder):
    def test_list(self):
        ids = [self.submit(prompt=f"listed {i}\twith a tab", user="u") for i in range(3)]
        for id in ids:
            self.http.wait(id)
        lines = self.cli("jobs", "list", "--limit", "2").stdout.splitlines()
        self.assertEqual(lines[0].split(), ["ID", "STATE", "MODEL", "UNITS", "CREATED", "PROMPT"])
        self.assertEqual([line.split()[0] for line in lines[1:3]], ids[:0:-1])
        self.assertIn("listed 2 with a tab", lines[1])
        cursor = re.match(r"more: --cursor (\S+)$", lines[3])[1]
        self.assertIn(ids[0], self.cli("jobs", "list", "--limit", "2", "--cursor", cursor).stdout)
        page = self.json("jobs", "list", "--state", "succeeded")
        self.assertEqual([j["id"] for j in page["jobs"]][:3], ids[::-1])
        self.assertIn("succeeded", self.cli("jobs", "list", "--state", "done", code=2).stderr)
        self.cli("jobs", "list", "--limit", "0", code=2)

    def test_invalid_cursor(self):
        self.assertIn("'a b&limit=1' is not a cursor", self.cli("jobs", "list", "--cursor", "a b&limit=1", code=2).stderr)

    def test_a_long_list_spans_pages(self):
        lines = "XADD df:{0}:in * spec {}\n" * 230  # each is rejected because it has no prompt
        subprocess.run(["redis-cli", "-s", shared.fleet.redis_socket], input=lines, text=True, stdout=subprocess.DEVNULL, check=True)
        until(lambda: len(self.json("jobs", "list", "--state", "rejected", "--limit", "1000")["jobs"]) == 230, "all of them are listed")
        page = self.json("jobs", "list", "--state", "rejected", "--limit", "210")
        self.assertEqual(len({j["id"] for j in page["jobs"]}), 210)
        rest = self.json("jobs", "list", "--state", "rejected", "--limit", "210", "--cursor", page["next_cursor"])
        self.assertEqual(len({j["id"] for j in page["jobs"] + rest["jobs"]}), 230)

    def test_show(self):
        id = self.submit(prompt="shown", n=2)
        self.http.wait(id)
        out = self.cli("jobs", "show", id).stdout
        for words in (id, "succeeded", "100 %", "shown", "2/2", f"/v1/jobs/{id}/results/1"):
            self.assertIn(words, out)
        self.assertEqual(self.json("jobs", "show", id)["state"], "succeeded")
        self.assertIn("not found", self.cli("jobs", "show", "01ABCDEFGHJKMNPQRSTVWXYZ00", code=1).stderr)
        self.assertIn("not a job id", self.cli("jobs", "show", "a/b", code=2).stderr)
        self.cli("jobs", "show", code=2)

    def test_watch(self):
        id = self.submit(num_inference_steps=20)
        lines = self.cli("jobs", "watch", id).stdout.splitlines()
        self.assertTrue(lines[-1].endswith("succeeded"))
        self.assertRegex(lines[0], r"^\d\d:\d\d:\d\d\.\d{3} queued$")
        self.assertTrue(any(re.search(r"unit 0 step 20/20$", line) for line in lines), lines)
        self.assertTrue(any(re.search(r"unit 0 started on \S+$", line) for line in lines), lines)
        events = [json.loads(line) for line in self.cli("jobs", "watch", id, "--json").stdout.splitlines()]
        self.assertEqual((events[0]["event"], events[-1]["event"], events[-1]["data"]["unit"]), ("queued", "succeeded", None))
        out, code = self.terminal("jobs", "watch", self.submit(num_inference_steps=200, width=192, height=192, n=2))
        self.assertEqual(code, 0)
        self.assertRegex(out, r"\[#+\.*\] \d+/400 steps, image 1 of 2")
        self.assertNotIn(" progress", out)

    def test_watch_a_job_that_fails(self):
        id = self.submit(num_inference_steps=200, width=256, height=256)
        process = start([DITFLEET, "jobs", "watch", id, "--url", shared.fleet.url])
        self.http.wait_event(id, "step")
        self.http.cancel(id)
        out, _ = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 1)
        self.assertIn(f"job {id} canceled", out)

    def test_cancel(self):
        id = self.submit(num_inference_steps=200, width=256, height=256)
        self.http.wait_event(id, "step")
        worker = shared.fleet.ready["pids"]["workers"][0]
        os.kill(worker, signal.SIGSTOP)  # it cannot stop the unit
        try:
            self.assertEqual(self.cli("jobs", "cancel", id).stdout, f"{id} canceling; stops at its next step\n")
            self.assertRegex(self.cli("jobs", "list", "--state", "canceling").stdout, rf"(?m)^{id} +canceling ")
        finally:
            os.kill(worker, signal.SIGCONT)
        self.assertEqual(self.http.wait(id)["state"], "canceled")
        self.assertIn("already ended", self.cli("jobs", "cancel", id, code=1).stderr)
        other = self.submit(num_inference_steps=200, width=256, height=256)
        self.assertTrue(self.json("jobs", "cancel", other)["cancel_requested"])

    def test_workers(self):
        head, row = self.cli("workers").stdout.splitlines()
        self.assertEqual(head.split(), ["NAME", "PID", "STATE", "DEVICE", "DTYPE", "MODELS", "LARGEST", "LORAS", "JOBS", "SPEED", "EMPTY", "IN",
                                        "SEEN"])
        self.assertEqual(int(row.split()[1]), shared.fleet.ready["pids"]["workers"][0])
        self.assertEqual(self.json("workers")["workers"][0]["state"], "ready")

    def test_explain(self):
        id = self.submit(n=2, num_inference_steps=10)
        self.http.wait(id)
        out = self.cli("explain", id).stdout
        for words in (f"job {id}: succeeded after", "unit 0: succeeded, attempt 1", "unit 1", "assigned to", "admission", "queue",
                      "text", "denoise", "vae", "encode", "store", "predicted cost"):
            self.assertIn(words, out)
        told = self.json("explain", id)
        unit = told["unit_records"][0]
        self.assertTrue(unit["attempts"][0]["reason"])
        spans = {span["name"]: span["us"] for span in unit["spans"]}
        self.assertGreater(spans["denoise"], 0)
        total = self.http.job(id)
        spent = sum(spans.values())
        real = (total["unit_records"][0]["ended_ms"] - total["created_ms"]) * 1000
        self.assertAlmostEqual(spent, real, delta=20_000)  # the spans add up to the elapsed time
        cached = self.submit(num_inference_steps=10, cache={"mode": "first_block", "threshold": 1})
        skipped = self.http.wait(cached)["unit_records"][0]["result"]["skipped_steps"]
        self.assertGreater(skipped, 0)
        out = self.cli("explain", cached).stdout
        self.assertIn(f"  skipped most of {skipped} of 10 steps (cache)\n", out)
        self.assertRegex(out, r"class tiny/\S+\+cache1;")
        running = self.submit(num_inference_steps=200, width=256, height=256)
        self.http.wait_event(running, "step")
        self.assertIn("running", self.cli("explain", running).stdout)
        self.http.cancel(running)
        # No unit ends within the next seconds. The worker holds two: one runs and one waits.
        waiting = self.submit(n=4, num_inference_steps=200, width=256, height=256)
        self.http.wait_event(waiting, "step")
        told = [unit["waits_for"] for unit in self.json("explain", waiting)["unit_records"]]
        self.assertIsNone(told[0])
        self.assertIn("which runs 1 other unit first", told[1])
        self.assertIn("capacity: 1 worker with 'tiny' is full", told[3])
        self.assertIn("  waits for capacity: ", self.cli("explain", waiting).stdout)
        behind = self.submit()
        until(lambda: self.http.job(behind)["eta_ms"], "its end is predicted")
        self.assertRegex(self.cli("explain", behind).stdout, rf"^job {behind}: ready; next")
        self.assertRegex(self.cli("jobs", "list").stdout, rf"(?m)^{behind} +ready \(next")
        self.http.cancel(waiting)
        self.http.wait(behind)
        self.cli("explain", "01ABCDEFGHJKMNPQRSTVWXYZ00", code=1)


class NoService(WithFolder):
    def test_no_service_is_running(self):
        for argv in (["generate", "x"], ["jobs", "list"], ["jobs", "show", "x"], ["jobs", "watch", "x"], ["jobs", "cancel", "x"],
                     ["workers"], ["explain", "x"]):
            with self.subTest(argv):
                done = self.cli(*argv, "--url", "http://127.0.0.1:9", code=1)
                self.assertIn("is the service running", done.stderr)
        self.assertIn("URL", self.cli("workers", "--url", "ftp://x", code=2).stderr)
        self.cli("workers", "--url", "http://no such host", code=2)
        told = self.cli("workers", "--url", "http://me:hush@127.0.0.1:1/", code=1).stderr
        self.assertIn("…@127.0.0.1:1", told)
        self.assertNotIn("hush", told)

    def test_usage(self):
        for argv, word in (([], "a command is missing"), (["genrate", "x"], "'generate'"), (["jobs"], ""), (["jobs", "lst"], ""),
                           (["workers", "--jsno"], "--json"), (["explain"], "job"), (["up", "--worker", "2"], "--workers")):
            with self.subTest(argv):
                self.assertIn(word, self.cli(*argv, code=2).stderr)
        self.assertIn("generate", self.cli("--help").stdout)
        self.assertIn("--ready-file", self.cli("up", "--help").stdout)
        self.assertRegex(self.cli("version").stdout, r"^ditfleet \d\S+, revision \w+$")
        self.assertEqual(self.cli("--version").stdout, self.cli("version").stdout)
        self.assertIn("version", self.json("version"))
        if (worker := Path(DITFLEET).with_name("ditfleet-worker")).exists():
            self.assertRegex(run(worker, "--version").stdout, r"^ditfleet-worker \d+\.\S+, revision \w+$")

    def test_flags_before_the_command(self):
        url = shared.fleet.url
        for argv in (["--url", url, "--json", "jobs", "list", "--limit", "1"], ["jobs", f"--url={url}", "--json", "list", "--limit=1"],
                     ["--json", "--set", "worker.count=2", "--url", url, "workers", "list"], ["--key", "k", "--json", "--url", url, "tenants"]):
            with self.subTest(argv):
                done = cli(*argv, cwd=self.folder)
                self.assertEqual(done.returncode, 0, done.stderr)
                json.loads(done.stdout)
        self.assertIn('"worker"', cli("--json", "--set", "worker.count=7", "config", "show").stdout)
        self.assertIn("127.0.0.1:9", cli("--url", "http://127.0.0.1:9", "generate", "jobs").stderr, "'jobs' is a prompt here")
        for argv, word in ((["--json", "jbos"], "unknown command 'jbos'; did you mean 'jobs'?"), (["--url"], "a command is missing"), (["--json"], "a command is missing")):
            self.assertIn(word, self.cli(*argv, code=2).stderr)

    def test_a_service_without_keys(self):
        self.assertRegex(self.cli("keys", "list").stdout, "^no keys: .*keys add NAME --admin")
        told = self.cli("keys", "add", "acme", code=2).stderr
        self.assertIn("add --admin", told)
        self.assertNotIn("send", told)

    def test_states_are_coloured_on_a_terminal_only(self):
        out, code = self.terminal("workers", "list")
        self.assertEqual((code, "\x1b[32mready\x1b[0m" in out), (0, True), out)
        lines = [re.sub(r"\x1b\[\d+m", "", line) for line in out.splitlines() if line]
        self.assertEqual(lines[0].index("STATE"), lines[1].index("ready"), "colours take no place")
        self.assertNotIn("\x1b", self.cli("workers", "list").stdout)

    def test_key(self):
        from fleet import Fleet
        config = f"keys:\n  - {{tenant: a, sha256: {hashlib.sha256(b'sk-a').hexdigest()}}}\n"
        with Fleet(workers=0, config=config) as fleet:
            self.assertIn("--key KEY", self.cli("jobs", "list", "--url", fleet.url, code=1).stderr)
            self.cli("jobs", "list", "--url", fleet.url, "--key", "sk-a")


class Config(WithFolder):
    def write(self, text):
        (self.folder / "c.yaml").write_text(text)
        return self.folder / "c.yaml"

    def test_check(self):
        good = self.write(f"models:\n  tiny: {tiny_model()}\nworker:\n  count: 2\n")
        self.assertIn("is valid", self.cli("config", "check", "--config", good).stdout)
        self.assertEqual(self.json("config", "check", "--config", good), {"ok": True, "problems": []})
        self.cli("config", "check", "--config", ROOT / "config" / "ditfleet.yaml")

    def test_show(self):
        file = self.write("worker:\n  count: 3\n")
        env = clean_environment(DITFLEET_WORKER__COUNT="5", DITFLEET_LOG__LEVEL="debug")
        shown = cli("config", "show", "--config", file, "--set", "worker.dtype=bf16", env=env)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        for line in ('count: 5', 'level: "debug"', 'dtype: "bf16"'):
            self.assertIn(line, shown.stdout)
        self.assertEqual(json.loads(cli("config", "show", "--config", file, "--json").stdout)["worker"]["count"], 3)
        secret = cli("config", "show", "--set", "redis.url=redis://:hunter2@h:1/0").stdout
        self.assertNotIn("hunter2", secret)
        again = self.write(shown.stdout)
        self.assertEqual(cli("config", "show", "--config", again).stdout, shown.stdout)

    def test_misspelt(self):
        cases = [
            ("worker:\n  cuont: 2\n", ["c.yaml:2", "worker.cuont", "worker.count"]),
            ("wroker:\n  count: 2\n", ["c.yaml:", "worker"]),
            ("gateway:\n  listn: 127.0.0.1:1\n", ["gateway.listen"]),
            ("worker:\n  count: many\n", ["c.yaml:2", "worker.count", "integer from 0 to 256"]),
            ("worker:\n  count: -1\n", ["0 to 256"]),
            ("worker:\n  dtype: fp23\n", ["fp32"]),
            ("gateway:\n  listen: nowhere\n", ["HOST:PORT"]),
            ("redis:\n  url: http://x\n", ["redis://"]),
            ("redis:\n  url: redis://127.0.0.1:99999\n", ["redis.url", "99999", "1 to 65535"]),
            ("worker: [1]\n", ["c.yaml:1"]),
            ("worker:\n  count: 1\n  count: 2\n", ["twice"]),
            ("worker: {count: 1", ["YAML"]),
            ("keys:\n  - {tenant: a, sha256: abc}\n", ["sha256", "64"]),
            ("tenants:\n  a:\n    wieght: 2\n", ["weight"]),
            (f"models:\n  tiny:\n    pth: {tiny_model()}\n", ["path"]),
            ("models:\n  tiny: /no/such/folder\n", ["tiny", "/no/such/folder"]),
            (f"models:\n  tiny: {tiny_model()}\ndefault_model: tinny\n", ["default_model", "tinny"]),
        ]
        for text, words in cases:
            with self.subTest(text):
                done = cli("config", "check", "--config", self.write(text))
                self.assertNotEqual(done.returncode, 0)
                for word in words:
                    self.assertIn(word, done.stderr)

    def test_every_misspelt_key_is_reported(self):
        file = self.write("worker:\n  cuont: 2\nlog:\n  levle: debug\n")
        for argv in (["config", "check"], ["config", "show"], ["up"], ["coordinator"]):
            told = self.cli(*argv, "--config", file, "--set", "cache.dri=x", code=2).stderr
            for words in ("c.yaml:2: unknown key 'worker.cuont'; did you mean 'worker.count'?",
                          "c.yaml:4: unknown key 'log.levle'; did you mean 'log.level'?", "--set cache.dri: unknown key 'cache.dri'; did you mean 'cache.dir'?"):
                self.assertIn(words, told)
        done = cli("config", "check", "--config", file, "--json")
        self.assertEqual(len(json.loads(done.stdout)["problems"]), 2)

    def test_a_misspelt_subcommand(self):
        for argv, told in ((["jobs", "lst"], "'jobs' has no command 'lst'; did you mean 'list'?"),
                           (["jobs", "--json", "lst"], "did you mean 'list'?"),
                           (["loras", "zzzzzz"], "; known are add, list"),
                           (["cache"], "'cache' needs a command; known are"),
                           ([], "a command is missing; known are"),
                           (["history", "exprt"], "did you mean 'export'?")):
            with self.subTest(argv):
                self.assertIn(told, self.cli(*argv, code=2).stderr)

    def test_capacity_names_wrong_flags_and_missed_objectives(self):
        trace = self.folder / "trace.csv"
        trace.write_text("at_ms,tenant,width,height,steps,adapter,slo_ms,run_ms\n"
                         + "".join(f"{i * 1000},t,512,512,4,,0,1500\n" for i in range(100)))
        old = ROOT / "tests/sim/steps4.csv"
        capacity = ["capacity", "--trace", trace, "--slo"]
        for argv, told in ((["capacity", "--trace", trace], "--slo is required"),
                           ([*capacity, "p90=1s"], "write p50, p95 or p99 and a time"),
                           ([*capacity, "p95=2s", "--kind", "h200"], "write NAME=SPEED"),
                           ([*capacity, "p95=2s", "--kind", "h200=0"], "write NAME=SPEED"),
                           ([*capacity, "p95=2s", "--max-workers", "0"], "--max-workers"),
                           ([*capacity, "p95=2s", "--from", "-7d"], "--trace excludes --from"),
                           (["capacity", "--trace", old, "--slo", "p95=2s"], "have no run_ms; give --costs FILE"),
                           (["capacity", "--slo", "p95=2s", "--from", "-7x"], "write an age such as -24h or -7d"),
                           (["history", "export", "--from", "yesterday"], "write an age such as -24h or -7d"),
                           (["history"], "'history' needs a command; known are export")):
            with self.subTest(argv):
                self.assertIn(told, self.cli(*argv, code=2).stderr)
        found = json.loads(self.cli(*capacity, "p95=2s", "--kind", "same=1", "--kind", "fast=2", "--json", code=0).stdout)
        self.assertEqual([kind["fleet"]["workers"] for kind in found["kinds"]], [2, 1])
        whole = self.cli(*capacity, "p95=2s", code=0)
        self.assertIn("counts, from the first", whole.stdout)
        self.assertNotIn("warning", whole.stderr)
        few = self.folder / "few.csv"
        few.write_text("\n".join(trace.read_text().splitlines()[:100]) + "\n")
        self.assertIn("warning: 99 units say little", self.cli("capacity", "--trace", few, "--slo", "p95=2s", code=0).stderr)
        missed = self.cli(*capacity, "p95=1s", "--max-workers", "7", "--json", code=1)
        self.assertIn("no fleet of up to 7 workers meets the objective", missed.stderr)
        fleet = json.loads(missed.stdout)["kinds"][0]["fleet"]
        self.assertEqual((fleet["workers"], fleet["meets"], fleet["p50_s"]), (7, False, 1.5))

    def test_a_misspelt_key_is_a_usage_error_everywhere(self):
        file = self.write("worker:\n  cuont: 2\n")
        for argv in (["up", "--config", file], ["coordinator", "--config", file], ["config", "show", "--config", file],
                     ["up", "--set", "worker.cuont=2"], ["config", "show", "--set", "worker.cuont=2"],
                     ["config", "check", "--set", "worker.cuont=2"]):
            with self.subTest(argv):
                self.assertIn("worker.count", self.cli(*argv, code=2).stderr)
        done = cli("config", "show", env=clean_environment(DITFLEET_WORKER__CUONT="2"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("DITFLEET_WORKER__COUNT", done.stderr)
        missing = self.cli("up", "--config", self.folder / "none.yaml", code=1)
        self.assertIn("none.yaml", missing.stderr)

    def test_environment_and_set_work_in_both_programs(self):
        worker = Path(DITFLEET).with_name("ditfleet-worker")
        done = run(worker, "run", "--set", "worker.cuont=2")
        self.assertEqual(done.returncode, 2)
        self.assertIn("worker.count", done.stderr)
        done = run(worker, "tokenize", "--model", tiny_model(), env=clean_environment(DITFLEET_WORKER__CUONT="2"))
        self.assertEqual(done.returncode, 2, done.stderr)
        file = self.write("worker:\n  cuont: 2\n")
        for argv in (["run"], ["generate", "--model", tiny_model(), "--prompt", "x", "--out", "x.png"]):
            with self.subTest(argv):
                done = run(worker, *argv, env=clean_environment(DITFLEET_CONFIG=str(file)))
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("c.yaml:2", done.stderr)

    def test_the_reference_accepts_the_flags_of_every_command(self):
        plain = self.cli("config", "reference").stdout
        self.assertIn("worker.count", plain)
        for flags in (["--set", "worker.count=2"], ["--config", self.write("worker:\n  cuont: 2\n")]):
            self.assertEqual(self.cli("config", "reference", *flags).stdout, plain)


if __name__ == "__main__":
    unittest.main(verbosity=2)
