"""The unmodified `openai` client against a running fleet."""
import asyncio
import base64
import hashlib
import struct
import threading
import unittest
import urllib.error
import urllib.request
import zlib

from fleet import ROOT, Shared, need, tiny_model, until

try:
    import openai
except ImportError:
    need(False, "the openai package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")

from api import Client
from image import describe

KEY = "sk-ditfleet-first"


CONFIG = f"keys:\n  - {{tenant: first, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}}}\n"
PICTURES = ROOT / "tests/fixtures/pictures"
# dev takes one image, klein up to four, and wan none.
MODELS = {"tiny": tiny_model(), "dev": ROOT / "tests/fixtures/flux/edit/dev/model",
          "klein": ROOT / "tests/fixtures/flux2/edit/klein/model", "wan": ROOT / "tests/fixtures/wan/two/model"}
shared = Shared(workers=2, models=MODELS, config=CONFIG, sets=["default_model=tiny"])
setUpModule, tearDownModule = shared.start, shared.stop
SMALL = {"num_inference_steps": 2, "max_sequence_length": 16}
LONG = {"num_inference_steps": 200}  # some seconds


PHOTO = describe((PICTURES / "photo.png").read_bytes())[1:]


def half_transparent(width, height, right=False):
    """A PNG whose left or right half is transparent."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    row = b"".join(bytes((9, 9, 9, 0 if (x >= width // 2) == right else 255)) for x in range(width))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress((b"\0" + row) * height)) + chunk(b"IEND", b""))


def client(key=KEY, **options):
    return openai.OpenAI(base_url=shared.fleet.url + "/v1", api_key=key, timeout=60, **options)


class Generate(unittest.TestCase):
    def generate(self, **fields):
        extra = {**SMALL, **fields.pop("extra_body", {})}
        fields.setdefault("size", "32x48")
        return client().images.generate(model="tiny", prompt="a red circle", extra_body=extra, **fields)

    def test_base64(self):
        answer = self.generate(response_format="b64_json", extra_body={"seed": 7})
        self.assertEqual(len(answer.data), 1)
        self.assertIsNone(answer.data[0].url)
        self.assertEqual(describe(base64.b64decode(answer.data[0].b64_json)), ("png", 32, 48))
        self.assertEqual((answer.size, answer.output_format, answer.background), ("32x48", "png", "opaque"))
        self.assertGreater(answer.created, 1_600_000_000)

    def test_a_url_needs_no_key(self):
        answer = self.generate(response_format="url")
        self.assertIsNone(answer.data[0].b64_json)
        with urllib.request.urlopen(answer.data[0].url) as response:  # as a browser's <img> fetches it
            self.assertEqual(response.headers["Content-Type"], "image/png")
            self.assertEqual(describe(response.read()), ("png", 32, 48))

    def test_a_changed_url_is_refused(self):
        url = self.generate(response_format="url").data[0].url
        last = "0" if url[-1] != "0" else "1"
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url[:-1] + last)
        self.assertEqual(refused.exception.code, 401)

    def test_formats(self):
        for name in ("png", "jpeg", "webp"):
            with self.subTest(name):
                answer = self.generate(response_format="b64_json", output_format=name, output_compression=80)
                self.assertEqual(describe(base64.b64decode(answer.data[0].b64_json)), (name, 32, 48))
                self.assertEqual(answer.output_format, name)

    def test_compression_makes_smaller_files(self):
        sizes = [len(self.generate(response_format="b64_json", output_format="jpeg", output_compression=q, size="64x64",
                                   extra_body={"seed": 1}).data[0].b64_json) for q in (5, 100)]
        self.assertLess(sizes[0], sizes[1])

    def test_four_images_differ_and_repeat(self):
        first = self.generate(n=4, response_format="b64_json", extra_body={"seed": 11})
        images = [d.b64_json for d in first.data]
        self.assertEqual(len(set(images)), 4)
        self.assertEqual([d.seed for d in first.data], [11, 12, 13, 14])  # our extension of the OpenAI response
        again = self.generate(response_format="b64_json", extra_body={"seed": 13})
        self.assertEqual(again.data[0].b64_json, images[2])

    def test_stream_with_partial_images(self):
        with self.generate(stream=True, partial_images=2, size="64x64",
                           extra_body={"num_inference_steps": 6}) as stream:
            events = list(stream)
        partial, last = events[:-1], events[-1]
        self.assertEqual([e.type for e in partial], ["image_generation.partial_image"] * 2)
        self.assertEqual([e.partial_image_index for e in partial], [0, 1])
        for event in partial:
            describe(base64.b64decode(event.b64_json))
            self.assertEqual(event.size, "64x64")
        self.assertEqual(last.type, "image_generation.completed")
        self.assertEqual(describe(base64.b64decode(last.b64_json)), ("png", 64, 64))

    def test_stream_and_plain_call_give_the_same_image(self):
        with self.generate(stream=True, extra_body={"seed": 5}) as stream:
            streamed = [e.b64_json for e in stream]
        plain = self.generate(response_format="b64_json", extra_body={"seed": 5})
        self.assertEqual(streamed, [plain.data[0].b64_json])

    def test_the_prompt_is_unchanged(self):
        for prompt in ("", "雪 🐎 Würfel </s>", "word " * 3000):
            with self.subTest(prompt[:20]):
                answer = client().images.generate(model="tiny", prompt=prompt, size="16x16", response_format="b64_json",
                                                  extra_body=SMALL)
                describe(base64.b64decode(answer.data[0].b64_json))

    def test_idempotency_key_of_the_client(self):
        headers = {"Idempotency-Key": "one-and-the-same"}
        one, two = (client().images.generate(model="tiny", prompt="a ring", size="16x16", extra_body=SMALL,
                                             extra_headers=headers) for _ in range(2))
        self.assertEqual(one.job_id, two.job_id)
        with self.assertRaises(openai.UnprocessableEntityError):
            client().images.generate(model="tiny", prompt="another ring", size="16x16", extra_body=SMALL,
                                     extra_headers=headers)

    def test_async_client(self):
        async def both():
            async with openai.AsyncOpenAI(base_url=shared.fleet.url + "/v1", api_key=KEY, timeout=60) as c:
                return await asyncio.gather(*(c.images.generate(model="tiny", prompt="a star", size="16x16", extra_body=SMALL)
                                              for _ in range(3)))
        self.assertEqual(len({a.job_id for a in asyncio.run(both())}), 3)


class Edit(unittest.TestCase):
    def setUp(self):
        self.rest = Client(shared.fleet.url, KEY)

    def edit(self, image="photo.png", **fields):
        """Several names of `image` are several images."""
        files = [PICTURES / image] if isinstance(image, str) else [PICTURES / name for name in image]
        extra = {**SMALL, "seed": 7, **fields.pop("extra_body", {})}
        fields = {"model": "dev", "prompt": "a red circle", "size": "64x48", "response_format": "b64_json", **fields}
        if isinstance(fields.get("mask"), str):
            fields["mask"] = PICTURES / fields["mask"]
        return client(max_retries=0).images.edit(image=files[0] if isinstance(image, str) else files, extra_body=extra, **fields)

    def picture(self, **fields):
        return base64.b64decode(self.edit(**fields).data[0].b64_json)

    def spec(self, answer):
        return self.rest.job(answer.job_id)["spec"]

    def test_an_image_and_a_mask(self):
        mask = half_transparent(*PHOTO)
        plain, masked = self.edit(n=2), self.edit(mask=mask)
        for image in (*plain.data, *masked.data):
            self.assertEqual(describe(base64.b64decode(image.b64_json)), ("png", 64, 48))
        self.assertEqual(len({image.b64_json for image in (*plain.data, *masked.data)}), 3)
        self.assertEqual((plain.size, plain.output_format, plain.background), ("64x48", "png", "opaque"))
        spec = self.spec(masked)
        for field, file in (("image", (PICTURES / "photo.png").read_bytes()), ("mask", mask)):
            self.assertEqual(spec[field], hashlib.sha256(file).hexdigest())
        self.assertEqual(spec["strength"], 0.6)

    def test_what_is_transparent_is_replaced(self):
        left, right = self.picture(mask=half_transparent(*PHOTO)), self.picture(mask=half_transparent(*PHOTO, right=True))
        self.assertEqual(len({left, right, self.picture()}), 3)

    def test_strength_and_other_fields_of_a_form(self):
        weak = self.edit(extra_body={"strength": 0.5, "num_inference_steps": 4, "guidance_scale": 2.5}, output_format="webp",
                         user="me", quality="high", input_fidelity="high", background="auto")
        spec = self.spec(weak)
        self.assertEqual((spec["strength"], spec["num_inference_steps"], spec["guidance_scale"], spec["user"]), (0.5, 4, 2.5, "me"))
        self.assertEqual((weak.output_format, weak.quality), ("webp", "high"))
        self.assertNotEqual(self.picture(extra_body={"strength": 0.5}), self.picture(extra_body={"strength": 1}))

    def test_several_images(self):
        answer = self.edit(image=["wide.png", "tall.jpg", "wide.png"], model="klein")
        self.assertEqual(describe(base64.b64decode(answer.data[0].b64_json)), ("png", 64, 48))
        files = [hashlib.sha256((PICTURES / name).read_bytes()).hexdigest() for name in ("wide.png", "tall.jpg")]
        self.assertEqual(self.spec(answer)["images"], [files[0], files[1], files[0]])
        self.assertNotEqual(answer.data[0].b64_json, self.edit(image="wide.png", model="klein").data[0].b64_json)
        one = self.edit(image=["wide.png"], model="klein")
        self.assertEqual(one.data[0].b64_json, self.edit(image="wide.png", model="klein").data[0].b64_json)

    def test_without_a_size_the_image_gives_it(self):
        size = {"extra_body": {"num_inference_steps": 1}}
        for asked in ("auto", openai.omit):
            answer = self.edit(image="large.png", model="klein", size=asked, **size)
            self.assertEqual(describe(base64.b64decode(answer.data[0].b64_json))[1:], tuple(map(int, answer.size.split("x"))))
            width, height = map(int, answer.size.split("x"))
            self.assertAlmostEqual(width / height, 1300 / 900, delta=0.05)
            self.assertNotIn("width", self.spec(answer))

    def test_stream(self):
        with self.edit(stream=True, partial_images=2, extra_body={"num_inference_steps": 8}) as stream:
            events = list(stream)
        self.assertEqual([e.type for e in events], ["image_edit.partial_image"] * 2 + ["image_edit.completed"])
        self.assertEqual([e.partial_image_index for e in events[:-1]], [0, 1])
        self.assertEqual((events[-1].size, events[0].size), ("64x48", "64x48"))
        self.assertEqual(events[-1].b64_json, self.edit(extra_body={"num_inference_steps": 8}).data[0].b64_json)

    def test_json_and_forms_give_one_image(self):
        url = "data:image/png;base64," + base64.b64encode((PICTURES / "photo.png").read_bytes()).decode()
        id = self.rest.request("POST", "/v1/uploads", (PICTURES / "photo.png").read_bytes(), {"Content-Type": "image/png"}).json()["id"]
        body = {"model": "dev", "prompt": "a red circle", "size": "64x48", "response_format": "b64_json", "seed": 7, **SMALL}
        pictures = {self.edit().data[0].b64_json}
        for route, images in (("edits", {"images": [{"image_url": url}]}), ("edits", {"images": [{"file_id": id}]}),
                              ("edits", {"image": url}), ("generations", {"image": url}), ("generations", {"images": [id]})):
            answer = self.rest.request("POST", "/v1/images/" + route, {**body, **images})
            self.assertEqual(answer.status, 200, answer)
            pictures.add(answer.json()["data"][0]["b64_json"])
        job = self.rest.wait(self.rest.submit(**{k: v for k, v in body.items() if k != "response_format"}, image=id))
        pictures.add(base64.b64encode(self.rest.get(job["unit_records"][0]["result"]["url"]).body).decode())
        self.assertEqual(len(pictures), 1)

    def test_wrong_edits_are_bad_requests_that_name_the_field(self):
        cases = [
            ({"model": "wan"}, "image", "does not apply to model 'wan'"),
            ({"image": ["photo.png", "tall.jpg"]}, "image", "has 2 images; model 'dev' takes 1"),
            ({"image": ["photo.png"] * 5, "model": "klein"}, "image", "it must have 1 to 4 images"),
            ({"image": ["photo.png", "../images/expected.json"], "model": "klein"}, "image[1]", "is not a PNG"),
            ({"mask": "../images/expected.json"}, "mask", "is not a PNG"),
            ({"mask": "mask.png", "model": "klein"}, "mask", "does not apply to model 'klein'"),
            ({"mask": "mask.png"}, "mask", "has no alpha channel"),
            ({"mask": half_transparent(8, 9)}, "mask", "the mask is 8x9 and the image {}x{}".format(*PHOTO)),
            ({"image": "gray.jpg", "model": "klein"}, "image", "both sides must be at least 64 pixels"),
            ({"size": "65x48"}, "size", "multiple"),
            ({"background": "transparent"}, "background", "opaque"),
            ({"extra_body": {"strength": 0}}, "strength", "above 0"),
            ({"extra_body": {"stpes": 3}}, "stpes", "openapi"),
        ]
        for fields, param, right in cases:
            with self.subTest(fields=fields), self.assertRaises(openai.BadRequestError) as refused:
                self.edit(**fields)
            self.assertEqual(refused.exception.param, param, refused.exception)
            self.assertIn(right, refused.exception.message)
        with self.assertRaises(openai.NotFoundError):
            self.edit(model="gpt-image-1")
        none = self.rest.request("POST", "/v1/images/edits", {"model": "dev", "prompt": "x"})
        self.assertEqual((none.status, none.error["param"]), (400, "image"), none)
        answer = self.rest.request("POST", "/v1/images/edits", "x", {"Content-Type": "text/plain"})
        self.assertEqual(answer.status, 415, answer)

    def test_variations_name_the_way_out(self):
        with self.assertRaises(openai.BadRequestError) as refused:
            client(max_retries=0).images.create_variation(image=PICTURES / "photo.png", model="dev")
        self.assertIn("use POST /v1/images/edits", refused.exception.message)


class Errors(unittest.TestCase):
    def test_an_invalid_field_is_a_bad_request_that_names_it(self):
        cases = [
            ({"model": "tinny"}, openai.NotFoundError, "model", "tiny"),
            ({"size": "33x48"}, openai.BadRequestError, "size", "multiple"),
            ({"size": "99999x16"}, openai.BadRequestError, "size", ""),
            ({"size": "wide"}, openai.BadRequestError, "size", "1024x1024"),
            ({"n": 0}, openai.BadRequestError, "n", "1"),
            ({"n": 1000}, openai.BadRequestError, "n", "64"),
            ({"n": "two"}, openai.BadRequestError, "n", "integer"),
            ({"response_format": "gif"}, openai.BadRequestError, "response_format", "b64_json"),
            ({"output_format": "bmp"}, openai.BadRequestError, "output_format", "webp"),
            ({"background": "transparent"}, openai.BadRequestError, "background", "opaque"),
            ({"prompt": 5}, openai.BadRequestError, "prompt", "string"),
            ({"stream": True, "partial_images": 9}, openai.BadRequestError, "partial_images", "3"),
            ({"extra_body": {"num_inference_steps": 0}}, openai.BadRequestError, "num_inference_steps", "1"),
            ({"extra_body": {"guidance_scale": 1e300}}, openai.BadRequestError, "guidance_scale", "100"),
            ({"extra_body": {"stpes": 3}}, openai.BadRequestError, "stpes", "openapi"),
        ]
        for fields, kind, param, right in cases:
            with self.subTest(fields=fields):
                with self.assertRaises(kind) as refused:
                    client(max_retries=0).images.generate(**{"model": "tiny", "prompt": "x", "size": "16x16", **fields})
                error = refused.exception
                self.assertEqual((error.param, error.type), (param, "invalid_request_error"))
                self.assertIn(right, error.message)
                self.assertTrue(error.request_id)

    def test_wrong_key(self):
        with self.assertRaises(openai.AuthenticationError) as refused:
            client("sk-wrong").images.generate(model="tiny", prompt="x")
        self.assertEqual(refused.exception.code, "invalid_api_key")

    def test_a_canceled_call_is_not_retried(self):
        rest = Client(shared.fleet.url, KEY)
        seen = {j["id"] for j in rest.get("/v1/jobs?limit=200").json()["jobs"]}
        result = {}

        def ask():
            try:
                client(max_retries=2).images.generate(model="tiny", prompt="long", size="256x256",
                                                      extra_body=LONG)
            except openai.APIError as e:
                result["error"] = e
        thread = threading.Thread(target=ask)
        thread.start()
        job = until(lambda: [j["id"] for j in rest.get("/v1/jobs?limit=200").json()["jobs"] if j["id"] not in seen], "the job")[0]
        rest.wait_event(job, "step")
        self.assertEqual(rest.cancel(job).status, 202)
        thread.join(30)
        self.assertIsInstance(result["error"], openai.ConflictError)
        self.assertIn(job, result["error"].message)
        after = {j["id"] for j in rest.get("/v1/jobs?limit=200").json()["jobs"]} - seen
        self.assertEqual(after, {job}, "the client tried again")

    def test_failure_while_streaming(self):
        rest = Client(shared.fleet.url, KEY)
        job = None
        with self.assertRaises(openai.APIError) as refused:
            with client(max_retries=0).images.generate(model="tiny", prompt="long", size="256x256", stream=True, partial_images=3,
                                                       extra_body=LONG) as stream:
                job = stream.response.headers["X-Job-Id"]
                for _ in stream:
                    rest.cancel(job)
        self.assertIn(f"job {job} canceled", str(refused.exception))


class Models(unittest.TestCase):
    def test_list_and_retrieve(self):
        models = client().models.list()
        self.assertEqual({m.id for m in models.data}, set(MODELS))
        self.assertEqual(client().models.retrieve("tiny").owned_by, "ditfleet")
        with self.assertRaises(openai.NotFoundError):
            client().models.retrieve("tinny")


if __name__ == "__main__":
    unittest.main(verbosity=2)
