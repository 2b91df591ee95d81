"""Scenes, their captions and tokens, made on many CPU processes before the GPU needs them."""
import multiprocessing
import random

import numpy as np
import torch

import parts
import render
import scenes
from training.work import SEED, SIZES, load, save

CAPTIONS = 4  # per scene
LABEL_SIZES = [11, 7, 4, 11, 7, 4, 5, 11]  # colour, shape, size of both objects (last: no object), relation, background


def _labels(scene, says_relation):
    row = []
    for i in range(2):
        if i < len(scene["objects"]):
            o = scene["objects"][i]
            row += [list(scenes.COLOURS).index(o["colour"]), scenes.SHAPES.index(o["shape"]), [None, "small", "large"].index(o["size"])]
        else:
            row += [10, 6, 3]
    relation = 4 if scene["relation"] is None else scenes.RELATIONS.index(scene["relation"]) if says_relation else -100
    return row + [relation, list(scenes.BACKGROUNDS).index(scene["background"])]


def _caption_part(job):
    (width, height), count, seed = job
    torch.set_num_threads(1)
    rng = random.Random(seed)
    test, validation = scenes.held_out_pairs()
    allowed = lambda key: key not in test and key not in validation
    drawn, texts, labels = [], [], []
    for _ in range(count):
        scene = scenes.sample_scene(rng, width, height, allowed)
        drawn.append(scene)
        for _ in range(CAPTIONS):
            explicit = scene["relation"] is None or rng.random() < 0.91
            texts.append(scenes.caption(rng, scene, explicit))
            labels.append(_labels(scene, explicit))
    clip_ids, t5_ids = parts.token_ids(texts, parts.TEXT_LENGTH, 32)
    return (render.scene_table(drawn).numpy(), clip_ids.short().view(count, CAPTIONS, 32).numpy(),
            t5_ids.short().view(count, CAPTIONS, parts.TEXT_LENGTH).numpy(),
            torch.tensor(labels).short().view(count, CAPTIONS, 8).numpy())


def stage_captions(a):
    result = {}
    with multiprocessing.Pool(a.processes) as pool:
        for k, (size, total) in enumerate(zip(SIZES, a.scenes)):
            chunk = max(1, total // (4 * a.processes))
            jobs = [(size, chunk, SEED + 1000 * k + i) for i in range(-(-total // chunk))]
            columns = [torch.from_numpy(np.concatenate(c)) for c in zip(*pool.map(_caption_part, jobs))]
            result[size] = dict(zip(("table", "clip", "t5", "labels"), columns))
    save(a, "captions.pt", result)


def caption_data(a):
    return {s: {k: v.to(a.device) for k, v in d.items()} for s, d in load(a, "captions.pt").items()}


def draw_captions(data, rows):
    which = torch.randint(CAPTIONS, (len(rows),), device=rows.device)
    return data["clip"][rows, which].long(), data["t5"][rows, which].long(), data["labels"][rows, which].long()
