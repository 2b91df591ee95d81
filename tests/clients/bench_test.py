"""`ditfleet bench queue`: whatever ends it, its private Redis and that one's folder go with it."""
import os
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

from fleet import DITFLEET, alive, start, until


class Ends(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        self.addCleanup(shutil.rmtree, self.folder, True)

    def bench(self, *flags, **options):
        """The running bench, and the pid of its Redis once that serves."""
        process = start([DITFLEET, "bench", "queue", "--dir", self.folder, *flags], **{"stdout": subprocess.DEVNULL, **options})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        until(lambda: list(self.folder.glob("*/redis.sock")), "the bench's Redis serves")
        of_bench = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        redis = [int(p) for p in of_bench.read_text().split()]
        self.assertEqual(len(redis), 1)
        self.assertEqual(Path(f"/proc/{redis[0]}/comm").read_text().strip(), "redis-server")
        self.addCleanup(lambda: alive(redis[0]) and os.kill(redis[0], signal.SIGKILL))
        return process, redis[0]

    def check_nothing_is_left(self, redis):
        until(lambda: not alive(redis), "the private Redis has ended", 10)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_signals(self):
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(one.name):
                process, redis = self.bench("--scenario", "throughput", "--seconds", "60")
                process.send_signal(one)
                self.assertEqual(process.wait(20), -one)  # so that a shell's loop ends, too
                self.check_nothing_is_left(redis)

    def test_a_reader_that_goes_away(self):
        for flags in ((), ("--json",)):
            with self.subTest(flags):
                process, redis = self.bench("--scenario", "throughput", "--seconds", "1", *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                process.stdout.close()  # as `| head -0`
                self.assertEqual(process.wait(30), -signal.SIGPIPE)
                self.assertEqual(process.stderr.read(), "")
                process.stderr.close()
                self.check_nothing_is_left(redis)

    def test_killed(self):
        process, redis = self.bench("--scenario", "throughput", "--seconds", "60")
        process.kill()
        until(lambda: not alive(redis), "the private Redis has ended", 10)  # its folder stays: nobody is there to remove it


if __name__ == "__main__":
    unittest.main(verbosity=2)
