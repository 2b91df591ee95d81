"""Receives the end of a job by a webhook, and checks its signature as Standard Webhooks say. A service needs
webhooks.allow_private for a receiver on the same host, as the demo has it."""
import base64
import hashlib
import hmac
import http.server
import json
import os
import time
import urllib.request

URL = os.environ.get("DITFLEET_URL", "http://127.0.0.1:8780")


def call(method, path, body=None):
    request = urllib.request.Request(URL + path, json.dumps(body).encode() if body else None, method=method)
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", "Bearer " + os.environ.get("DITFLEET_KEY", "none"))
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


SECRET = base64.b64decode(call("GET", "/v1/webhooks/secret")["secret"].removeprefix("whsec_"))


def is_genuine(headers, body):
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    right = "v1," + base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    fresh = abs(time.time() - int(headers["webhook-timestamp"])) < 300
    return fresh and any(hmac.compare_digest(right, one) for one in headers["webhook-signature"].split())


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if is_genuine(self.headers, body):
            event = json.loads(body)
            # The same event may come twice, always with the same webhook-id.
            print(self.headers["webhook-id"], event["type"], event["data"]["unit_records"][0]["result"]["url"])
            self.server.done = True
        self.send_response(204 if is_genuine(self.headers, body) else 400)
        self.end_headers()


with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
    server.done = False
    here = f"http://127.0.0.1:{server.server_port}/ditfleet"
    call("POST", "/v1/jobs", {"model": "demo", "prompt": "a green star", "webhook": here})
    while not server.done:
        server.handle_request()
