"""Runs a coordinator under callgrind for service.sh, with and without an OTLP receiver, and prints its instructions per
job: from the submission over HTTP to the end that a worker reports."""
import re
import socket
import statistics
import subprocess
import tempfile
from pathlib import Path

from api import Client
from fleet import BIN, DITFLEET, SpanSink, clean_environment, start, tiny_model, until

FEW, MANY, ROUNDS = 200, 1200, 5
JOB = {"prompt": "x", "width": 32, "height": 16, "num_inference_steps": 3, "seed": 1}
PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def answers(url):
    try:
        return Client(url).get("/readyz").status == 200
    except OSError:
        return False


def instructions(jobs, endpoint):
    with tempfile.TemporaryDirectory(prefix="ditfleet-bench-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        redis = start(["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis", "--save", ""], stdout=subprocess.DEVNULL)
        out = Path(folder) / "callgrind"
        with open(f"{folder}/log", "w") as log:
            process = start(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", DITFLEET, "coordinator", "--redis",
                             f"unix://{folder}/redis", "--listen", url, "--set", f"models.tiny.path={tiny_model()}", "--set",
                             f"telemetry.otlp_endpoint={endpoint}"], stdout=log, env=clean_environment())
        worker = start([BIN / "ditfleet-worker", "run", "--redis", f"unix://{folder}/redis", "--model", f"tiny={tiny_model()}",
                        "--device", "cpu", "--set", "worker.threads=1"], stdout=subprocess.DEVNULL)
        try:
            until(lambda: answers("http://" + url), "the coordinator is ready", 120)
            client = Client("http://" + url, timeout=120)
            for _ in range(jobs):
                answer = client.request("POST", "/v1/jobs", JOB, PARENT)
                assert answer.status == 202, answer.body
            assert client.wait(answer.json()["id"])["state"] == "succeeded"  # jobs run in order
            process.terminate()
            process.wait(120)
            return int(re.search(r"^(?:totals|summary): *(\d+)", out.read_text(), re.M)[1])
        except BaseException:
            print(Path(f"{folder}/log").read_text()[-4000:], flush=True)
            raise
        finally:
            for one in (process, worker, redis):
                one.kill()
                one.wait()


with SpanSink() as sink:
    endpoints = ["", sink]
    few = [instructions(FEW, endpoint) for endpoint in endpoints]
    # In turn: how many jobs the scheduler takes at a time depends on the machine's load.
    many = [[instructions(MANY, endpoint) for endpoint in endpoints] for _ in range(ROUNDS)]
off, on = ((statistics.median(runs) - base) / (MANY - FEW) for runs, base in zip(zip(*many), few))
print("instructions_per_job_untraced", round(off), "instructions")
print("instructions_per_job_traced", round(on), "instructions")
print("traced_to_untraced", round(on / off, 4), "x")
