"""Scores videos against the prompts that they were generated from, whatever program generated them; prints JSON.

  evaluate.py --worker build/bin/ditfleet-worker    generates with the worker's `generate`, then scores
  evaluate.py --diffusers                           generates with diffusers' WanPipeline, then scores
  evaluate.py --frames FOLDER                       scores FOLDER/000/*.png, FOLDER/001/*.png, ... (line 0, 1, ...)
  evaluate.py --checker 1000                        scores the checker itself: drawn clips, true and shuffled captions

The prompts are heldout_prompts.jsonl. Settings not given are those of the model's ditfleet.json. Video i has the seed
SEED + i. --worker and --frames need numpy and pillow only.
"""
import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

import clips
import tracker

HERE = os.path.dirname(os.path.abspath(__file__))


def generate_with_worker(a, prompts, settings, folder):
    for i, line in enumerate(prompts):
        subprocess.run([a.worker, "generate", "--model", a.model, "--prompt", line["prompt"], "--seed", str(a.seed + i),
                        "--steps", str(settings["num_inference_steps"]), "--guidance", str(settings["guidance_scale"]),
                        "--device", a.device, "--dtype", a.dtype, "--frames-dir", os.path.join(folder, f"{i:03d}"),
                        "--out", os.path.join(folder, f"{i:03d}.mp4")], check=True, stdout=subprocess.DEVNULL)


def generate_with_diffusers(a, prompts, settings, folder):
    import torch
    from diffusers import WanPipeline

    device = a.device if a.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"auto": torch.bfloat16 if device == "cuda" else torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
    pipeline = WanPipeline.from_pretrained(a.model, dtype=dtype[a.dtype]).to(device)
    pipeline.set_progress_bar_config(disable=True)
    names = {"num_frames" if k == "frames" else k: v for k, v in settings.items()}
    for i, line in enumerate(prompts):
        frames = pipeline(prompt=line["prompt"], generator=torch.Generator("cpu").manual_seed(a.seed + i), output_type="np", **names).frames[0]
        os.makedirs(os.path.join(folder, f"{i:03d}"))
        for k, frame in enumerate((frames * 255).round().astype(np.uint8)):
            Image.fromarray(frame).save(os.path.join(folder, f"{i:03d}", f"frame_{k:04d}.png"))


def read_frames(folder):
    return np.stack([np.asarray(Image.open(p).convert("RGB")) for p in sorted(glob.glob(os.path.join(folder, "*.png")))])


def check_the_checker(count):
    import torch

    import motion

    torch.manual_seed(1)
    numbers = torch.randint(len(clips.triples()), (count,))
    videos = [v for part in numbers.split(50) for v in motion.pixels(motion.draw(part))]
    asked = [dict(zip(tracker.ATTRIBUTES, clips.triples()[i])) for i in numbers]
    return {name: tracker.percentages([tracker.compare(asked[(i + shift) % count], v) for i, v in enumerate(videos)])
            for name, shift in (("true", 0), ("shuffled", count // 2))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--worker", metavar="PROGRAM", help="generate with this worker")
    source.add_argument("--diffusers", action="store_true", help="generate with diffusers")
    source.add_argument("--frames", metavar="FOLDER", help="score these videos")
    source.add_argument("--checker", metavar="N", type=int, help="score the checker on N drawn clips")
    parser.add_argument("--prompts", default=os.path.join(HERE, "heldout_prompts.jsonl"))
    parser.add_argument("--count", type=int, help="only the first N prompts")
    parser.add_argument("--model", default=os.path.join(HERE, "model"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--keep", metavar="FOLDER", help="keep the frames in this new folder")
    parser.add_argument("--at-least", type=float, default=0.0, help="exit with 1 if fewer percent are all right")
    a = parser.parse_args()
    if a.checker:
        print(json.dumps(check_the_checker(a.checker)))
        return 0
    with open(a.prompts, encoding="utf-8") as f:
        prompts = [json.loads(line) for line in f][:a.count]
    with open(os.path.join(a.model, "ditfleet.json"), encoding="utf-8") as f:
        settings = json.load(f)
    settings["num_inference_steps"] = a.steps or settings["num_inference_steps"]
    settings["guidance_scale"] = a.guidance or settings["guidance_scale"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.frames or a.keep or temporary
        os.makedirs(folder, exist_ok=True)
        began = time.time()
        if a.worker:
            generate_with_worker(a, prompts, settings, folder)
        elif a.diffusers:
            generate_with_diffusers(a, prompts, settings, folder)
        seconds = time.time() - began
        results = []
        for i, line in enumerate(prompts):
            results.append(tracker.compare(line, read_frames(os.path.join(folder, f"{i:03d}"))))
            if not results[-1]["all"]:
                print(f"{i:03d} wrong ({', '.join(k for k in tracker.ATTRIBUTES if not results[-1][k])}): {line['prompt']}", file=sys.stderr)
    score = tracker.percentages(results)
    print(json.dumps({"prompts": len(prompts), "settings": settings, "seed": a.seed, "seconds_generating": round(seconds, 1), **score}))
    return 0 if score["all"] >= a.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
