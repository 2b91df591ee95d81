"""The Kubernetes manifests and the Containerfile. Renders both overlays, validates them, and runs their configuration and
command lines with the real programs. No cluster and no container runtime is needed."""
import base64
import hashlib
import json
import re
import shutil
import tempfile
import unittest
import urllib.request
from pathlib import Path

from fleet import BIN, ROOT, cli, free_port, need, run, start, tiny_model, until

try:
    import kubernetes_validate
    import yaml
except ImportError:
    need(False, "kubernetes-validate is not installed (tests/requirements.txt)")
need(shutil.which("kubectl"), "kubectl is not installed")

FOLDER = ROOT / "deploy" / "kubernetes"
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
VERSION = re.search(r"project\(ditfleet VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
KEY = "a key"


def get(url):
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + KEY})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status
    except OSError as error:
        return getattr(error, "code", 0)


class Overlay:
    def __init__(self, name, **replacements):
        """Renders an overlay. `replacements` maps files of the overlay to functions of their text."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
            for file, replace in replacements.items():
                path = Path(folder) / name / file
                path.write_text(replace(path.read_text()))
            rendered = run("kubectl", "kustomize", Path(folder) / name)
        assert rendered.returncode == 0, rendered.stderr
        self.objects = list(yaml.safe_load_all(rendered.stdout))

    def of(self, kind):
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    def pods(self):
        """Returns the pod templates by name."""
        return {o["metadata"]["name"]: o["spec"]["template"] for o in self.objects if o["kind"] in ("Deployment", "StatefulSet", "Job")}

    def secret(self, prefix):
        """Returns the files of a generated Secret."""
        found = [o for n, o in self.of("Secret").items() if re.fullmatch(prefix + "(-[a-z0-9]{10})?", n)]
        assert len(found) == 1, prefix
        return {n: base64.b64decode(v).decode() for n, v in found[0]["data"].items()}


class Manifests(unittest.TestCase):
    def test_schemas(self):
        for name in ("one-node", "gpu-pool"):
            overlay = Overlay(name)
            for one in overlay.objects:
                with self.subTest(name, object=one["kind"] + "/" + one["metadata"]["name"]):
                    if "keda.sh" not in one["apiVersion"]:
                        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
                    self.assertTrue(one["kind"] == "Namespace" or one["metadata"]["namespace"] == "ditfleet")
        self.assertEqual(Overlay("one-node").of("ScaledObject"), {})

    def test_references(self):
        for name in ("one-node", "gpu-pool"):
            overlay = Overlay(name)
            pods = overlay.pods()
            labels = [pod["metadata"]["labels"] for pod in pods.values()]
            for one in overlay.objects:
                if one["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
                    selector = one["spec"].get("selector") or one["spec"].get("podSelector")
                    selector = selector.get("matchLabels", selector)
                    self.assertTrue([l for l in labels if selector.items() <= l.items()], one)
            for pod_name, pod in pods.items():
                self.assertEqual(pod["spec"]["securityContext"]["runAsNonRoot"], True)
                claims = {c["metadata"]["name"] for c in overlay.of("StatefulSet").get(pod_name, {"spec": {}})["spec"].get("volumeClaimTemplates", [])}
                volumes = {v["name"] for v in pod["spec"].get("volumes", [])} | claims
                for volume in pod["spec"].get("volumes", []):
                    if "secret" in volume:
                        self.assertIn(volume["secret"]["secretName"], overlay.of("Secret"))
                for container in pod["spec"]["containers"]:
                    self.assertLessEqual({m["name"] for m in container["volumeMounts"]}, volumes)
                    if container["image"].startswith("ditfleet"):
                        self.assertRegex(container["image"], f"^ditfleet(-worker)?:{re.escape(VERSION)}$")
            config = yaml.safe_load(overlay.secret("ditfleet")["ditfleet.yaml"])
            worker, coordinator = pods["worker"]["spec"], pods["coordinator"]["spec"]
            self.assertGreater(worker["terminationGracePeriodSeconds"], config["worker"]["drain_ms"] / 1000 + 10)
            self.assertGreater(coordinator["terminationGracePeriodSeconds"], 5 + 12)  # preStop, then gateway and scheduler
            self.assertEqual(worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"], 1)
            self.assertEqual(config["worker"]["metrics_listen"], "0.0.0.0:9464")
            self.assertEqual(config["gateway"]["listen"], "0.0.0.0:8780")

    def test_redis_refuses_work_before_its_cgroup_is_full(self):
        overlay = Overlay("one-node")
        settings = dict(line.split(None, 1) for line in overlay.secret("redis")["redis.conf"].splitlines() if line.strip())
        limit = overlay.pods()["redis"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
        self.assertRegex(settings["maxmemory"] + limit, r"^\d+gb\d+Gi$")
        self.assertLessEqual(int(settings["maxmemory"][:-2]), 0.75 * int(limit[:-2]), "the rest is for the copy while it saves")

    def test_scaling(self):
        overlay = Overlay("gpu-pool")
        scaled, = overlay.of("ScaledObject").values()
        spec, trigger = scaled["spec"], scaled["spec"]["triggers"][0]
        worker = overlay.of("Deployment")[spec["scaleTargetRef"]["name"]]
        self.assertNotIn("replicas", worker["spec"], "each `kubectl apply` would undo KEDA's decision")
        self.assertEqual((spec["minReplicaCount"], trigger["type"]), (0, "metrics-api"))
        self.assertEqual(trigger["metadata"]["valueLocation"], "backlog_gpu_seconds")
        self.assertEqual(trigger["metadata"]["url"], "http://coordinator.ditfleet.svc:8780/v1/scaling")
        api = json.loads((ROOT / "coordinator/gateway/openapi.json").read_text())
        self.assertIn("get", api["paths"]["/v1/scaling"])
        self.assertIn(trigger["metadata"]["valueLocation"], api["components"]["schemas"]["Scaling"]["properties"])
        self.assertIn("coordinator", overlay.of("Service"))
        self.assertGreater(float(trigger["metadata"]["targetValue"]), 0)
        token, = overlay.of("TriggerAuthentication")[trigger["authenticationRef"]["name"]]["spec"]["secretTargetRef"]
        self.assertIn(token["name"], overlay.of("Secret"))
        self.assertEqual(token["parameter"], "token")
        self.assertIn(token["key"], overlay.secret("scaling"))

    def test_placeholders_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "ditfleet.yaml"
            for name in ("one-node", "gpu-pool"):
                text = Overlay(name).secret("ditfleet")["ditfleet.yaml"]
                text = text.replace("/srv/models/flux", str(tiny_model()))
                for change, words in ((text, "cache.secret"), (re.sub("sha256: change-me", "sha256: " + "0" * 64, text), "cache.secret"),
                                      (re.sub("secret: change-me", "secret: " + "0" * 64, text), "sha256")):
                    file.write_text(change)
                    checked = cli("config", "check", "--config", file)
                    self.assertNotEqual(checked.returncode, 0)
                    self.assertIn(words, checked.stderr)
                values = iter("0123456789")
                file.write_text(re.sub("change-me(?!@)", lambda _: next(values) * 64, text))
                checked = cli("config", "check", "--config", file)
                self.assertEqual(checked.returncode, 0, checked.stderr)

    def test_the_command_lines_of_one_node(self):
        """Runs each container's command with the rendered configuration; only addresses, folders and the device differ."""
        need(shutil.which("redis-server"), "redis-server is not installed")
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        redis_port, http, metrics = free_port(), free_port(), free_port()
        places = {"redis:6379": f"127.0.0.1:{redis_port}", "0.0.0.0:8780": f"127.0.0.1:{http}", "0.0.0.0:9464": f"127.0.0.1:{metrics}",
                  "/data": str(folder), "/srv/models/flux": str(tiny_model()), "/etc/ditfleet": str(folder), "/etc/redis": str(folder),
                  "$(POD_NAME)": "worker-0"}

        def here(text):
            for there, place in places.items():
                text = text.replace(there, place)
            return text

        sha256 = hashlib.sha256(KEY.encode()).hexdigest()
        overlay = Overlay("one-node", **{"ditfleet.yaml": lambda t: t.replace("sha256: change-me", "sha256: " + sha256)
                                         .replace("secret: change-me", "secret: " + "0" * 64)})
        (folder / "ditfleet.yaml").write_text(here(overlay.secret("ditfleet")["ditfleet.yaml"]))
        (folder / "redis.conf").write_text(here(overlay.secret("redis")["redis.conf"]) + f"port {redis_port}\nbind 127.0.0.1\n")
        pods, processes = overlay.pods(), {}

        def launch(name):
            container = pods[name]["spec"]["containers"][0]
            program = [] if name == "redis" else [BIN / container["image"].split(":")[0]]
            argv = program + ["cpu" if a == "cuda" else here(a) for a in container["args"]]
            with open(folder / f"{name}.log", "w") as log:
                processes[name] = start(argv, stdout=log)
            self.addCleanup(processes[name].wait, 30)
            self.addCleanup(processes[name].terminate)
            return container

        def answers(container, probe):
            check = container[probe]["httpGet"]
            port = {"http": http, "metrics": metrics}[check["port"]]
            until(lambda: get(f"http://127.0.0.1:{port}{check['path']}") == 200, f"{container['name']}'s {probe}", 30)

        launch("redis")
        coordinator = launch("coordinator")
        for probe in ("livenessProbe", "readinessProbe"):
            answers(coordinator, probe)
        launch("compile")
        self.assertEqual(processes["compile"].wait(120), 0, (folder / "compile.log").read_text())
        self.assertIn("compiled", (folder / "compile.log").read_text())
        worker = launch("worker")
        for probe in ("livenessProbe", "startupProbe", "readinessProbe"):
            answers(worker, probe)
        url = ("--url", f"http://127.0.0.1:{http}", "--key", KEY)
        self.assertIn(" ready ", cli("workers", *url).stdout, "a worker that is ready is registered")
        made = cli("generate", *url, "--size", "32x32", "--steps", "1", "-o", folder / "image.png", "x")
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertIn("worker-0", cli("workers", *url).stdout)
        programs = cli("cache", "list", "--config", folder / "ditfleet.yaml", "--set", f"cache.dir={folder}/none")
        self.assertIn("sm_90a", programs.stdout, "the Job stores its programs in Redis")


