"""Flow matching of the transformer and the text encoders in the autoencoder's latents, with an average of the weights."""
import math
import multiprocessing
import random
import time

import torch
import torch.nn.functional as F

import checker
import parts
from muon import Muon
from training.accuracy import half_parts, identity_score, read_prompts
from training.autoencoder import encode_latents, trained_vae
from training.captions import caption_data, draw_captions
from training.text import ReadOuts
from training.work import SIZES, autocast, load, rate, save, say, synchronized


def compile_blocks(transformer):
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
        block.compile(dynamic=False)


def take_exact_times(transformer):
    """Under autocast the timestep would pass through bf16; half of a batch gets it so, half as fp32 inference has it."""
    embed = transformer.time_text_embed
    original = embed.forward
    embed.forward = lambda timestep, pooled: original(transformer.exact_times, pooled)


def velocity(a, transformer, z, t, pooled, text, size):
    rounded = (t.bfloat16() * 1000).float()
    transformer.exact_times = torch.where(torch.rand_like(t) < 0.5, rounded, t * 1000)
    zeros = torch.zeros(text.shape[1], 3, device=z.device)
    return transformer(hidden_states=z, timestep=t, pooled_projections=pooled, encoder_hidden_states=text, txt_ids=zeros,
                       img_ids=parts.image_ids(size[1], size[0], z.device), return_dict=False)[0]


def stage_warm(a):
    """Runs one step of each compiled shape, so that the flow stage finds the kernels in the on-disk cache."""
    began = time.time()
    transformer = parts.build()["transformer"].to(a.device)
    take_exact_times(transformer)
    compile_blocks(transformer)
    for size in SIZES[:2]:
        n = size[0] * size[1] // parts.PATCH ** 2
        with autocast(a):
            # Text as the encoders give it under autocast: CLIP's last norm and T5's scaled norm are fp32.
            text = torch.randn(a.batch, parts.TEXT_LENGTH, 128, device=a.device, requires_grad=True)
            pooled = torch.randn(a.batch, 96, device=a.device, requires_grad=True)
            out = velocity(a, transformer, torch.randn(a.batch, n, 32, device=a.device), torch.rand(a.batch, device=a.device), pooled, text, size)
            out.float().square().mean().backward()
    say("warm", round(synchronized(a) - began, 1), "s")
    save(a, "warm.pt", torch.zeros(1))


def draw_times(n, device):
    normal = torch.sigmoid(0.4 + torch.randn(n, device=device))
    return torch.where(torch.rand(n, device=device) < 0.8, normal, torch.rand(n, device=device)).clamp(1e-3, 1.0)


