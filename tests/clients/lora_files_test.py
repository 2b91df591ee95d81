"""LoRA adapters from files: the configured folders, the command line, and a restart of Redis."""
import json
import os
import subprocess
import tempfile
import unittest

from adapters import adapter, digest, form, Redis, RegistryCase, safetensors
from fleet import Shared, cli, tiny_model, until


class Files(RegistryCase):
    """A fleet with its own adapter folders."""

    @classmethod
    def setUpClass(cls):
        cls.shared = Shared(workers=0, models={"tiny": tiny_model()})
        cls.top = tempfile.TemporaryDirectory(prefix="ditfleet-loras-")
        top = cls.top.name
        for name in ("one", "two", "outside"):
            os.mkdir(os.path.join(top, name))
        os.mkdir(os.path.join(top, "one", "below"))
        os.mkfifo(os.path.join(top, "one", "fifo"))
        for path, seed in (("one/a.safetensors", 1), ("one/below/b.safetensors", 2), ("two/c.safetensors", 3), ("outside/d.safetensors", 4)):
            with open(os.path.join(top, path), "wb") as f:
                f.write(adapter(seed))
        with open(os.path.join(top, "one", "pickle.safetensors"), "wb") as f:
            f.write(b"PK\x03\x04" + b"\0" * 200)
        os.symlink(os.path.join(top, "outside", "d.safetensors"), os.path.join(top, "one", "out.safetensors"))
        os.symlink(os.path.join(top, "outside"), os.path.join(top, "one", "outlink"))
        os.symlink(os.path.join(top, "one", "a.safetensors"), os.path.join(top, "two", "in.safetensors"))
        cls.shared.options["sets"] = [f"loras.folders={top}/one:{top}/two"]
        cls.shared.start()

    @classmethod
    def tearDownClass(cls):
        cls.shared.stop()
        cls.top.cleanup()

    def setUp(self):
        self.connect(self.shared.fleet)

    def by_path(self, path, **fields):
        return self.first.request("PUT", "/v1/loras/file", {"path": path, **fields})

    def test_registers_files_in_the_configured_folders(self):
        top = os.path.realpath(self.top.name)
        for path, real, seed in ((f"{top}/one/a.safetensors", "one/a.safetensors", 1), ("below/b.safetensors", "one/below/b.safetensors", 2),
                                 ("c.safetensors", "two/c.safetensors", 3), (f"{top}/one/below/../a.safetensors", "one/a.safetensors", 1),
                                 ("in.safetensors", "one/a.safetensors", 1)):
            with self.subTest(path):
                answer = self.by_path(path, sha256=digest(adapter(seed)), pinned=True, models=["tiny"])
                self.assertIn(answer.status, (200, 201), answer)
                lora = answer.json()
                self.assertEqual((lora["source"], lora["path"], lora["sha256"]), ("file", f"{top}/{real}", digest(adapter(seed))))
                self.assertEqual((lora["pinned"], lora["models"], lora["rank"]), (True, ["tiny"], 4))
                blob = self.redis("HGETALL", "df:{lora}:blob:" + lora["sha256"])
                self.assertIn(lora["path"].encode(), blob)
        self.assertEqual(self.chunk_keys(), [])

    def test_refuses_files_outside_the_configured_folders(self):
        top = self.top.name
        outside = ["/etc/passwd", f"{top}/outside/d.safetensors", "../outside/d.safetensors", f"{top}/one/../outside/d.safetensors",
                   f"{top}/one/out.safetensors", "out.safetensors", "outlink/d.safetensors", "/etc/no-such-file", f"{top}/one-more/x", "/"]
        for path in outside:
            with self.subTest(path):
                self.refused(self.by_path(path), 400, "outside loras.folders", param="path")
        for path in ("none.safetensors", f"{top}/one", "below", "fifo", f"{top}/one/a.safetensors/x"):
            with self.subTest(path):
                self.refused(self.by_path(path), 400, "no file", param="path")
        self.refused(self.by_path("pickle.safetensors"), 400, "pickle", param="path")
        self.refused(self.by_path("a.safetensors", sha256=digest(b"")), 400, digest(adapter(1)), param="sha256")
        self.refused(self.by_path("a.safetensors", models=["tinny"]), 400, "'tiny'", param="model")
        self.refused(self.by_path("a.safetensors", modles=["tiny"]), 400, "models", param="modles")
        self.refused(self.by_path(5), 400, "string", param="path")
        self.refused(self.by_path(""), 400, "path", param="path")
        self.refused(self.first.request("PUT", "/v1/loras/file", {}), 400, "'path' is missing", param="path")
        self.refused(self.first.request("PUT", "/v1/loras/file", [], {"Content-Type": "application/json"}), 400, "object")

    def test_the_command_line(self):
        url = ("--url", self.shared.fleet.url)
        file = os.path.join(self.top.name, "outside", "d.safetensors")
        added = cli("loras", "add", "--pin", "--model", "tiny", "style", file, *url)
        self.assertEqual(added.returncode, 0, added.stderr)
        self.assertIn(digest(adapter(4)), added.stdout)
        shown = json.loads(cli("loras", "show", "style", "--json", *url).stdout)
        self.assertEqual((shown["source"], shown["pinned"], shown["models"]), ("upload", True, ["tiny"]))
        self.assertIn("pinned", cli("loras", "show", "style", *url).stdout)
        path = cli("loras", "add", "path", "a.safetensors", "--by-path", *url)
        self.assertEqual(path.returncode, 0, path.stderr)
        listed = cli("loras", "list", *url).stdout.splitlines()
        self.assertEqual([line.split()[0] for line in listed], ["NAME", "path", "style"])
        self.assertFalse(json.loads(cli("loras", "unpin", "style", "--json", *url).stdout)["pinned"])
        self.assertTrue(json.loads(cli("loras", "pin", "style", "--json", *url).stdout)["pinned"])
        taken = cli("loras", "add", "style", file, "--keep", *url)
        self.assertEqual((taken.returncode, "already" in taken.stderr), (1, True), taken.stderr)
        self.assertEqual(cli("loras", "remove", "style", *url).returncode, 0)
        for words, status, told in ((("remove", "style"), 1, "not found"), (("add", "x", "/no/such"), 1, "/no/such"), (("add", "x", "/tmp"), 1, "/tmp"),
                                    (("add", "-- -x", file), 2, ""), (("add", "x", "/etc/passwd", "--by-path"), 2, "outside loras.folders"), (("lst",), 2, "did you mean 'list'")):
            with self.subTest(words):
                done = cli("loras", *words, *url)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn(told, done.stderr)
        self.assertEqual(self.names(), ["path"])

    CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"to_q": 2}, "target_modules": ["to_q"]}

    def has_the_configuration(self, stored, file):
        """The stored file has the tensors of `file`, and in its metadata the configuration."""
        def parts(data):
            end = 8 + int.from_bytes(data[:8], "little")
            return json.loads(data[8:end]), data[end:]
        (before, tensors), (header, kept) = parts(file), parts(stored)
        self.assertEqual(kept, tensors)
        told = json.loads(header.pop("__metadata__")["lora_adapter_metadata"])
        self.assertEqual(told, {key: self.CONFIG[key] for key in ("r", "lora_alpha", "use_rslora", "alpha_pattern")})
        before.pop("__metadata__", None)
        self.assertEqual(header, before)

    @staticmethod
    def write_folder(folder, file, config):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "adapter_config.json"), "w") as f:
            json.dump(config, f)
        if file:
            with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as f:
                f.write(file)

    def test_a_folder_of_peft_is_uploaded_with_its_configuration(self):
        with tempfile.TemporaryDirectory() as folder:
            def add(file, **changed):
                self.write_folder(folder, file, {**self.CONFIG, **changed})
                return cli("loras", "add", "peft", folder, "--url", self.shared.fleet.url, "--json")
            self.assertIn("has no adapter_model.safetensors", add(None).stderr)
            for kind in ("LOHA", 5):
                refused = add(adapter(7), peft_type=kind)
                self.assertEqual((refused.returncode, "peft_type is" in refused.stderr), (2, True), refused.stderr)
            added = add(adapter(7))
            self.assertEqual(added.returncode, 0, added.stderr)
        self.has_the_configuration(self.stored(json.loads(added.stdout)["sha256"]), adapter(7))

    def test_a_folder_of_peft_is_uploaded_as_two_parts(self):
        with tempfile.TemporaryDirectory() as folder:
            self.write_folder(folder, adapter(7), self.CONFIG)
            url = self.shared.fleet.url + "/v1/loras/"
            curl = ["curl", "-sS", "-X", "PUT", "-F", f"config=@{folder}/adapter_config.json", "-F", f"file=@{folder}/adapter_model.safetensors"]
            lora = json.loads(subprocess.run(curl + [url + "two"], check=True, capture_output=True).stdout)
            self.assertEqual((lora["rank"], lora["layers"]), (4, 1), lora)
            self.has_the_configuration(self.stored(lora["sha256"]), adapter(7))
            one = json.loads(subprocess.run(["curl", "-sS", "-X", "PUT", "-F", f"file=@{folder}/adapter_model.safetensors", url + "one"],
                                            check=True, capture_output=True).stdout)
            self.assertEqual(one["sha256"], digest(adapter(7)))
        config, file = ("config", "adapter_config.json", json.dumps(self.CONFIG).encode()), ("file", "a.safetensors", adapter(7))
        self.clean()

        def put(*parts, cut=None, **other):
            body, headers = form(*parts)
            return self.first.request("PUT", "/v1/loras/form", body[:cut], {**headers, **other})
        for parts, told in (((file, config), "before the file"), ((file, file), "two files"), ((config, config, file), "two parts"),
                            ((config,), "no file"), ((), "no file"), ((config, ("file", "a", b"x")), "too small"), ((config, ("file", "a", b"\xff" * 64)), "header"),
                            ((("config", "adapter_config.json", b'{"peft_type": "LOHA"}'), file), "peft_type"), ((("config", "c", b"[]"), file), "JSON object"),
                            ((("config", "c", b" " * (1 << 20) + b"{}"), file), "1 MiB")):
            with self.subTest(told, parts=[part[:2] for part in parts]):
                self.refused(put(*parts), 400, told)
        self.refused(put(config, file, cut=-9), 400, "incomplete")
        self.refused(put(config, file, **{"Content-Type": "multipart/form-data"}), 400, "boundary")
        self.assertEqual(self.chunk_keys(), [])

    def test_a_folder_of_peft_is_registered_by_its_path(self):
        top = self.top.name
        self.write_folder(f"{top}/two/peft", adapter(7), self.CONFIG)
        with open(f"{top}/two/peft/README.md", "w") as f:
            f.write("not read")
        answer = self.by_path("peft")
        self.assertEqual(answer.status, 201, answer)
        with tempfile.TemporaryDirectory() as folder:
            self.write_folder(folder, adapter(7), self.CONFIG)
            uploaded = json.loads(cli("loras", "add", "up", folder, "--url", self.shared.fleet.url, "--json").stdout)
        self.assertEqual((answer.json()["sha256"], answer.json()["bytes"]), (uploaded["sha256"], uploaded["bytes"]), "the same adapter")
        self.clean()
        os.remove(f"{top}/two/peft/adapter_model.safetensors")
        os.symlink(f"{top}/outside/d.safetensors", f"{top}/two/peft/adapter_model.safetensors")
        self.refused(self.by_path("peft"), 400, "no file", param="path")
        os.remove(f"{top}/two/peft/adapter_model.safetensors")
        self.write_folder(f"{top}/two/peft", adapter(7), {**self.CONFIG, "peft_type": "LOHA"})
        self.refused(self.by_path("peft"), 400, "peft_type", param="path")

    def test_says_which_models_an_adapter_fits(self):
        url = ("--url", self.shared.fleet.url)
        added = cli("loras", "add", "flux", os.path.join(self.top.name, "one", "a.safetensors"), *url)
        self.assertIn("1 layer, for tiny", added.stdout)
        self.assertIn("1 layer, for tiny", cli("loras", "show", "flux", *url).stdout)
        rank = ("F32", [2, 64], bytes(512))
        wan = safetensors({f"diffusion_model.blocks.{i}.self_attn.q.lora_{side}.weight": rank if side == "A" else ("F32", [64, 2], bytes(512))
                           for i in range(3) for side in "AB"})
        lora = self.put("wan", wan).json()
        self.assertEqual((lora["layers"], lora["fits"]), (3, []))
        self.clean()
        self.refused(self.put("wan", wan, query="?model=tiny"), 400, "'tiny' is flux", param="model")

    def test_a_redis_that_refuses_is_not_reported_as_unreachable(self):
        self.addCleanup(self.redis, "REPLICAOF", "NO", "ONE")
        self.addCleanup(self.redis, "CONFIG", "SET", "maxmemory", "0")
        self.redis("CONFIG", "SET", "maxmemory", "1")
        self.refused(self.put("full", adapter(5)), 429, "memory limit", "nothing was changed")
        self.redis("CONFIG", "SET", "maxmemory", "0")
        self.redis("REPLICAOF", "127.0.0.1", "1")  # as after a failover
        answer = self.put("replica", adapter(5))
        self.redis("REPLICAOF", "NO", "ONE")
        self.assertEqual(answer.status, 503, answer)
        for told in ("rejects commands at the moment", "READONLY"):
            self.assertIn(told, answer.error["message"])
        until(lambda: self.first.get("/v1/loras").status == 200, "the registry again", 10)
        self.assertEqual(self.names(), [])
        self.assertEqual(self.chunk_keys(), [])

    def test_everything_survives_a_restart_of_redis(self):
        self.redis("CONFIG", "SET", "appendfsync", "always")  # everysec keeps a write in memory while a sync runs
        self.put("kept", adapter(9))
        pid = self.shared.fleet.ready["pids"]["redis"]
        os.kill(pid, 9)
        until(lambda: self.shared.fleet.ready["pids"]["redis"] not in (0, None, pid), "another Redis", 30)
        until(lambda: self.first.get("/v1/loras").status == 200, "it answers again", 30)
        self.assertEqual(self.names(), ["kept"])
        self.redis = Redis(self.shared.fleet.redis_socket)
        self.addCleanup(self.redis.close)
        self.assertEqual(self.stored(digest(adapter(9))), adapter(9))


if __name__ == "__main__":
    unittest.main()
