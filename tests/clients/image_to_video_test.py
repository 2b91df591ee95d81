"""Jobs with an image, from the upload to the video, on a tiny image-to-video folder (tests/fixtures/wan/i2v), and both
commands for them."""
import base64
import hashlib
import struct
import unittest
import zlib
from pathlib import Path

from api import Client
from fleet import BIN, ROOT, Shared, cli, run, tiny_model
from image import colours, describe

IMAGES = ROOT / "tests/fixtures/images"
MODEL = ROOT / "tests/fixtures/wan/i2v/model"
shared = Shared(workers=1, models={"i2v": MODEL, "tiny": tiny_model()}, sets=["default_model=i2v"])
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = dict(frames=5, size="48x32", num_inference_steps=2, max_sequence_length=16, seed=3)


def png(width, height, rgb=(200, 40, 90)):
    """A PNG of one colour. The rows compress to almost nothing."""
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    rows = zlib.compress((b"\0" + bytes(rgb) * width) * height, 9)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


class TestImages(unittest.TestCase):
    def setUp(self):
        self.client = Client(shared.fleet.url)
        self.folder = shared.fleet.folder / self.id()
        self.folder.mkdir()

    def upload(self, file, type="application/octet-stream"):
        return self.client.request("POST", "/v1/uploads", file, {"Content-Type": type})

    def refusal(self, status, **fields):
        response = self.client.request("POST", "/v1/jobs", {"prompt": "a", **SMALL, **fields})
        self.assertEqual(response.status, status, response)
        return response.error

    def end(self, **fields):
        return self.client.wait(self.client.submit("a cat walks", **{**SMALL, **fields}))

    def results(self, job):
        self.assertEqual(job["state"], "succeeded", job)
        return [self.client.get(unit["result"]["url"]).body for unit in job["unit_records"]]

    def test_an_upload_has_the_id_of_its_bytes(self):
        file = (IMAGES / "turned6.jpg").read_bytes()
        for type in ("image/jpeg", "application/octet-stream"):
            response = self.upload(file, type)
            self.assertEqual(response.status, 201, response)
            expected = {"id": hashlib.sha256(file).hexdigest(), "object": "upload", "bytes": len(file),
                        "media_type": "image/jpeg", "width": 7, "height": 11}
            self.assertEqual({key: response.json()[key] for key in expected}, expected)

    def test_the_ways_to_send_an_image_give_one_video(self):
        file = (IMAGES / "rgb.png").read_bytes()
        text = base64.b64encode(file).decode()
        videos = [self.results(self.end(image=image)) for image in
                  (self.upload(file).json()["id"], text, "data:image/png;base64," + text)]
        self.assertEqual(videos[0], videos[1])
        self.assertEqual(videos[0], videos[2])
        other = self.results(self.end(image=base64.b64encode(png(37, 23)).decode()))
        self.assertNotEqual(videos[0], other)

    def test_the_job_has_only_the_digest_and_all_its_videos_share_it(self):
        file = png(20, 20)
        job = self.end(image=base64.b64encode(file).decode(), n=2)
        self.assertEqual(job["spec"]["image"], hashlib.sha256(file).hexdigest())
        first, second = self.results(job)
        self.assertNotEqual(first, second)

    def test_an_image_gives_the_size_upright(self):
        id = self.upload((IMAGES / "turned6.jpg").read_bytes()).json()["id"]
        fields = {key: value for key, value in SMALL.items() if key != "size"}
        job = self.client.wait(self.client.submit(image=id, output_format="png", **{**fields, "frames": 1}))
        # sqrt(832 · 480 · 11 / 7) = 792, sqrt(832 · 480 · 7 / 11) = 504
        self.assertEqual(describe(self.results(job)[0]), ("png", 496, 784))

    def test_another_aspect_ratio_is_stretched(self):
        self.results(self.end(image=base64.b64encode(png(10, 300)).decode()))

    def test_wrong_images_are_refused_at_once(self):
        for body, status, message in (
                (b"GIF89a", 400, "the image is not a PNG, JPEG or WebP file"),
                (b"", 400, "the image is empty"),
                (png(8000, 5000), 400, "the image is 8000x5000; it must have 1 to 33554432 pixels")):
            response = self.upload(body)
            self.assertEqual(response.status, status, response)
            self.assertIn(message, response.error["message"])
        large = self.folder / "large.png"
        large.write_bytes(png(8, 8) + bytes(20 << 20))
        done = run("curl", "-s", "--data-binary", f"@{large}", "-H", "Content-Type: image/png",
                   shared.fleet.url + "/v1/uploads")
        self.assertIn("the body has more than 20971520 bytes", done.stdout)
        for image, message in (
                ("https://example.com/a.png", "image is a URL, but no URL is fetched"),
                ("not base64!", "image must be an image in base64"),
                ("data:image/png,abc", "image is a data URL without base64"),
                (base64.b64encode(b"hello").decode(), "the image is not a PNG, JPEG or WebP file"),
                ("0" * 64, "is not stored, or has expired; upload it again")):
            error = self.refusal(400, image=image)
            self.assertIn(message, error["message"])
            self.assertEqual(error["param"], "image")
        self.assertEqual(self.upload(b"{}", "application/json").status, 415)

    def test_models_take_an_image_or_refuse_it(self):
        self.assertIn("image is missing; model 'i2v' needs it", self.refusal(400)["message"])
        error = self.refusal(400, model="tiny", image=base64.b64encode(png(9, 9)).decode())
        self.assertIn("does not apply to model 'tiny'", error["message"])

    def test_a_truncated_file_is_refused_or_fails_its_job(self):
        refused = self.upload((IMAGES / "rgb.png").read_bytes()[:-20])  # the lengths of its chunks tell
        self.assertEqual(refused.status, 400, refused)
        self.assertIn("the image is a damaged or unsupported PNG file: the file is truncated", refused.error["message"])
        for name in ("rgb.jpg", "lossless.webp"):
            file = (IMAGES / name).read_bytes()
            job = self.end(image=self.upload(file[:len(file) - 20]).json()["id"])
            self.assertEqual(job["state"], "failed", job)
            self.assertIn("the image is a damaged or unsupported", job["unit_records"][0]["error"]["message"])
            self.assertEqual(job["unit_records"][0]["attempt"], 1)

    def test_both_commands_take_a_file(self):
        video, frames = self.folder / "video.mp4", self.folder / "frames"
        flags = ["--frames", "5", "--size", "48x32", "--steps", "2", "--max-sequence-length", "16", "--seed", "3",
                 "--guidance-2", "2.5", "--image", IMAGES / "rgb.png"]
        done = cli("generate", "a cat walks", "--url", shared.fleet.url, "-o", video, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        own = self.folder / "own.mp4"
        done = run(BIN / "ditfleet-worker", "generate", "--model", MODEL, "--prompt", "a cat walks", *flags, "-n", "2",
                   "--device", "cpu", "--frames-dir", frames, "--out", own)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.folder / "own-1.mp4").read_bytes(), video.read_bytes())
        for folder in ("frames-1", "frames-2"):
            files = sorted((self.folder / folder).iterdir())
            self.assertEqual([file.name for file in files], [f"frame_{i:04}.png" for i in range(5)])
            self.assertGreater(len(colours(files[4].read_bytes())), 10)
        done = cli("generate", "a", "--url", shared.fleet.url, "--image", ROOT / "README.md", *flags[:-2])
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("--image: the image is not a PNG, JPEG or WebP file", done.stderr)


if __name__ == "__main__":
    unittest.main()