class Packages(unittest.TestCase):
    def upgrade(self, fails=""):
        """Runs the postinst of the workers' package with a systemctl that records. Returns the calls and stderr."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (folder / "systemctl").write_text(f"""#!/bin/sh
            echo "$*" >>{folder}/calls
            [ "$1" != list-units ] || printf 'ditfleet-worker@%s.service loaded active running DiTFleet worker\\n' 0 1 cpu
            [ "$*" != "restart {fails}" ]""")
        (folder / "systemctl").chmod(0o755)
        script = (ROOT / "deploy/packages/ditfleet-worker.postinst").read_text().replace("/run/systemd/system", str(folder))
        done = run("sh", "-c", script, "postinst", "configure", "0.0.9", env={"PATH": f"{folder}:/usr/bin:/bin"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return (folder / "calls").read_text().splitlines(), done.stderr

    def test_an_upgrade_restarts_workers_one_by_one(self):
        unit = "ditfleet-worker@{}.service".format
        calls, errors = self.upgrade()
        self.assertEqual(calls[0], "daemon-reload")
        self.assertEqual(calls[2:], ["restart " + unit(name) for name in ("0", "1", "cpu")])
        self.assertEqual(errors, "")
        # `systemctl restart` returns when the worker is ready.
        service = (ROOT / "deploy/systemd/ditfleet-worker@.service").read_text()
        self.assertIn("\nType=notify\n", service)
        calls, errors = self.upgrade(fails=unit("1"))
        self.assertEqual(calls[2:], ["restart " + unit(name) for name in ("0", "1")], "one of each kind goes on")
        self.assertIn(unit("1") + " does not get ready", errors)


class Containers(unittest.TestCase):
    def test_sources_and_stages(self):
        stages = re.findall(r"^FROM (\S+) AS (\S+)$", CONTAINERFILE, re.MULTILINE)
        self.assertEqual([name for _, name in stages], ["build", "coordinator", "worker"])
        sources = re.findall(r"^COPY (?!--)(\S+) ", CONTAINERFILE, re.MULTILINE)
        for source in sources:
            self.assertTrue((ROOT / source).exists(), source)
        tracked = {line.split("/")[0] for line in run("git", "-C", ROOT, "ls-files").stdout.splitlines()}
        self.assertEqual(set(sources), {t for t in tracked if not t.startswith(".")} - {"README.md"}, "the build needs all of them")
        self.assertIn("deploy/package.sh /packages", CONTAINERFILE)  # what packages_test installs
        for deb in ("ditfleet_*.deb", "ditfleet-worker_*.deb"):
            self.assertIn(f"COPY --from=build /packages/{deb} /packages/", CONTAINERFILE)
        for program, command in re.findall(r'^ENTRYPOINT \["/usr/bin/(\S+)"\]\nCMD \["(\S+)",', CONTAINERFILE, re.MULTILINE):
            self.assertEqual(run(BIN / program, command, "--help").returncode, 0)


if __name__ == "__main__":
    unittest.main(verbosity=2)
