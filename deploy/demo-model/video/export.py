"""Writes model/ and training.json from a training: `export.py --work DIR [--out FOLDER]`.

The folder is what diffusers' WanPipeline.from_pretrained and the worker read: bf16 safetensors, the configurations, the
scheduler, the tokenizer (copied from beside this file; the weights belong to exactly that one) and ditfleet.json, the
request defaults. training.json has the training's record and evaluation.
"""
import argparse
import json
import os
import random
import shutil

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

import clips
import layers

OWN = os.path.join(layers.HERE, "model")
DEFAULTS = {"num_inference_steps": layers.STEPS, "guidance_scale": 1.0, "width": clips.WIDTH, "height": clips.HEIGHT,
            "frames": clips.FRAMES, "max_sequence_length": layers.TEXT_LENGTH}


def load(module, weights):
    """Loads weights and checks that only tied ones are missing."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"encoder.embed_tokens.weight"}, (missing, unexpected)
    return module.eval()


def pipeline(checkpoint, dtype):
    weights, record = checkpoint["weights"], checkpoint["record"]
    tokenizer = T5TokenizerFast.from_pretrained(os.path.join(OWN, "tokenizer"))
    text = UMT5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=0, eos_token_id=1,
                      decoder_start_token_id=0, is_encoder_decoder=False, use_cache=False, **layers.TEXT)
    latents = {k: record[k] for k in ("latents_mean", "latents_std")}
    parts = dict(
        text_encoder=load(UMT5EncoderModel(text), weights["text_encoder"]),
        vae=load(AutoencoderKLWan(**layers.VAE, **latents), weights["vae"]),
        **{k: load(WanTransformer3DModel(**layers.TRANSFORMER), weights[k]) for k in ("transformer", "transformer_2")})
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000,
                                        flow_shift=layers.SHIFT)
    return WanPipeline(tokenizer=tokenizer, scheduler=scheduler, boundary_ratio=layers.BOUNDARY,
                       **{k: m.to(dtype) for k, m in parts.items()})


def write_model(pipe, folder):
    """Replaces `folder` and returns its size in bytes."""
    work = folder.rstrip("/") + ".part"
    shutil.rmtree(work, ignore_errors=True)
    pipe.save_pretrained(work)
    shutil.rmtree(os.path.join(work, "tokenizer"))
    shutil.copytree(os.path.join(OWN, "tokenizer"), os.path.join(work, "tokenizer"))
    with open(os.path.join(work, "ditfleet.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(DEFAULTS, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(work, folder)
    return sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(folder) for f in files)


def check_tokens(tokenizer):
    """Training splits captions into words itself; the tokenizer must give the same ids."""
    rng = random.Random(1)
    lines = [clips.caption(rng, rng.choice(clips.triples())) for _ in range(2000)]
    ids = tokenizer(lines, padding="max_length", max_length=layers.TEXT_LENGTH, return_tensors="pt").input_ids
    assert torch.equal(ids, layers.token_ids(lines)), "the tokenizer's ids differ from those of the training"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder of the training")
    parser.add_argument("--out", default=layers.HERE, help="gets model/ and training.json")
    a = parser.parse_args()
    checkpoint = torch.load(os.path.join(a.work, "checkpoint.pt"), map_location="cpu", weights_only=True)
    pipe = pipeline(checkpoint, torch.bfloat16)
    check_tokens(pipe.tokenizer)
    model = os.path.join(a.out, "model")
    size = write_model(pipe, model)
    print(f"{model}: {size} bytes, {size / 2 ** 20:.2f} MiB")
    record = checkpoint["record"]
    evaluation = os.path.join(a.work, "evaluation.json")
    if os.path.exists(evaluation):
        with open(evaluation, encoding="utf-8") as f:
            record["evaluation"] = json.load(f)
    with open(os.path.join(a.out, "training.json"), "w", encoding="utf-8") as f:
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in record.items()]
        f.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
