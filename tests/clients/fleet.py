"""Runs DiTFleet as real processes: `ditfleet up` with a private Redis on a unix socket, a free port and a temporary
folder. Every wait is for an event and has a deadline."""
import contextlib
import ctypes
import http.server
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DITFLEET_BIN_DIR", ROOT / "build" / "bin"))
DITFLEET = str(BIN / "ditfleet")
MODELS = ROOT / "tests" / "fixtures" / "flux"
SKIPPED = 77  # CTest's SKIP_RETURN_CODE


def tiny_model(name="schnell"):
    """Returns a diffusers folder with tiny random weights (tests/fixtures/flux)."""
    return MODELS / name / "model"


def need(condition, why):
    """Skips the test program, with a line that says what is missing, unless the condition holds."""
    if not condition:
        print(f"skipped: {why}")
        sys.exit(SKIPPED)


def clean_environment(**extra):
    """Returns the environment without DiTFleet's settings and without proxies."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith("DITFLEET_") and k.lower() not in ("http_proxy", "https_proxy", "all_proxy")}
    return {**kept, "NO_PROXY": "*", "LC_ALL": "C.UTF-8", **extra}


def until(condition, what, seconds=20.0):
    """Polls `condition` every 20 ms and returns its first true value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


class Background:
    """`with` runs the method run() on another thread until the block ends: then `done` is set."""

    def __init__(self):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


class Listener:
    """A port of this host. serve(client) runs on a thread for each connection."""

    def __init__(self):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client = self.listening.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()


