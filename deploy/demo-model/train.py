"""Trains the demo model: one GPU, under half an hour. `train.py all --work DIR` runs every stage:

  captions   scenes, captions and their tokens (CPU)          vae      the autoencoder
  text       both text encoders, with linear read-outs        warm     compiles the transformer's blocks (fills a cache)
  flow       latents, then flow matching of everything but the autoencoder, with an average of the weights
  lora NAME  one adapter on the averaged weights               grid     accuracy over steps and guidance, validation prompts

Stages are processes that meet in the work folder; one whose result is there is skipped. Times are
seconds; the rates follow the clock, so that every stage ends when its time is up.
"""
import argparse
import importlib
import os
import subprocess
import sys
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import torch  # noqa: E402  (after the environment is set)

from training.work import say, set_up  # noqa: E402

LORAS = ["outline", "night", "pastel"]
DONE = {"captions": "captions.pt", "vae": "vae.pt", "text": "text.pt", "warm": "warm.pt", "flow": "flow.pt", "grid": "grid.json"}
STAGES = {"captions": ("captions", "stage_captions"), "vae": ("autoencoder", "stage_vae"), "text": ("text", "stage_text"),
          "warm": ("flow", "stage_warm"), "flow": ("flow", "stage_flow"), "grid": ("accuracy", "stage_grid"),
          "lora": ("adapters", "stage_lora")}


def stage_all(a):
    began = a.began or time.time()

    def start(*stage, name=None):
        name = name or stage[0]
        if os.path.exists(os.path.join(a.work, DONE.get(name, name + ".json"))):
            return None
        log = open(os.path.join(a.work, name + ".log"), "a")
        say("start", *stage)
        return name, subprocess.Popen([sys.executable, os.path.abspath(__file__), *stage, *sys.argv[2:]], stdout=log, stderr=log)

    def wait(*jobs):
        for job in jobs:
            if job and job[1].wait() != 0:
                say("FAILED", job[0])
                if job[0] != "warm":
                    raise SystemExit(1)

    vae, captions = start("vae"), start("captions")
    wait(captions)
    text = start("text")
    warm = start("warm") if a.compile else None
    wait(text, vae, warm)
    wait(start("flow", "--deadline", str(began + a.total - a.lora_time - 45)))
    wait(start("grid"), *[start("lora", "--name", n, name="lora_" + n) for n in LORAS])
    say("ALL DONE", round(time.time() - began, 1), "s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["all", *STAGES])
    parser.add_argument("--work", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="the adapter, for the stage lora")
    parser.add_argument("--total", type=float, default=1560, help="seconds for everything")
    parser.add_argument("--began", type=float, help="when the total began (seconds since 1970), for going on after a stop")
    parser.add_argument("--deadline", type=float, help="when the flow ends (seconds since 1970)")
    parser.add_argument("--vae-time", type=float, default=170)
    parser.add_argument("--text-time", type=float, default=25)
    parser.add_argument("--flow-time", type=float, default=1100)
    parser.add_argument("--lora-time", type=float, default=90)
    parser.add_argument("--kl", type=float, default=4e-4)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--muon-lr", type=float, default=3e-3, help="0: AdamW for all")
    parser.add_argument("--hold", type=float, default=0.4)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="sizes for a quick trial on a CPU")
    parser.add_argument("--lora-steps", type=int, help="so many steps instead of so much time")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--small-lora", action="store_true", help="the adapters on a CPU: few scenes, small batches")
    a = parser.parse_args()
    a.half = torch.bfloat16 if a.device == "cuda" else torch.float32  # bf16 convolutions take minutes on many CPUs
    a.processes, a.scenes, a.vae_scenes, a.vae_batch = 14, [110000, 37000, 37000], 24000, 64
    a.batch, a.text_batch, a.lora_batch, a.lora_scenes = 512, 512, 128, 8000
    a.validation, a.validation_steps, a.test, a.grid_steps, a.grid_cfg = 142, 20, 300, [4, 8, 12, 20], [1.0, 2.0, 3.0]
    a.settings = [(4, 1.0), (8, 1.0), (8, 2.0), (20, 3.0)]
    if a.tiny:
        a.processes, a.scenes, a.vae_scenes, a.vae_batch = 1, [64, 16, 16], 160, 4
        a.batch, a.text_batch, a.lora_batch, a.lora_scenes = 4, 16, 2, 8
        a.validation, a.validation_steps, a.test, a.grid_steps, a.grid_cfg = 2, 2, 2, [2], [3.0]
        a.settings = [(2, 2.0)]
    if a.small_lora:  # what two CPU cores can do in minutes
        a.processes, a.scenes, a.lora_batch, a.lora_scenes = 2, [600, 150, 150], 4, 40
    os.makedirs(a.work, exist_ok=True)
    if a.stage == "all":
        stage_all(a)
        return
    set_up(a)
    module, function = STAGES[a.stage]
    getattr(importlib.import_module("training." + module), function)(a)


if __name__ == "__main__":
    main()
