"""Videos of tiny Wan folders over HTTP and by both programs: presets, adapters for one of two transformers, warnings."""
import json
import shutil
import tempfile
import unittest
from pathlib import Path

import browser
from adapters import BYTES
from api import Client
from browser import Browser
from fleet import BIN, cli, ROOT, run, Shared

FIXTURES = ROOT / "tests/fixtures/wan"
ADAPTERS = FIXTURES / "lora/adapters"
PRESET = {"num_inference_steps": 4, "guidance_scale": 1, "guidance_scale_2": 1, "sampler": "euler", "flow_shift": 5,
          "sigmas": "1, 0.75, 0.5, 0.25"}
LORAS = [{"name": "fast-high_noise", "expert": "high"}, {"name": "fast-low", "scale": 0.5, "expert": "low"}]
SMALL = {"width": 48, "height": 32, "frames": 5, "max_sequence_length": 48, "seed": 7}

folder = tempfile.TemporaryDirectory(prefix="ditfleet-wan-")
TWO = Path(folder.name) / "two"
shutil.copytree(FIXTURES / "two/model", TWO)
(TWO / "ditfleet.json").write_text(json.dumps({
    "num_inference_steps": 6, "presets": {"lightning-4": {**PRESET, "loras": LORAS}, "draft": {"num_inference_steps": 2},
                                          "lost": {"loras": [{"name": "nowhere"}]}}}))
shared = Shared(workers=1, models={"two": TWO, "one": FIXTURES / "one/model"}, config="default_model: two\n")


def setUpModule():
    shared.start()
    client = Client(shared.fleet.url)
    for name, file in {"fast-high_noise": "original", "fast-low": "musubi", "ink": "peft"}.items():
        answer = client.request("PUT", "/v1/loras/" + name, (ADAPTERS / f"{file}.safetensors").read_bytes(), BYTES)
        assert answer.status == 201, answer


def tearDownModule():
    shared.stop()
    folder.cleanup()


