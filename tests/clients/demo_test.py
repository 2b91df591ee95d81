"""deploy/demo.sh as somebody runs it who has built this checkout: its set-up finds everything there, fetches nothing and builds
nothing. It works in a folder and on a port of the test's own, so that it disturbs no service and no demo that runs."""
import contextlib
import os
import re
import shutil
import signal
import tempfile
import unittest
from pathlib import Path

from fleet import BIN, ROOT, clean_environment, need, run, start
from picture import colours, describe

BUILD = ROOT / "build"
PROMPT = "a red circle above a blue square"


def configured_libtorch():
    """The LibTorch that setup.sh configured build/ for; None: another configuration, in whose place it would put its own."""
    try:
        lines = (BUILD / ".configured").read_text().splitlines()
    except FileNotFoundError:
        return None
    return lines[1] if len(lines) == 2 and lines[0] == str(ROOT) and lines[1] else None


LIBTORCH = configured_libtorch()
need(BIN == BUILD / "bin", f"the demo runs what is in {BUILD}/bin, and this is the test of {BIN}")
need(LIBTORCH, "build/ is not as deploy/setup.sh configures it, and the demo would configure it anew")
need(shutil.which("ninja") and shutil.which("redis-server"), "ninja or redis-server is not installed")
need("no work to do" in run("ninja", "-C", BUILD, "-n", "ditfleet", "ditfleet-worker").stdout,
     "the two programs are older than their sources, and the demo would build them")


def processes_of(folder):
    """{pid: command line} of those whose environment or command line names the folder: all that a demo in it has started."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            said = (process / "environ").read_bytes() + command
        except OSError:
            continue
        if str(folder).encode() in said and int(process.name) != os.getpid():
            found[int(process.name)] = command.decode(errors="replace").replace("\0", " ")
    return found


class Demo(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-demo-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.addCleanup(self.end_what_is_left)
        self.environment = clean_environment(DITFLEET_SKIP_PACKAGES="1", DITFLEET_LIBTORCH=LIBTORCH,
                                             DITFLEET_DEMO_FOLDER=str(self.folder), DITFLEET_DEMO_PORT="0")

    def demo(self):
        """One that is on its way, from another folder than the checkout."""
        process = start([ROOT / "deploy" / "demo.sh", PROMPT, "--once"], env=self.environment, cwd=self.folder)
        self.addCleanup(self.end, process)
        return process

    def end_what_is_left(self):
        for pid in processes_of(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end(self, process):
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        process.stdout.close()

    def picture_of(self, process):
        """The path that it printed, of a picture that is one."""
        told, _ = process.communicate(timeout=200)
        self.assertEqual(process.returncode, 0, told)
        self.assertIn("ninja: no work to do", told)
        printed = re.search(r"^==> The picture: (.*\.png)$", told, re.MULTILINE)
        self.assertTrue(printed, told)
        picture = Path(printed[1])
        data = picture.read_bytes()
        self.assertEqual(describe(data), ("png", 256, 256))
        self.assertGreater(len(colours(data)), 50, "one colour is no drawing")
        return picture

    def test_once_again_and_two_at_once(self):
        first = self.picture_of(self.demo())
        self.assertEqual(first, self.folder / "pictures" / "a-red-circle-above-a-blue-square.png")
        self.assertEqual(processes_of(self.folder), {})
        first.unlink()
        both = [self.demo(), self.demo()]  # one of them on the data of the first, the other beside it
        pictures = {self.picture_of(process) for process in both}
        self.assertEqual(len(pictures), 2)
        self.assertIn(first, pictures)
        self.assertEqual(processes_of(self.folder), {})
        self.assertEqual(list(self.folder.glob("beside-*")), [], "what worked beside it cleans up")

    def test_an_interrupt_ends_all_of_it_whenever_it_comes(self):
        for moment, signal_ in (("Starting the service", signal.SIGINT), ("Drawing", signal.SIGTERM)):
            with self.subTest(moment):
                process = self.demo()
                while moment not in process.stdout.readline():
                    self.assertIsNone(process.poll())
                process.send_signal(signal_)
                told, _ = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 130, told)
                self.assertEqual(processes_of(self.folder), {})

    def test_a_folder_that_cannot_be_written(self):
        self.environment["DITFLEET_DEMO_FOLDER"] = "/proc/demo"
        told, _ = self.demo().communicate(timeout=60)
        self.assertIn("demo: cannot write to /proc/demo", told)
        self.assertIn("DITFLEET_DEMO_FOLDER", told)
        self.environment["DITFLEET_DEMO_FOLDER"] = str(self.folder)
        (self.folder / "data").touch()  # so that the service does not start
        (self.folder / "up.log").symlink_to("/dev/full")
        process = self.demo()
        told, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, told)
        self.assertIn("the service did not start, and left no word in", told)
        self.assertRegex(told, "is there room for it\\? [0-9.]+[A-Z]? are free there")

    def test_what_it_cannot_do_it_says(self):
        for arguments, words in (([], "there is no prompt"), (["a", "b"], "'b' is a second prompt"), (["a", "--onse"], "unknown option '--onse'")):
            done = run(ROOT / "deploy" / "demo.sh", *arguments, env=self.environment)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
