#!/usr/bin/env python3
"""Draws the demo model's held-out prompts quantized, with the worker and with diffusers, and with skipped blocks, and
scores the pictures.

    precision_demo.py [--worker build/bin/ditfleet-worker] [SYSTEM…]     default: every system of SYSTEMS

All draw in bf16 on the CPU, with the same seeds. diffusers' transformer is quantized by torchao (every linear that it
accepts, dynamic activations by row) or with bitsandbytes' NF4. tests/fixtures/quant/make.py says which packages this
needs and how a CPU stands in for a GPU. Replaces the systems' rows in results/precision_cpu.csv.
"""
import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
DEMO = TOP / "deploy/demo-model"
CSV = HERE / "results/precision_cpu.csv"
FIELDS = ["date", "revision", "machine", "versions", "system", "scenario", "metric", "value", "unit"]
FP8, ATTENTION = "--quantize transformer=fp8", "--attention fp8 --set compile.backend=cpu_jit"  # fp8 only in compiled blocks
# Of the worker: options of evaluate.py. Of diffusers: who quantizes.
SYSTEMS = {"ditfleet bf16": [], "ditfleet fp8": [f"--options={FP8}"], "ditfleet nf4": ["--options=--quantize transformer=nf4"],
           "ditfleet fp8 attention": [f"--options={ATTENTION}"],
           "ditfleet fp8 linears and attention": [f"--options={FP8} {ATTENTION}"],
           # Of the model's 4 steps a cache skips none.
           "ditfleet 28 steps": ["--steps=28"], "ditfleet 28 steps cache 0.08": ["--steps=28", "--options=--cache first_block:0.08"],
           "diffusers bf16": None, "diffusers torchao fp8": "torchao", "diffusers bitsandbytes nf4": "bitsandbytes"}
PEERS = {"ditfleet fp8": "diffusers torchao fp8", "ditfleet nf4": "diffusers bitsandbytes nf4",
         "ditfleet fp8 attention": "ditfleet bf16", "ditfleet fp8 linears and attention": "ditfleet bf16",
         "ditfleet 28 steps cache 0.08": "ditfleet 28 steps"}


def evaluate(*arguments):
    out = subprocess.run([sys.executable, str(DEMO / "evaluate.py"), "--json", *arguments], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)["all"]


def diffusers_pipeline(by):
    import torch
    quant = SourceFileLoader("quant_make", str(TOP / "tests/fixtures/quant/make.py")).load_module()
    parts = {}
    if by == "torchao":
        config = quant.TorchAoConfig(quant.Float8DynamicActivationFloat8WeightConfig(granularity=quant.PerRow()))
        parts["transformer"] = quant.FluxTransformer2DModel.from_pretrained(DEMO / "model/transformer", quantization_config=config,
                                                                            torch_dtype=torch.bfloat16)
    pipe = quant.FluxPipeline.from_pretrained(DEMO / "model", torch_dtype=torch.bfloat16, **parts)
    if by == "bitsandbytes":
        functional = quant.bitsandbytes.functional
        for module in pipe.transformer.modules():
            if isinstance(module, torch.nn.Linear):
                flat = module.weight.data.view(1, -1)  # its code for AVX-512 needs rows of whole blocks
                module.weight.data = functional.dequantize_4bit(*functional.quantize_4bit(flat, quant_type="nf4")).view_as(module.weight)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_with_diffusers(by, folder):
    import torch
    torch.set_num_threads(1)  # on a busy machine, threads that wait for one another take ten times as long
    settings = json.loads((DEMO / "model/ditfleet.json").read_text())
    pipe = diffusers_pipeline(by)
    for i, line in enumerate((DEMO / "heldout_prompts.jsonl").read_text().splitlines()):
        image = pipe(prompt=json.loads(line)["prompt"], generator=torch.Generator("cpu").manual_seed(i), **settings).images[0]
        image.save(f"{folder}/{i:03d}.png")


def share_right(system, worker):
    how = SYSTEMS[system]
    if system.startswith("ditfleet"):
        return evaluate("--worker", worker, "--device", "cpu", "--dtype", "bf16", "--threads", "1", *how)
    with tempfile.TemporaryDirectory() as folder:
        draw_with_diffusers(how, folder)
        return evaluate("--pictures", folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS), metavar="SYSTEM", help="one of: " + ", ".join(SYSTEMS))
    parser.add_argument("--worker", default=str(TOP / "build/bin/ditfleet-worker"), metavar="PROGRAM")
    a = parser.parse_args()
    if unknown := set(a.systems) - set(SYSTEMS):
        parser.error(f"unknown system {sorted(unknown)}; choose from {list(SYSTEMS)}")
    revision = os.environ.get("DITFLEET_BENCH_REVISION") or subprocess.run(
        ["git", "-C", str(TOP), "rev-parse", "--short=7", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    for system in a.systems:
        right = share_right(system, a.worker)
        print(f"{system}: {right} %", flush=True)
        rows = list(csv.DictReader(CSV.open())) if CSV.exists() else []
        versions = "-" if system.startswith("ditfleet") else "torch 2.11.0 diffusers 0.42.1 torchao 0.18.0 bitsandbytes 0.50.2"
        row = dict(date=datetime.datetime.now().isoformat(timespec="minutes"), revision=revision, machine="CPU", versions=versions,
                   system=system, scenario="demo", metric="held_out_prompts_right", value=str(right), unit="%")
        rows = [r for r in rows if r["system"] != system] + [row]
        scores = {r["system"]: float(r["value"]) for r in rows if r["metric"] == "held_out_prompts_right"}
        for ours, peer in PEERS.items():
            if system in (ours, peer) and {ours, peer} <= set(scores):
                rows = [r for r in rows if (r["system"], r["metric"]) != (ours, "points_below_peer")]
                rows.append(dict(row, system=ours, metric="points_below_peer", value=f"{scores[peer] - scores[ours]:.2f}", unit="points"))
        with CSV.open("w", newline="") as file:
            out = csv.DictWriter(file, FIELDS, lineterminator="\n")
            out.writeheader()
            out.writerows(rows)


if __name__ == "__main__":
    main()