class TestWan(unittest.TestCase):
    def setUp(self):
        self.client = Client(shared.fleet.url)

    def draw(self, **fields):
        """Runs a job to its end and returns its record and the digest of its video."""
        job = self.client.wait(self.client.submit(**{**SMALL, **fields}))
        self.assertEqual(job["state"], "succeeded", job)
        return job, job["unit_records"][0]["result"]["sha256"]

    def refused(self, param, **fields):
        answer = self.client.request("POST", "/v1/jobs", {"prompt": "x", **SMALL, **fields})
        self.assertEqual(answer.status, 400, answer)
        self.assertEqual(answer.error["param"], param)
        return answer.error["message"]

    def test_a_preset_is_its_fields_and_adapters(self):
        self.assertEqual(self.client.get("/v1/models/two").json()["presets"], ["draft", "lightning-4", "lost"])
        job, video = self.draw(preset="lightning-4")
        self.assertEqual((job["spec"]["preset"], job["spec"]["num_inference_steps"]), ("lightning-4", 4))
        self.assertEqual([(use["name"], use["expert"]) for use in job["spec"]["loras"]],
                         [("fast-high_noise", "high"), ("fast-low", "low")])
        self.assertEqual(self.draw(**PRESET, loras=LORAS)[1], video)
        for other in (PRESET, {**PRESET, "loras": LORAS[:1]}, {**PRESET, "loras": LORAS, "flow_shift": 3}):
            self.assertNotEqual(self.draw(**other)[1], video, other)
        self.assertEqual(self.draw(preset="lightning-4", flow_shift=3)[1],
                         self.draw(**{**PRESET, "flow_shift": 3}, loras=LORAS)[1])
        self.assertEqual(self.draw(preset="draft")[1], self.draw(num_inference_steps=2)[1])

    def test_an_adapter_changes_the_experts_that_the_request_names(self):
        videos = [self.draw(loras=loras)[1] for loras in (
            [], [{"name": "ink", "expert": "high"}], [{"name": "ink", "expert": "low"}], [{"name": "ink"}],
            [{"name": "ink", "expert": "low"}, {"name": "ink", "expert": "high"}])]
        self.assertEqual(len(set(videos[:4])), 4)
        self.assertEqual(videos[3], videos[4])

    def test_what_is_left_out_is_a_warning(self):
        warnings = self.draw(loras=[{"name": "fast-high_noise", "expert": "low"}])[0]["warnings"]
        self.assertEqual(len(warnings), 2, warnings)
        self.assertIn("adapter fast-high_noise: left out 5 tensors: diffusion_model.", warnings[0])
        self.assertEqual(warnings[1], "adapter fast-high_noise seems to be for the expert high, but is used for low")
        self.assertEqual(self.draw(loras=[{"name": "ink"}])[0]["warnings"], [])

    def test_refusals_say_what_would_be_right(self):
        self.assertEqual(self.refused("preset", preset="lightning"),
                         "preset is 'lightning', which model 'two' does not have; it has draft, lightning-4, lost")
        self.assertIn("it has no presets", self.refused("preset", preset="draft", model="one"))
        self.assertIn("nowhere", self.refused("loras[0].name", preset="lost"))
        self.assertIn("has one transformer; leave expert out",
                      self.refused("loras[0].expert", model="one", loras=[{"name": "ink", "expert": "low"}]))
        self.assertIn("high, low or both", self.refused("loras[0].expert", loras=[{"name": "ink", "expert": "mid"}]))
        self.assertIn("flow_shift is 101", self.refused("flow_shift", flow_shift=101))

    @unittest.skipUnless(browser.PROGRAM, "chromium is not installed (tests/packages.txt)")
    def test_the_console_offers_presets(self):
        with Browser() as page:
            page.open(shared.fleet.url + "/")
            page.until("document.getElementById('model')?.value === 'two'")
            page.js("model.value = 'one', model.onchange()")
            self.assertTrue(page.js("preset.parentElement.hidden"))
            page.js("model.value = 'two', model.onchange()")
            self.assertEqual(page.js("[...preset.options].map(o => o.value)"), ["", "draft", "lightning-4", "lost"])
            self.assertEqual(page.js("num_inference_steps.value"), "6")
            page.js("preset.value = 'lightning-4', preset.onchange()")
            self.assertEqual(page.js("num_inference_steps.value"), "")
            page.js("""for (const [name, value] of Object.entries({prompt: 'from the console', width: 48, height: 32, frames: 5,
                       adapters: 'ink:0.5:low'})) document.getElementById(name).value = value""")
            page.js("submit.click()")
            page.until("document.querySelector('article')?.textContent.includes('from the console')")
            self.assertEqual(page.errors, [])
        spec = self.client.get("/v1/jobs?limit=1").json()["jobs"][0]["id"]
        spec = self.client.wait(spec)["spec"]
        self.assertEqual((spec["num_inference_steps"], spec["sampler"]), (4, "euler"))
        self.assertEqual([(use["name"], use["scale"], use.get("expert")) for use in spec["loras"]],
                         [("ink", 0.5, "low"), ("fast-high_noise", 1, "high"), ("fast-low", 0.5, "low")])

    def test_both_programs_take_presets_and_experts(self):
        flags = ["--size", "48x32", "--frames", "5", "--max-sequence-length", "48", "--seed", "7", "--preset", "lightning-4"]
        files = [Path(folder.name) / name for name in ("service.mp4", "worker.mp4")]
        done = cli("generate", "a red circle", *flags, "--url", shared.fleet.url, "-o", files[0])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("left out ", done.stderr)

        def generate(*loras):
            return run(BIN / "ditfleet-worker", "generate", "--model", TWO, "--device", "cpu", "--prompt", "a red circle",
                       *flags, "--out", files[1], *[part for lora in loras for part in ("--lora", lora)])

        done = generate()
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("needs the adapters fast-high_noise (high), fast-low (low); pass their files", done.stderr)
        done = generate(f"{ADAPTERS}/original.safetensors:1:high", f"{ADAPTERS}/musubi.safetensors:0.5:low")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
        done = generate(f"{ADAPTERS}/original.safetensors:1:mid", f"{ADAPTERS}/musubi.safetensors")
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("FILE:SCALE:EXPERT", done.stderr)


if __name__ == "__main__":
    unittest.main()
