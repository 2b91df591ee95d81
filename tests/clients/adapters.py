"""Builds adapter files, and holds what the tests of their registry share."""
import hashlib
import json
import socket
import struct
import unittest

from api import Client

BYTES = {"Content-Type": "application/octet-stream"}
DOWN, UP = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "transformer.transformer_blocks.0.attn.to_q.lora_B.weight"


def safetensors(tensors, tail=b""):
    """Returns the safetensors file of {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return raw_file(header, data + tail)


def raw_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def adapter(seed=0, rank=4, width=64):
    """Returns a well-formed adapter; each seed gives different bytes."""
    fill = lambda n: (hashlib.sha256(str(seed).encode()).digest() * (n // 32 + 1))[:n]
    return safetensors({DOWN: ("F32", [rank, width], fill(rank * width * 4)), UP: ("F32", [width, rank], fill(rank * width * 4))})


def form(*parts, boundary="zz"):
    """Returns the body and headers of a form with (name, file name, contents)."""
    body = b"".join(b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n'
                    % (boundary.encode(), name.encode(), file.encode(), data) for name, file, data in parts)
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def digest(data):
    return hashlib.sha256(data).hexdigest()


class Redis:
    """A RESP2 client that can read binary values."""

    def __init__(self, path):
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")

    def __call__(self, *words):
        words = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        self.socket.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        return self.reply()

    def reply(self):
        line = self.file.readline().rstrip()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        if kind == b"-":
            raise AssertionError(rest)
        return int(rest) if kind == b":" else rest

    def close(self):
        self.file.close()
        self.socket.close()


class RegistryCase(unittest.TestCase):
    """A test of a fleet's registry. The registry is empty when the test begins."""

    def connect(self, fleet, first=None, second=None, admin=None):
        self.first, self.second, self.admin = (Client(fleet.url, key) for key in (first, second, admin))
        self.redis = Redis(fleet.redis_socket)
        self.addCleanup(self.redis.close)
        self.addCleanup(self.clean)

    def clean(self):
        """Empties the registry, including the retained bytes of replaced adapters."""
        redis = Redis(self.redis.path)
        self.addCleanup(redis.close)
        keys = redis("KEYS", "df:{lora}:*")
        if keys:
            redis("DEL", *keys)

    def put(self, name, data, client=None, query="", **headers):
        return (client or self.first).request("PUT", f"/v1/loras/{name}{query}", data, {**BYTES, **headers})

    def refused(self, answer, status, *words, param=None):
        self.assertEqual(answer.status, status, answer)
        for word in words:
            self.assertIn(word, answer.error["message"])
        self.assertEqual(answer.error["param"], param)
        self.assertEqual(self.names(), [])

    def names(self, client=None):
        return [lora["name"] for lora in (client or self.first).get("/v1/loras").json()["loras"]]

    def stored(self, sha256):
        """Returns the bytes stored under a digest, or None."""
        blob = self.redis("HGETALL", "df:{lora}:blob:" + sha256)
        blob = dict(zip(blob[::2], blob[1::2]))
        if b"upload" not in blob:
            return None
        chunks = [self.redis("GET", b"df:{lora}:chunk:%s:%d" % (blob[b"upload"], i)) for i in range(int(blob[b"chunks"]))]
        self.assertTrue(all(len(c) <= 1 << 20 for c in chunks))
        return b"".join(chunks)

    def chunk_keys(self):
        return self.redis("KEYS", "df:{lora}:chunk:*")
