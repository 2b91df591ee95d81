"""A video by Python's own library: submits a job, shows its progress and writes video.mp4."""
import json
import os
import urllib.request

URL = os.environ.get("DITFLEET_URL", "http://127.0.0.1:8780")
HEADERS = {"Authorization": "Bearer " + os.environ.get("DITFLEET_KEY", "none"), "Content-Type": "application/json"}


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(URL + path, data, HEADERS))


job = json.load(call("/v1/jobs", {"model": "demo-video", "prompt": "a red circle moves right"}))
with call(f"/v1/jobs/{job['id']}/events") as events:  # server-sent events, which end with the job
    for line in events:
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if event.get("total"):
                print(f"step {event['step']} of {event['total']}")
job = json.load(call("/v1/jobs/" + job["id"]))
if job["state"] != "succeeded":
    raise SystemExit(f"{job['state']}: {job['error']}")
with open("video.mp4", "wb") as file:
    file.write(call(f"/v1/jobs/{job['id']}/results/0").read())