def stage_flow(a):
    began = time.time()
    vae, _ = trained_vae(a)
    data = caption_data(a)
    latents = encode_latents(a, vae, data)
    latent_seconds = round(synchronized(a) - began, 1)
    say("latents", {k: tuple(v.shape) for k, v in latents.items()}, latent_seconds, "s; std", round(latents[SIZES[0]][:4096].float().std().item(), 3))

    p = {k: v.to(a.device) for k, v in parts.build().items() if k != "vae"}
    text_state = load(a, "text.pt")
    p["text_encoder"].load_state_dict(text_state["clip"])
    p["text_encoder_2"].load_state_dict(text_state["t5"])
    heads = ReadOuts(parts.tokenizers()[1]).to(a.device)
    heads.load_state_dict(text_state["heads"])
    transformer = p["transformer"]
    transformer_lr, text_lr = a.lr, a.lr * 0.4
    matrices = [q for n, q in transformer.named_parameters() if q.ndim == 2 and "transformer_blocks" in n and "norm" not in n]
    chosen = {id(q) for q in matrices}
    others = [q for q in transformer.parameters() if id(q) not in chosen]
    text_parameters = [*p["text_encoder"].parameters(), *p["text_encoder_2"].parameters(), *heads.parameters()]
    muon = Muon(matrices, lr=a.muon_lr, weight_decay=0.02) if a.muon_lr else None
    groups = [dict(params=others + ([] if muon else matrices), peak=transformer_lr), dict(params=text_parameters, peak=text_lr)]
    adam = torch.optim.AdamW(groups, lr=transformer_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=a.device == "cuda")
    averaged = [q for m in p.values() for q in m.parameters()]
    average = [q.detach().clone() for q in averaged]
    take_exact_times(transformer)
    if a.compile:
        compile_blocks(transformer)

    clip_empty, t5_empty = (x.to(a.device)[0] for x in parts.token_ids([""], parts.TEXT_LENGTH, 32))
    validation = read_prompts("validation_prompts.jsonl")[:a.validation]
    pool = multiprocessing.get_context("spawn").Pool(min(8, a.processes))
    waiting, validations, curve, recent = [], [], [], []
    step, next_validation, next_save = 0, 0.15, 0.2
    limit = max(5.0, a.deadline - began) if a.deadline else a.flow_time
    ready = None

    def averaged_weights():
        it = iter(average)
        result = {}
        for k, m in p.items():
            own = dict(m.state_dict())
            for n, _ in m.named_parameters():
                own[n] = next(it)
            result[k] = {n: v.detach().cpu().contiguous() for n, v in own.items()}
        return result

    def validate(share):
        half = half_parts(a, averaged_weights(), vae)
        images = parts.sample(half, [v["prompt"] for v in validation], steps=a.validation_steps, cfg=4.0, seed=1)
        asked = [checker.asked_of(v) for v in validation]
        waiting.append((step, round(time.time() - began, 1), pool.starmap_async(identity_score, list(zip(asked, images)), chunksize=8)))

    def collect(block=False):
        while waiting and (block or waiting[0][2].ready()):
            at, seconds, result = waiting.pop(0)
            validations.append(dict(step=at, seconds=seconds, **checker.percentages(result.get())))
            say("validation", validations[-1])

    def record():
        return dict(steps=step, seconds=round(time.time() - began, 1), latent_seconds=latent_seconds, curve=curve, validation=validations,
                    ms_per_step=ready and round((time.time() - ready[1]) / max(1, step - ready[0]) * 1000, 2),
                    peak_gib=round(torch.cuda.max_memory_allocated() / 2 ** 30, 2) if a.device == "cuda" else None)

    while (progress := (time.time() - began) / limit) < 1:
        size = random.choices(SIZES, [0.6, 0.2, 0.2])[0]
        long_text = step % 32 == 31
        n = a.batch // 4 if long_text else a.batch
        rows = torch.randint(len(latents[size]), (n,), device=a.device)
        clip_ids, t5_ids, labels = draw_captions(data[size], rows)
        empty = torch.rand(n, device=a.device) < 0.1
        clip_ids = torch.where(empty[:, None], clip_empty, clip_ids)
        t5_ids = torch.where(empty[:, None], t5_empty, t5_ids)
        if long_text:
            t5_ids = F.pad(t5_ids, (0, random.choice([32, 96, 224, 480])))
        x = latents[size][rows].float()
        noise = torch.randn_like(x)
        t = draw_times(n, a.device)
        z = x + t[:, None, None] * (noise - x)
        with autocast(a):
            pooled = p["text_encoder"](input_ids=clip_ids).pooler_output
            text = p["text_encoder_2"](input_ids=t5_ids).last_hidden_state
            aside, _ = heads(pooled, text, t5_ids, labels.masked_fill(empty[:, None], -100)) if step % 4 == 0 else (0.0, None)
            with torch.compiler.set_stance("force_eager" if long_text else "default"):
                v = velocity(a, transformer, z, t, pooled.float(), text.float(), size)
        flow_loss = (v.float() - (noise - x)).square().mean()
        loss = flow_loss + 0.1 * aside
        adam.zero_grad(set_to_none=True)
        if muon:
            muon.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others + text_parameters if muon else averaged + list(heads.parameters()), 1.0)
        share = rate(progress, a.hold)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * share
        adam.step()
        if muon:
            muon.param_groups[0]["lr"] = a.muon_lr * share
            muon.step()
        decay = min(0.9995, 1 - 1 / (1 + step / 5))
        torch._foreach_lerp_(average, [q.detach() for q in averaged], 1 - decay)
        step += 1
        recent.append(flow_loss.detach())
        if step == 50:
            ready = (step, synchronized(a))
        if step % 100 == 0 or a.device == "cpu":
            mean = torch.stack(recent).mean().item()
            recent = []
            curve.append([step, round(time.time() - began, 1), round(mean, 5)])
            if step % 500 == 0 or step in (100, 200) or a.device == "cpu":
                say("flow step, s, loss", curve[-1])
            if not math.isfinite(mean):
                raise SystemExit("the loss is not finite")
        if progress > next_validation:
            collect()
            validate(progress)
            next_validation += 0.12
        if progress > next_save:
            save(a, "flow_part.pt", dict(weights=averaged_weights(), record=record()))
            next_save += 0.2
    final = averaged_weights()
    save(a, "flow.pt", dict(weights=final, record=record()))
    validate(1.0)
    collect(True)
    save(a, "flow.pt", dict(weights=final, record=record()))
    say("flow done", {k: v for k, v in record().items() if k not in ("curve", "validation")})
    pool.close()
    pool.join()
