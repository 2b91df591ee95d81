"""nightly.sh on the demo model and a CPU. DITFLEET_BUILD_DIR: the build's folder."""
import csv
import itertools
import os
import pathlib
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent
FACTORS = {"mode": {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "eager"},
           "format": {"fp32", "bf16", "fp8", "nf4"},
           "offload": {"none", "model", "block", "auto"},
           "size": {"128x128", "256x256", "256x192"}}
POSITIVE = ("first_step_s", "steady_step_s", "image_s", "peak_bytes", "model_bytes", "load_s")


class Nightly(unittest.TestCase):
    def nightly(self, **environment):
        """The exit status and the rows of a run."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "nightly.csv"
            done = subprocess.run([HERE / "nightly.sh", os.environ["DITFLEET_BUILD_DIR"], path], check=False,
                                  env={**os.environ, "DITFLEET_BENCH_DEVICE": "cpu", **environment})
            with open(path, newline="") as file:
                return done.returncode, list(csv.DictReader(file))

    def test_the_first_five_rows_have_every_value_and_are_measured(self):
        status, rows = self.nightly(DITFLEET_BENCH_ROWS="5")
        self.assertEqual([row["error"] for row in rows], [""] * 5)
        self.assertEqual(status, 0)
        for name, values in FACTORS.items():
            self.assertEqual({row[name] for row in rows}, values)
        for row in rows:
            for metric in POSITIVE:
                self.assertGreater(float(row[metric]), 0, (metric, row))
            self.assertEqual(float(row["compile_s"]) > 0, row["mode"] != "eager", row)
            self.assertEqual((row["recompiles"], row["fallbacks"]), ("0", "0"), row)

    def test_every_pair_is_covered(self):
        names = {"$wide": "fp32", "$small": "128x128", "$large": "256x256", "$broad": "256x192"}
        table = (HERE / "nightly.sh").read_text().split('\nrows="\n')[1].split('\n"\n')[0]
        rows = [[names.get(word, word) for word in line.split()] for line in table.splitlines()]
        self.assertEqual(len(rows), 20)
        for (a, of_a), (b, of_b) in itertools.combinations(enumerate(FACTORS.values()), 2):
            self.assertEqual({(row[a], row[b]) for row in rows}, set(itertools.product(of_a, of_b)))

    def test_a_failing_row_is_recorded_and_the_next_one_runs(self):
        for environment, error in (({"DITFLEET_BENCH_MODEL": "/nonexistent, folder"}, "/nonexistent; folder"),
                                   ({"DITFLEET_BENCH_TIMEOUT": "0.01"}, "timed out after 0.01 s")):
            status, rows = self.nightly(**environment, DITFLEET_BENCH_ROWS="2")
            self.assertEqual(status, 1)
            self.assertEqual(len(rows), 2)
            for row in rows:
                self.assertIn(error, row["error"])
                self.assertEqual(row["image_s"], "")


if __name__ == "__main__":
    unittest.main()
