"""Prints, for service.sh, how long a worker takes from a video's last frame until its result can be fetched: with results in a
folder, and in the S3 store that moto serves on this host. A tiny model makes noise, which is the worst case of MP4."""
import statistics
import tempfile

from s3_test import Store, fetch, sets  # tests/clients
from api import Client
from fleet import ROOT, Fleet

VIDEO = {"prompt": "x", "width": 256, "height": 256, "frames": 81, "num_inference_steps": 1, "output_compression": 100}


def measure(model, options):
    """Seconds of the last frames' encoding and of storing, and bytes, for each of three videos."""
    with Fleet(models={"video": model}, sets=["default_model=video", *options]) as fleet:
        http = Client(fleet.url, timeout=300)
        for seed in range(4):
            job = http.wait(http.submit(seed=seed, **VIDEO))
            unit, = job["unit_records"]
            assert unit["state"] == "succeeded", unit
            if seed > 0:  # the first one is a warm-up
                yield (unit["phases_us"]["encode"] + unit["phases_us"]["store"]) / 1e6, unit["result"]


with tempfile.TemporaryDirectory(prefix="ditfleet-s3-") as folder, Store() as store:
    model = ROOT / "tests/fixtures/wan/two/model"
    local = list(measure(model, ["results.backend=file", f"results.dir={folder}/results"]))
    remote = list(measure(model, [one for one in sets(store) if "default_model" not in one]))
    assert len(fetch(remote[0][1]["url"])[2]) == remote[0][1]["bytes"]
local_s, remote_s = (statistics.median(seconds for seconds, _ in rows) for rows in (local, remote))
print("video_81_bytes", round(statistics.median(result["bytes"] for _, result in local)), "bytes")
print("last_frame_to_result_file", round(local_s, 3), "s")
print("last_frame_to_result_s3", round(remote_s, 3), "s")
print("s3_more_than_file", round(remote_s - local_s, 3), "s")
