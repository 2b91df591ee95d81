"""deploy/examples and the lines of README.md, as they are written, on the demo's models."""
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from api import Client
from fleet import BIN, ROOT, Shared, clean_environment, need
from image import describe

need(importlib.util.find_spec("openai"), "the openai package is not installed; tests/run.sh installs tests/requirements.txt and sets DITFLEET_TEST_PYTHON")
EXAMPLES = ROOT / "deploy/examples"
MODELS = {"demo": ROOT / "deploy/demo-model/model", "demo-video": ROOT / "deploy/demo-model/video/model"}
shared = Shared(workers=1, models=MODELS, sets=["default_model=demo", "webhooks.allow_private=true"])
setUpModule, tearDownModule = shared.start, shared.stop


class WithFolder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.environment = clean_environment(DITFLEET_URL=shared.fleet.url, DITFLEET_REDIS=str(shared.fleet.redis_socket),
                                             PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def run_here(self, argv):
        done = subprocess.run(argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 0, f"{argv}: {done.stdout}{done.stderr}")
        return done.stdout

    def assert_picture(self, name):
        self.assertEqual(describe((self.folder / name).read_bytes()), ("png", 256, 256), name)


class Examples(WithFolder):
    MAKES = {"image.sh": ["image.png"], "image.py": ["image-0.png", "image-1.png"], "edit.py": ["edited.png"], "video.py": ["video.mp4"],
             "image.mjs": ["image-js.png"], "adapter.sh": ["adapter.png"], "webhook.py": [], "redis.sh": ["redis.png"],
             "batch.sh": ["batch-1.png", "batch-2.png", "batch-3.png"]}

    def test_each_writes_what_it_says(self):
        self.assertEqual({file.name for file in EXAMPLES.iterdir()} - {"README.md"}, set(self.MAKES))
        for name, files in self.MAKES.items():  # image.sh comes before edit.py
            program = {".sh": "sh", ".py": sys.executable, ".mjs": shutil.which("node")}[Path(name).suffix]
            with self.subTest(name):
                if not program:
                    self.skipTest("node is not installed")
                self.run_here([program, str(EXAMPLES / name)])
                for file in files:
                    if file.endswith(".mp4"):
                        self.assertEqual((self.folder / file).read_bytes()[4:8], b"ftyp")
                    else:
                        self.assert_picture(file)


class Readme(WithFolder):
    def test_every_line_of_the_readme_works(self):
        text = (ROOT / "README.md").read_text()
        blocks = ["\n".join(line[4:] for line in block.splitlines()) for block in re.findall(r"(?:^    .*\n)+", text.split("## Layout")[0], re.MULTILINE)]
        self.assertTrue(blocks[0].startswith("deploy/demo.sh"), "client_demo runs it")
        ran = 0
        for block in blocks[1:]:
            block = block.replace("http://127.0.0.1:8780", shared.fleet.url).replace("build/demo/data/redis/redis.sock", str(shared.fleet.redis_socket))
            block = block.replace("build/bin/", f"{BIN}/").replace(" deploy/", f" {ROOT}/deploy/")
            with self.subTest(block=block):
                if "import" in block:
                    self.run_here([sys.executable, "-c", block])
                else:
                    for line in block.replace("\\\n", "").splitlines():
                        self.run_line(line)
                ran += 1
        self.assertGreaterEqual(ran, 4)
        self.assert_picture("image.png")

    def test_the_requests_of_the_migration_notes_work(self):
        text = (ROOT / "deploy/MIGRATING.md").read_text()
        blocks = ["\n".join(line[4:] for line in block.splitlines()) for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)]
        self.assertEqual(len(blocks), 2)
        for block in blocks:
            with self.subTest(block=block):
                self.assertRegex(self.run_here(["bash", "-c", block]), r'"(data|state)":')

    def run_line(self, line):
        http = Client(shared.fleet.url)
        if "/v1/videos/ID" in line:
            id = http.get("/v1/videos").json()["data"][0]["id"]
            http.wait(id)
            line = line.replace("/v1/videos/ID", f"/v1/videos/{id}")
        if shlex.split(line, comments=True)[-1] == "JOB":
            line = line.replace("JOB", http.get("/v1/jobs").json()["jobs"][0]["id"])
        self.run_here(["bash", "-c", line])


if __name__ == "__main__":
    unittest.main(verbosity=2)
