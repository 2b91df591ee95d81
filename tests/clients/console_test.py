"""The console page at / in a headless browser: jobs with progress, previews and results; the form; narrow and dark.
DITFLEET_SCREENSHOTS=FOLDER saves screenshots of the page there."""
import hashlib
import os
import signal
import unittest
from pathlib import Path

import browser
from adapters import BYTES, DOWN, UP, safetensors
from api import Client
from browser import Browser
from fleet import Fleet, Shared, need
from image import describe

need(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
shared = Shared(workers=1)
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = {"width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 16}
LONG = {"width": 256, "height": 256, "num_inference_steps": 200, "max_sequence_length": 16, "partial_images": 3}


def card(id, part=""):
    return f"document.querySelector('article[data-id=\"{id}\"] {part}')"


class Console(unittest.TestCase):
    def setUp(self):
        self.http = Client(shared.fleet.url)
        self.page = Browser()
        self.addCleanup(self.page.__exit__)

    def open(self, url=None):
        self.page.open((url or shared.fleet.url) + "/")
        self.page.until("document.readyState === 'complete' && document.querySelector('#ready .dot.ok') !== null")

    def image_of(self, id, part=".image img"):
        """Waits for an image of a job's card to load and returns its bytes."""
        self.page.until(f"{card(id, part)}?.complete && {card(id, part)}.naturalWidth > 0")
        return self.http.get(self.page.js(f"{card(id, part)}.src")).body

    def shot(self, name):
        folder = os.environ.get("DITFLEET_SCREENSHOTS")
        path = Path(folder or shared.fleet.folder) / f"console-{name}.png"
        self.page.screenshot(path)
        return describe(path.read_bytes())

    def test_a_job_from_the_form_to_its_image(self):
        self.open()
        self.page.until("document.getElementById('model').value === 'tiny'")
        self.page.js("""(() => { const set = (id, v) => document.getElementById(id).value = v;
            set('prompt', 'a red circle <b>above</b> a blue square'); set('width', 64); set('height', 48); set('num_inference_steps', 20);
            set('n', 2); set('seed', 5); document.getElementById('submit').click(); })()""")
        id = self.page.until("document.querySelector('article')?.dataset.id")
        self.page.until(f"{card(id, '.state')}.textContent === 'succeeded'")
        self.page.until(f"document.querySelectorAll('article[data-id=\"{id}\"] .image:not(.partial) img').length === 2")
        self.assertEqual(self.page.js(f"{card(id, '.prompt')}.textContent"), "a red circle <b>above</b> a blue square")
        facts = self.page.js(f"{card(id, '.facts')}.textContent")
        for words in ("tiny", "64×48", "20 steps", "seed 5", "2 images", "took"):
            self.assertIn(words, facts)
        self.assertEqual(hashlib.sha256(self.image_of(id)).hexdigest(), self.http.job(id)["unit_records"][0]["result"]["sha256"])
        self.assertTrue(self.page.js(f"{card(id, 'button.small')}.hidden"))  # nothing left to cancel
        self.page.js(f"{card(id, '.image')}.click()")
        self.page.until("document.getElementById('viewer').open && document.querySelector('#viewer img').naturalWidth === 64")
        self.assertIn("denoise", self.page.js("document.querySelector('#viewer .facts').textContent"))
        self.shot("viewer")
        self.assertEqual(self.page.errors, [])

    def test_the_form_has_every_field_of_the_model(self):
        self.open()
        self.page.until("document.getElementById('model').value === 'tiny'")
        fields = self.http.get("/v1/models/tiny").json()["fields"]
        self.assertIn("max_sequence_length", fields)  # the form does not list it
        for name, field in fields.items():
            at, default = f"document.getElementById('{name}')", field.get("default", "")
            shown = "first_block:0.08" if field["type"] == "object" else default if isinstance(default, str) else f"{default:g}"
            self.assertEqual(self.page.js(f"{at}.placeholder || {at}.value"), shown, name)
        before = self.page.js("document.querySelector('article')?.dataset.id")
        self.page.js("(() => { const set = (id, v) => document.getElementById(id).value = v; set('width', 32); set('height', 32);"
                     "set('max_sequence_length', 16); set('cache', 'first_block:0.5'); document.getElementById('submit').click(); })()")
        id = self.page.until(f"(id => id !== '{before}' && id)(document.querySelector('article')?.dataset.id)")
        spec = self.http.wait(id)["spec"]
        self.assertEqual((spec["max_sequence_length"], spec["cache"]), (16, {"mode": "first_block", "threshold": 0.5}))

    def test_adapters(self):
        nothing = safetensors({DOWN: ("F32", [4, 40], bytes(640)), UP: ("F32", [40, 4], bytes(640))})
        for name in ("ink", "night"):
            self.assertEqual(self.http.request("PUT", f"/v1/loras/{name}", nothing, BYTES).status, 201)
        self.open()
        self.page.until("document.getElementById('model').value === 'tiny'")
        self.page.js("document.getElementById('details').open = true")
        self.page.until("document.getElementById('adapters').title === 'registered: ink, night'")
        fill = "document.getElementById('prompt').value = 'x'; document.getElementById('width').value = document.getElementById('height').value = 32;"
        ask = lambda text: self.page.js(f"(() => {{ {fill} document.getElementById('adapters').value = '{text}'; document.getElementById('submit').click(); }})()")
        ask("ink:much")
        self.page.until("/'ink:much' must be NAME/.test(document.getElementById('form-error').textContent)")
        ask("ikn")
        self.page.until("/did you mean 'ink'/.test(document.getElementById('form-error').textContent)")
        ask(" ink:0.7, night")
        id = self.page.until("[...document.querySelectorAll('article')].find(a => a.textContent.includes('with ink × 0.7, night'))?.dataset.id")
        job = self.http.wait(id)
        self.assertEqual(job["state"], "succeeded", job["error"])
        self.assertEqual([(use["name"], use["scale"]) for use in job["spec"]["loras"]], [("ink", 0.7), ("night", 1)])

    def test_progress_previews_and_cancel(self):
        id = self.http.submit(prompt="a long one", **LONG)
        self.open()
        self.page.until(f"{card(id, '.state')}?.textContent === 'running'")
        first = self.page.until(f"parseFloat({card(id, '.bar > div')}.style.width)")
        self.page.until(f"parseFloat({card(id, '.bar > div')}.style.width) > {first}")
        self.assertRegex(self.page.until(f"{card(id, '.facts')}.textContent.match(/step \\d+.200/)?.[0]"), r"step \d+/200")
        describe(self.image_of(id, ".image.partial img"))  # a preview, while it runs
        self.page.js(f"{card(id, 'button.small')}.click()")
        self.page.until(f"{card(id, '.state')}.textContent === 'canceled'")
        self.assertEqual(self.http.wait(id)["state"], "canceled")
        self.assertEqual(self.page.errors, [])

    def test_the_queue(self):
        self.http.wait(self.http.submit(prompt="seen", **SMALL))
        busy = self.http.submit(prompt="busy", **{**LONG, "n": 6})
        self.addCleanup(self.http.cancel, busy)
        self.http.wait_event(busy, "step")
        ids = [self.http.submit(prompt=f"job {i}", **SMALL) for i in range(3)]
        self.open()
        facts = lambda id: f"{card(id, '.facts')}?.textContent"
        self.page.until(f"/next · \\d+ (s|min).* left$/.test({facts(ids[0])})")
        self.page.until(f"/1 job ahead · .* left$/.test({facts(ids[1])})")
        self.page.until(f"/2 jobs ahead · .* left$/.test({facts(ids[2])})")
        self.page.until(f"/image 1 of 6 · step \\d+.200 · .* left$/.test({facts(busy)})")
        self.assertLess(self.page.until(f"parseFloat({card(busy, '.bar > div')}.style.width)"), 17)  # of all six
        self.shot("queue")
        worker = shared.fleet.ready["pids"]["workers"][0]
        os.kill(worker, signal.SIGSTOP)  # it cannot stop the unit
        try:
            self.page.js(f"{card(busy, 'button.small')}.click()")
            self.page.until(f"{card(busy, '.state')}.textContent === 'canceling'")
        finally:
            os.kill(worker, signal.SIGCONT)
        self.page.until(f"{card(ids[2], '.state')}.textContent === 'succeeded'")
        self.assertEqual(self.page.errors, [])

    def test_errors_are_shown(self):
        long_prompt = self.http.submit(prompt="word " * 400, **SMALL)
        self.http.wait(long_prompt)
        self.open()
        self.page.until(f"{card(long_prompt, '.warning')}?.textContent.includes('CLIP')")
        self.page.until("document.getElementById('model').value === 'tiny'")
        self.page.js("document.getElementById('form').noValidate = true; document.getElementById('width').value = 33; "
                     "document.getElementById('submit').click()")
        self.page.until("document.getElementById('form-error').textContent.includes('multiple of 8')")

    def test_workers_and_filter(self):
        done = self.http.submit(prompt="done", **SMALL)
        self.http.wait(done)
        self.open()
        worker = self.http.get("/v1/workers").json()["workers"][0]
        self.page.until(f"document.getElementById('workers').textContent.includes('pid {worker['pid']}')")
        self.assertIn("ready", self.page.js("document.getElementById('workers').textContent"))
        self.page.js("(() => { const f = document.getElementById('filter'); f.value = 'failed'; f.onchange(); })()")
        self.page.until("document.querySelectorAll('article').length === 0 && document.querySelector('.empty') !== null")

    def test_screen_sizes_and_colour_schemes(self):
        for n in (1, 3, 6, 12):
            self.http.wait(self.http.submit(prompt=f"{n} of them " + "and a long description " * (n % 4), n=n, **SMALL))
        running = self.http.submit(prompt="one that runs", n=2, **LONG)
        self.addCleanup(self.http.cancel, running)
        self.http.wait_event(running, "preview")
        for name, width, dark in (("wide", 1280, False), ("tablet", 820, False), ("phone", 390, False), ("dark", 1280, True)):
            with self.subTest(name):
                self.page.size(width, 900)
                self.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
                self.open()
                self.page.until("document.querySelectorAll('article img').length >= 22")
                wide = self.page.js("document.documentElement.scrollWidth")
                self.assertLessEqual(wide, width, "it scrolls sideways")
                out = self.page.js("""[...document.querySelectorAll('article *')].filter(e => e.offsetParent &&
                    e.getBoundingClientRect().right > e.closest('article').getBoundingClientRect().right + 1).length""")
                self.assertEqual(out, 0, "something sticks out of its card")
                back = self.page.js("getComputedStyle(document.body).backgroundColor")
                self.assertEqual(sum(map(int, back[4:-1].split(","))) < 200, dark)
                self.assertEqual(self.shot(name), ("png", width, 900))
        self.assertEqual(self.page.errors, [])

    def test_the_page_asks_for_a_key(self):
        config = f"keys:\n  - {{tenant: a, sha256: {hashlib.sha256(b'sk-a').hexdigest()}}}\n"
        with Fleet(workers=0, config=config) as fleet:
            self.open(fleet.url)
            self.page.until("document.getElementById('key-dialog').open")
            self.page.js("document.getElementById('key').value = 'sk-wrong'; document.querySelector('#key-dialog button').click()")
            self.page.until("document.getElementById('key-dialog').open && !document.getElementById('key-error').hidden")
            self.page.js("document.getElementById('key').value = 'sk-a'; document.querySelector('#key-dialog button').click()")
            self.page.until("document.getElementById('model').value === 'tiny' && document.querySelector('.empty') !== null")

    def test_dump_dom(self):
        """`chromium --dump-dom` waits for no script."""
        id = self.http.submit(prompt="in the dump & <i>no markup</i>", **SMALL)
        self.http.wait(id)
        html = browser.dump_dom(shared.fleet.url + "/", shared.fleet.folder / "profile")
        self.assertIn(f'data-id="{id}"', html)
        self.assertIn("in the dump &amp; &lt;i&gt;no markup&lt;/i&gt;", html)
        self.assertIn(f"/v1/jobs/{id}/results/0", html)


if __name__ == "__main__":
    unittest.main(verbosity=2)
