#!/usr/bin/env python3
"""The peer of queue.sh: BullMQ with jobs that only report progress three times.

  PYTHON bullmq_peer.py [--jobs N] [--processes N] [--concurrency N] [--csv FILE --revision R --machine M]

PYTHON needs the packages bullmq, redis and uvloop; queue.sh makes such an environment. The script starts and stops a
private redis-server (append-only, everysec, loopback) and the worker processes. It adds all jobs in bulk before the
workers start and times only the draining. That flatters the peer, because DiTFleet's figure includes submission.
Prints one JSON object per figure.
"""
import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

QUEUE = "bench"
SPEC = {
    "model": "flux.1-dev",
    "prompt": "a lighthouse on a cliff above a stormy sea at dusk, oil on canvas, thick brush strokes",
    "n": 1, "width": 1024, "height": 1024, "num_inference_steps": 28, "guidance_scale": 3.5, "seed": 1234567890123,
}


def options(port):
    return {"connection": {"host": "127.0.0.1", "port": port}}


async def work(port, concurrency):
    from bullmq import Worker

    async def process(job, token):
        for step in (9, 18, 27):
            await job.updateProgress(step)

    worker = Worker(QUEUE, process, {**options(port), "concurrency": concurrency})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await worker.close(force=True)


async def add(port, jobs):
    from bullmq import Queue

    queue = Queue(QUEUE, options(port))
    began = time.monotonic()
    for first in range(0, jobs, 500):
        count = min(500, jobs - first)
        await queue.addBulk([{"name": "image", "data": SPEC} for _ in range(count)])
    took = time.monotonic() - began
    await queue.close()
    return jobs / took


async def drain(client, jobs, limit_s):
    """Waits until all jobs have completed. Returns the seconds from the first to the last completion and their number."""
    deadline = time.monotonic() + limit_s
    first_at = first = last = None
    while time.monotonic() < deadline:
        done = await client.zcard(f"bull:{QUEUE}:completed")
        now = time.monotonic()
        if done > 0 and first_at is None:
            first_at, first = now, done
        if done >= jobs:
            last = now
            break
        await asyncio.sleep(0.05)
    if last is None:
        raise SystemExit(f"bullmq_peer: {done} of {jobs} jobs completed within {limit_s} s")
    return last - first_at, jobs - first


def redis_server(folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes",
         "--appendfsync", "everysec", "--auto-aof-rewrite-min-size", "1gb", "--dir", folder, "--loglevel", "warning"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(200):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return server, port
        time.sleep(0.05)
    server.kill()
    raise SystemExit("bullmq_peer: redis-server did not come up")


async def run(args, port):
    import redis.asyncio

    client = redis.asyncio.Redis(port=port)
    add_rate = await add(port, args.jobs)
    memory = (await client.info("memory"))["used_memory"]
    cpu = await client.info("cpu")
    workers = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--work", str(port), str(args.concurrency)])
               for _ in range(args.processes)]
    try:
        seconds, count = await drain(client, args.jobs, args.limit)
        after = await client.info("cpu")
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
    spent = sum(after[k] - cpu[k] for k in ("used_cpu_user", "used_cpu_sys"))
    yield "added_per_s", add_rate, "jobs/s"
    yield "jobs_per_s", count / seconds, "jobs/s"
    yield "redis_cpu_per_job", spent / args.jobs * 1e6, "us"
    yield "redis_memory_per_waiting_job", memory / args.jobs, "bytes"
    await client.aclose()


async def measure(args):
    folder = tempfile.mkdtemp(prefix="ditfleet-peer-")
    server, port = redis_server(folder)
    try:
        rows = []
        async for metric, value, unit in run(args, port):
            print(json.dumps({"system": "bullmq", "scenario": args.scenario, "metric": metric, "value": round(value, 3), "unit": unit}), flush=True)
            rows.append((metric, value, unit))
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    if not args.csv:
        return
    versions = f"bullmq {importlib.metadata.version('bullmq')}; python {sys.version.split()[0]}"
    with open(args.csv, "a") as out:
        for metric, value, unit in rows:
            date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            out.write(f"{date},{args.revision},{args.machine},{versions},bullmq,{args.scenario},{metric},{value:.3f},{unit}\n")


def main():
    import uvloop

    if len(sys.argv) > 3 and sys.argv[1] == "--work":
        uvloop.run(work(int(sys.argv[2]), int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--limit", type=float, default=240)
    parser.add_argument("--scenario", default="throughput")
    parser.add_argument("--csv")
    parser.add_argument("--revision", default="unknown")
    parser.add_argument("--machine", default="unknown")
    args = parser.parse_args()
    uvloop.run(measure(args))


main()
