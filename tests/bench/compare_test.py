"""compare.py finds regressions beyond both thresholds, and only these."""
import csv
import pathlib
import subprocess
import sys
import tempfile
import unittest

COMPARE = pathlib.Path(__file__).with_name("compare.py")
ROW = {"date": "2026-11-25T01:00:00Z", "revision": "a", "machine": "m", "versions": "torch", "mode": "default",
       "format": "bf16", "offload": "none", "size": "512x512", "first_step_s": "0.5", "steady_step_s": "0.1",
       "image_s": "3", "peak_bytes": "30000000000", "model_bytes": "24000000000", "load_s": "10", "compile_s": "0.6",
       "recompiles": "0", "fallbacks": "0", "error": ""}
BASE = [ROW, {**ROW, "offload": "block"}]
NEXT_NIGHT = {"date": "2026-11-26T01:00:00Z", "revision": "b"}


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, rows):
        with open(self.folder / name, "w", newline="") as file:
            out = csv.DictWriter(file, ROW)
            out.writeheader()
            out.writerows(rows)

    def run_compare(self, *flags):
        done = subprocess.run([sys.executable, COMPARE, "base.csv", "new.csv", *flags], cwd=self.folder, text=True,
                              capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def compare(self, new, *flags, base=None):
        self.write("base.csv", base or BASE)
        self.write("new.csv", new)
        return self.run_compare(*flags)

    def changed(self, **cells):
        """The next night's rows, with these cells in the second row."""
        return [{**ROW, **NEXT_NIGHT}, {**BASE[1], **NEXT_NIGHT, **cells}]

    def assert_found(self, result, *words):
        status, out, err = result
        self.assertEqual(status, 1, out + err)
        for word in words:
            self.assertIn(word, out)
        self.assertIn("1 regressions in 2 configurations", out)

    def assert_none(self, result):
        status, out, err = result
        self.assertEqual(status, 0, out + err)

    def test_equal_and_better_rows(self):
        self.assert_none(self.compare(self.changed()))
        self.assert_none(self.compare(self.changed(steady_step_s="0.05", peak_bytes="1")))

    def test_a_regression_beyond_both_thresholds(self):
        self.assert_found(self.compare(self.changed(steady_step_s="0.12")),
                          "default bf16 block 512x512", "steady_step_s", "0.1 ", "0.12", "+20.0%")
        for metric, value in {"first_step_s": "0.6", "image_s": "4", "peak_bytes": "32000000000",
                              "model_bytes": "26000000000", "load_s": "11", "compile_s": "0.8"}.items():
            self.assert_found(self.compare(self.changed(**{metric: value})), metric, value)

    def test_a_regression_beyond_one_threshold(self):
        self.assert_none(self.compare(self.changed(image_s="3.1")))  # 3 %, but 0.1 s
        short = [{**row, "first_step_s": "0.01"} for row in BASE]
        new = [{**row, **NEXT_NIGHT, "first_step_s": "0.02"} for row in short]
        self.assert_none(self.compare(new, base=short))  # 10 ms, but 100 %

    def test_thresholds_can_be_set(self):
        self.assert_found(self.compare(self.changed(image_s="3.1"), "--relative", "0.02"), "image_s")
        self.assert_none(self.compare(self.changed(image_s="4"), "--absolute", "image_s=1.5"))

    def test_a_count_regresses_with_any_growth(self):
        self.assert_found(self.compare(self.changed(recompiles="1")), "recompiles")
        self.assert_found(self.compare(self.changed(fallbacks="1")), "fallbacks")

    def test_a_missing_or_failing_row(self):
        self.assert_found(self.compare(self.changed()[:1]), "missing")
        empty = {metric: "" for metric in list(ROW)[8:17]}
        self.assert_found(self.compare(self.changed(**empty, error="timed out")), "failed: timed out")

    def test_the_latest_row_counts(self):
        self.assert_none(self.compare([{**BASE[1], "image_s": "9"}, *self.changed()]))
        self.assert_found(self.compare([*self.changed(image_s="9"), BASE[1]]), "image_s")

    def test_another_machine(self):
        moved = [{**row, "machine": "other"} for row in self.changed(image_s="9")]
        result = self.compare(moved)
        self.assert_found(result, "image_s")
        self.assertIn("warning: base.csv has no rows of \"other\"; compared with those of \"m\"", result[2])
        both = BASE + [{**row, "machine": "other", "image_s": "99"} for row in BASE]
        self.assert_found(self.compare(self.changed(image_s="9"), base=both), "image_s")

    def test_unusable_numbers(self):
        for metric, value in ("image_s", "fast"), ("image_s", ""), ("peak_bytes", "-1"), ("load_s", "nan"):
            status, _, err = self.compare(self.changed(**{metric: value}))
            self.assertEqual(status, 2)
            self.assertIn(f"new.csv:3: {metric} is \"{value}\"; it must be a number that is not negative", err)

    def test_unusable_files(self):
        self.write("base.csv", BASE)
        header = ",".join(ROW) + "\n"
        for text, message in {"": "has no column", "a,b\n1,2\n": "has no column", header: "has no rows",
                              header + "x,y\n": "new.csv:2 has fewer cells", "\0": "must be a CSV of nightly.sh"}.items():
            (self.folder / "new.csv").write_text(text)
            status, _, err = self.run_compare()
            self.assertEqual(status, 2, text)
            self.assertIn(message, err)
        (self.folder / "new.csv").unlink()
        self.assertEqual(self.run_compare()[0], 2)

    def test_unusable_flags(self):
        for flags in ("--relative", "-x"), ("--relative", "much"), ("--absolute", "image=1"), ("--absolute", "image_s"):
            self.assertEqual(self.compare(self.changed(), *flags)[0], 2, flags)


if __name__ == "__main__":
    unittest.main()
