"""A model family that only tests have (tests/test_family), from an HTTP request to the stored video: five frames, two
networks that switch halfway and a guidance scale for each."""
import hashlib
import json
import os
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

import browser
from api import Client
from browser import Browser
from fleet import Fleet, Shared, clean_environment, cli, run
from image import describe
from video_model import write_video_model


folder = tempfile.TemporaryDirectory(prefix="ditfleet-family-")
MODEL = Path(folder.name) / "video"
write_video_model(MODEL)
shared = Shared(workers=1, models={"video": MODEL},
                sets=["results.backend=file", f"results.dir={folder.name}/results"])


def setUpModule():
    shared.start()


def tearDownModule():
    shared.stop()
    folder.cleanup()


def frames(data):
    """Returns the durations in ms of an animated WebP's frames."""
    found, at = [], 12
    while at < len(data):
        kind, size = data[at:at + 4], struct.unpack("<I", data[at + 4:at + 8])[0]
        if kind == b"ANMF":
            found.append(int.from_bytes(data[at + 20:at + 23], "little"))
        at += 8 + size + size % 2
    return found


class TestFamily(unittest.TestCase):
    def setUp(self):
        self.client = Client(shared.fleet.url)

    def video(self, **fields):
        """Runs a job to its end and returns the bytes of its result."""
        id = self.client.submit(**{"seed": 7, **fields})
        job = self.client.wait(id)
        self.assertEqual(job["state"], "succeeded", job)
        response = self.client.get(job["unit_records"][0]["result"]["url"])
        self.assertEqual(response.status, 200, response)
        kind = "image/webp" if fields.get("output_format") == "webp" else "video/mp4"
        self.assertEqual((response.headers["Content-Type"], response.headers["Accept-Ranges"]), (kind, "bytes"))
        return response.body

    @unittest.skipUnless(shutil.which("ffprobe"), "ffmpeg is not installed (tests/packages.txt)")
    def test_the_video_is_an_mp4_file(self):
        file = Path(folder.name) / "video.mp4"
        file.write_bytes(self.video(frames=9, fps=12.5, width=64, height=48))
        probed = run("ffprobe", "-v", "error", "-count_frames", "-of", "json", "-show_streams", file)
        stream = json.loads(probed.stdout)["streams"][0]
        self.assertEqual([stream[k] for k in ("codec_name", "pix_fmt", "width", "height", "color_space", "color_range",
                                              "avg_frame_rate", "nb_read_frames", "duration")],
                         ["h264", "yuv420p", 64, 48, "bt709", "tv", "25/2", "9", "0.720000"])

    @unittest.skipUnless(shutil.which("curl"), "curl is not installed")
    def test_curl_reads_a_video_in_parts(self):
        job = self.client.wait(self.client.submit(seed=7, width=256, height=256, frames=9))
        result = job["unit_records"][0]["result"]
        files = [Path(folder.name) / name for name in ("whole", "first", "rest", "headers")]

        def curl(*arguments):
            done = run("curl", "-sS", "-D", files[3], "-w", "%{http_code}", *arguments, result["url"])
            self.assertEqual(done.returncode, 0, done.stderr)
            return int(done.stdout[-3:]), files[3].read_text().lower()

        self.assertEqual(curl("-o", files[0])[0], 200)
        whole = files[0].read_bytes()
        self.assertEqual((len(whole), hashlib.sha256(whole).hexdigest()), (result["bytes"], result["sha256"]))
        status, headers = curl("-o", files[1], "-r", "0-999")
        self.assertEqual(status, 206)
        self.assertIn(f"content-range: bytes 0-999/{len(whole)}", headers)
        status, headers = curl("-o", files[2], "-r", "1000-", "-H", f'If-Range: "{result["sha256"]}"')
        self.assertEqual(status, 206)
        self.assertEqual(files[1].read_bytes() + files[2].read_bytes(), whole)
        files[1].write_bytes(whole[:1000])
        self.assertEqual(curl("-o", files[1], "-C", "-")[0], 206)
        self.assertEqual(files[1].read_bytes(), whole)
        status, headers = curl("-o", "/dev/null", "-r", f"{len(whole)}-")
        self.assertEqual(status, 416)
        self.assertIn(f"content-range: bytes */{len(whole)}", headers)
        status, headers = curl("-I")
        self.assertEqual(status, 200)
        self.assertIn(f"content-length: {len(whole)}", headers)

    @unittest.skipUnless(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
    def test_the_console_plays_the_video(self):
        id = self.client.submit(seed=7, frames=9, fps=3, width=64, height=48)
        self.client.wait(id)
        with Browser() as page:
            page.open(shared.fleet.url + "/")
            card = f"document.querySelector('article[data-id=\"{id}\"] .image video')"
            page.until(f"{card}?.readyState > 0")
            self.assertEqual(page.js(f"[{card}.duration, {card}.videoWidth, {card}.videoHeight]"), [3, 64, 48])
            page.js(f"{card}.parentElement.click()")
            video = "document.querySelector('#viewer video')"
            self.assertTrue(page.until(f"{video}?.readyState > 0 && {video}.controls"))
            page.js(f"{video}.play()")
            page.until(f"{video}.currentTime > 0.1")
            page.js("document.querySelector('#viewer [data-close]').click()")
            page.until(f"{video} === null")
            page.open(shared.fleet.url + "/jobs/" + id)
            page.until("document.querySelector('#images video')?.duration === 3")
            self.assertEqual(page.errors, [])

    @unittest.skipUnless(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
    def test_a_video_from_the_form_with_previews(self):
        shot = lambda name: page.screenshot(Path(os.environ.get("DITFLEET_SCREENSHOTS", folder.name)) / f"console-{name}.png")
        with Browser() as page:
            page.open(shared.fleet.url + "/")
            page.until("document.getElementById('model')?.value === 'video'")
            value = lambda id: page.js(f"(e => e.offsetParent && (e.value || e.placeholder))(document.getElementById('{id}'))")
            self.assertEqual([value("frames"), value("fps")], ["5", "8"])
            page.js("document.getElementById('details').open = true")
            self.assertEqual([value("guidance_scale_2"), value("true_cfg_scale")], ["2", None])
            shot("form")
            page.js("""(() => { const set = (id, v) => document.getElementById(id).value = v;
                set('prompt', 'fault step sleep'); set('num_inference_steps', 20); set('frames', 9); set('fps', 3);
                set('width', 64); set('height', 48); document.getElementById('submit').click(); })()""")
            id = page.until("[...document.querySelectorAll('article')].find(a => a.textContent.includes('fault step sleep'))?.dataset.id")
            image = f"document.querySelector('article[data-id=\"{id}\"] .image.partial img')"
            page.until(f"{image}?.complete && {image}.naturalWidth > 0")  # a preview, while it runs
            shot("preview")
            self.assertEqual(self.client.job(id)["state"], "running")
            page.until(f"document.querySelector('article[data-id=\"{id}\"] .image:not(.partial) video')?.duration === 3")
            self.assertIn("64×48 · 9 frames", page.js(f"document.querySelector('article[data-id=\"{id}\"] .facts').textContent"))
            page.js(f"document.querySelector('article[data-id=\"{id}\"] .image').click()")
            video = "document.querySelector('#viewer video')"
            page.until(f"{video}?.readyState > 0")
            page.js(f"{video}.play()")
            page.until(f"{video}.currentTime > 0.5")
            shot("playing")
            self.assertEqual(page.errors, [])

    def test_the_model_is_listed_with_its_fields(self):
        models = self.client.get("/v1/models").json()["data"]
        self.assertEqual([m["id"] for m in models], ["video"])
        self.assertIn("test-video", json.dumps(models))

    def test_a_job_stores_five_frames(self):
        data = self.video(output_format="webp")
        self.assertEqual(describe(data), ("webp", 32, 32))
        self.assertEqual(frames(data), [125] * 5)
        for kind in ("webp", "mp4"):
            data = self.video(output_format=kind)
            self.assertEqual(data, self.video(output_format=kind))
            self.assertNotEqual(data, self.video(output_format=kind, seed=8))

    def test_the_command_line_saves_the_video(self):
        file = Path(folder.name) / "cli.mp4"
        done = cli("generate", "x", "-o", file, "--seed", "7",
                   env=clean_environment(DITFLEET_URL=shared.fleet.url))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(file.read_bytes(), self.video(prompt="x"))

    def test_previews_of_a_video_are_images(self):
        id = self.client.submit(seed=7, partial_images=2)
        self.client.wait(id)
        previews = [e.data for e in self.client.events(id) if e.type == "preview"]
        self.assertTrue(previews)
        for preview in previews:
            self.assertEqual(preview["media_type"], "image/webp")
            self.assertEqual(describe(self.client.get(preview["url"]).body), ("webp", 32, 32))

    def test_a_video_too_large_for_redis_fails_with_advice(self):
        with Fleet(models={"video": MODEL}, sets=["results.redis_max_bytes=1024"]) as fleet:
            client = Client(fleet.url)
            job = client.wait(client.submit(seed=7, width=256, height=256))
            self.assertEqual((job["state"], job["unit_records"][0]["error"]["code"]), ("failed", "payload_too_large"), job)
            self.assertIn("results.backend: file", job["unit_records"][0]["error"]["message"])

    def test_the_request_decides_frames_and_their_rate(self):
        data = self.video(frames=3, fps=10, width=64, height=16, output_format="webp")
        self.assertEqual((describe(data), frames(data)), (("webp", 64, 16), [100] * 3))

    def test_each_network_uses_its_own_guidance_scale(self):
        first, second, both = (self.video(**{"num_inference_steps": 2, **f}) for f in (
            {"guidance_scale": 5}, {"guidance_scale_2": 5}, {"guidance_scale": 5, "guidance_scale_2": 5}))
        self.assertEqual(len({first, second, both, self.video(num_inference_steps=2)}), 4)
        # With one step the second network never runs.
        self.assertEqual(self.video(num_inference_steps=1), self.video(num_inference_steps=1, guidance_scale_2=5))

    def test_fields_of_other_families_are_refused(self):
        for field, value in (("true_cfg_scale", 2), ("max_sequence_length", 16), ("frames", 10), ("width", 12),
                             ("output_format", "png")):
            with self.subTest(field=field):
                response = self.client.request("POST", "/v1/jobs", {"prompt": "x", field: value})
                self.assertEqual((response.status, response.error["param"]), (400, field), response)


if __name__ == "__main__":
    unittest.main()
