#!/usr/bin/env python3
"""Compares ditfleet-worker with diffusers on random FLUX configurations, stage by stage.

    python3 tests/parity/flux_crosscheck.py --worker build/bin/ditfleet-worker [--count 25] [--first 0]
        [--device cpu|cuda] [--csv FILE] [--keep] [--fixtures] [--requests 2]

Run by hand: needs the Python packages that tests/fixtures/flux/make.py pins. Configuration i is drawn from seed
i alone, so that a failing one can be repeated with --first i --count 1 --keep. Each is a folder of random weights
with sizes, activations, rope axes, layer counts, VAE factors, scheduler variants, tokenizer files and weight
formats of its own; each gets requests in fp32 and in bf16 with sizes from one token to extreme aspect ratios,
true CFG, sequence lengths from 1 to 512, and prompts from empty to over-long. --fixtures compares the committed
folders and requests instead.

Both programs compute everything from the prompt on, on the same device. Limits, as in the parity tests:
fp32 max |a − b| ≤ 1e-4 · max(1, max |reference|) at every stage, pixels max 1 and mean 0.02 of 255;
bf16 pixels mean 2 of 255. The sigmas must be equal to 1e-6. Exit status 1 when anything differs.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import FluxPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/fixtures/flux"))
import make  # noqa: E402

EXACT = ("clip_ids", "t5_ids")
STAGES = ("pooled_prompt_embeds", "prompt_embeds", "noise", "sigmas", "timesteps", "latents", "image")
TEXT_ACTIVATIONS = ["quick_gelu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "silu",
                    "swish", "mish", "tanh", "sigmoid", "linear"]
T5_PROJECTIONS = ["gated-gelu", "relu", "gelu", "gelu_new", "silu", "gated-silu", "gated-relu", "gated-gelu_new"]
VAE_ACTIVATIONS = ["silu", "silu", "swish", "mish", "gelu", "relu"]
PROMPTS = [
    make.PROMPT, "", " ", "photo of a cat", "A LARGE Yellow RING, left of...the  black\tstar!\n", "Ein Würfel im Schnee",
    "雪の中の馬 🐎 и красный круг", "e\u0301 ﬀ ﬁ ½ ™ ​ \u00ad x\u0324", "</s> <pad> <extra_id_3> <|endoftext|>",
    "very " * 400, "a" * 900, "1234567890 $%^&*() 3.14159",
]


def random_spec(rng):
    """A value of make.FOLDERS."""
    clip_heads, clip_dim = rng.randint(1, 6), rng.choice([4, 6, 8, 10, 16])
    clip_width = clip_heads * clip_dim
    positions = rng.choice([77, 77, 77, 40, 100])
    clip = dict(hidden_size=clip_width, intermediate_size=rng.randint(8, 80), num_hidden_layers=rng.randint(1, 4),
                num_attention_heads=clip_heads, hidden_act=rng.choice(TEXT_ACTIVATIONS),
                layer_norm_eps=rng.choice([1e-5, 1e-5, 1e-6, 1e-4]), max_position_embeddings=positions)
    if rng.random() < 0.3:
        clip["eos_token_id"] = 2
    t5 = dict(d_model=rng.randint(4, 40), d_kv=rng.randint(2, 20), d_ff=rng.randint(8, 80), num_layers=rng.randint(1, 4),
              num_heads=rng.randint(1, 6), feed_forward_proj=rng.choice(T5_PROJECTIONS),
              relative_attention_num_buckets=rng.choice([32, 32, 16, 8, 20, 64]),
              relative_attention_max_distance=rng.choice([128, 128, 40, 300]),
              layer_norm_epsilon=rng.choice([1e-6, 1e-6, 1e-5]))
    axes = [2 * rng.randint(0, 3), 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)]
    latent = rng.choice([1, 2, 3, 4, 4, 8, 16, 16])
    patch = rng.choice([1, 1, 1, 2])
    doubles, singles = rng.choice([(0, 1), (1, 0), (1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (0, 3), (4, 4)])
    transformer = dict(in_channels=4 * latent, patch_size=patch, num_layers=doubles, num_single_layers=singles,
                       attention_head_dim=sum(axes), num_attention_heads=rng.randint(1, 6),
                       guidance_embeds=rng.random() < 0.5, axes_dims_rope=tuple(axes))
    if patch == 2:
        transformer["out_channels"] = latent
    groups = rng.choice([1, 2, 3, 4])
    blocks = rng.choice([1, 2, 3, 4, 4, 4, 5])
    widths = [groups * rng.randint(1, 4) for _ in range(blocks)]
    if rng.random() < 0.5:
        widths.sort()
    vae = dict(latent_channels=latent, block_out_channels=tuple(widths), layers_per_block=rng.randint(1, 3),
               norm_num_groups=groups, scaling_factor=rng.choice([0.3611, 0.18215, 1.0, 0.7, 2.0]),
               shift_factor=rng.choice([0.1159, 0.0, None, -0.3]), use_quant_conv=rng.random() < 0.5,
               use_post_quant_conv=rng.random() < 0.5, mid_block_add_attention=rng.random() < 0.7,
               act_fn=rng.choice(VAE_ACTIVATIONS),
               up_block_types=tuple(rng.choice(["UpDecoderBlock2D"] * 4 + ["AttnUpDecoderBlock2D"]) for _ in range(blocks)))
    scheduler = rng.choice([
        dict(make.DYNAMIC), dict(make.DYNAMIC), dict(use_dynamic_shifting=False, shift=rng.choice([1.0, 3.0, 0.5, 7.3])),
        dict(make.DYNAMIC, base_image_seq_len=rng.randint(1, 64), max_image_seq_len=rng.randint(65, 5000),
             base_shift=rng.uniform(0.1, 1), max_shift=rng.uniform(0.5, 3)),
    ])
    if rng.random() < 0.3:
        scheduler["time_shift_type"] = "linear"
    if rng.random() < 0.3:
        scheduler["shift_terminal"] = rng.choice([0.02, 0.1])
    if rng.random() < 0.4:
        scheduler[rng.choice(["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_flow_sigmas", "invert_sigmas"])] = True
    if rng.random() < 0.2:
        scheduler["num_train_timesteps"] = rng.choice([500, 2000])
    spec = dict(seed=rng.randint(0, 1 << 30), dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
                tokenizer_files=rng.choice(["json", "published"]), charsmap=rng.random() < 0.5, eos_first=rng.random() < 0.2,
                clip_prefix=rng.random() < 0.5, null_parts=rng.random() < 0.5, positions=positions, clip=clip, t5=t5,
                t5_embedding=rng.choice([("shared.weight",), ("encoder.embed_tokens.weight",),
                                         ("shared.weight", "encoder.embed_tokens.weight")]),
                transformer=transformer, vae=vae, scheduler=scheduler)
    if rng.random() < 0.3:
        spec["shards"] = "60KB"
    return spec


def random_case(rng, spec, bf16):
    unit = 2 ** len(spec["vae"]["block_out_channels"])  # VAE factor × 2
    columns, rows = rng.choice([(1, 1), (1, rng.randint(20, 60)), (rng.randint(20, 60), 1), (2, 2), (3, 5), (8, 6)] +
                               [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(4)])
    case = dict(prompt=rng.choice(PROMPTS), width=columns * unit, height=rows * unit, steps=rng.choice([1, 2, 3, 4, 8]),
                guidance=rng.choice([3.5, 1.0, 0.0, 7.25, 30.0]), seed=rng.choice([0, 1, 2**31, 2**32 + 9, 2**62, rng.randint(0, 10**9)]),
                max_sequence_length=rng.choice([1, 2, 16, 77, 128, 256, 512]))
    if rng.random() < 0.4:
        case["negative"] = rng.choice(PROMPTS)
        case["true_cfg"] = rng.choice([1.5, 4.0, 1.0])
    if bf16:
        case["bf16"] = True
    if spec["scheduler"].get("shift_terminal"):  # diffusers divides 0 by 0 for a single step; we refuse it
        case["steps"] = max(2, case["steps"])
    return case


def run_worker(worker, folder, case, device, work):
    png, dump = work / "image.png", work / "dump.safetensors"
    for old in (png, dump):
        old.unlink(missing_ok=True)
    command = [worker, "generate", "--model", folder, "--prompt", case["prompt"], "--seed", case["seed"], "--steps",
               case["steps"], "--guidance", case["guidance"], "--size", f"{case['width']}x{case['height']}",
               "--max-sequence-length", case["max_sequence_length"], "--device", device, "--dtype",
               "bf16" if case.get("bf16") else "fp32", "--dump", dump, "--out", png]
    if "negative" in case:
        command += ["--negative", case["negative"]]
    if "true_cfg" in case:
        command += ["--true-cfg", case["true_cfg"]]
    begin = time.monotonic()
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"ditfleet-worker failed ({done.returncode}): {done.stderr.strip()}")
    with safe_open(str(dump), "pt") as file:
        metadata = file.metadata()
    return load_file(dump), np.array(Image.open(png).convert("RGB")), metadata, time.monotonic() - begin


def distance(got, reference):
    if got.shape != reference.shape:
        return float("inf")
    a, b = got.double(), reference.double()
    return ((a - b).abs().max() / max(1.0, b.abs().max().item())).item()


def compare(got, png, reference, bf16):
    """{figure: value} and the list of what is wrong."""
    figures, wrong = {}, []
    for name in EXACT:
        if got[name].dtype != torch.int64 or not torch.equal(got[name], reference[name]):
            wrong.append(f"{name} differ: {got[name].tolist()} instead of {reference[name].tolist()}"[:400])
    for name in STAGES:
        if got[name].dtype != reference[name].dtype:
            wrong.append(f"{name} is {got[name].dtype}, not {reference[name].dtype}")
        figures[name] = distance(got[name], reference[name])
        limit = 1e-6 if name in ("sigmas", "timesteps") else 1e-4
        if not (figures[name] <= limit) and (not bf16 or name in ("sigmas", "timesteps", "noise")):
            wrong.append(f"{name} {figures[name]:.2e}")
    pixels = reference["pixels"].numpy()
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    if pixels.shape != png.shape:
        return figures, wrong + [f"pixels {png.shape} instead of {pixels.shape}"]
    apart = np.abs(pixels.astype(int) - png.astype(int))
    figures["pixels_max"], figures["pixels_mean"] = float(apart.max()), float(apart.mean())
    figures["pixels_std"] = float(pixels.std())
    if figures["pixels_mean"] > (2 if bf16 else 0.02) or (not bf16 and figures["pixels_max"] > 1):
        wrong.append(f"pixels max {figures['pixels_max']:.0f} mean {figures['pixels_mean']:.4f}")
    return figures, wrong


class Reference:
    """diffusers with one folder, on the device."""

    def __init__(self, folder, device, positions=77):
        self.folder, self.device, self.positions, self.pipes = folder, device, positions, {}

    def stages(self, case):
        bf16 = bool(case.get("bf16"))
        if bf16 not in self.pipes:
            pipe = FluxPipeline.from_pretrained(self.folder, torch_dtype=torch.bfloat16 if bf16 else torch.float32)
            pipe.set_progress_bar_config(disable=True)
            self.pipes[bf16] = pipe.to(self.device)
        begin = time.monotonic()
        tensors = {k: v.cpu() for k, v in make.stages(self.pipes[bf16], case).items()}
        return tensors, time.monotonic() - begin


def random_folders(args, work):
    for i in range(args.first, args.first + args.count):
        rng = random.Random(i)
        spec = random_spec(rng)
        folder = work / f"config_{i}" / "model"
        shutil.rmtree(folder.parent, ignore_errors=True)
        try:
            make.build(spec, folder)
        except Exception as error:  # noqa: BLE001: such as a trained charsmap that tokenizers cannot read
            yield f"config_{i}", folder, {}, dict(spec, unbuildable=f"{type(error).__name__}: {error}")
            continue
        if spec["positions"] != 77:  # a tokenizer that is cut where the encoder's positions end
            config = folder / "tokenizer/tokenizer_config.json"
            config.write_text(json.dumps(dict(json.loads(config.read_text()), model_max_length=spec["positions"])))
        cases = {f"{'bf16' if bf16 else 'fp32'}_{k}": random_case(rng, spec, bf16)
                 for k in range(args.requests) for bf16 in (False, True)}
        yield f"config_{i}", folder, cases, spec
        if not args.keep:
            shutil.rmtree(folder.parent, ignore_errors=True)


def committed_folders():
    for name, spec in make.FOLDERS.items():
        folder = ROOT / "tests/fixtures/flux" / name / "model"
        yield name, folder, {k: dict(c, prompt=c.get("prompt", make.PROMPT)) for k, c in spec["cases"].items()}, spec


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", default=ROOT / "build/bin/ditfleet-worker")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--requests", type=int, default=2, help="of each precision for each configuration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fixtures", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--csv", type=Path, help="system,scenario,metric,value a line")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(2)
    work = args.work or Path(tempfile.mkdtemp(prefix="flux_crosscheck_"))
    work.mkdir(parents=True, exist_ok=True)
    table = open(args.csv or os.devnull, "w")
    print("system,scenario,metric,value", file=table, flush=True)
    failures, total, worst = 0, 0, {}
    for name, folder, cases, spec in committed_folders() if args.fixtures else random_folders(args, work):
        if "unbuildable" in spec:
            print(f"none {name}: no folder to compare, {spec['unbuildable']}", flush=True)
        reference = Reference(folder, args.device)
        for case_name, case in cases.items():
            total += 1
            bf16 = bool(case.get("bf16"))
            try:
                expected, theirs = reference.stages(case)
                got, png, metadata, ours = run_worker(args.worker, folder, case, args.device, work)
                figures, wrong = compare(got, png, expected, bf16)
            except Exception as error:  # noqa: BLE001: one broken case must not hide the others
                figures, wrong = {}, [f"{type(error).__name__}: {error}"[:600]]
            for key, value in figures.items():
                print(f"{args.device} {'bf16' if bf16 else 'fp32'},{name}/{case_name},{key},{value:.6g}", file=table, flush=True)
                worst[bf16, key] = max(worst.get((bf16, key), 0), value)
            print(f"{'FAIL' if wrong else 'ok  '} {name}/{case_name} {case['width']}x{case['height']} "
                  f"steps {case['steps']} " + " ".join(f"{k}={v:.1e}" for k, v in figures.items()), flush=True)
            if wrong:
                failures += 1
                print("     " + "; ".join(wrong))
                print("     " + json.dumps({"case": case, "spec": {k: v for k, v in spec.items() if k != "cases"}}, default=str), flush=True)
    for (bf16, key), value in sorted(worst.items()):
        print(f"worst {'bf16' if bf16 else 'fp32'} {key}: {value:.3g}")
    print(f"{total - failures} of {total} requests agree")
    if not args.work and not args.keep:
        shutil.rmtree(work)
    sys.exit(1 if failures or total == 0 else 0)


if __name__ == "__main__":
    main()
