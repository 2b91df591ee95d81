"""The Debian packages on bare hosts without a network: the commands of deploy/README.md, the systemd units, and apt."""
import hashlib
import json
import os
import re
import shutil
import tempfile
import unittest
from pathlib import Path

from api import Client
from debian import Host, bare_root, enter
from demo_test import LIBTORCH
from fleet import ROOT, clean_environment, cli, need, run, tiny_model, until
from image import describe

need(shutil.which("prometheus"), "prometheus is not installed (tests/packages.txt)")
TREE = Path(LIBTORCH).parent  # has torch/ and nvidia/
need(TREE.name.startswith("libtorch-"), f"{LIBTORCH} was not installed by deploy/setup.sh")
DEBS = ROOT / "build" / "packages"
if "DITFLEET_TEST_ENTERED" not in os.environ:
    shutil.rmtree(DEBS, ignore_errors=True)
    built = run(ROOT / "deploy" / "package.sh", DEBS, seconds=400,
                env=clean_environment(DITFLEET_SKIP_PACKAGES="1", DITFLEET_LIBTORCH=LIBTORCH))
    assert built.returncode == 0, built.stdout + built.stderr
BARE = bare_root(sorted(DEBS.glob("*.deb")), "redis-server", "openssl")
enter()
COLLECTOR = """
import http.server, itertools, os
os.makedirs("/root/spans")
numbers = itertools.count()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("/root/spans/.partial", "wb") as file:
            file.write(body)
        os.rename("/root/spans/.partial", f"/root/spans/{next(numbers)}.json")
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", 4318), Handler).serve_forever()
"""
MODEL = {tiny_model(): "/srv/models/tiny"}
WORKER = "ditfleet-worker@cpu"
SMALL = {"width": 32, "height": 32, "num_inference_steps": 1}


