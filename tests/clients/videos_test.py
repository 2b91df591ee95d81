"""The videos API with the unmodified `openai` client, and videos among images while a worker is killed."""
import base64
import hashlib
import json
import os
import shutil
import signal
import struct
import tempfile
import unittest
import zlib
from pathlib import Path

from fleet import ROOT, Fleet, Shared, need, run, tiny_model, until

try:
    import openai
except ImportError:
    need(False, "the openai package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")
need(shutil.which("ffprobe"), "ffmpeg is not installed (tests/packages.txt)")

from api import Client
from video_model import write_video_model

FIRST, SECOND = "sk-ditfleet-first", "sk-ditfleet-second"
CONFIG = "keys:\n" + "".join(f"  - {{tenant: {tenant}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}\n"
                             for tenant, key in (("first", FIRST), ("second", SECOND)))
folder = tempfile.TemporaryDirectory(prefix="ditfleet-videos-")
FOLDER = Path(folder.name)
write_video_model(FOLDER / "video")
MODELS = {"video": FOLDER / "video", "wan": ROOT / "tests/fixtures/wan/two/model", "i2v": ROOT / "tests/fixtures/wan/i2v/model", "tiny": tiny_model()}
shared = Shared(workers=2, models=MODELS, config=CONFIG, sets=["default_model=video"])
SLOW = "fault step sleep"  # 200 ms per step, of the test family


def setUpModule():
    shared.start()


def tearDownModule():
    shared.stop()
    folder.cleanup()


def client(key=FIRST, **options):
    return openai.OpenAI(base_url=shared.fleet.url + "/v1", api_key=key, timeout=60, **options)


