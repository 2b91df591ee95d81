"""Trains the video model on one GPU with torch and numpy alone; README.md has the two commands.

The autoencoder first, then the text encoder with linear read-outs, then flow matching of both experts and the text
encoder in the autoencoder's latents. Writes DIR/checkpoint.pt about every minute, which export.py reads even if the
training was cut off, and at the end DIR/evaluation.json. `--resume FILE` goes on from a checkpoint: it keeps the
autoencoder and trains the experts for the whole time.
"""
import argparse
import json
import math
import multiprocessing
import os
import random
import time

BEGAN = time.time()
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import clips  # noqa: E402
import layers  # noqa: E402
import motion  # noqa: E402
import tracker  # noqa: E402
from muon import Muon  # noqa: E402
from training.work import autocast, rate, save, say, set_up  # noqa: E402

CAPTIONS = 128  # per triple
TEXT_LENGTHS = [64, 128, 512]  # sometimes, beside layers.TEXT_LENGTH
PARTS = ["vae", "text_encoder", "transformer", "transformer_2"]
FINAL = 45  # seconds for the evaluation


def write(a, parts, record):
    """Saves the weights {part: state dict or module} and the record."""
    weights = {k: {n: v.detach().float().cpu().clone() for n, v in (m if isinstance(m, dict) else m.state_dict()).items()}
               for k, m in parts.items()}
    record["seconds"] = round(time.time() - BEGAN, 1)
    save(a, "checkpoint.pt", dict(weights=weights, record=record))


class Clock:
    """Share of the time between now and `end`, and when the next checkpoint is due."""

    def __init__(self, end):
        self.start, self.end, self.due = time.time(), end, time.time() + 60

    def progress(self):
        return (time.time() - self.start) / max(1.0, self.end - self.start)

    def checkpoint(self):
        due = time.time() > self.due
        if due:
            self.due = time.time() + 60
        return due


def optimizer(parameters, lr, a):
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=a.device == "cuda")


def step(optimizers, loss, parameters):
    """optimizers: (optimizer, learning rate) pairs."""
    for o, lr in optimizers:
        o.zero_grad(set_to_none=True)
        o.param_groups[0]["lr"] = lr
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for o, _ in optimizers:
        o.step()


