"""The console page at / in a headless browser: jobs with progress, previews and results; the form; pictures and masks;
narrow and dark.
DITFLEET_SCREENSHOTS=FOLDER saves screenshots of the page there."""
import base64
import hashlib
import json
import os
import re
import signal
import unittest
import zlib
from pathlib import Path

import browser
from adapters import BYTES, DOWN, UP, adapter, safetensors
from api import Client
from browser import Browser
from fleet import Fleet, ROOT, Shared, need, run, tiny_model
from image import describe

need(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
FIXTURES = ROOT / "tests/fixtures"
PICTURES = FIXTURES / "pictures"
shared = Shared(workers=1, sets=["default_model=tiny"], models={
    "tiny": tiny_model(), "edit": FIXTURES / "flux/edit/dev/model", "text": FIXTURES / "z_image/turbo/model",
    "several": FIXTURES / "flux2/klein/model"})
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = {"width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 16}
LONG = {"width": 256, "height": 256, "num_inference_steps": 200, "max_sequence_length": 16, "partial_images": 3}


def grey_rows(data):
    """Returns the rows of a PNG that is 8-bit grey, in one IDAT chunk and unfiltered."""
    _, width, height = describe(data)
    assert data[24:29] == bytes((8, 0, 0, 0, 0)), "another kind of PNG"
    at = data.index(b"IDAT")
    raw = zlib.decompress(data[at + 4:at + 4 + int.from_bytes(data[at - 4:at])])
    return [raw[y * (width + 1) + 1:(y + 1) * (width + 1)] for y in range(height)]


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
        self.assertEqual({name for name in ("image", "mask") if fields.pop(name)}, {"image", "mask"})  # no inputs of text
        for name, field in fields.items():
            at, default = f"document.getElementById('{name}')", field.get("default", "")
            shown = "first_block:0.08" if field["type"] == "object" else default if isinstance(default, str) else f"{default:g}"
            self.assertEqual(self.page.js(f"{at}.placeholder || {at}.value"), shown, name)
        self.set(width=32, height=32, max_sequence_length=16, cache="first_block:0.5")
        spec = self.http.wait(self.send())["spec"]
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

    def screens(self, name):
        """Shows the page on two screens."""
        for width in (1440, 390):
            self.page.size(width, 900)
            self.assertLessEqual(self.page.js("document.documentElement.scrollWidth"), width, "it scrolls sideways")
            self.assertEqual(self.shot(f"{name}-{width}"), ("png", width, 900))
        self.page.size(1280, 900)

    def drop(self, *files):
        """Drops files on the page, as from a file manager."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for type in ("dragEnter", "dragOver", "drop"):
            self.page.call("Input.dispatchDragEvent", type=type, x=500, y=300, data=data)

    def paste(self, file):
        """Pastes a picture as Ctrl+V does."""
        bytes = list(file.read_bytes())
        self.page.js(f"""(() => {{ const data = new DataTransfer();
            data.items.add(new File([new Uint8Array({bytes})], "image.png", {{type: "image/png"}}));
            document.activeElement.dispatchEvent(new ClipboardEvent("paste", {{clipboardData: data, bubbles: true, cancelable: true}})); }})()""")

    def set(self, **values):
        self.page.js(f"for (const [id, value] of Object.entries({json.dumps(values)})) document.getElementById(id).value = value")

    def choose(self, model):
        self.page.until("document.getElementById('model').value === 'tiny'")
        self.page.js(f"(() => {{ const e = document.getElementById('model'); e.value = '{model}'; e.onchange(); }})()")

    def send(self):
        """Sends the form and returns the id of the new job."""
        self.page.until("document.querySelector('article, .empty') !== null")
        before = self.page.js("document.querySelector('article')?.dataset.id")
        self.page.js("document.getElementById('submit').click()")
        return self.page.until(f"(id => id !== {json.dumps(before)} && id)(document.querySelector('article')?.dataset.id)")

    def key(self, key, **more):
        for type in ("rawKeyDown", "keyUp"):
            self.page.call("Input.dispatchKeyEvent", type=type, key=key, windowsVirtualKeyCode={"Escape": 27}.get(key, 0), **more)

    def on_mask(self, x, y):
        """The point of the page at these parts of the mask's canvas."""
        box = self.page.js("(b => [b.left, b.top, b.width, b.height])(document.querySelector('#canvas canvas').getBoundingClientRect())")
        return {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}

    def stroke(self, *points):
        for type, (x, y) in zip(["mousePressed"] + ["mouseMoved"] * (len(points) - 1) + ["mouseReleased"], [*points, points[-1]]):
            self.page.call("Input.dispatchMouseEvent", type=type, button="left", buttons=1, clickCount=1, **self.on_mask(x, y))

    def until_painted(self, x, y, painted=True):
        """Waits until the mask's canvas is painted, or is not, at these parts of its sides."""
        self.page.until(f"{str(painted).lower()} === (c => c.getContext('2d').getImageData(c.width * {x}, c.height * {y}, 1, 1).data[3] > 127)(document.querySelector('#canvas canvas'))")

    def paint_mask(self):
        self.page.until("!document.getElementById('mask-button').disabled")
        self.page.js("document.getElementById('mask-button').click()")
        self.page.until("document.querySelector('#canvas canvas')?.clientWidth > 0 && document.activeElement.localName === 'canvas'")

    def uploaded(self, many=1):
        self.page.until(f"document.querySelectorAll('#pictures .picture:not(.busy) img').length === {many}")

    def test_a_picture_and_a_mask_from_the_drop_to_the_result(self):
        photo = PICTURES / "photo.png"
        _, width, height = describe(photo.read_bytes())
        self.open()
        self.choose("edit")
        self.assertFalse(self.page.js("document.getElementById('strength').offsetParent !== null"))
        self.drop(photo)
        self.uploaded()
        self.assertEqual([upload["id"] for upload in self.http.get("/v1/uploads").json()["data"] if upload["bytes"] == photo.stat().st_size],
                         [hashlib.sha256(photo.read_bytes()).hexdigest()])
        self.assertEqual(self.page.js("[document.getElementById('width').value, document.getElementById('strength').placeholder]"), ["", "0.6"])
        self.paint_mask()
        self.set(brush=50)
        self.stroke((0.1, 0.25), (0.5, 0.25), (0.9, 0.25))
        for x, y, painted in ((0.3, 0.25, True), (0.7, 0.25, True), (0.5, 0.9, False)):
            self.until_painted(x, y, painted)
        self.page.js("document.getElementById('erase').click()")
        self.stroke((0.75, 0.25), (0.99, 0.25))
        self.until_painted(0.9, 0.25, False)
        self.until_painted(0.3, 0.25)
        self.screens("painter")
        self.page.js("document.getElementById('painted').click()")
        self.page.until("document.querySelector('#pictures .mask') !== null")
        self.set(prompt="a hat", num_inference_steps=4, max_sequence_length=16, width=64, height=64, seed=3, strength=0.75)
        id = self.send()
        spec = self.http.wait(id)["spec"]
        self.assertEqual((spec["image"], spec["strength"]), (hashlib.sha256(photo.read_bytes()).hexdigest(), 0.75))
        rows = grey_rows(self.http.get(f"/v1/uploads/{spec['mask']}/content").body)
        self.assertEqual((len(rows[0]), len(rows)), (width, height))
        self.assertEqual([rows[height // 4][int(part * width)] for part in (0.3, 0.9)] + [rows[int(0.9 * height)][width // 2]], [255, 0, 0])
        # The result beside its input, on the card and on the job's page.
        self.page.until(f"{card(id, '.picture .mask')} !== null && {card(id, '.picture img')}.naturalWidth === {width} && {card(id, '.image:not(.partial) img')}?.naturalWidth === 64")
        left, right = (self.page.js(f"{card(id, part)}.getBoundingClientRect().left") for part in (".picture", ".image"))
        self.assertLess(left, right)
        self.screens("edited")
        self.page.js(f"{card(id, '.picture')}.click()")
        self.page.until(f"document.querySelector('#viewer img')?.naturalWidth === {width} && document.querySelector('#viewer .mask') !== null")
        self.screens("viewer-of-an-input")
        self.page.open(f"{shared.fleet.url}/jobs/{id}")
        self.page.until("document.querySelector('#inputs .mask') && document.querySelector('#images img')?.naturalWidth === 64")
        self.screens("job-with-a-picture")
        # Its form again, from there, gives the same job.
        self.page.open(self.page.js("document.getElementById('again').href"))
        self.page.until("document.getElementById('prompt')?.value === 'a hat'")
        self.uploaded()
        self.page.until("document.querySelector('#pictures .mask') !== null")
        again = self.http.wait(self.send())
        self.assertEqual(again["spec"], spec)
        self.assertEqual(again["unit_records"][0]["result"]["sha256"], self.http.job(id)["unit_records"][0]["result"]["sha256"])
        self.assertEqual(self.page.errors, [])

    def test_pictures_are_pasted_ordered_and_removed(self):
        self.open()
        self.choose("text")
        self.assertFalse(self.page.js("document.getElementById('picture-fields').offsetParent !== null"))
        error = "document.getElementById('form-error').textContent"
        self.drop(PICTURES / "photo.png")
        self.page.until(f"{error}.startsWith(\"Model 'text' takes no pictures; \")")
        self.assertEqual(set(re.split("; |, | do$", self.page.js(error))[1:-1]), {"tiny", "edit", "several"})
        self.page.js("(() => { const e = document.getElementById('model'); e.value = 'edit'; e.onchange(); })()")
        self.page.js("document.getElementById('prompt').focus()")
        self.paste(PICTURES / "photo.png")
        self.uploaded()
        self.paste(PICTURES / "wide.png")
        self.page.until(f"{error} === \"Model 'edit' takes one picture; remove one first\"")
        self.page.js("(() => { const e = document.getElementById('model'); e.value = 'several'; e.onchange(); })()")
        self.drop(PICTURES / "wide.png", PICTURES / "large.png", PICTURES / "tall.jpg")
        self.uploaded(4)
        self.assertTrue(self.page.js("document.getElementById('add-picture') === null && document.getElementById('mask-button').disabled"))
        self.page.js("document.querySelectorAll('#pictures .forward')[1].click()")
        self.page.js("document.querySelector('#pictures .picture button').click()")
        names = "[...document.querySelectorAll('#pictures img')].map(i => i.alt)"
        self.assertEqual(self.page.js(names), ["large.png", "wide.png", "tall.jpg"])
        self.screens("pictures")
        self.set(prompt="both", num_inference_steps=2, width=64, height=64)
        id = self.send()
        sent = [hashlib.sha256((PICTURES / name).read_bytes()).hexdigest() for name in ("large.png", "wide.png", "tall.jpg")]
        self.assertEqual(self.http.wait(id)["spec"]["images"], sent)
        self.page.until(f"{card(id, '.image:not(.partial) img')}?.naturalWidth === 64")
        widths = f"[...document.querySelectorAll('article[data-id=\"{id}\"] .picture img')].map(i => i.naturalWidth)"
        self.page.until(f"{widths}.join() === '1300,90,68'")
        self.set(width='', height='')
        self.screens("several-pictures")
        damaged = Path(shared.fleet.folder) / "damaged.png"
        damaged.write_bytes((PICTURES / "photo.png").read_bytes()[:50])
        self.drop(damaged)
        self.page.until("document.querySelector('#pictures .error')?.textContent.includes('PNG')")
        self.page.js("document.getElementById('submit').click()")
        self.page.until(f"{error}.startsWith('damaged.png: ')")
        self.drop(ROOT / "README.md")
        self.page.until(f"{error} === \"'README.md' is no picture\"")
        for _ in range(4):
            self.page.js("document.querySelector('#pictures .picture button').click()")
        self.assertEqual(self.page.js("[document.getElementById('width').value, document.getElementById('strength').disabled]"), ["1024", True])

    def test_a_mask_by_keys_and_touch(self):
        self.open()
        self.choose("edit")
        self.drop(PICTURES / "photo.png")
        self.paint_mask()
        self.key(" ")
        self.until_painted(0.5, 0.5)
        self.key("z", modifiers=2)
        self.until_painted(0.5, 0.5, False)
        for _ in range(2):
            self.key("ArrowLeft", modifiers=8)
        before = self.page.js("document.getElementById('brush-shape').offsetWidth")
        self.key("]")
        self.page.until(f"document.getElementById('brush-shape').offsetWidth > {before}")
        self.key(" ")
        self.until_painted(0.3, 0.5)
        self.until_painted(0.5, 0.5, False)
        self.key("e")
        self.key(" ")
        self.until_painted(0.3, 0.5, False)
        self.key("e")
        self.page.call("Emulation.setTouchEmulationEnabled", enabled=True)
        for type, at in (("touchStart", 0.2), ("touchMove", 0.5), ("touchMove", 0.8), ("touchEnd", None)):
            self.page.call("Input.dispatchTouchEvent", type=type, touchPoints=[self.on_mask(at, 0.8)] if at else [])
        for at in (0.2, 0.5, 0.8):
            self.until_painted(at, 0.8)
        self.page.js("document.getElementById('clear').click()")
        self.until_painted(0.5, 0.8, False)
        self.key("Escape")
        self.page.until("painter === null")
        self.assertEqual(list(self.page.js("pictures_asked({mask: {}})")), ["image"])  # an empty mask is none
        self.assertEqual(self.page.errors, [])

    def test_a_job_is_used_again(self):
        nothing = safetensors({DOWN: ("F32", [4, 40], bytes(640)), UP: ("F32", [40, 4], bytes(640))})
        self.assertEqual(self.http.request("PUT", "/v1/loras/chalk", nothing, BYTES).status, 201)
        self.addCleanup(self.http.request, "DELETE", "/v1/loras/chalk")
        id = self.http.submit(prompt="as before", model="tiny", n=2, seed=11, guidance_scale=2.5, negative_prompt="fog", output_format="webp",
                              cache={"mode": "first_block", "threshold": 0.25}, loras=[{"name": "chalk", "scale": 0.5}], **SMALL)
        spec = self.http.wait(id)["spec"]
        self.open()
        self.page.until(f"{card(id, '.state')}?.textContent === 'succeeded'")
        self.choose("text")
        self.page.js(f"[...{card(id)}.querySelectorAll('button')].find(b => b.textContent === 'Use again').click()")
        self.assertEqual(self.page.js("document.getElementById('prompt').value"), "as before")
        again = self.http.wait(self.send())["spec"]
        self.assertEqual({**again, "partial_images": 0}, {**spec, "partial_images": 0})

    def test_the_viewer_goes_through_the_results(self):
        ids = [self.http.submit(prompt=f"number {i}", model="tiny", n=2, seed=i, **SMALL) for i in (1, 2)]
        for id in ids:
            self.http.wait(id)
        self.open()
        self.page.until(f"document.querySelectorAll('article:nth-child(-n+2) .image:not(.partial) img').length === 4")
        self.page.js(f"{card(ids[1], '.image')}.click()")
        facts = "document.querySelector('#viewer .facts').textContent"
        shows = lambda i, unit: self.page.until(f"{facts}.startsWith('number {i} · 32×32, seed {i + unit} · ')")
        shows(2, 0)
        for key, i, unit in (("ArrowRight", 2, 1), ("ArrowRight", 1, 0), ("ArrowRight", 1, 1), ("ArrowLeft", 1, 0)):
            self.key(key)
            shows(i, unit)
        self.assertEqual(self.page.js("document.querySelector('#viewer a').download"), f"{ids[0]}-0.png")
        self.page.until("document.querySelector('#viewer img').naturalWidth === 32")
        self.assertRegex(self.page.js("document.querySelector('#viewer .note').textContent"), r"^3 of \d+$")
        self.key("Escape")
        self.page.until("!document.getElementById('viewer').open && document.querySelector('#viewer img') === null")
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

    def search(self, text):
        self.page.js(f"(() => {{ const e = document.getElementById('search'); e.value = {json.dumps(text)}; e.dispatchEvent(new Event('input')); }})()")

    def until_shown(self, *ids):
        """Waits until the list shows just these jobs."""
        self.page.until(f"[...document.querySelectorAll('article')].filter(a => a.offsetParent).map(a => a.dataset.id).join() === '{','.join(ids)}'")

    def test_the_list_is_searched(self):
        needle, other = (self.http.submit(prompt=prompt, **SMALL) for prompt in ("A Needle in the hay", "hay alone"))
        for id in (needle, other):
            self.http.wait(id)
        self.open()
        self.page.until(f"{card(needle)} !== null")
        self.search(" needle in ")
        self.until_shown(needle)
        self.assertEqual(self.page.js("location.search"), "?q=needle+in")
        self.search("hay")
        self.until_shown(other, needle)
        self.search(other.lower())
        self.until_shown(other)
        self.search("no such <b>text</b>")
        self.until_shown()
        self.page.until("document.querySelector('.empty')?.textContent.startsWith('No job of this list')")
        self.search("hay")
        self.page.js("(() => { const f = document.getElementById('filter'); f.value = 'succeeded'; f.onchange(); })()")
        self.assertEqual(self.page.js("location.search"), "?q=hay&state=succeeded")
        self.page.open(shared.fleet.url + "/?state=succeeded&q=needle")
        self.until_shown(needle)
        self.assertEqual(self.page.js("document.getElementById('search').value"), "needle")
        self.screens("searched")
        self.assertEqual(self.page.errors, [])

    def test_the_search_shows_a_batch(self):
        lines = [{"prompt": "first of a batch", **SMALL}, {"prompt": "second", "width": 7}, {"prompt": "third", **SMALL}]
        made = self.http.request("POST", "/v1/batches?on_error=skip", "\n".join(map(json.dumps, lines)), {"Content-Type": "application/jsonl"})
        id = made.json()["id"]
        for line in (1, 3):
            self.http.wait(f"{id}-{line}")
        self.page.open(f"{shared.fleet.url}/jobs/{id}-1")
        self.page.until(f"document.getElementById('batch')?.href?.endsWith('/?q={id}')")
        self.page.js("document.getElementById('batch').click()")
        self.page.until("document.querySelector('#batch .facts')?.textContent.startsWith('2 of 3 succeeded · 1 failed · 1 line was refused · created')")
        self.until_shown(f"{id}-3", f"{id}-1")
        self.assertEqual(self.page.js("document.getElementById('batch-state').textContent + document.getElementById('batch-cancel').hidden"), "completedtrue")
        self.screens("batch")
        self.search("nothing")
        self.page.until("document.getElementById('batch').hidden")
        self.search("batch_0000000000000000000000000a")
        self.page.until("document.querySelector('#batch .facts').textContent.includes('not found')")
        slow = "\n".join(json.dumps({"prompt": str(i), "width": 256, "height": 256, "num_inference_steps": 100}) for i in range(5))
        id = self.http.request("POST", "/v1/batches", slow, {"Content-Type": "application/jsonl"}).json()["id"]
        self.search(id)
        self.page.until("!document.getElementById('batch-cancel').hidden")
        self.page.js("document.getElementById('batch-cancel').click()")
        self.page.until("document.getElementById('batch-state').textContent === 'cancelled'")

    def test_compact_rows(self):
        done = self.http.submit(prompt="two of them " + "and a long description " * 4, n=2, **SMALL)
        self.http.wait(done)
        edited = self.http.submit(prompt="a hat", model="edit", image=base64.b64encode((PICTURES / "photo.png").read_bytes()).decode(), **SMALL)
        self.http.wait(edited)
        running = self.http.submit(prompt="one that runs", **LONG)
        waiting = self.http.submit(prompt="one that waits", **LONG)
        for id in (running, waiting):
            self.addCleanup(self.http.cancel, id)
        self.http.wait_event(running, "preview")
        self.open()
        self.page.until(f"{card(done, 'img')}?.naturalWidth === 32")
        tall = f"{card(done)}.offsetHeight"
        self.assertGreater(self.page.js(tall), 80)
        self.page.js("document.getElementById('compact').click()")
        for width in (1440, 390):
            self.page.size(width, 900)
            self.page.until(f"{tall} < 45")
            self.page.until(f"{card(edited, '.picture img')} !== null && {card(edited)}.offsetHeight < 45")
            for id in (done, edited, running, waiting):
                self.page.until(f"['.image', '.prompt', '.state', '.when'].every(part => {card(id)}.querySelector(part)?.offsetWidth > 0)")
            self.assertEqual(self.page.js(f"[...{card(done)}.querySelectorAll('.image')].filter(i => i.offsetParent).length"), 1)
        self.page.until(f"/left|next/.test({card(waiting, '.when')}.textContent)")
        self.assertRegex(self.page.js(f"{card(done, '.when')}.textContent"), "now|ago")
        self.assertEqual(self.page.js(f"{card(done, '.when')}.pathname"), f"/jobs/{done}")
        self.screens("compact")
        self.open()  # kept
        self.page.until(f"{tall} < 45 && document.getElementById('compact').ariaPressed === 'true'")
        self.page.js("document.getElementById('compact').click()")
        self.page.until(f"{tall} > 80 && {card(done, '.when')}.offsetWidth === 0")
        self.assertEqual(self.page.errors, [])

    def test_jobs_are_retried(self):
        self.assertEqual(self.http.request("PUT", "/v1/loras/odd", adapter(width=64), BYTES).status, 201)
        failed = [self.http.submit(prompt=f"fails {i}", seed=i, loras=[{"name": "odd"}], **SMALL) for i in range(3)]
        for id in failed:
            self.assertEqual(self.http.wait(id)["state"], "failed")
        canceled = self.http.submit(prompt="was canceled", seed=4, **LONG)
        self.http.cancel(canceled)
        self.http.wait(canceled)
        done = self.http.submit(prompt="is done", **SMALL)
        spec = self.http.wait(done)["spec"]
        self.open()
        self.page.until(f"{card(done, '.state')}?.textContent === 'succeeded'")
        button = lambda id: f"[...{card(id)}.querySelectorAll('button')].find(b => /^Retr/.test(b.textContent))"
        self.assertTrue(self.page.js(f"{button(done)}.hidden"))
        self.screens("retry")
        self.page.js(f"{button(canceled)}.click()")
        again = self.page.until(f"(id => id !== '{done}' && id)(document.querySelector('article').dataset.id)")
        self.addCleanup(self.http.cancel, again)
        self.assertEqual(self.http.job(again)["spec"], self.http.job(canceled)["spec"])
        self.http.cancel(again)
        self.page.until(f"{button(canceled)}.disabled && document.getElementById('told').textContent === 'Submitted 1 job again.'")
        # All failed ones that are shown, once the adapter is there again.
        self.assertEqual(self.http.request("DELETE", "/v1/loras/odd").status, 200)
        self.page.js("window.asked = []; window.confirm = text => { asked.push(text); return asked.length > 1; }")
        self.search("fails")
        self.page.js("document.getElementById('retry-failed').click()")
        self.assertEqual(self.page.js("asked"), ["Submit 3 failed jobs again?"])
        self.assertEqual(self.page.js("document.querySelector('article').dataset.id"), again, "it was not confirmed")
        self.page.js("document.getElementById('retry-failed').click()")
        self.page.until("document.getElementById('told').textContent.startsWith('Submitted 0 of 3 jobs again: ')")
        self.assertEqual(self.http.request("PUT", "/v1/loras/odd", adapter(width=64), BYTES).status, 201)
        self.addCleanup(self.http.request, "DELETE", "/v1/loras/odd")
        self.page.js("document.getElementById('retry-failed').click()")
        self.page.until("document.getElementById('told').textContent === 'Submitted 3 jobs again.'")
        ids = self.page.until("(ids => ids.length === 6 && ids)([...document.querySelectorAll('article')].filter(a => a.offsetParent).map(a => a.dataset.id))")
        self.assertCountEqual([self.http.wait(id)["spec"] for id in ids[:3]], [self.http.job(id)["spec"] for id in failed])
        self.page.until("shown_failed().length === 3")  # the new ones
        self.search("is done")
        self.assertTrue(self.page.js("document.getElementById('retry-failed').hidden"))
        self.assertEqual(len(self.page.errors), 1, self.page.errors)  # the refusal

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
        self.page.js("(() => { const f = document.getElementById('filter'); f.value = 'rejected'; f.onchange(); })()")
        self.page.until("document.querySelectorAll('article').length === 0 && document.querySelector('.empty') !== null")
        self.assertEqual(self.page.js("location.search"), "?state=rejected")
        self.page.open(shared.fleet.url + "/?state=succeeded")
        self.page.until(f"{card(done)} !== null && document.getElementById('filter').value === 'succeeded'")

    def test_the_form_as_code(self):
        self.open()
        self.choose("tiny")
        self.set(prompt="it's code", num_inference_steps=2, max_sequence_length=16, width=32, height=32, seed=9)
        self.page.js("window.copied = []; navigator.clipboard.writeText = async text => { copied.push(text); }")
        self.page.js("(() => { const s = document.getElementById('copy'); s.value = 'as curl'; s.onchange(); })()")
        code = self.page.until("copied[0]")
        by_form = self.http.wait(self.send())
        by_code = self.http.wait(json.loads(run("bash", "-c", code).stdout)["id"])
        self.assertEqual(by_code["spec"], by_form["spec"])
        self.assertEqual(by_code["unit_records"][0]["result"]["sha256"], by_form["unit_records"][0]["result"]["sha256"])

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
        config = "keys:\n" + "".join(f"  - {{tenant: {tenant}, sha256: {hashlib.sha256(b'sk-' + tenant.encode()).hexdigest()}, admin: {admin}}}\n"
                                     for tenant, admin in (("a", "false"), ("ops", "true")))
        with Fleet(workers=0, config=config) as fleet:
            self.open(fleet.url)
            self.page.until("document.getElementById('key-dialog').open")
            self.page.js("document.getElementById('key').value = 'sk-wrong'; document.querySelector('#key-dialog button').click()")
            self.page.until("document.getElementById('key-dialog').open && !document.getElementById('key-error').hidden")
            self.page.js("document.getElementById('key').value = 'sk-a'; document.querySelector('#key-dialog button').click()")
            self.page.until("document.getElementById('model').value === 'tiny' && document.querySelector('.empty') !== null")
            photo = base64.b64encode((PICTURES / "photo.png").read_bytes()).decode()
            id = Client(fleet.url, "sk-a").submit(image=photo, **SMALL)
            self.page.until(f"{card(id, '.picture img')}?.naturalWidth === 50")
            # What an administrator submits again stays its tenant's.
            id = Client(fleet.url, "sk-a").submit(**SMALL)
            Client(fleet.url, "sk-a").cancel(id)
            self.page.js("sessionStorage.setItem('ditfleet-key', 'sk-ops')")
            self.open(fleet.url)
            self.page.until(f"{card(id, '.state')}?.textContent === 'canceled'")
            self.page.js(f"[...{card(id)}.querySelectorAll('button')].find(b => b.textContent === 'Retry').click()")
            self.page.until("document.getElementById('told').textContent === 'Submitted 1 job again.'")
            self.assertEqual(len(Client(fleet.url, "sk-a").get("/v1/jobs").json()["jobs"]), 3)

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
