"""How often images show what was asked: held-out prompts at a few settings, validation prompts over steps and guidance."""
import json
import multiprocessing
import os

import checker
import parts
from training.autoencoder import trained_vae
from training.work import SIZES, load, say


def read_prompts(name):
    with open(os.path.join(parts.HERE, name), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def half_parts(a, weights, vae):
    """The four parts in bf16 from fp32 weights {transformer, text_encoder, text_encoder_2}."""
    p = {k: v.to(a.device, a.half).eval() for k, v in parts.build().items() if k != "vae"}
    for k in p:
        p[k].load_state_dict(weights[k])
    return {**p, "vae": vae}


def identity_score(asked, image):
    return checker.compare(asked, checker.read(image))


def stage_grid(a):
    """Accuracy on the held-out prompts at a few settings and sizes, then on the validation prompts over steps and guidance."""
    weights = load(a, "flow.pt")["weights"]
    models = {"bf16": half_parts(a, weights, trained_vae(a)[0])}
    models["fp32"] = {k: m.float() for k, m in half_parts(a, weights, trained_vae(a)[0]).items()}  # the same rounded weights
    held_out, validation = (read_prompts(n)[:k] for n, k in (("heldout_prompts.jsonl", a.test), ("validation_prompts.jsonl", a.validation)))
    square, wide, high = SIZES
    jobs = [("held out", held_out, "bf16", square, steps, cfg, 3) for steps, cfg in a.settings]
    jobs += [("held out", held_out, "bf16", size, *a.settings[i], 3) for i in (0, -1) for size in (wide, high)]
    jobs += [("held out", held_out, "fp32", square, *a.settings[i], 3) for i in (0, -1)]
    jobs += [("validation", validation, "bf16", square, steps, cfg, 2) for steps in a.grid_steps for cfg in a.grid_cfg]
    results = []
    with multiprocessing.get_context("spawn").Pool(min(8, a.processes)) as pool:
        for name, prompts, dtype, size, steps, cfg, seed in jobs:
            images = parts.sample(models[dtype], [v["prompt"] for v in prompts], *size, steps=steps, cfg=cfg, seed=seed)
            right = pool.starmap(identity_score, list(zip(map(checker.asked_of, prompts), images)), chunksize=8)
            results.append(dict(prompts=name, count_of=len(prompts), dtype=dtype, width=size[0], height=size[1], steps=steps, cfg=cfg,
                                seed=seed, **checker.percentages(right)))
            say("grid", results[-1])
            with open(os.path.join(a.work, "grid.part.json"), "w") as f:
                json.dump(results, f, indent=1)
    os.replace(os.path.join(a.work, "grid.part.json"), os.path.join(a.work, "grid.json"))
