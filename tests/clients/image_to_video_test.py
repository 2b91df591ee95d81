"""Jobs with an image, from the upload to the video, on a tiny image-to-video folder (tests/fixtures/wan/i2v), and both
commands for them."""
import base64
import hashlib
import json
import random
import struct
import unittest
import zlib

from api import Client
from fleet import BIN, ROOT, Shared, cli, run, tiny_model
from image import colours, describe

IMAGES = ROOT / "tests/fixtures/images"
MODEL = ROOT / "tests/fixtures/wan/i2v/model"
EDITS = {name: ROOT / f"tests/fixtures/flux/edit/{name}/model" for name in ("dev", "kontext")}
MODELS = {"i2v": MODEL, "wan": ROOT / "tests/fixtures/wan/two/model", "tiny": tiny_model(), **EDITS}
shared = Shared(workers=1, models=MODELS, sets=["default_model=i2v"])
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = dict(frames=5, size="48x32", num_inference_steps=2, max_sequence_length=16, seed=3)


def png(width, height, rgb=(200, 40, 90)):
    """A PNG of one colour. The rows compress to almost nothing."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(b"\0" + bytes(rgb) * width) for _ in range(height)) + packer.flush()
    return png_of(width, height, rows)


def png_of(width, height, rows):
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
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

    def test_the_size_of_an_image_keeps_to_the_limits_of_the_model(self):
        """Wan2.2#231: a strip, and one that is longer than any video. One step, so that the size is all that counts."""
        fields = {"frames": 1, "num_inference_steps": 1, "max_sequence_length": 16, "output_format": "png"}
        for width, height, size in ((300, 4, (2048, 64)), (4, 300, (64, 2048)), (20000, 20, (2048, 16))):
            job = self.client.wait(self.client.submit(image=base64.b64encode(png(width, height)).decode(), **fields))
            self.assertEqual(describe(self.results(job)[0]), ("png", *size))

    def test_photos_of_telephones(self):
        """48 megapixels are read at half their size. CMYK, BMP and GIF are read, too."""
        self.results(self.end(image=self.upload(png(8064, 6048)).json()["id"]))
        for name in ("cmyk.jpg", "rgb.bmp", "animated.gif"):
            response = self.upload((IMAGES / name).read_bytes())
            self.assertEqual(response.status, 201, response)
            self.results(self.end(image=response.json()["id"]))

    def test_a_large_image_in_json(self):
        """lobehub#14891: more than gateway.max_body_bytes, up to the limit of images."""
        rows = b"".join(b"\0" + random.Random(1).randbytes(3 * 900) for _ in range(900))
        file = png_of(900, 900, zlib.compress(rows, 0))  # 2.4 MB
        text = base64.b64encode(file).decode()
        job = self.end(image=text)
        self.assertEqual(job["spec"]["image"], hashlib.sha256(file).hexdigest())
        video = self.client.request("POST", "/v1/videos", {"prompt": "a", "input_reference": {"image_url": "data:image/png;base64," + text},
                                                           **{k: v for k, v in SMALL.items() if k != "frames"}, "seconds": "0.3"})
        self.assertEqual(video.status, 200, video)
        whole = base64.b64encode(file + bytes(19 << 20)).decode()  # 22 MB of file
        (self.folder / "whole.json").write_text(json.dumps({"prompt": "a", "image": whole}))
        for method, route, message in (
                ("POST", "/v1/jobs", "bytes; results.input_max_bytes is 20971520"),
                ("PATCH", "/v1/loras/x", "larger than 1048576 bytes (gateway.max_body_bytes); send images to POST /v1/uploads")):
            done = run("curl", "-s", "-X", method, "-H", "Content-Type: application/json", "--data-binary",
                       f"@{self.folder / 'whole.json'}", shared.fleet.url + route)
            self.assertIn(message, done.stdout)

    def test_a_form_uploads_a_file(self):
        """bytebin#26: curl -F, as well as --data-binary."""
        file = (IMAGES / "rgb.png").read_bytes()
        for flags in (["-F", f"file=@{IMAGES / 'rgb.png'}"], ["-F", "purpose=vision", "-F", f"image=@{IMAGES / 'rgb.png'}"],
                      ["--data-binary", f"@{IMAGES / 'rgb.png'}", "-H", "Content-Type: image/png"]):
            done = run("curl", "-s", *flags, shared.fleet.url + "/v1/uploads")
            self.assertEqual(json.loads(done.stdout)["id"], hashlib.sha256(file).hexdigest(), done.stdout)
        done = run("curl", "-s", "-F", "file=none", shared.fleet.url + "/v1/uploads")
        self.assertIn("the form has no file; send one, as curl -F file=@FILE does", done.stdout)

    def test_a_video_model_draws_a_picture_on_the_route_of_pictures(self):
        """Wan2GP#507: one frame as PNG, unless the request asks for more."""
        asked = {"prompt": "a", "model": "i2v", "image": base64.b64encode(png(9, 9)).decode(), "num_inference_steps": 1,
                 "max_sequence_length": 16, "size": "48x32", "response_format": "b64_json"}
        for extra, kind in (({}, "png"), ({"output_format": "jpeg"}, "jpeg"), ({"frames": 1}, "png")):
            response = self.client.request("POST", "/v1/images/generations", {**asked, **extra})
            self.assertEqual(response.status, 200, response)
            self.assertEqual(describe(base64.b64decode(response.json()["data"][0]["b64_json"])), (kind, 48, 32))
        response = self.client.request("POST", "/v1/images/generations", {**asked, "frames": 5})
        self.assertEqual(base64.b64decode(response.json()["data"][0]["b64_json"])[4:8], b"ftyp")

    def test_spellings_of_a_request(self):
        """Wan's own sizes, and a byte order mark, as PowerShell writes it."""
        job = self.end(size="48*32", image=base64.b64encode(png(9, 9)).decode())
        self.assertEqual((job["spec"]["width"], job["spec"]["height"]), (48, 32))
        body = b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "model": "tiny"}).encode()
        response = self.client.request("POST", "/v1/jobs", body, {"Content-Type": "application/json"})
        self.assertEqual(response.status, 202, response)

    def test_another_aspect_ratio_is_stretched(self):
        self.results(self.end(image=base64.b64encode(png(10, 300)).decode()))

    def test_wrong_images_are_refused_at_once(self):
        for body, status, message in (
                (b"GIF89a", 400, "the image is a damaged or unsupported GIF file: the file is truncated"),
                (b"", 400, "the image is empty"),
                (png(20000, 8000), 400, "the image is 20000x8000; a file of its kind must have 1 to 134217728 pixels")):
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
                (base64.b64encode(b"hello").decode(), "the image is not a PNG, JPEG, WebP, BMP or GIF file"),
                ("0" * 64, "is not stored, or has expired; upload it again")):
            error = self.refusal(400, image=image)
            self.assertIn(message, error["message"])
            self.assertEqual(error["param"], "image")
        self.assertEqual(self.upload(b"{}", "application/json").status, 415)

    def test_models_take_an_image_or_refuse_it(self):
        self.assertIn("image is missing; model 'i2v' needs it", self.refusal(400)["message"])
        error = self.refusal(400, model="wan", image=base64.b64encode(png(9, 9)).decode())
        self.assertIn("does not apply to model 'wan'", error["message"])

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
        self.assertIn("--image: the image is not a PNG, JPEG, WebP, BMP or GIF file", done.stderr)

    def test_both_commands_edit(self):
        """The same image from the service and without it, of image to image, inpainting and Kontext."""
        pictures = ROOT / "tests/fixtures/pictures"
        image, mask = ("--image", pictures / "photo.png"), ("--mask", pictures / "mask.png")
        flags = ["--steps", "3", "--max-sequence-length", "16", "--seed", "3", "--size", "64x48"]
        seen = set()
        for model, extra in (("dev", [*image]), ("dev", [*image, "--strength", "0.9"]), ("dev", [*image, *mask]),
                             ("kontext", [*image, "--no-auto-resize"])):
            out, own = self.folder / "out.png", self.folder / "own.png"
            done = cli("generate", "a cat", "--url", shared.fleet.url, "--model", model, "-o", out, *flags, *extra)
            self.assertEqual(done.returncode, 0, done.stderr)
            done = run(BIN / "ditfleet-worker", "generate", "--model", EDITS[model], "--prompt", "a cat", *flags, *extra,
                       "--device", "cpu", "--out", own)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(out.read_bytes(), own.read_bytes(), extra)
            seen.add(own.read_bytes())
        self.assertEqual(len(seen), 4)
        worker = [BIN / "ditfleet-worker", "generate", "--model", EDITS["dev"], "--prompt", "a", "--device", "cpu", "--out", out]
        for extra, message in (([*image, *image], "--image: images has 2 images; model"),
                               ([*image, "--strength", "0"], "--strength: strength is 0"),
                               ([*mask], "--mask: mask is given without image"),
                               ([*image, "--no-auto-resize"], "--no-auto-resize: auto_resize does not apply to model")):
            for command in ([BIN / "ditfleet", "generate", "a", "--url", shared.fleet.url, "--model", "dev"], worker):
                done = run(*command, *flags, *extra)
                self.assertEqual(done.returncode, 2, done)
                self.assertIn(message, done.stderr)


if __name__ == "__main__":
    unittest.main()