def blocks(section, document="README.md"):
    """Returns the indented blocks of a section of a document in deploy/."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", (ROOT / "deploy" / document).read_text(), re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    return [re.sub(r"^ {4}(?: {4})?", "", block, flags=re.MULTILINE).strip() + "\n" for block in found]


def ready_workers(host, key=""):
    """Returns how many workers `ditfleet workers` reports as ready."""
    return host.run("ditfleet", "workers", *(["--key", key] if key else []), check=False).stdout.count(" ready ")


class OneHost(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.host = Host("one", BARE, {DEBS: "/root/debs", TREE: "/srv/libtorch", Path(shutil.which("prometheus")).parent: "/opt/bin", **MODEL})
        cls.addClassCleanup(cls.host.close)


    def test_the_life_of_an_installation(self):
        host = self.host
        install, _, cpu, use, watch = blocks("One host")
        self.assertIn("sudo ditfleet-worker-setup  ", install)
        install = install.replace("ditfleet-worker-setup  ", f"ditfleet-worker-setup --flavour slim --from {self.pack()}  ")
        install = install.replace("./ditfleet", "./debs/ditfleet")
        edit = "models: {tiny: {path: /srv/models/tiny}}\ntenants: {acme: {queued_units: 1}, busy: {weight: 2}}\ntelemetry: {otlp_endpoint: 'http://127.0.0.1:4318'}\n"
        host.shell(f"sudoedit() {{ sed -i '/^models/d' $1; cat >>$1 <<END\n{edit}END\n}}\n" + install, seconds=400)
        modes = host.run("stat", "-c", "%U %G %a", "/etc/ditfleet/ditfleet.yaml", "/var/lib/ditfleet").stdout
        self.assertEqual(modes, "root ditfleet 640\nditfleet ditfleet 750\n")
        self.check_setup()
        self.check_units()

        host.write("/root/collector.py", COLLECTOR)
        host.shell("ln -s /opt/bin/prometheus /usr/bin; systemd-run --unit=collector python3 /root/collector.py")
        host.shell(cpu)
        until(lambda: ready_workers(host) == 1, "the worker is ready", 30)
        self.assertIn('a red circle" -o image.png', use)
        keys = host.shell(use.replace('circle" -o', 'circle" --size 32x32 --steps 1 -o') +
                          "echo keys $DITFLEET_KEY $ACME_KEY $(ditfleet keys add busy | awk 'END { print $NF }')").stdout
        self.assertEqual(describe((host.upper / "root/image.png").read_bytes()), ("png", 32, 32))
        root, acme, busy = re.search(r"^keys (\S+) (\S+) (\S+)$", keys, re.MULTILINE).groups()

        self.watch(watch, root, acme)
        host.run("systemctl", "stop", WORKER)
        self.assertIn("draining", host.journal(WORKER))
        self.assertEqual(host.run("systemctl", "show", "-P", "Result", WORKER).stdout.strip(), "success")
        waiting = [self.submit(key)["id"] for key in (acme, busy, busy)]
        self.assertIn("quotas.queued_units is 1", self.submit(acme)["error"]["message"])

        backup, restore = blocks("Backup and restore", "RUNBOOK.md")
        host.shell(backup)
        host.run("systemctl", "stop", "ditfleet")
        host.run("redis-cli", "FLUSHALL")
        host.shell(restore + "systemctl restart redis-server; systemctl start ditfleet")

        # The queue outlives an upgrade of both packages and a new Redis process; the configuration stays as it was edited.
        # Of two workers, the second one restarts when the first one is ready.
        others = [f"ditfleet-worker@{name}" for name in ("a", "b")]
        for port, other in enumerate(others, 9471):
            host.write(f"/etc/ditfleet/worker-{other[-1]}.env",
                       f"DITFLEET_WORKER__DEVICE=cpu\nDITFLEET_WORKER__METRICS_LISTEN=127.0.0.1:{port}\n")
            host.run("systemctl", "start", other)
        self.assertEqual(ready_workers(host, root), 2, "`systemctl start` waits until they are ready")
        self.upgrade("9.9.9")
        times = [[int(host.run("systemctl", "show", "-P", name + "TimestampMonotonic", other).stdout)
                  for name in ("InactiveEnter", "ActiveEnter")] for other in others]
        self.assertLess(times[0][1], times[1][0], "the first was ready before the second stopped")
        host.run("systemctl", "stop", *others)
        host.run("systemctl", "start", WORKER)
        host.shell("ls -d /var/lib/redis/appendonlydir; " + blocks("Log rotation", "RUNBOOK.md")[0])
        host.run("systemctl", "kill", "-s", "KILL", "redis-server", WORKER)
        self.assertIn("9.9.9", host.run("dpkg-query", "-W", "ditfleet").stdout)
        host.shell("sudo apt-get install --allow-downgrades ./debs/*.deb", seconds=400)
        self.assertNotIn("9.9.9", host.run("dpkg-query", "-W", "ditfleet").stdout)
        self.assertIn("busy", host.run("cat", "/etc/ditfleet/ditfleet.yaml").stdout)
        for job in waiting:
            until(lambda: host.run("ditfleet", "jobs", "show", job, "--json", "--key", root, check=False).stdout.find('"succeeded"') > 0,
                  "a job that was waiting has succeeded", 40)
        until(lambda: ready_workers(host, root) == 1, "the killed worker is ready again", 30)

        host.run("apt-get", "purge", "ditfleet", "ditfleet-worker")
        self.assertNotIn("ditfleet", host.run("cat", "/etc/passwd", "/etc/group").stdout)
        self.assertNotIn("ditfleet", host.run("sh", "-c", "cat /proc/[0-9]*/comm").stdout)
        left = host.run("find", "/etc", "/usr", "/var", "/lib", "-xdev", "-name", "*ditfleet*").stdout
        self.assertEqual(left, "")
        self.assertEqual(host.run("systemctl", "is-system-running").stdout.strip(), "running")

    def watch(self, commands, root, acme):
        """Reads the trace of a job, the slow jobs, a number of a dashboard, and drains the worker."""
        slow, prometheus, drain = commands.splitlines()
        job = json.loads(self.host.run("ditfleet", "jobs", "list", "--json", "--key", acme).stdout)["jobs"][0]["id"]
        self.assertIn(job, self.host.shell(f"export DITFLEET_KEY={root}\n" + slow).stdout)
        trace = json.loads(self.host.run("ditfleet", "jobs", "show", job, "--json", "--key", root).stdout)["traceparent"].split("-")[1]

        def spans():
            bodies = [json.loads(file.read_bytes()) for file in (self.host.upper / "root/spans").glob("*.json")]
            return {span["name"] for body in bodies for resource in body["resourceSpans"] for scope in resource["scopeSpans"]
                    for span in scope["spans"] if span["traceId"] == trace}

        parts = {"POST /v1/jobs", "queue_wait", "route", "unit", "text_encode", "first_step", "vae_decode", "image_encode", "result_store"}
        until(lambda: parts <= spans(), "the job's trace has arrived", 20)

        self.host.shell(f"systemd-run --unit=prometheus {prometheus} --storage.tsdb.path=/tmp/tsdb --web.listen-address=127.0.0.1:9090")
        for program in ("ditfleet", "ditfleet-worker"):
            for file in (f"bash-completion/completions/{program}", f"zsh/vendor-completions/_{program}",
                         f"fish/vendor_completions.d/{program}.fish", f"man/man1/{program}.1", f"man/man1/{program}-generate.1"):
                self.host.run("test", "-s", f"/usr/share/{file}")
        dashboard = json.loads(self.host.run("cat", "/usr/share/ditfleet/observability/dashboards/fleet.json").stdout)
        query = next(panel for panel in dashboard["panels"] if panel["title"] == "Workers" and "targets" in panel)["targets"][0]["expr"]
        ask = "import sys, urllib.parse, urllib.request as r\nprint(r.urlopen('http://127.0.0.1:9090/api/v1/query?query=' + urllib.parse.quote(sys.argv[1])).read().decode())"

        def ready():
            answer = json.loads(self.host.run("python3", "-c", ask, query, check=False).stdout or "{}")
            return [r["value"][1] for r in answer.get("data", {}).get("result", []) if r["metric"]["state"] == "ready"]

        until(lambda: ready() == ["1"], "Prometheus counts the worker", 30)
        self.host.run("systemctl", "stop", "prometheus")

        name = json.loads(self.host.run("ditfleet", "workers", "--json", "--key", root).stdout)["workers"][0]["name"]
        self.host.shell(f"export DITFLEET_KEY={root}\n{drain.replace('NAME', name)}; ditfleet workers | grep draining; ditfleet workers resume {name}")
        until(lambda: ready_workers(self.host, root) == 1, "the worker is ready again", 20)

    def pack(self):
        """Makes a tarball of LibTorch as ditfleet-worker-setup installs it, without what only a GPU or a build needs."""
        torch = re.search(r"^torch==([\d.]+)", (ROOT / "deploy/libtorch/slim.txt").read_text(), re.MULTILINE)[1]
        self.host.shell(f"""
            mkdir /tmp/libtorch; echo '{torch} slim' >/tmp/libtorch/version
            tar -C /srv/libtorch -cf /root/libtorch.tar --exclude='libtorch_cuda*' --exclude=libtorch_python.so --exclude=include \
                --exclude='*nvrtc*' --exclude=version .
            tar -C /tmp/libtorch -rf /root/libtorch.tar ./version
            sha256sum libtorch.tar >libtorch.tar.sha256""")
        return "libtorch.tar"

    def check_setup(self):
        again = self.host.run("ditfleet-worker-setup", "--flavour", "slim")
        self.assertIn("is installed in /var/lib/ditfleet/libtorch", again.stdout)
        for prepare, arguments, words in (
                ("echo 0 >f.tar.sha256; echo >f.tar", "--from f.tar", "f.tar does not match f.tar.sha256"),
                ("mkdir wheels", "--from wheels", "no wheel of nvidia-cuda-crt, nvidia-cuda-cupti"),
                ("for n in torch nvidia_cuda_crt nvidia_cuda_cupti nvidia_cuda_nvrtc nvidia_cuda_runtime; do echo x >wheels/$n-1.whl; done",
                 "--from wheels", "which /usr/share/ditfleet-worker/slim.txt does not list"),
                ("true", "--from libtorch.tar --flavour full", "full is needed"),
                ("true", "--from /nowhere", "/nowhere does not exist")):
            failed = self.host.shell(f"{prepare}; ditfleet-worker-setup --into /root/other --flavour slim {arguments}", check=False)
            self.assertEqual(failed.returncode, 1, arguments)
            self.assertIn(words, failed.stderr)
        self.assertEqual(self.host.run("find", "/root", "/var/lib/ditfleet", "-name", ".partial*").stdout, "")

    def check_units(self):
        units = ["ditfleet.service", "ditfleet-worker@0.service"]
        self.assertEqual(self.host.run("systemd-analyze", "verify", *units).stderr, "")
        for unit, limit in zip(units, ("1.6", "2.4")):
            security = self.host.run("systemd-analyze", "security", "--offline=yes", "--threshold=" + limit.replace(".", ""),
                                     "/lib/systemd/system/" + unit.replace("@0", "@"), check=False)
            print(unit, security.stdout.strip().splitlines()[-1])
            self.assertEqual(security.returncode, 0, security.stdout)

    def submit(self, key):
        """Submits a job with Python, because the host has no curl. Returns the response as JSON."""
        script = """import json, sys, urllib.error, urllib.request
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
try:
    answer = urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8780/v1/jobs", sys.argv[2].encode(), headers))
