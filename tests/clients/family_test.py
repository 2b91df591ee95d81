"""A model family that only tests have (tests/test_family), from an HTTP request to the stored video: five frames, two
networks that switch halfway and a guidance scale for each."""
import json
import struct
import tempfile
import unittest
from pathlib import Path

from api import Client
from fleet import Shared
from image import describe
from video_model import write_video_model


folder = tempfile.TemporaryDirectory(prefix="ditfleet-family-")
MODEL = Path(folder.name) / "video"
write_video_model(MODEL)
shared = Shared(workers=1, models={"video": MODEL})


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
        self.assertEqual(response.headers["Content-Type"], "image/webp")
        return response.body

    def test_the_model_is_listed_with_its_fields(self):
        models = self.client.get("/v1/models").json()["data"]
        self.assertEqual([m["id"] for m in models], ["video"])
        self.assertIn("test-video", json.dumps(models))

    def test_a_job_stores_five_frames(self):
        data = self.video()
        self.assertEqual(describe(data), ("webp", 32, 32))
        self.assertEqual(frames(data), [125] * 5)
        self.assertEqual(data, self.video())
        self.assertNotEqual(data, self.video(seed=8))

    def test_the_request_decides_frames_and_their_rate(self):
        data = self.video(num_frames=3, frame_rate=10, width=64, height=16)
        self.assertEqual((describe(data), frames(data)), (("webp", 64, 16), [100] * 3))

    def test_each_network_uses_its_own_guidance_scale(self):
        first, second, both = (self.video(**{"num_inference_steps": 2, **f}) for f in (
            {"guidance_scale": 5}, {"guidance_scale_2": 5}, {"guidance_scale": 5, "guidance_scale_2": 5}))
        self.assertEqual(len({first, second, both, self.video(num_inference_steps=2)}), 4)
        # With one step the second network never runs.
        self.assertEqual(self.video(num_inference_steps=1), self.video(num_inference_steps=1, guidance_scale_2=5))

    def test_fields_of_other_families_are_refused(self):
        for field, value in (("true_cfg_scale", 2), ("max_sequence_length", 16), ("num_frames", 10), ("width", 12),
                             ("output_format", "png")):
            with self.subTest(field=field):
                response = self.client.request("POST", "/v1/jobs", {"prompt": "x", field: value})
                self.assertEqual((response.status, response.error["param"]), (400, field), response)


if __name__ == "__main__":
    unittest.main()