def train_vae(a, parts, train, end, record):
    vae = parts["vae"]
    adam, clock, curve, recent, count = optimizer(vae.parameters(), 2e-3, a), Clock(end), [], [], 0
    while (progress := clock.progress()) < 1:
        whole = progress > 0.6
        n = max(1, a.vae_batch // 2) if whole else a.vae_batch
        x = motion.draw(train[torch.randint(len(train), (n,), device=a.device)], None if whole else 64)
        with autocast(a):
            mean, log_variance = vae.encode(x.contiguous(memory_format=torch.channels_last_3d))
            y = vae.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        weight = 1 + 4 * (x.amin(1, keepdim=True) < 0.9)
        loss = (weight * ((y - x).abs() + (y - x).square())).mean() + 3e-4 * kl
        step([(adam, 2e-3 * rate(progress, 0.45, 0.03))], loss, vae.parameters())
        count += 1
        recent.append(torch.stack([(y - x).square().mean().detach(), kl.detach()]))
        if count % 100 == 0 or a.smoke:
            mse, kl = torch.stack(recent).mean(0).tolist()
            recent = []
            curve.append([count, round(time.time() - BEGAN, 1), round(10 * math.log10(4 / mse), 2), round(kl, 3)])
            say("vae step, s, dB, kl", curve[-1])
        if clock.checkpoint():
            write(a, parts, record)
    record["vae"] = dict(steps=count, curve=curve)


@torch.no_grad()
def make_latents(a, vae, train, record):
    """Encodes random clips: latents [N, C, T, H, W], normalized, bf16 on a GPU, and their triples' numbers [N]."""
    numbers = train[torch.randint(len(train), (a.clips,), device=a.device)]
    latents, end = [], time.time() + 30
    for part in numbers.split(a.vae_batch):
        with autocast(a):
            latents.append(vae.encode(motion.draw(part).contiguous(memory_format=torch.channels_last_3d))[0].to(a.half))
        if time.time() > end:
            break
    latents = torch.cat(latents)
    sample = latents[:4096].float()
    if "latents_mean" not in record:
        record["latents_mean"] = [round(v, 6) for v in sample.mean((0, 2, 3, 4)).tolist()]
        record["latents_std"] = [round(v, 6) for v in sample.std((0, 2, 3, 4)).tolist()]
    mean, std = (torch.tensor(record[k], device=a.device).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
    say("latents", tuple(latents.shape))
    return torch.cat([((p.float() - mean) / std).to(a.half) for p in latents.split(1024)]), numbers[:len(latents)]


class ReadOut(torch.nn.Module):
    """Reads shape, colour and direction from the text encoder at the end mark, so that it keeps all of them."""

    def __init__(self):
        super().__init__()
        self.sizes = [len(clips.SHAPES), len(clips.COLOURS), len(clips.DIRECTIONS)]
        self.linear = torch.nn.Linear(layers.TEXT["d_model"], sum(self.sizes))

    def forward(self, text, ids, numbers):
        """Cross-entropy of the triples [B]; -1: none, for an empty caption."""
        end = text[torch.arange(len(text), device=text.device), (ids == 1).int().argmax(1)]
        targets = (numbers // (self.sizes[1] * self.sizes[2]), numbers // self.sizes[2] % self.sizes[1], numbers % self.sizes[2])
        return sum(F.cross_entropy(p.float(), t.masked_fill(numbers < 0, -100))
                   for p, t in zip(self.linear(end).split(self.sizes, 1), targets))


def train_text(a, encoder, heads, captions, train, seconds):
    both = [*encoder.parameters(), *heads.parameters()]
    adam, clock = optimizer(both, 2e-3, a), Clock(time.time() + seconds)
    while (progress := clock.progress()) < 1:
        numbers = train[torch.randint(len(train), (a.batch,), device=a.device)]
        ids = captions[numbers, torch.randint(CAPTIONS, (a.batch,), device=a.device)]
        with autocast(a):
            loss = heads(encoder(ids), ids, numbers)
        step([(adam, 2e-3 * rate(progress, 0.5, 0.05))], loss, both)
    say("text, read-out loss", round(loss.item(), 5))


def train_flow(a, parts, heads, captions, latents, numbers, end, record):
    text_encoder, experts = parts["text_encoder"], [parts["transformer"], parts["transformer_2"]]
    matrices = [[p for n, p in e.named_parameters() if n.startswith("blocks.") and p.ndim == 2] for e in experts]
    others = [[p for n, p in e.named_parameters() if not (n.startswith("blocks.") and p.ndim == 2)] for e in experts]
    muons = [Muon(m, lr=3e-3, weight_decay=0.02) for m in matrices]
    adams = [optimizer(o, 1.5e-3, a) for o in others]
    text_parameters = [*text_encoder.parameters(), *heads.parameters()]
    text_adam = optimizer(text_parameters, 6e-4, a)
    averages = {k: {n: v.detach().clone() for n, v in parts[k].state_dict().items()} for k in PARTS[1:]}
    if a.compile:
        for e in experts:
            for block in e.blocks:
                block.compile(dynamic=False)
    empty = layers.token_ids([""]).to(a.device)
    clock, curve, recent, count = Clock(end), [], ([], []), 0

    def averaged():
        return {"vae": parts["vae"], **averages}

    while (progress := clock.progress()) < 1:
        which = count % 2  # the experts take turns
        odd = count % 32 >= 30
        n = max(1, a.batch // 8) if odd else a.batch
        rows = torch.randint(len(latents), (n,), device=a.device)
        ids = captions[numbers[rows], torch.randint(CAPTIONS, (n,), device=a.device)]
        unnamed = torch.rand(n, device=a.device) < 0.1
        ids = torch.where(unnamed[:, None], empty, ids)
        if odd:
            ids = F.pad(ids, (0, random.choice(TEXT_LENGTHS) - ids.shape[1]))
        x = latents[rows].float()
        noise = torch.randn_like(x)
        # Each expert sees its own noise levels and a little of the other's.
        u = torch.rand(n, device=a.device)
        if which == 0:
            t = 1 - u * (1.02 - layers.BOUNDARY)
        else:
            t = layers.SHIFT * u / (1 + (layers.SHIFT - 1) * u) * (layers.BOUNDARY + 0.02)
        z = x + t.view(-1, 1, 1, 1, 1) * (noise - x)
        with autocast(a), torch.compiler.set_stance("force_eager" if odd else "default"):
            text = text_encoder(ids)
            aside = heads(text, ids, numbers[rows].masked_fill(unnamed, -1)) if not odd else 0.0
            v = experts[which](z, (1000 * t).floor(), text)
        flow = (v - (noise - x)).square().mean()
        share = rate(progress, 0.4)
        step([(muons[which], 3e-3 * share), (adams[which], 1.5e-3 * share), (text_adam, 6e-4 * share)],
             flow + 0.02 * aside, others[which] + text_parameters)
        count += 1
        decay = min(0.999, 1 - 1 / (1 + count / 10))
        for name in ("text_encoder", PARTS[2 + which]):
            state = parts[name].state_dict()
            torch._foreach_lerp_(list(averages[name].values()), [state[k] for k in averages[name]], 1 - decay)
        recent[which].append(flow.detach())
        if count % 200 == 0 or a.smoke and all(recent):
            losses = [round(torch.stack(r).mean().item(), 5) for r in recent]
            recent = ([], [])
            curve.append([count, round(time.time() - BEGAN, 1), *losses])
            if count % 1000 == 0 or count == 200 or a.smoke:
                say("flow step, s, loss high, low", curve[-1])
            if not all(map(math.isfinite, losses)):
                raise SystemExit("the loss is not finite")
        if clock.checkpoint():
            record["flow"] = dict(steps=count, curve=curve)
            write(a, averaged(), record)
    record["flow"] = dict(steps=count, curve=curve)
    write(a, averaged(), record)
    return averages


@torch.no_grad()
def sample(a, weights, record, texts, steps, guidance):
    """Videos of captions, uint8 [N, T, H, W, 3], with weights rounded to bf16, computed in fp32."""
    parts = build(a)
    for name, module in parts.items():
        module.load_state_dict({k: v.bfloat16().float() for k, v in weights[name].items()})
        module.eval()
    ids = layers.token_ids(texts).to(a.device)
    text, empty = parts["text_encoder"](ids), parts["text_encoder"](layers.token_ids([""]).to(a.device))
    latents = torch.randn(len(texts), *layers.LATENT, generator=torch.Generator().manual_seed(1)).to(a.device)
    latents = layers.denoise([parts["transformer"], parts["transformer_2"]], latents, text, empty.expand(len(texts), -1, -1),
                             steps, guidance)
    mean, std = (torch.tensor(record[k], device=a.device).view(1, -1, 1, 1, 1) for k in ("latents_mean", "latents_std"))
    return [v for part in (latents * std + mean).split(a.vae_batch) for v in motion.pixels(parts["vae"].decode(part))]


def evaluate(a, weights, record, pool):
    with open(os.path.join(layers.HERE, "heldout_prompts.jsonl"), encoding="utf-8") as f:
        test = [json.loads(line) for line in f][:a.test]
    rng, seen = random.Random(5), sorted(set(clips.triples()) - set(clips.held_out()))
    chosen = [rng.choice(seen) for _ in test]
    known = [{"prompt": clips.caption(rng, c), **dict(zip(tracker.ATTRIBUTES, c))} for c in chosen]
    result = {}
    for name, asked, steps, guidance in [("held_out", test, 8, 1), ("held_out", test, 12, 1), ("held_out", test, 8, 3),
                                         ("held_out", test, 6, 1), ("seen", known, 8, 1)]:
        videos = sample(a, weights, record, [line["prompt"] for line in asked], steps, guidance)
        judged = pool.starmap(tracker.compare, list(zip(asked, videos)), chunksize=4)
        result[f"{name}, {steps} steps, guidance {guidance}"] = tracker.percentages(judged)
        say(name, steps, "steps, guidance", guidance, tracker.percentages(judged))
        with open(os.path.join(a.work, "evaluation.json"), "w", encoding="utf-8") as f:
            json.dump(result, f, indent=1)


@torch.no_grad()
def read_back(a, vae, train, pool):
    """How well clips are recognized after the autoencoder, in percent."""
    numbers = train[torch.randint(len(train), (a.test,), device=a.device)]
    triples = clips.triples()
    asked = [dict(zip(tracker.ATTRIBUTES, triples[i])) for i in numbers.tolist()]
    videos = [v for part in numbers.split(a.vae_batch) for v in motion.pixels(vae.decode(vae.encode(motion.draw(part))[0]))]
    return tracker.percentages(pool.starmap(tracker.compare, list(zip(asked, videos)), chunksize=4))


def build(a):
    return {k: m.to(a.device) for k, m in zip(PARTS, (layers.Autoencoder(), layers.TextEncoder(), layers.Transformer(), layers.Transformer()))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, dest="work", help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--vae-share", type=float, default=0.3, help="share of the time for the autoencoder")
    parser.add_argument("--resume", metavar="FILE", help="checkpoint to go on from")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--smoke", action="store_true", help="sizes for a quick trial on a CPU")
    a = parser.parse_args()
    a.device = "cuda" if torch.cuda.is_available() else "cpu"
    a.half = torch.bfloat16 if a.device == "cuda" else torch.float32
    a.threads, a.compile = os.cpu_count(), a.compile and a.device == "cuda"
    a.batch, a.vae_batch, a.clips, a.test = (4, 2, 8, 2) if a.smoke else (512, 48, 49152, 200)
    os.makedirs(a.work, exist_ok=True)
    set_up(a)
    pool = multiprocessing.get_context("spawn").Pool(2 if a.smoke else min(12, os.cpu_count()))

    total, parts, record = 60 * a.minutes, build(a), {"device": torch.cuda.get_device_name() if a.device == "cuda" else "cpu"}
    if a.resume:
        saved = torch.load(a.resume, map_location="cpu", weights_only=True)
        record = saved["record"]
        for name, module in parts.items():
            module.load_state_dict(saved["weights"][name])
    triples, out = clips.triples(), set(clips.held_out())
    train = torch.tensor([i for i, t in enumerate(triples) if t not in out], device=a.device)
    rng = random.Random(3)
    captions = layers.token_ids([clips.caption(rng, t) for t in triples for _ in range(CAPTIONS)])
    captions = captions.view(len(triples), CAPTIONS, -1).to(a.device)
    say("ready after", round(time.time() - BEGAN, 1), "s on", record["device"])

    if "latents_mean" not in record:
        train_vae(a, parts, train, BEGAN + a.vae_share * total, record)
        record["read_back"] = read_back(a, parts["vae"], train, pool)
        say("recognized after the autoencoder", record["read_back"])
    latents, numbers = make_latents(a, parts["vae"], train, record)
    write(a, parts, record)
    heads = ReadOut().to(a.device)
    train_text(a, parts["text_encoder"], heads, captions, train, 0.015 * total)
    averages = train_flow(a, parts, heads, captions, latents, numbers, BEGAN + total - (1 if a.smoke else FINAL), record)
    evaluate(a, {"vae": parts["vae"].state_dict(), **averages}, record, pool)
    if a.device == "cuda":
        say("peak GiB", round(torch.cuda.max_memory_allocated() / 2 ** 30, 1))
    pool.close()
    pool.join()
    say("done after", round(time.time() - BEGAN, 1), "s")


if __name__ == "__main__":
    main()