def png(width, height):
    """Returns a grey PNG file of a byte per pixel."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = (b"\0" + b"\x80" * width) * height
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b""))


def probe(data):
    """Returns codec, size, number of frames and seconds of an MP4 file."""
    file = FOLDER / "probed.mp4"
    file.write_bytes(data)
    probed = run("ffprobe", "-v", "error", "-count_frames", "-of", "json", "-show_streams", file)
    stream = json.loads(probed.stdout)["streams"][0]
    return (stream["codec_name"], f"{stream['width']}x{stream['height']}", int(stream["nb_read_frames"]), float(stream["duration"]))


class Videos(unittest.TestCase):
    def setUp(self):
        self.videos = client().videos
        self.http = Client(shared.fleet.url, FIRST)

    def test_create_poll_and_download(self):
        video = self.videos.create_and_poll(model="video", prompt="a red circle", seconds="1", size="64x48", poll_interval_ms=50)
        self.assertEqual((video.object, video.status, video.progress, video.model, video.prompt, video.error),
                         ("video", "completed", 100, "video", "a red circle", None), video)
        self.assertEqual((video.seconds, video.size), ("1", "64x48"))
        self.assertLessEqual(video.created_at, video.completed_at)
        self.assertEqual(video.expires_at - video.completed_at, 3600)  # queue.retention_ms
        content = self.videos.download_content(video.id)
        self.assertEqual(content.response.headers["Content-Type"], "video/mp4")
        self.assertEqual(probe(content.read()), ("h264", "64x48", 8, 1.0))
        self.assertEqual(self.http.job(video.id)["state"], "succeeded")  # it is a job

    def test_seconds_become_the_nearest_number_of_frames_that_the_model_accepts(self):
        extra = {"num_inference_steps": 2, "max_sequence_length": 16, "seed": 7}
        video = self.videos.create_and_poll(model="wan", prompt="a red circle", seconds="0.5", size="32x48", extra_body=extra, poll_interval_ms=50)
        self.assertEqual((video.status, video.seconds), ("completed", "0.6"), video)  # 8 frames are none of 5, 9, 13
        self.assertEqual(probe(self.videos.download_content(video.id).read()), ("h264", "32x48", 9, 9 / 16))
        spec = self.http.job(video.id)["spec"]
        self.assertEqual((spec["frames"], spec["num_inference_steps"], spec["seed"]), (9, 2, 7))

    def test_a_video_begins_with_its_input_reference(self):
        extra = {"num_inference_steps": 2, "max_sequence_length": 16, "seed": 7}
        make = lambda **more: self.videos.create_and_poll(model="i2v", prompt="x", seconds="0.3", size="48x32", poll_interval_ms=50, extra_body=extra, **more)
        video = make(input_reference=("first.png", png(48, 32), "image/png"))
        self.assertEqual((video.status, video.size), ("completed", "48x32"), video)
        content = self.videos.download_content(video.id).read()
        self.assertEqual(probe(content)[:3], ("h264", "48x32", 5))
        data = "data:image/png;base64," + base64.b64encode(png(48, 32)).decode()
        same = self.http.request("POST", "/v1/videos", {"model": "i2v", "prompt": "x", "seconds": "0.3", "size": "48x32", **extra, "input_reference": {"image_url": data}})
        self.assertEqual(same.status, 200, same)
        self.http.wait(same.json()["id"])
        self.assertEqual(self.http.get(f"/v1/videos/{same.json()['id']}/content").body, content)
        with self.assertRaises(openai.BadRequestError) as refused:
            make()
        self.assertIn("needs it", refused.exception.message)

    def test_a_remix_has_another_prompt_and_the_same_seed(self):
        extra = {"num_inference_steps": 2, "max_sequence_length": 16}
        first = self.videos.create_and_poll(model="i2v", prompt="x", seconds="0.3", size="48x32", extra_body=extra, poll_interval_ms=50,
                                            input_reference=("first.png", png(48, 32), "image/png"))
        self.assertEqual((first.status, first.remixed_from_video_id), ("completed", None))
        remix = self.videos.remix(first.id, prompt="a red circle")
        self.assertEqual((remix.prompt, remix.remixed_from_video_id, remix.size, remix.seconds),
                         ("a red circle", first.id, first.size, first.seconds))
        specs = [self.http.wait(id)["spec"] for id in (first.id, remix.id)]
        self.assertEqual({**specs[0], "prompt": "a red circle", "remixed_from": first.id}, specs[1])
        self.assertEqual(self.videos.retrieve(remix.id).remixed_from_video_id, first.id)
        again = self.videos.remix(remix.id, prompt="x")
        self.assertEqual(again.remixed_from_video_id, remix.id)
        self.http.wait(again.id)
        self.assertEqual(*(self.videos.download_content(id).read() for id in (first.id, again.id)))
        with self.assertRaises(openai.NotFoundError):
            client(SECOND).videos.remix(first.id, prompt="x")
        failed = self.videos.create_and_poll(model="video", prompt="fault text memory", poll_interval_ms=50)
        with self.assertRaises(openai.BadRequestError) as refused:
            self.videos.remix(failed.id, prompt="x")
        self.assertIn("is failed; only a completed video can be remixed", refused.exception.message)

    def test_json_and_the_default_model(self):
        answer = self.http.request("POST", "/v1/videos", {"prompt": "x", "seconds": "0.5", "fps": 4})
        self.assertEqual(answer.status, 200, answer)
        video = answer.json()
        self.assertEqual((video["model"], video["seconds"], video["size"]), ("video", "0.5", "32x32"), video)
        self.assertIn(video["status"], ("queued", "in_progress"), "a worker may have begun")
        self.assertEqual((video["completed_at"], video["expires_at"], video["error"]), (None, None, None))
        self.http.wait(video["id"])
        self.assertEqual(probe(self.http.get(f"/v1/videos/{video['id']}/content").body), ("h264", "32x32", 2, 0.5))

    def test_a_range_of_the_content(self):
        id = self.videos.create_and_poll(model="video", prompt="x", poll_interval_ms=50).id
        whole = self.http.get(f"/v1/videos/{id}/content").body
        part = self.http.get(f"/v1/videos/{id}/content", Range="bytes=10-19")
        self.assertEqual((part.status, part.headers["Content-Range"], part.body), (206, f"bytes 10-19/{len(whole)}", whole[10:20]))
        self.assertEqual(self.http.get(f"/v1/videos/{id}/content", Range=f"bytes={len(whole)}-").status, 416)
        with self.assertRaises(openai.BadRequestError) as refused:
            self.videos.download_content(id, variant="thumbnail")
        self.assertEqual(refused.exception.param, "variant")

    def test_progress_and_deletion_while_it_runs(self):
        id = self.videos.create(model="video", prompt=SLOW, extra_body={"num_inference_steps": 50}).id
        running = until(lambda: (v := self.videos.retrieve(id)).progress > 5 and v, "progress")
        self.assertEqual(running.status, "in_progress")
        self.assertLess(running.progress, 100)
        self.assertEqual([v.status for v in self.videos.list() if v.id == id], ["in_progress"])
        self.assertTrue(self.videos.delete(id).deleted)
        self.assertEqual(self.http.wait(id)["state"], "canceled")
        with self.assertRaises(openai.NotFoundError):
            self.videos.retrieve(id)
        self.assertNotIn(id, [v.id for v in self.videos.list()])

    def test_progress_while_a_video_is_decoded(self):
        # Decoding sleeps for 200 ms, far longer than the steps take.
        extra = {"num_inference_steps": 8, "frames": 3}
        make = lambda: self.videos.create(model="video", prompt="fault decode sleep", extra_body=extra).id
        for _ in range(2):
            self.http.wait(make())
        seen = []
        for _ in range(3):
            id = make()
            while (video := self.videos.retrieve(id)).status != "completed":
                job = self.http.job(id)
                if job["state"] == "running":
                    seen.append((job["progress"], job["unit_records"][0]["phase"], video.progress))
        decoding = [(progress, percent) for progress, phase, percent in seen if phase == "decoding"]
        self.assertGreater(len(decoding), 5, seen)
        self.assertLess(min(p for p, _ in decoding), 0.8, seen)
        self.assertLess(sum(p >= 0.99 for p, _ in decoding), 0.8 * len(decoding), seen)
        self.assertLess(min(percent for _, percent in decoding), 80, seen)

    def test_a_video_that_fails(self):
        video = self.videos.create_and_poll(model="video", prompt="fault text memory", poll_interval_ms=50)
        self.assertEqual((video.status, video.error.code), ("failed", "out_of_memory"), video)
        self.assertIn("out of memory", video.error.message)
        self.assertEqual([v.error.code for v in self.videos.list() if v.id == video.id], ["out_of_memory"])
        self.assertEqual(self.videos.delete(video.id).object, "video.deleted")

    def test_list_and_delete(self):
        videos = client(SECOND).videos
        self.assertEqual(list(videos.list()), [])
        ids = [videos.create_and_poll(model="video", prompt="x", extra_body={"frames": 1 + i}, poll_interval_ms=50).id for i in range(5)]
        image = Client(shared.fleet.url, SECOND)
        image.wait(image.submit(model="tiny", width=32, height=32, num_inference_steps=1, max_sequence_length=16))
        self.assertEqual([v.id for v in videos.list(order="asc", limit=2)], ids)  # three pages
        self.assertEqual([v.id for v in videos.list(limit=2)], ids[::-1])
        page = videos.list(limit=2)
        self.assertEqual(([v.id for v in page.data], page.has_more), (ids[:2:-1], True))
        self.assertEqual([v.id for v in videos.list(after=ids[2])], ids[1::-1])
        self.assertEqual([v.id for v in videos.list(after=ids[2], order="asc")], ids[3:])
        first = videos.retrieve(ids[0])
        url = image.job(first.id)["unit_records"][0]["result"]["url"]
        for video in videos.list(limit=2):  # the last of a page is gone when the next is read
            self.assertTrue(videos.delete(video.id).deleted)
        self.assertEqual(list(videos.list()), [])
        for path in (f"/v1/videos/{first.id}", f"/v1/videos/{first.id}/content", f"/v1/jobs/{first.id}", url):
            self.assertEqual(image.get(path).status, 404)
        with self.assertRaises(openai.NotFoundError):
            videos.delete(first.id)
        self.assertEqual([j["spec"]["model"] for j in image.get("/v1/jobs").json()["jobs"]], ["tiny"])

    def test_other_tenants_and_images_are_not_found(self):
        video = self.videos.create_and_poll(model="video", prompt="x", poll_interval_ms=50).id
        image = self.http.submit(model="tiny", width=32, height=32, num_inference_steps=1, max_sequence_length=16)
        for videos, id in ((client(SECOND).videos, video), (self.videos, image), (self.videos, "none")):
            for call in (videos.retrieve, videos.download_content, videos.delete):
                with self.subTest(id=id, call=call), self.assertRaises(openai.NotFoundError):
                    call(id)
        self.assertEqual(self.http.wait(image)["state"], "succeeded")

    def test_idempotency_key(self):
        headers = {"Idempotency-Key": "the-same-video"}
        one, two = (self.videos.create(model="video", prompt="x", extra_headers=headers) for _ in range(2))
        self.assertEqual(one.id, two.id)
        with self.assertRaises(openai.UnprocessableEntityError):
            self.videos.create(model="video", prompt="y", extra_headers=headers)

    def test_an_invalid_field_is_a_bad_request_that_names_it(self):
        cases = [
            ({"model": "sora-2"}, openai.NotFoundError, "model", "use i2v or video or wan"),
            ({"model": "tiny"}, openai.BadRequestError, "model", "generates images"),
            ({"seconds": "four"}, openai.BadRequestError, "seconds", "number"),
            ({"seconds": "0"}, openai.BadRequestError, "seconds", "above 0"),
            ({"seconds": "nan"}, openai.BadRequestError, "seconds", "number"),
            ({"seconds": "4"}, openai.BadRequestError, "seconds", "1 to 9 frames, at most 1.1 seconds"),
            ({"seconds": "1e300"}, openai.BadRequestError, "seconds", "at most 1.1 seconds"),
            ({"seconds": "1", "extra_body": {"frames": 5}}, openai.BadRequestError, "seconds", "frames"),
            ({"size": "65x48"}, openai.BadRequestError, "size", "multiple of 8"),
            ({"size": "720x1280"}, openai.BadRequestError, "size", "8 to 256"),
            ({"size": "wide"}, openai.BadRequestError, "size", "1024x1024"),
            ({"extra_body": {"n": 2}}, openai.BadRequestError, "n", "not a field"),
            ({"extra_body": {"num_inference_steps": "many"}}, openai.BadRequestError, "num_inference_steps", "integer"),
            ({"extra_body": {"stpes": 3}}, openai.BadRequestError, "stpes", "openapi"),
            ({"input_reference": ("a.png", b"\x89PNG\r\n\r\n--x", "image/png")}, openai.BadRequestError, "input_reference", "image does not apply to model"),
            ({"input_reference": ("a.png", png(1200, 1200), "image/png")}, openai.BadRequestError, "input_reference", "image does not apply to model 'video'"),
        ]
        for fields, kind, param, right in cases:
            with self.subTest(fields=fields):
                with self.assertRaises(kind) as refused:
                    client(max_retries=0).videos.create(**{"model": "video", "prompt": "x", **fields})
                error = refused.exception
                self.assertEqual((error.param, error.type), (param, "invalid_request_error"), error)
                self.assertIn(right, error.message)

        for reference, right in (({"image_url": "https://example.com/a.png"}, "image does not apply to model"), ({"image_url": "a", "file_id": "b"}, "either"), (5, "data URL")):
            answer = self.http.request("POST", "/v1/videos", {"prompt": "x", "input_reference": reference})
            self.assertEqual((answer.status, answer.error["param"]), (400, "input_reference"), answer)
            self.assertIn(right, answer.error["message"])

    def test_malformed_forms(self):
        good = '--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        self.assertEqual(self.http.request("POST", "/v1/videos", good, kind).status, 200)
        self.assertEqual(self.http.request("POST", "/v1/videos", "ignored\r\n" + good, {"Content-Type": 'multipart/form-data; boundary="b"'}).status, 200)
        for body, headers, right in ((good, {"Content-Type": "multipart/form-data"}, "boundary"),
                                     (good.replace("--b--", "--b"), kind, "incomplete"),
                                     (good.replace("name=", "nome="), kind, "no name"),
                                     (good.replace("x\r\n", "x\r\n" + good[:-7]), kind, "twice"),
                                     (good.replace('"prompt"', '"prompt"; filename="a"'), kind, "not a file"),
                                     (good[:-7] * 65 + good, kind, "64 parts"), ("", kind, "incomplete")):
            answer = self.http.request("POST", "/v1/videos", body, headers)
            self.assertEqual((answer.status, answer.error["type"]), (400, "invalid_request_error"), answer)
            self.assertIn(right, answer.error["message"])
        self.assertEqual(self.http.request("POST", "/v1/videos", good, {"Content-Type": "text/plain"}).status, 415)


class Mixed(unittest.TestCase):
    def test_images_and_videos_survive_a_killed_worker(self):
        with Fleet(workers=2, models=MODELS) as fleet:
            http = Client(fleet.url, timeout=120)
            videos = [http.submit(model="video", prompt=SLOW, frames=4 + i, num_inference_steps=10, seed=i) for i in range(4)]
            videos += [http.submit(model="wan", frames=9, width=32, height=32, num_inference_steps=4, max_sequence_length=16) for _ in range(3)]
            images = [http.submit(model="tiny", width=32, height=32, num_inference_steps=4, max_sequence_length=16) for _ in range(6)]

            def running():
                """The pid of a worker in the middle of a video."""
                workers = {w["name"]: w["pid"] for w in http.get("/v1/workers").json()["workers"]}
                for id in videos:
                    for unit in http.job(id)["unit_records"]:
                        if unit["state"] == "running" and 2 <= unit["step"] <= 6:
                            return id, workers.get(unit["worker"])
            killed, pid = until(lambda: (found := running()) and found[1] and found, "a video runs")
            os.kill(pid, signal.SIGKILL)
            for id in videos + images:
                job = http.wait(id)
                self.assertEqual(job["state"], "succeeded", job)
                with http.events(id) as stream:
                    self.assertEqual(sum(event.ends_job for event in stream), 1, id)
            self.assertGreater(http.job(killed)["unit_records"][0]["attempt"], 1)
            for id in videos:
                spec = http.job(id)["spec"]
                self.assertEqual(probe(http.get(f"/v1/videos/{id}/content").body),
                                 ("h264", f"{spec['width']}x{spec['height']}", spec["frames"], spec["frames"] / spec["fps"]))


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")  # the client calls its own API deprecated
