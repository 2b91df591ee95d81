"""LoRA adapters on the finished weights: each learns to draw the same captions in one style of render.py."""
import json
import os
import random
import time

import torch
from diffusers import FluxPipeline
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

import parts
from training.accuracy import half_parts
from training.autoencoder import encode_latents, trained_vae
from training.captions import caption_data, draw_captions
from training.flow import draw_times, take_exact_times, velocity
from training.work import SIZES, autocast, load, rate, say

LORAS = {"outline": dict(rank=4, clip=True), "night": dict(rank=4, clip=False), "pastel": dict(rank=4, clip=False)}


def stage_lora(a):
    began, setting = time.time(), LORAS[a.name]
    vae, _ = trained_vae(a)
    half = half_parts(a, load(a, "flow.pt")["weights"], vae)
    p = {k: half[k].float().requires_grad_(False) for k in ("transformer", "text_encoder", "text_encoder_2")}
    data = {s: {k: v[:a.lora_scenes // (1 if s == SIZES[0] else 4)] for k, v in d.items()} for s, d in caption_data(a).items()}
    latents = encode_latents(a, vae, data, a.name)
    blocks = r"(single_)?transformer_blocks\.\d+\."
    config = LoraConfig(r=setting["rank"], lora_alpha=setting["rank"], target_modules=blocks +
                        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)|ff\.net\.(0\.proj|2)|"
                        r"ff_context\.net\.(0\.proj|2)|proj_mlp|proj_out)")
    inject_adapter_in_model(config, p["transformer"])
    clip_config = LoraConfig(r=setting["rank"], lora_alpha=setting["rank"], target_modules=["q_proj", "k_proj", "v_proj", "out_proj"])
    if setting["clip"]:
        inject_adapter_in_model(clip_config, p["text_encoder"])
    take_exact_times(p["transformer"])
    parameters = [q for m in p.values() for n, q in m.named_parameters() if "lora_" in n]
    for q in parameters:
        q.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    clip_empty, t5_empty = (x.to(a.device)[0] for x in parts.token_ids([""], parts.TEXT_LENGTH, 32))
    step, curve, recent = 0, [], []
    while (progress := step / a.lora_steps if a.lora_steps else (time.time() - began) / a.lora_time) < 1:
        size = random.choices(SIZES, [0.7, 0.15, 0.15])[0]
        rows = torch.randint(len(latents[size]), (a.lora_batch,), device=a.device)
        clip_ids, t5_ids, _ = draw_captions(data[size], rows)
        empty = torch.rand(len(rows), device=a.device)[:, None] < 0.1
        clip_ids, t5_ids = torch.where(empty, clip_empty, clip_ids), torch.where(empty, t5_empty, t5_ids)
        x = latents[size][rows].float()
        noise, t = torch.randn_like(x), draw_times(len(rows), a.device)
        with autocast(a):
            pooled = p["text_encoder"](input_ids=clip_ids).pooler_output
            text = p["text_encoder_2"](input_ids=t5_ids).last_hidden_state
            v = velocity(a, p["transformer"], x + t[:, None, None] * (noise - x), t, pooled.float(), text.float(), size)
        loss = (v.float() - (noise - x)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate(progress, 0.4, 0.05)
        optimizer.step()
        step += 1
        recent.append(loss.detach())
        if step % (10 if a.device == "cpu" else 50) == 0:
            curve.append([step, round(time.time() - began, 1), round(torch.stack(recent).mean().item(), 5)])
            recent = []
            say("lora step, s, loss", curve[-1])
    trained = lambda m: {k: v.bfloat16().cpu().contiguous() for k, v in get_peft_model_state_dict(m).items()}
    # No adapter metadata: alpha is the rank, which is what readers assume without it.
    FluxPipeline.save_lora_weights(
        a.work, transformer_lora_layers=trained(p["transformer"]), weight_name=a.name + ".safetensors",
        text_encoder_lora_layers=trained(p["text_encoder"]) if setting["clip"] else None)
    record = dict(name=a.name, rank=config.r, alpha=config.lora_alpha, text_encoder=setting["clip"], steps=step,
                  seconds=round(time.time() - began, 1), batch=a.lora_batch, curve=curve)
    with open(os.path.join(a.work, f"lora_{a.name}.json"), "w") as f:
        json.dump(record, f)
    say("lora done", {k: v for k, v in record.items() if k != "curve"}, "loss", curve[:1], curve[-1:])