def alive(pid):
    """Returns whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: ends with the test program even if that is killed


def start(argv, **options):
    """Starts a process that ends with this one. Its output goes to `stdout`, by default a text pipe."""
    options.setdefault("env", clean_environment())
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.STDOUT)
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen([str(a) for a in argv], text=True, preexec_fn=_die_with_parent, **options)


def run(*argv, seconds=60, **options):
    """Runs a program to its end; stdout and stderr are text."""
    options.setdefault("env", clean_environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=seconds, **options)


def cli(*argv, **options):
    return run(DITFLEET, *argv, **options)


def free_ports(count):
    """Ports that are free now. They are below those that the kernel gives to whoever binds to port 0, such as another test
    before this one has used them."""
    found = set()
    while len(found) < count:
        port = random.randint(20000, 32000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def free_port():
    return free_ports(1)[0]


class Fleet:
    """`with Fleet(workers=2) as fleet:` starts a service and waits until it is ready. On exit every process must end cleanly."""

    def __init__(self, workers=1, models=None, config="", sets=(), flags=(), wait_for_workers=True, data=None,
                 listen="127.0.0.1:0"):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        self.data = Path(data) if data else self.folder / "data"
        self.ready_file = self.folder / "ready.json"
        self.log = self.folder / "up.log"
        models = {"tiny": tiny_model()} if models is None else models
        self.argv = [DITFLEET, "up", "--listen", listen, "--data", self.data, "--workers", workers,
                     "--ready-file", self.ready_file, "--device", "cpu"]
        for name, folder in models.items():
            self.argv += ["--model", f"{name}={folder}"]
        if config:
            (self.folder / "ditfleet.yaml").write_text(config)
            self.argv += ["--config", self.folder / "ditfleet.yaml"]
        # Compiled once, not by each fleet; `cache.dir=` gives a fleet its own folder (tests/programs.h).
        if programs := os.environ.get("DITFLEET_TEST_PROGRAMS"):
            self.argv += ["--set", f"cache.dir={programs}"]
        for one in sets:
            self.argv += ["--set", one]
        self.argv += list(flags)
        self.workers = workers if wait_for_workers else 0
        self.process = None

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind, *_):
        try:
            self.stop()
        finally:
            if kind:
                print(self.tail(), file=sys.stderr)
            self.kill()

    def start(self):
        with open(self.log, "a") as log:
            self.process = start(self.argv, stdout=log)
        until(self._is_ready, "ditfleet up is ready", 60)
        if self.workers:
            until(lambda: len(self.ready_workers()) >= self.workers, "the workers are ready", 60)

    def _is_ready(self):
        if self.process.poll() is not None:
            raise AssertionError(f"ditfleet up ended with status {self.process.returncode}:\n{self.tail()}")
        return self.ready_file.exists()

    @property
    def ready(self):
        return json.loads(self.ready_file.read_text())

    @property
    def url(self):
        return self.ready["gateway"]

    @property
    def redis_url(self):
        return self.ready["redis"]

    @property
    def redis_socket(self):
        return self.data / "redis" / "redis.sock"

    def pids(self):
        pids = self.ready["pids"]
        return [p for p in [pids["redis"], pids["coordinator"], *pids["workers"]] if p]

    def ready_workers(self):
        """Read from Redis, which needs no API key."""
        out = run("redis-cli", "-s", self.redis_socket, "--raw", "zrange", "df:{0}:workers", "0", "-1")
        names = out.stdout.split()
        infos = [run("redis-cli", "-s", self.redis_socket, "--raw", "hget", "df:{0}:worker:" + n, "info").stdout
                 for n in names]
        return [n for n, info in zip(names, infos) if info.strip() and json.loads(info).get("state") == "ready"]

    def tail(self, lines=40):
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, signal_=signal.SIGINT, seconds=60):
        """Stops the service as Ctrl-C does. It must exit with status 0 and leave no process."""
        if self.process is None or self.process.poll() is not None:
            return
        pids = self.pids() if self.ready_file.exists() else []
        self.process.send_signal(signal_)
        status = self.process.wait(seconds)
        left = [p for p in pids if alive(p)]
        assert status == 0, f"ditfleet up ended with status {status}:\n{self.tail()}"
        assert not left, f"ditfleet up left processes {left}:\n{self.tail()}"

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # its children end with it
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Redis:
    """A redis-server on a loopback port, with lines of redis.conf as options."""

    def __init__(self, *options, password="", conf=None, port=None, env=None, cli=()):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        self.port, self.user, self.password, self.env = port or free_port(), "default", password, env or {}
        self.cli_words = ["redis-cli", "-p", self.port, *cli]
        self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}"
        self.argv = ["redis-server", *([conf] if conf else []), "--port", self.port, "--bind", "127.0.0.1", "--dir", self.folder, *options]
        if password:
            self.argv += ["--requirepass", password]
        self.start()

    def start(self):
        self.process = start(self.argv, stdout=subprocess.DEVNULL, env=clean_environment(**self.env))
        until(lambda: self.cli("ping") == "PONG", "redis-server is up")

    def cli(self, *words, user=None, password=None):
        login = [] if (user or self.user) == "default" else ["--user", user or self.user]
        secret = {"REDISCLI_AUTH": password or self.password} if password or self.password else {}
        return run(*self.cli_words, *login, *words, env=clean_environment(**secret)).stdout.strip()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Members:
    """`with Members("redis.url=…") as members:` runs coordinators and workers on a Redis of the test, each with these
    options. On exit every one must end with status 0."""

    def __init__(self, *sets, config=""):
        self.folder = Path(tempfile.mkdtemp(prefix="ditfleet-"))
        (self.folder / "ditfleet.yaml").write_text(config)
        self.sets = [f"models.tiny.path={tiny_model()}", f"data.dir={self.folder}", "worker.device=cpu", "worker.threads=1", *sets]
        if programs := os.environ.get("DITFLEET_TEST_PROGRAMS"):
            self.sets.append(f"cache.dir={programs}")
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if not kind:
                for name in sorted(self.processes, reverse=True):  # workers first
                    self.stop(name)
            else:
                for name in self.processes:
                    print(f"--- {name}\n" + "\n".join(self.log(name).splitlines()[-30:]), file=sys.stderr)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def flags(self, *sets):
        return ["--config", self.folder / "ditfleet.yaml", *(word for one in (*self.sets, *sets) for word in ("--set", one))]

    def start(self, name, *sets):
        """A coordinator if the name begins with "coordinator", else a worker of this name."""
        words = [DITFLEET, "coordinator"] if name.startswith("coordinator") else [BIN / "ditfleet-worker", "run", "--name", name]
        with open(self.folder / f"{name}.log", "a") as log:
            self.processes[name] = start([*words, *self.flags(*sets)], stdout=log)

    def stop(self, name):
        process = self.processes.pop(name)
        process.terminate()
        try:
            status = process.wait(60)
        finally:
            process.kill()
        assert status == 0, f"{name} ended with status {status}:\n{self.log(name)[-4000:]}"


class SpanSink:
    """`with SpanSink() as url:` receives spans and discards them."""

    def __enter__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Shared:
    """One fleet shared by all tests of a program: setUpModule = shared.start, tearDownModule = shared.stop."""

    def __init__(self, **options):
        self.options = options
        self.stack = contextlib.ExitStack()
        self.fleet = None

    def start(self):
        self.fleet = self.stack.enter_context(Fleet(**self.options))

    def stop(self):
        self.stack.close()
