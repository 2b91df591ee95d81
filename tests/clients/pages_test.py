"""The pages of a job, of slow jobs and of the fleet in a headless browser, and `ditfleet jobs slow`. The last test shows
DITFLEET_PAGES_JOBS (default 1,000) open and as many ended jobs on 200 workers. DITFLEET_SCREENSHOTS=FOLDER saves screenshots
of the pages there."""
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import time
import unittest
from pathlib import Path
from urllib.parse import parse_qs

import browser
from api import Client
from browser import Browser
from fleet import Fleet, cli, clean_environment, need, run, until
from image import describe

need(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
AXE = importlib.util.find_spec("axe_core_python")
SMALL = {"width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 16}
LONG = {"width": 256, "height": 256, "num_inference_steps": 200, "max_sequence_length": 16}
SCREENS = (("wide", 1280, False), ("dark", 1280, True), ("phone", 390, False))


class Pages(unittest.TestCase):
    def setUp(self):
        self.page = Browser()
        self.addCleanup(self.page.__exit__)

    def start(self, **options):
        self.fleet = Fleet(**options)
        self.fleet.__enter__()
        self.addCleanup(self.fleet.__exit__, None)
        self.http = Client(self.fleet.url)

    def open(self, path):
        self.page.open(self.fleet.url + path)
        self.page.until("document.readyState === 'complete' && document.querySelector('#ready .dot.ok') !== null")

    def screens(self, path, shown):
        """Shows a page on each screen, once the expression `shown` is true."""
        for name, width, dark in SCREENS:
            with self.subTest(path=path, screen=name):
                self.page.size(width, 1000)
                self.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
                self.open(path)
                self.page.until(shown)
                self.assertLessEqual(self.page.js("document.documentElement.scrollWidth"), width, "it scrolls sideways")
                folder = os.environ.get("DITFLEET_SCREENSHOTS")
                file = Path(folder or self.fleet.folder) / f"{path.split('/')[1]}-{name}.png"
                self.page.screenshot(file)
                self.assertEqual(describe(file.read_bytes()), ("png", width, 1000))
        self.page.size(1280, 1000)

    def choose_range(self, path, shown):
        """Shows the last 15 minutes on a page, which keeps them in its address."""
        self.open(path)
        self.page.js("(() => { const s = document.getElementById('range'); s.value = '15'; s.onchange(); })()")
        self.assertEqual(self.page.js("location.pathname + location.search"), path + "?minutes=15")
        self.page.until(shown)
        self.open(path + "?minutes=15")
        self.page.until(f"document.getElementById('range').value === '15' && {shown}")

    def test_a_job_whose_worker_was_lost(self):
        self.start(workers=2, sets=["queue.lease_ms=2000", "telemetry.trace_url=https://traces.example/trace/{trace_id}?from=ditfleet"])
        for _ in range(6):
            self.http.wait(self.http.submit(**{**LONG, "num_inference_steps": 4}))
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        id = self.http.submit(prompt="one <b>that</b> is lost", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, **LONG)
        self.http.wait_event(id, "step")
        lost = self.http.job(id)["unit_records"][0]["worker"]
        pid = next(w["pid"] for w in self.http.get("/v1/workers").json()["workers"] if w["name"] == lost)
        os.kill(pid, signal.SIGKILL)
        job = self.http.wait(id)
        self.assertEqual(job["state"], "succeeded", job["error"])
        last = job["unit_records"][0]["worker"]

        timeline = self.http.get(f"/v1/jobs/{id}/timeline").json()["unit_records"][0]
        self.assertEqual([a["worker"] for a in timeline["attempts"]], [lost, last])
        self.assertIn("lease lapsed", timeline["attempts"][0]["back"])
        self.assertTrue(1 <= timeline["attempts"][0]["step"] < timeline["attempts"][0]["total_steps"] == 200)
        self.assertEqual([timeline["attempts"][1][name] for name in ("step", "total_steps")], [200, 200])
        ends = [0] + [s["begin_us"] + s["us"] for s in timeline["spans"]]
        self.assertEqual([s["begin_us"] for s in timeline["spans"]], ends[:-1])  # without gaps
        self.assertEqual(ends[-1], (job["ended_ms"] - job["created_ms"]) * 1000)

        self.open(f"/jobs/{id}")
        self.page.until("document.getElementById('state').textContent === 'succeeded'")
        self.assertEqual(self.page.js("document.getElementById('prompt').textContent"), "one <b>that</b> is lost")
        text = self.page.js("document.getElementById('units').innerText")
        for words in (f"attempt 1 on {lost}", f"attempt 2 on {last}", "returned to the queue: lease lapsed", "chosen: ", "2 attempts",
                      f"reached step {timeline['attempts'][0]['step']}/200", "reached step 200/200",
                      "admission", "queue", "earlier attempts", "queued again", "text", "denoise", "vae", "encode", "store", "predicted"):
            self.assertIn(words, text)
        self.assertEqual(self.page.js("(a => [a.textContent, a.href])(document.getElementById('trace'))"),
                         ["trace " + trace, f"https://traces.example/trace/{trace}?from=ditfleet"])
        self.page.until("document.querySelector('#images img')?.naturalWidth === 256")
        self.screens(f"/jobs/{id}", "document.querySelectorAll('.fall .track').length > 8")

        # The slowest of its class; the time went into the lost attempt or into its 200 steps.
        slow = self.http.get("/v1/jobs/slow").json()["jobs"]
        self.assertEqual((slow[0]["id"], slow[0]["attempts"], slow[0]["worker"]), (id, 2, last))
        self.assertIn(slow[0]["blame"]["phase"], ("earlier attempts", "denoise", "run"))
        self.assertEqual(slow[0]["blame"]["over_us"], slow[0]["blame"]["us"] - slow[0]["blame"]["expected_us"])
        self.assertEqual(self.http.get("/v1/jobs/slow?limit=1&class=" + slow[0]["class"]).json()["jobs"][0]["id"], id)
        self.assertEqual(self.http.get("/v1/jobs/slow?class=none").json()["jobs"], [])
        env = clean_environment(DITFLEET_URL=self.fleet.url)
        done = cli("jobs", "slow", "--limit", "3", env=env)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = done.stdout.splitlines()
        self.assertEqual(len(rows), 4)
        self.assertIn(id, rows[1])
        self.assertIn(slow[0]["blame"]["phase"], rows[1])
        self.assertEqual(json.loads(cli("jobs", "slow", "--json", env=env).stdout)["jobs"][0]["id"], id)
        self.open("/slow")
        self.page.until(f"document.querySelector('#rows tr a')?.textContent === '{id}'")
        self.assertIn(slow[0]["blame"]["phase"], self.page.js("document.querySelector('#rows tr').innerText"))
        self.choose_range("/slow", f"document.querySelector('#rows tr a')?.textContent === '{id}'")
        self.page.js(f"(() => {{ const s = document.getElementById('class'); s.value = '{slow[0]['class']}'; s.onchange(); }})()")
        kept = self.page.js("location.search")
        self.assertEqual(parse_qs(kept[1:]), {"minutes": ["15"], "class": [slow[0]["class"]]})
        self.open("/slow" + kept)  # as dashboards link to it
        self.page.until(f"document.getElementById('class').value === '{slow[0]['class']}' && document.querySelectorAll('#rows tr').length === 7")
        self.screens("/slow", "document.querySelectorAll('#rows tr').length > 4")
        self.assertEqual(self.page.errors, [])

    def test_actions_on_a_job(self):
        self.start(workers=1)
        id = self.http.submit(prompt="it's \"here\"", n=2, seed=5, **SMALL)
        spec = self.http.wait(id)["spec"]
        self.open(f"/jobs/{id}")
        self.page.until("document.querySelectorAll('#images img').length === 2 && !document.getElementById('download').hidden")
        self.assertTrue(self.page.js("document.getElementById('cancel').hidden"))
        self.page.js("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); }")

        def copy(what):
            self.page.js(f"(() => {{ const s = document.getElementById('copy'); s.value = '{what}'; s.onchange(); }})()")
            return self.page.until("copied.pop()")
        self.assertEqual(copy("link"), f"{self.fleet.url}/jobs/{id}")
        self.assertEqual(json.loads(copy("as JSON")), spec)
        for language, argv in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
            again = json.loads(run(*argv, copy(f"as {language}")).stdout)["id"]
            self.assertEqual(self.http.wait(again)["spec"], spec)
        self.page.js("window.saved = []; HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }; document.getElementById('download').click()")
        self.assertEqual(self.page.js("saved"), [f"{id}-1.png", f"{id}-2.png"])
        self.assertEqual(self.page.js("document.querySelectorAll('.axis')[0].children.length"), 5)
        box, picture = (self.page.js(f"(() => {{ const r = document.querySelector('{what}').getBoundingClientRect(); return [r.width, r.height]; }})()")
                        for what in ("#images .image", "#images .image img"))
        self.assertAlmostEqual(picture[0], picture[1], delta=1, msg="the picture is square")
        self.assertLessEqual(picture[1], box[1], "and whole")
        long = self.http.submit(**LONG)
        self.http.wait_event(long, "step")
        self.open(f"/jobs/{long}")
        self.page.until("!document.getElementById('cancel').hidden")
        self.page.js("document.getElementById('pause').click()")
        self.page.until("document.getElementById('state').textContent === 'paused' && document.getElementById('pause').textContent === 'Resume'")
        self.page.js("document.getElementById('pause').click()")
        self.page.until("document.getElementById('state').textContent === 'running' && document.getElementById('pause').textContent === 'Pause'")
        self.page.js("document.getElementById('cancel').click()")
        self.page.until("document.getElementById('state').textContent === 'canceled'")
        self.assertEqual(self.http.job(long)["state"], "canceled")
        self.assertEqual(self.page.js("document.getElementById('trace').getAttribute('href')"), None)  # no tracing backend
        self.screens(f"/jobs/{long}", "document.getElementById('retry')?.offsetWidth > 0")
        self.page.js("document.getElementById('retry').click()")
        again = self.page.until(f"location.pathname !== '/jobs/{long}' && document.getElementById('cancel')?.offsetWidth > 0 && location.pathname.split('/')[2]")
        self.addCleanup(self.http.cancel, again)
        self.assertEqual(self.http.job(again)["spec"], self.http.job(long)["spec"])
        self.assertTrue(self.page.js("document.getElementById('retry').hidden"))
        self.assertEqual(self.page.errors, [])

    @unittest.skipUnless(AXE, "axe-core-python (tests/requirements.txt) is not installed")
    def test_pages_are_accessible(self):
        """axe-core finds nothing serious on any page, in either colour scheme."""
        self.start(workers=1)
        id = self.http.submit(prompt="a job", **SMALL)
        self.http.wait(id)
        script = (Path(AXE.submodule_search_locations[0]) / "axe.min.js").read_text()
        for dark in (False, True):
            self.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
            self.open("/")
            self.page.js(f"localStorage.setItem('ditfleet-compact', {str(dark).lower()})")
            for path, shown in (("/", f"document.querySelector('{'.compact' if dark else ':not(.compact) >'} article')"), (f"/jobs/{id}", "document.querySelector('.axis')"), ("/slow", "document.querySelector('#rows tr')"),
                                ("/fleet", "document.querySelector('#phases tr')"), ("/docs", "document.querySelector('.operation')"), ("/alerts", "document.querySelector('main')")):
                with self.subTest(path=path, dark=dark):
                    self.open(path)
                    self.page.until(f"{shown} !== null")
                    self.page.js(script + "; null")
                    found = json.loads(self.page.js("axe.run().then(r => JSON.stringify(r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.target.join(' '))])))"))
                    self.assertEqual([v for v in found if v[0] in ("serious", "critical")], [])

    def test_the_fleet_under_load(self):
        self.start(workers=2)
        for i in range(12):
            self.http.submit(prompt=f"job {i}", n=2, **{**LONG, "num_inference_steps": 10 + 5 * (i % 5)})
        ended = [self.http.submit(prompt="small", **SMALL) for _ in range(5)]
        waiting = self.http.submit(n=3, **LONG)
        self.addCleanup(self.http.cancel, waiting)
        for id in ended:
            self.http.wait(id)
        fleet = self.http.get("/v1/fleet").json()
        self.assertGreaterEqual(sum(fleet["throughput"]["succeeded"]), 5)
        self.assertEqual({w["state"] for w in fleet["workers"]}, {"ready"})
        self.assertEqual({(r["model"], r["tenant"]) for r in fleet["queue"]}, {("tiny", "default")})
        phases = fleet["classes"][0]["phases"]
        self.assertLessEqual({"text", "wait", "denoise", "vae", "encode", "store", "total"}, set(phases))
        self.assertLessEqual(phases["total"]["p50_us"], phases["total"]["p99_us"])
        self.open("/fleet")
        self.page.until("document.querySelectorAll('#phases tr').length > 6")
        names = self.page.js("document.getElementById('names').innerText")
        for worker in fleet["workers"]:
            self.assertIn(worker["name"], names)
        self.assertIn("tiny", self.page.js("document.getElementById('queue').innerText"))
        before = self.page.js("document.querySelectorAll('#tiles b')[1].textContent")
        self.page.until(f"document.querySelectorAll('#tiles b')[1].textContent !== '{before}'")  # it is live
        self.screens("/fleet", "document.querySelectorAll('#phases tr').length > 6")
        self.choose_range("/fleet", "document.querySelectorAll('#tiles .note')[1]?.textContent === 'succeeded in the last 15 minutes'")
        self.screens("/fleet?minutes=15", "document.querySelectorAll('#phases tr').length > 6")
        # What operators do, with the worker that is chosen.
        name = fleet["workers"][1]["name"]
        self.page.js("window.asked = []; window.confirm = text => { asked.push(text); return true; }")
        for action, state in (("drain", "draining"), ("resume", "ready"), ("stop", "gone")):
            self.page.js(f"(() => {{ document.getElementById('worker').value = '{name}'; document.querySelector('[data-action={action}]').click(); }})()")
            self.page.until(f"document.getElementById('acted').textContent.startsWith('{name} ')")
            until(lambda: {w["name"]: w["state"] for w in self.http.get("/v1/fleet").json()["workers"]}.get(name, "gone") == state, f"{name} is {state}", 60)
        self.assertIn(f"Stop {name}?", self.page.js("asked.join()"))
        self.page.until(f"![...document.getElementById('worker').options].some(o => o.value === '{name}')")
        # A click on a run opens its job.
        self.open("/fleet")
        self.page.until("placed.some(p => p[4][4] === 'succeeded')")
        # Runs of a second are a pixel wide, so that it may be the next one's job.
        self.page.js("""(() => { const p = placed.find(p => p[4][4] === 'succeeded'), c = document.getElementById('timeline'), box = c.getBoundingClientRect();
            c.dispatchEvent(new MouseEvent('click', {clientX: box.left + (p[1] + p[2]) / 2, clientY: box.top + p[0] * ROW + 8})); })()""")
        self.page.until("location.pathname.startsWith('/jobs/') && document.body?.innerText.includes('attempt 1 on')")
        self.assertEqual(self.page.errors, [])

    def test_the_api_page_sends_requests_and_shows_them_as_code(self):
        self.start(workers=1)
        document = self.http.get("/openapi.json").json()
        operations = {operation["operationId"] for item in document["paths"].values() for method, operation in item.items() if method != "parameters"}
        self.open("/docs")
        self.page.until("document.querySelectorAll('.operation').length > 20")
        self.assertEqual(set(self.page.js("[...document.querySelectorAll('.operation')].map(o => o.id.slice(3))")), operations)
        self.assertEqual(set(self.page.js("[...document.querySelectorAll('#index a')].map(a => a.hash.slice(4))")), operations)
        rows = "[...document.querySelectorAll('#op-editImage td:first-child')].map(td => td.textContent)"
        self.assertLessEqual({"prompt *", "mask", "strength", "num_inference_steps"}, set(self.page.js(rows)))
        # The code of a request does what the page does.
        self.page.js("""(() => { const o = document.getElementById('op-createImage'); o.querySelector('details').open = true;
            const body = o.querySelector('textarea'); body.value = JSON.stringify({prompt: "it's a ring", size: '32x32', seed: 3, num_inference_steps: 2,
              max_sequence_length: 16, response_format: 'b64_json'}); body.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        pictures = set()
        for language, argv in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
            self.page.js(f"(() => {{ const s = document.querySelector('#op-createImage select'); s.value = '{language}'; s.dispatchEvent(new Event('change')); }})()")
            code = self.page.until(f"document.querySelector('#op-createImage .try pre').textContent.startsWith({'curl' if language == 'curl' else 'import'!r}) && document.querySelector('#op-createImage .try pre').textContent")
            pictures.add(json.loads(run(*argv, code).stdout)["data"][0]["b64_json"])
        self.page.js("document.querySelector('#op-createImage .buttons button').click()")
        self.page.until("document.querySelector('#op-createImage .answer img')?.naturalWidth === 32")
        pictures.add(self.page.js("document.querySelector('#op-createImage .answer img').src").split(",")[1])
        self.assertEqual(len(pictures), 1)
        self.assertEqual(self.page.errors, [])
        self.page.js("(() => { const o = document.getElementById('op-getJob'); o.querySelector('details').open = true; o.querySelector('input').value = 'x'; o.querySelector('.buttons button').click(); })()")
        self.page.until("document.querySelector('#op-getJob .answer')?.textContent.includes('404')")
        self.screens("/docs", "document.querySelectorAll('.operation').length > 20")
        self.screens("/docs#op-createImage", "document.querySelectorAll('.operation').length > 20")

    def test_what_is_old_is_grey(self):
        self.start(workers=0)
        redis = self.fleet.ready["pids"]["redis"]
        for path in ("/fleet", "/"):
            self.open(path)
            self.page.until("!document.querySelector('main').classList.contains('stale') && document.getElementById('problem').textContent === ''")
            os.kill(redis, signal.SIGSTOP)
            try:
                self.page.until("document.querySelector('main.stale') && document.getElementById('problem').textContent.includes('does not answer')")
                shown = "#tiles .panel > *" if path == "/fleet" else "#workers"
                self.assertIn("grayscale", self.page.js(f"getComputedStyle(document.querySelector('{shown}')).filter"))
            finally:
                os.kill(redis, signal.SIGCONT)
            self.page.until("!document.querySelector('main').classList.contains('stale')")

    def test_many_jobs_and_workers(self):
        """Publishes the events of the jobs and writes the heartbeats of the workers to Redis."""
        self.start(workers=0)
        jobs, workers, phases, now = int(os.environ.get("DITFLEET_PAGES_JOBS", 1000)), 200, ("text", "wait", "denoise", "vae", "encode", "store"), int(time.time() * 1000)
        commands, chance, free = [], random.Random(5), [now - 3_500_000] * workers

        def publish(at_ms, line):
            commands.append(("PUBLISH", "df:{0}:feed", f"{at_ms}-{len(commands)}\n{line}"))

        def admit(id, at_ms, tenant, size):
            publish(at_ms, f'{id} - queued -1 {{"tenant":"{tenant}"}}')
            publish(at_ms + 5, f'{id} - ready 0 {{"tenant":"{tenant}","class":"flux/{size}x{size}x1/embedded/512/bf16","units":1,"steps":28,"adapters":0,"cost_us":60000000}}')
        for w in range(workers):
            info = {"name": f"gpu-{w:03}", "boot": "b", "host": "h", "pid": w + 1, "state": "ready", "device": "cuda:0", "device_name": "test", "precision": "bf16",
                    "models": ["flux"], "warm_classes": ["a", "b"], "adapter_slots": 4, "adapters": ["x"], "adapter_swap_us": 4200, "adapter_swaps": 14, "compiles": 3, "capacity": 2, "version": "t",
                    "memory": {"flux": {"limits": [{"plan": "resident", "max_pixels": 4_200_000}], "available_bytes": 80_000_000_000, "bytes": 34_000_000_000, "resident": w % 9 > 0, "load_us": 1}}, "units": []}
            commands.append(("HSET", "df:{0}:worker:" + info["name"], "boot", "b", "info", json.dumps(info), "heartbeat", str(now + 3_600_000)))
            commands.append(("ZADD", "df:{0}:workers", str(now + 3_600_000), info["name"]))
        for i in range(jobs):
            w = min(range(workers), key=free.__getitem__)
            run_ms, wait_ms = chance.randint(45_000, 95_000), chance.randint(10, 20_000)
            start, id, size = free[w] + chance.randint(100, 900), f"load-{i:05}", 512 * (1 + i % 4)
            free[w] = start + run_ms
            admit(id, start - wait_ms, f"tenant-{i % 12}", size)
            publish(start, f'{id} - assigned 0 {{"attempt":1,"worker":"gpu-{w:03}","reason":"warm"}}')
            publish(start, f'{id} - started 0 {{"attempt":1,"worker":"gpu-{w:03}"}}')
            if start + run_ms < now:
                us = json.dumps({p: run_ms * (900 if p == "denoise" else 10) for p in phases})
                end = "failed" if i % 50 == 0 else "succeeded"
                publish(start + run_ms, f'{id} - {end} 0 {{"job":"{end}","phases_us":{us}}}')
        for i in range(jobs):
            admit(f"open-{i:05}", now - chance.randint(0, 600_000), f"tenant-{i % 12}", 1024)
        begun = time.monotonic()
        with socket.socket(socket.AF_UNIX) as redis:
            redis.connect(str(self.fleet.redis_socket))
            replies = redis.makefile("rb")
            for first in range(0, len(commands), 1000):
                part = commands[first:first + 1000]
                redis.sendall(b"".join(b"*%d\r\n" % len(c) + b"".join(b"$%d\r\n%s\r\n" % (len(a.encode()), a.encode()) for a in c) for c in part))
                for _ in part:
                    self.assertEqual(replies.readline()[:1], b":")
        # The open ones, and those that still run.
        seen = until(lambda: (f := self.http.get("/v1/fleet").json()) and sum(r["ready"] for r in f["queue"]) == jobs and f, "the gateway has read the events", 60)
        print(f"\n{len(commands)} commands in {time.monotonic() - begun:.2f} s")
        self.assertEqual(len(seen["workers"]), workers)
        self.assertGreater(sum(seen["throughput"]["succeeded"]), 0.9 * jobs)
        begun = time.monotonic()
        whole = self.http.get("/v1/fleet")
        print(f"GET /v1/fleet: {len(whole.body) / 1e6:.2f} MB in {1000 * (time.monotonic() - begun):.0f} ms")

        self.page.open(self.fleet.url + "/fleet")
        self.page.until("performance.getEntriesByName('update').length >= 5", 60)
        updates = self.page.js("performance.getEntriesByName('update').map(e => [e.startTime + e.duration, e.duration])")
        paint = self.page.until("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        parse = self.page.js("fetch('/v1/fleet').then(r => r.text()).then(t => { const t0 = performance.now(); JSON.parse(t); return performance.now() - t0; })")
        print(f"first contentful paint after {paint:.0f} ms, all data shown after {updates[0][0]:.0f} ms; scripts of an update took " +
              ", ".join(f"{took:.1f}" for _, took in updates) + f" ms and {parse:.1f} ms to parse the answer")
        self.assertEqual(self.page.js("document.getElementById('queue').children.length"), 12)
        self.assertIn("resident up to 4.2 MP", self.page.js("document.getElementById('about').innerText"))
        self.screens("/fleet", "document.getElementById('names').children.length === 200")
        self.screens("/slow", "document.querySelectorAll('#rows tr').length === 50")
        recent = self.http.get("/v1/jobs/slow?minutes=15&limit=50").json()["jobs"]
        self.assertTrue(all(job["ended_ms"] > now - 15 * 60_000 for job in recent))
        self.choose_range("/slow", f"document.querySelectorAll('#rows tr').length === {len(recent)}")
        self.choose_range("/fleet", "fleet && document.querySelectorAll('#tiles b')[1]?.textContent === String(sum(fleet.throughput.succeeded.slice(-90)))")
        self.assertLess(int(self.page.js("document.querySelectorAll('#tiles b')[1].textContent")), sum(seen["throughput"]["succeeded"]) / 2)
        self.assertEqual(self.page.errors, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
