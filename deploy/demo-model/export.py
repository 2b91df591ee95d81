"""Writes the model folder, the adapters and training.json from a training: `export.py --work DIR [--out FOLDER]`.

The folder is what diffusers' FluxPipeline.from_pretrained reads and what the worker reads: bf16 safetensors, the
configurations, the scheduler, both tokenizers (copied from beside this file, the weights belong to exactly those)
and ditfleet.json, the settings that requests get where they say nothing.

training.json holds what the stages recorded, the grid, and every evaluation that lies in the work folder as
eval_NAME.json (what `evaluate.py --json` prints); run.json there says where and with what it ran.
"""
import argparse
import glob
import json
import os
import shutil

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

import parts
from training.work import SEED

DEFAULTS = {"num_inference_steps": 4, "guidance_scale": 0.0, "true_cfg_scale": 1.0, "negative_prompt": "", "width": 256, "height": 256,
            "max_sequence_length": parts.TEXT_LENGTH}


def trained_parts(work, flow="flow.pt", dtype=torch.bfloat16):
    """The four parts on the CPU, rounded to `dtype`, from the files that the stages vae and flow left in `work`."""
    def load(name):
        return torch.load(os.path.join(work, name), map_location="cpu", weights_only=True)

    vae, weights = load("vae.pt"), load(flow)["weights"]
    result = {k: v for k, v in parts.build().items() if k != "vae"}
    for name, module in result.items():
        module.load_state_dict(weights[name])
    scaling = {k: vae["record"][k] for k in ("scaling_factor", "shift_factor")}
    result["vae"] = parts.AutoencoderKL(**{**parts.VAE, **scaling})
    result["vae"].load_state_dict(vae["weights"])
    return {k: m.to(dtype).eval() for k, m in result.items()}


def pipeline(p, tokenizers=os.path.join(parts.HERE, "model")):
    clip_tokenizer, t5_tokenizer = parts.tokenizers(tokenizers)
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(**parts.SCHEDULER), tokenizer=clip_tokenizer,
                        tokenizer_2=t5_tokenizer, **p)


def write_model(p, folder):
    """Replaces what lies in `folder`, the tokenizers aside, which stay or are copied from beside this file."""
    own = os.path.join(parts.HERE, "model")
    work = folder.rstrip("/") + ".part"
    shutil.rmtree(work, ignore_errors=True)
    pipeline(p).save_pretrained(work, safe_serialization=True)
    for name in ("tokenizer", "tokenizer_2"):
        shutil.rmtree(os.path.join(work, name))
        shutil.copytree(os.path.join(own, name), os.path.join(work, name))
    with open(os.path.join(work, "ditfleet.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(DEFAULTS, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(work, folder)
    return sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def record_of(work, flow="flow.pt"):
    """What training.json says, from the files of the work folder that are there."""
    def stage(name):
        return torch.load(os.path.join(work, name), map_location="cpu", weights_only=True)["record"]

    def named(pattern, start):
        return {os.path.basename(f)[len(start):-5]: read_json(f) for f in sorted(glob.glob(os.path.join(work, pattern)))}

    run = os.path.join(work, "run.json")
    record = {"run": read_json(run) if os.path.exists(run) else {}, "seed": SEED,
              "parameters": {k: sum(x.numel() for x in m.parameters()) for k, m in parts.build().items()},
              "evaluation": named("eval_*.json", "eval_"), "vae": stage("vae.pt"), "text": stage("text.pt"),
              "flow": stage(flow), "adapters": named("lora_*.json", "lora_")}
    if os.path.exists(os.path.join(work, "grid.json")):
        record["grid"] = read_json(os.path.join(work, "grid.json"))
    return record


def one_line_a_leaf(value, indent=0):
    """JSON whose innermost lists and objects take a line each, so that a loss curve stays readable."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(v, (dict, list)) for v in inner):
        return json.dumps(value, ensure_ascii=False)
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        body = [f"{pad}{json.dumps(k)}: {one_line_a_leaf(v, indent + 1)}" for k, v in value.items()]
    else:
        body = [pad + one_line_a_leaf(v, indent + 1) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(body) + "\n" + " " * indent + closing


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder of the training")
    parser.add_argument("--flow", default="flow.pt", help="flow_part.pt: a training that was stopped early")
    parser.add_argument("--out", default=parts.HERE, help="gets model/, loras/ and training.json")
    a = parser.parse_args()
    model = os.path.join(a.out, "model")
    size = write_model(trained_parts(a.work, a.flow), model)
    print(f"{model}: {size} bytes, {size / 2 ** 20:.2f} MiB")
    loras = os.path.join(a.out, "loras")
    os.makedirs(loras, exist_ok=True)
    for path in sorted(glob.glob(os.path.join(a.work, "*.safetensors"))):
        shutil.copy(path, loras)
        print(os.path.join(loras, os.path.basename(path)))
    with open(os.path.join(a.out, "training.json"), "w", encoding="utf-8") as f:
        f.write(one_line_a_leaf(record_of(a.work, a.flow)) + "\n")


if __name__ == "__main__":
    main()
