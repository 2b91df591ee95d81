"""A thread of a worker hangs, as in a driver: the worker notices it, ends, and its unit runs on another worker."""
import subprocess
import sys
import unittest
from pathlib import Path

from api import Client
from fleet import Fleet, alive, need, until

# Stops one thread of another process, and reaps it when the process ends: its parent learns of the end only then.
STOP_THREAD = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
tid = int(sys.argv[1])
SEIZE, INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
for call in (SEIZE, INTERRUPT):
    if libc.ptrace(call, tid, None, None) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(tid, WALL)
print("stopped", flush=True)
os.waitpid(tid, WALL)
"""
STUCK_MS = 2000
FIRST_S = 5 * STUCK_MS / 1000  # before a class has been seen
ELSEWHERE_S = 15
# Seconds of denoising, so that the thread stops within a unit.
LONG = {"width": 256, "height": 256, "num_inference_steps": 100}


class Hang:
    """The thread of this name of the process is stopped until the process ends."""

    def __init__(self, pid, name):
        tasks = [t for t in Path(f"/proc/{pid}/task").iterdir() if (t / "comm").read_text().strip() == name]
        assert len(tasks) == 1, f"{pid} has {len(tasks)} threads '{name}'"
        self.tracer = subprocess.Popen([sys.executable, "-c", STOP_THREAD, tasks[0].name], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True)
        self.stopped = self.tracer.stdout.readline().strip() == "stopped"

    def end(self):
        self.tracer.kill()
        return self.tracer.communicate()[1]


def at(event):
    """The time of an event in seconds, by Redis' clock."""
    return int(event.id.split("-")[0]) / 1000


class HangTest(unittest.TestCase):
    def setUp(self):
        self.fleet = self.enterContext(Fleet(workers=2, sets=[f"worker.stuck_ms={STUCK_MS}", "worker.threads=1"]))
        self.client = Client(self.fleet.url)

    def workers(self):
        return {w["name"]: w for w in self.client.get("/v1/workers").json()["workers"]}

    def hang(self, pid, thread):
        hang = Hang(pid, thread)
        self.addCleanup(hang.end)
        need(hang.stopped, "ptrace is not permitted")
        return hang

    def unit_events(self, id):
        with self.client.events(id) as stream:
            events = []
            for event in stream:
                events.append(event)
                if event.ends_job:
                    return events

    def expect_elsewhere(self, events, since, bound, hung):
        """The second attempt starts on another worker, soon after the bound."""
        started = [e for e in events if e.type == "started"]
        again = started[-1]
        print(f"started elsewhere {at(again) - since:.1f} s after the last progress, {bound:.1f} s is the bound")
        self.assertNotEqual(again.data["worker"], hung, events)
        self.assertLessEqual(at(again) - since, bound + ELSEWHERE_S)
        self.assertEqual(events[-1].type, "succeeded", events[-1])

    def test_the_device(self):
        id = self.client.submit(model="tiny", **LONG)
        with self.client.events(id) as stream:
            steps = 0
            for event in stream:
                if event.type == "started":
                    hung = event.data["worker"]
                steps += event.type == "step"
                if steps == 3:
                    break
        worker = self.workers()[hung]
        self.hang(worker["pid"], "device")
        until(lambda: not alive(worker["pid"]), "the worker has ended", 60)
        self.assertIn("a step of class", self.fleet.tail(400))
        events = self.unit_events(id)
        retried = next(i for i, e in enumerate(events) if e.type == "ready" and e.data.get("crashes"))
        times = [at(e) for e in events[:retried] if e.type in ("started", "step")]
        slowest = max(b - a for a, b in zip(times, times[1:]))
        self.expect_elsewhere(events, times[-1], max(FIRST_S, 20 * slowest), hung)
        until(lambda: len(self.fleet.ready_workers()) == 2, "the worker is restarted", 60)

    def test_the_text(self):
        hung, worker = next(iter(self.workers().items()))
        self.hang(worker["pid"], "text")
        ids = [self.client.submit(model="tiny", num_inference_steps=4) for _ in range(6)]
        every = {id: self.unit_events(id) for id in ids}
        until(lambda: not alive(worker["pid"]), "the worker has ended")
        moved = 0
        for id, events in every.items():
            assigned = [e for e in events if e.type == "assigned" and e.data["worker"] == hung]
            retried = [e for e in events if e.type == "ready" and "encoding the text" in e.data.get("message", "")]
            if assigned and retried:
                moved += 1
                self.expect_elsewhere(events, at(assigned[0]), FIRST_S, hung)
            self.assertEqual(events[-1].type, "succeeded", events[-1])
        self.assertEqual(moved, 1, "the unit whose text hung; the others were handed back")


if __name__ == "__main__":
    unittest.main()
