"""The autoencoder: trained on windows around objects and on whole images, flat and in the adapters' styles."""
import math
import random
import time

import torch

import checker
import parts
import render
import scenes
from training.work import SEED, SIZES, autocast, load, rate, save, say, synchronized


def stage_vae(a):
    began = time.time()
    rng = random.Random(SEED + 1)
    tables = {s: render.scene_table([scenes.sample_scene(rng, *s) for _ in range(a.vae_scenes // (1 if s[0] == 256 else 3))]).to(a.device) for s in SIZES}
    vae = parts.build()["vae"].to(a.device, memory_format=torch.channels_last)
    encoder, decoder = vae.encoder, vae.decoder
    if a.compile:
        encoder, decoder = torch.compile(encoder, dynamic=False), torch.compile(decoder, dynamic=False)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=a.device == "cuda")
    step, curve, recent, ready = 0, [], [], None
    while True:
        progress = (time.time() - began) / a.vae_time
        if progress >= 1:
            break
        whole = step % 5 in (2, 4)
        size = SIZES[0] if not whole or step % 5 == 2 else SIZES[1 + step // 5 % 2]
        if size != SIZES[0] and a.compile:
            size = SIZES[0]  # one compiled shape for whole images
        table = tables[size]
        rows = torch.randint(len(table), (a.vae_batch // 4 if whole else a.vae_batch,), device=a.device)
        picked = table[rows]
        style = random.choices(["flat", "outline", "checkerboard", "pastel"], [0.7, 0.1, 0.1, 0.1])[0]
        if whole:
            x = render.render(picked, *size, style)
        else:
            second = (torch.rand(len(picked), device=a.device) < 0.5) & (picked[:, 6] > 0)
            centre = torch.where(second[:, None], picked[:, 9:11], picked[:, 3:5])
            origin = (centre - 64 + (torch.rand_like(centre) - 0.5) * 110).round()
            x = render.render(picked, 128, 128, style, origin)
        x = x.contiguous(memory_format=torch.channels_last)
        with autocast(a):
            mean, log_variance = encoder(x).float().chunk(2, 1)
            log_variance = log_variance.clamp(-20, 10)
            z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            y = decoder(z).float()
        difference = y - x
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = difference.abs().mean() + difference.square().mean() + a.kl * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(progress, 0.45, 0.03)
        optimizer.step()
        step += 1
        recent.append(torch.stack([difference.square().mean().detach(), kl.detach()]))
        if step == 20:
            ready = (step, synchronized(a))
        if step % 200 == 0 or a.device == "cpu":
            mse, kl_mean = torch.stack(recent).mean(0).tolist()
            recent = []
            curve.append([step, round(time.time() - began, 1), round(10 * math.log10(4 / mse), 2), round(kl_mean, 4)])
            say("vae step, s, dB, kl", curve[-1])
    ms = (synchronized(a) - ready[1]) / max(1, step - ready[0]) * 1000 if ready else None
    # Latents of unit variance around 0, then what the image looks like after bf16 weights and arithmetic.
    with torch.no_grad(), autocast(a):
        sample = torch.cat([encoder(render.render(tables[SIZES[0]][i * 16:i * 16 + 16], 256, 256)
                                    .contiguous(memory_format=torch.channels_last)).float().chunk(2, 1)[0]
                            for i in range(a.vae_scenes // 80)])
    vae.register_to_config(scaling_factor=round(1 / sample.std().item(), 6), shift_factor=round(sample.mean().item(), 6))
    test = [scenes.sample_scene(rng, 256, 256) for _ in range(a.test)]
    half = parts.AutoencoderKL(**parts.VAE).to(a.device, a.half)
    half.load_state_dict(vae.state_dict())
    with torch.no_grad():
        x = render.render(render.scene_table(test).to(a.device), 256, 256)
        y = torch.cat([half.decode(half.encode(c.to(a.half)).latent_dist.mean).sample for c in x.split(50)]).float()
    pixels = ((y * 0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    db = 10 * math.log10(4 / (y - x).square().mean().item())
    right = checker.score([checker.asked_of(s) for s in test], pixels)
    record = dict(steps=step, seconds=round(time.time() - began, 1), ms_per_step=ms and round(ms, 2), db=round(db, 2), read_back=right,
                  scaling_factor=vae.config.scaling_factor, shift_factor=vae.config.shift_factor, curve=curve)
    say("vae done", {k: v for k, v in record.items() if k != "curve"})
    save(a, "vae.pt", dict(weights={k: v.contiguous().cpu() for k, v in vae.state_dict().items()}, record=record))


def trained_vae(a):
    saved = load(a, "vae.pt")
    vae = parts.AutoencoderKL(**{**parts.VAE, **{k: saved["record"][k] for k in ("scaling_factor", "shift_factor")}})
    vae.load_state_dict(saved["weights"])
    return vae.to(a.device, a.half).requires_grad_(False), saved["record"]


@torch.no_grad()
def encode_latents(a, vae, data, style="flat", batch=256):
    """Packed, scaled latents [N, tokens, 32] bf16 of every scene, per size."""
    result = {}
    for (width, height), d in data.items():
        chunks = []
        for table in d["table"].split(batch):
            x = render.render(table, width, height, style).to(vae.dtype)
            z = vae.encode(x).latent_dist.mean
            chunks.append(parts.pack((z - vae.config.shift_factor) * vae.config.scaling_factor).bfloat16())
        result[width, height] = torch.cat(chunks)
    return result
