"""Drives headless Chromium through its debugging pipe.
(https://chromedevtools.github.io/devtools-protocol)"""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

from fleet import clean_environment, run

PROGRAM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]


class Navigated(Exception):
    """The page went away before it answered."""


class Browser:
    """One page. `errors` collects the exceptions and error messages of its scripts."""

    def __init__(self, width=1280, height=900, dark=False):
        self.profile = tempfile.mkdtemp(prefix="ditfleet-chromium-")
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()

        def place():
            os.dup2(to_read, 198), os.dup2(to_write, 199)  # the pipes may occupy 3 and 4 already
            os.dup2(198, 3), os.dup2(199, 4)
            os.close(198), os.close(199)
        self.process = subprocess.Popen([PROGRAM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank"],
                                        preexec_fn=place, close_fds=False, env=clean_environment(),
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read), os.close(to_write)
        self.buffer, self.next_id, self.errors, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        self.size(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.session = None
            self.call("Browser.close")
        except (OSError, AssertionError):
            self.process.kill()
        self.process.wait(20)
        os.close(self.read_end), os.close(self.write_end)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(method)
            if answer.get("id") == self.next_id:
                if answer.get("error", {}).get("message") == "Inspected target navigated or closed":
                    raise Navigated(method)
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def receive(self, waiting_for, seconds=30):
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"the browser does not answer {waiting_for}"
            chunk = os.read(self.read_end, 1 << 20)
            assert chunk, "the browser ended"
            self.buffer += chunk
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"].get("exception", {}).get("description", "exception"))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.errors.append(message["params"]["entry"]["text"] + " " + message["params"]["entry"].get("url", ""))
        return message

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def open(self, url):
        self.call("Page.navigate", url=url)

    def js(self, expression):
        """Evaluates a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression, seconds=30):
        """Waits until the expression is true, on this page or on the one that it navigates to."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if value := self.js(expression):
                    break
            except Navigated:
                pass
            assert time.monotonic() < deadline, f"not within {seconds} s: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def screenshot(self, path):
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        with open(path, "wb") as file:
            file.write(data)


def dump_dom(url, folder):
    """Returns the HTML that `chromium --dump-dom` prints after some seconds of virtual time."""
    done = run(PROGRAM, *FLAGS, "--virtual-time-budget=4000", f"--user-data-dir={folder}", "--dump-dom", url)
    assert done.returncode == 0, done.stderr
    return done.stdout
