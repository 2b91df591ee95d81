"""Scores images against the prompts they were drawn from, whatever program drew them.

  evaluate.py --worker build/bin/ditfleet-worker    draws with the worker's `generate`, then scores
  evaluate.py --diffusers                           draws with diffusers' FluxPipeline, then scores
  evaluate.py --pictures FOLDER                     scores 000.png, 001.png, ... (line 0, 1, ... of the prompts)
  evaluate.py --checker 1000                        scores the checker itself: drawn scenes, true and shuffled captions

The prompts are heldout_prompts.jsonl: pairs of (colour, shape) that training never saw together. Settings not given
are those of the model's ditfleet.json. The i-th image is drawn with seed SEED + i. --worker and --pictures need
numpy and pillow only.
"""
import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time

import numpy as np
from PIL import Image

import checker
import scenes

HERE = os.path.dirname(os.path.abspath(__file__))


def image_path(folder, i):
    return os.path.join(folder, f"{i:03d}.png")


def draw_with_worker(a, prompts, settings, folder):
    for i, line in enumerate(prompts):
        command = [a.worker, "generate", "--model", a.model, "--prompt", line["prompt"], "--seed", str(a.seed + i),
                   "--steps", str(settings["num_inference_steps"]), "--true-cfg", str(settings["true_cfg_scale"]),
                   "--negative", settings["negative_prompt"], "--size", f"{settings['width']}x{settings['height']}",
                   "--device", a.device, "--dtype", a.dtype, "--set", f"worker.threads={a.threads}", "--out", image_path(folder, i), *shlex.split(a.options)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def draw_with_diffusers(a, prompts, settings, folder):
    import torch
    from diffusers import FluxPipeline

    device = a.device if a.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"auto": torch.bfloat16 if device == "cuda" else torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
    pipeline = FluxPipeline.from_pretrained(a.model, dtype=dtype[a.dtype]).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for name in a.lora:
        pipeline.load_lora_weights(name)
    for i, line in enumerate(prompts):
        drawn = pipeline(prompt=line["prompt"], generator=torch.Generator("cpu").manual_seed(a.seed + i), **settings)
        drawn.images[0].save(image_path(folder, i))


def read_image(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def check_the_checker(count, size):
    """The checker on drawn scenes: with their own captions, and with those of other scenes."""
    import torch

    import render

    rng = random.Random(1)
    drawn = [scenes.sample_scene(rng, *size) for _ in range(count)]
    asked = [checker.asked_of(s) for s in drawn]
    results = {"true": [], "shuffled": []}
    for i, scene in enumerate(drawn):
        x = render.render(render.scene_table([scene]), *size)[0]
        seen = checker.read(((x * 0.5 + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
        results["true"].append(checker.compare(asked[i], seen))
        results["shuffled"].append(checker.compare(asked[(i + count // 2) % count], seen))
    return {k: checker.percentages(v) for k, v in results.items()}


def table(rows):
    names = [*checker.ATTRIBUTES, "all"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return "\n".join(lines + [f"| {k} | " + " | ".join(f"{v[n]:.1f}" for n in names) + " |" for k, v in rows.items()])


def size_of(text):
    width, _, height = text.partition("x")
    return int(width), int(height)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--worker", metavar="PROGRAM", help="draw with this worker")
    source.add_argument("--diffusers", action="store_true", help="draw with diffusers")
    source.add_argument("--pictures", metavar="FOLDER", help="score these images")
    source.add_argument("--checker", metavar="N", type=int, help="score the checker on N drawn scenes")
    parser.add_argument("--prompts", default=os.path.join(HERE, "heldout_prompts.jsonl"))
    parser.add_argument("--count", type=int, help="only the first N prompts")
    parser.add_argument("--model", default=os.path.join(HERE, "model"))
    parser.add_argument("--size", type=size_of, metavar="WxH")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--true-cfg", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of the worker; 0: all cores")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--options", default="", help="more options of the worker's `generate`, such as '--quantize transformer=fp8'")
    parser.add_argument("--lora", action="append", default=[], metavar="FILE", help="adapter, with --diffusers")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the images here")
    parser.add_argument("--at-least", type=float, default=0.0, help="exit with 1 if fewer percent are all right")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    a = parser.parse_args()

    if a.checker:
        rows = check_the_checker(a.checker, a.size or (256, 256))
        print(json.dumps(rows) if a.json else table(rows))
        return 0

    with open(a.prompts, encoding="utf-8") as f:
        prompts = [json.loads(line) for line in f][:a.count]
    with open(os.path.join(a.model, "ditfleet.json"), encoding="utf-8") as f:
        settings = json.load(f)
    settings["negative_prompt"] = settings.get("negative_prompt") or ""
    if a.size:
        settings["width"], settings["height"] = a.size
    if a.steps:
        settings["num_inference_steps"] = a.steps
    if a.true_cfg:
        settings["true_cfg_scale"] = a.true_cfg

    with tempfile.TemporaryDirectory() as temporary:
        folder = a.pictures or a.keep or temporary
        os.makedirs(folder, exist_ok=True)
        began = time.time()
        if a.worker:
            draw_with_worker(a, prompts, settings, folder)
        elif a.diffusers:
            draw_with_diffusers(a, prompts, settings, folder)
        seconds = time.time() - began
        results = []
        for i, line in enumerate(prompts):
            seen = checker.read(read_image(image_path(folder, i)))
            results.append(checker.compare(checker.asked_of(line), seen))
            if not results[-1]["all"] and not a.json:
                wrong = ", ".join(k for k in checker.ATTRIBUTES if not results[-1][k])
                print(f"{i:03d} wrong ({wrong}): {line['prompt']}", file=sys.stderr)
    score = checker.percentages(results)
    if a.json:
        print(json.dumps({"prompts": len(prompts), "settings": settings, "seed": a.seed, "seconds_drawing": round(seconds, 1), **score}))
    else:
        print(table({f"{len(prompts)} prompts": score}))
        if not a.pictures:
            print(f"{seconds / len(prompts):.2f} s per image")
    return 0 if score["all"] >= a.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