except urllib.error.HTTPError as refused:
    answer = refused
print(answer.read().decode())"""
        return json.loads(self.host.run("python3", "-c", script, key, json.dumps({"prompt": "x", **SMALL})).stdout)

    def upgrade(self, version):
        for deb in DEBS.glob("*.deb"):
            self.host.shell(f"dpkg-deb -R debs/{deb.name} tree; sed -i 's/^Version:.*/Version: {version}/; s/ditfleet (= [^)]*)/ditfleet (= {version})/' "
                            f"tree/DEBIAN/control; dpkg-deb -b -Znone tree new-{deb.name}; rm -rf tree")
        self.host.shell("sudo apt-get install ./new-*.deb")


class SeveralHosts(unittest.TestCase):
    def test_three_hosts(self):
        shared = Path(self.enterContext(tempfile.TemporaryDirectory()))
        for part in ("results", "adapters"):
            (shared / part).mkdir()
        shared.chmod(0o755)
        mounts = {DEBS: "/root", shared: "/srv/ditfleet", **MODEL}
        hosts = {}
        for number, (name, more) in enumerate({"redis": {}, "coordinator": mounts, "worker": {**mounts, TREE: "/var/lib/ditfleet/libtorch"}}.items()):
            hosts[name] = Host(name, BARE, more, f"10.9.0.{number + 1}")
            self.addCleanup(hosts[name].close)
        redis, coordinator, worker = hosts.values()
        secure, configure = blocks("Several hosts")

        redis.shell("""
            apt-get install redis-server openssl
            cd /etc/redis
            openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=ca -keyout ca.key -out ca.pem
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=redis.fleet -keyout redis.key -out redis.csr
            echo subjectAltName=DNS:redis.fleet >names
            openssl x509 -req -in redis.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile names -out redis.pem
            chown redis redis.key""")
        redis.shell("PASSWORD=hard-to-guess\n" + secure)
        ca = (redis.upper / "etc/redis/ca.pem").read_text()
        key_sha256 = hashlib.sha256(b"root-key").hexdigest()
        for host, packages, unit in ((coordinator, "./ditfleet_*.deb", "ditfleet"),
                                     (worker, "./ditfleet_*.deb ./ditfleet-worker_*.deb", WORKER)):
            host.shell("apt-get install " + packages)
            host.write("/etc/ditfleet/ca.pem", ca)
            host.write("/etc/ditfleet/cache-secret", "a secret of the fleet\n")
            host.write("/etc/ditfleet/worker-cpu.env", "DITFLEET_WORKER__DEVICE=cpu\n")
            host.shell(f"""
                chgrp ditfleet /etc/ditfleet/*; chmod 640 /etc/ditfleet/cache-secret; chown ditfleet /srv/ditfleet/results
                echo 10.9.0.1 redis.fleet >>/etc/hosts
                for unit in ditfleet ditfleet-worker@; do
                  mkdir /etc/systemd/system/$unit.service.d
                  printf '[Service]\\nReadWritePaths=/srv/ditfleet/results\\n' >/etc/systemd/system/$unit.service.d/results.conf
                done
                systemctl daemon-reload
                PASSWORD=hard-to-guess REDIS_HOST=redis.fleet KEY_SHA256={key_sha256}\n""" + configure.replace("\n  ", "\n") +
                       f"systemctl enable --now {unit}")
        client = Client("http://10.9.0.2:8780", "root-key")
        try:
            until(lambda: [w for w in client.get("/v1/workers").json()["workers"] if w["state"] == "ready"], "the worker is ready", 40)
            image = shared / "image.png"
            made = cli("generate", "--url", "http://10.9.0.2:8780", "--key", "root-key", "--size", "32x32", "--steps", "1", "-o", image, "a circle")
            self.assertEqual(made.returncode, 0, made.stderr)
            self.assertEqual(describe(image.read_bytes()), ("png", 32, 32))
            self.assertTrue(list((shared / "results").rglob("*.png")), "results are in the shared folder")
            self.assertNotIn("not shared", worker.journal(WORKER))
        except BaseException:
            print(coordinator.journal("ditfleet"), worker.journal(WORKER))
            raise
        self.assertEqual(Client("http://10.9.0.2:8780", "wrong").get("/v1/jobs").status, 401)
        plain = redis.run("redis-cli", "-h", "10.9.0.1", "ping", check=False)
        self.assertNotIn("PONG", plain.stdout)
        unnamed = redis.run("redis-cli", "--tls", "--cacert", "/etc/redis/ca.pem", "-h", "10.9.0.1", "ping")
        self.assertIn("NOAUTH", unnamed.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
