"""Completion scripts in three shells and manual pages, as both programs write them, and the container recipe."""
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from fleet import DITFLEET, ROOT, run


class Documents(unittest.TestCase):
    PROGRAMS = (Path(DITFLEET), Path(DITFLEET).parent / "ditfleet-worker")
    # Words before the one that is completed, some candidates, and some that are not.
    CASES = {"ditfleet": [((), {"generate", "jobs", "completion"}, {"list", "--url"}), (("jobs",), {"list", "watch"}, {"generate"}),
                          (("jobs", "list"), {"--state", "--url", "--json"}, {"watch"}), (("generate", "a cat"), {"--no-wait", "-o", "--out"}, {"jobs"}),
                          (("completion",), set(), {"jobs"}), (("generate", "-o"), set(), {"--out"})],
             "ditfleet-worker": [((), {"run", "generate", "inspect"}, {"--model"}), (("generate", "--offload"), {"auto", "none", "model", "block"}, {"--image"}),
                                 (("generate", "--image"), set(), {"--image"})]}

    def candidates(self, shell, program, words):
        with tempfile.NamedTemporaryFile("w", suffix="." + shell) as script:
            script.write(run(program, "completion", shell).stdout)
            script.flush()
            name = program.name
            function = "_" + name.replace("-", "_")
            text = {"bash": f'source {script.name}; COMP_WORDS=({name} "$@" ""); COMP_CWORD=$(($# + 1)); {function}; printf "%s\\n" "${{COMPREPLY[@]}}"',
                    "zsh": f'source {script.name}; {function}_words "$@"', "fish": f'source {script.name}; complete -C (string join " " -- {name} (string escape -- $argv) "")'}[shell]
            done = subprocess.run([shell, "-c", text, *(["-"] if shell != "fish" else []), *words], capture_output=True, text=True, timeout=30)
        self.assertEqual((done.returncode, done.stderr), (0, ""), (shell, words))
        return {line.split("\t")[0] for line in done.stdout.splitlines()}

    def test_completion(self):
        for shell in ("bash", "zsh", "fish"):
            if not shutil.which(shell):
                continue
            for program in self.PROGRAMS:
                for words, some, others in self.CASES[program.name]:
                    with self.subTest(shell=shell, words=(program.name, *words)):
                        found = self.candidates(shell, program, words)
                        self.assertEqual((found & some, found & others), (some, set()), found)
        self.assertIn("bash|zsh|fish", run(DITFLEET, "completion", "--help").stdout)

    def test_manual_pages(self):
        with tempfile.TemporaryDirectory() as folder:
            for program in self.PROGRAMS:
                run(program, "man", folder)
            pages = {page.name: page.read_text() for page in Path(folder).iterdir()}
        self.assertLessEqual({"ditfleet.1", "ditfleet-generate.1", "ditfleet-jobs.1", "ditfleet-worker.1", "ditfleet-worker-run.1"}, set(pages))
        generate = pages["ditfleet-generate.1"]
        for words in (r"\fB\-o\fR, \fB\-\-out\fR \fIFILE\fR", ".SH NAME\nditfleet\\-generate \\- Generate images", "DITFLEET_URL", 'ditfleet generate "a red circle"'):
            self.assertIn(words, generate)
        self.assertIn(".SH \"ditfleet jobs watch\"", pages["ditfleet-jobs.1"])
        if shutil.which("groff"):
            for name, text in pages.items():
                done = subprocess.run(["groff", "-k", "-man", "-Tutf8", "-ww"], input=text, capture_output=True, text=True, timeout=30)
                self.assertEqual((done.returncode, done.stderr), (0, ""), name)


class Containerfile(unittest.TestCase):
    def test_hadolint_finds_nothing(self):
        linter = Path(sys.executable).parent / "hadolint"  # of tests/requirements.txt
        if not linter.exists():
            self.skipTest("hadolint is not installed")
        # DL3008: Debian's packages get security fixes by name.
        done = run(linter, "--no-color", "--ignore", "DL3008", ROOT / "deploy/Containerfile")
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)
        with tempfile.NamedTemporaryFile("w", suffix="-Containerfile") as wrong:
            wrong.write("FROM debian\nRUN cd /x && apt-get install a\n")
            wrong.flush()
            self.assertIn("DL3006", run(linter, wrong.name).stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
