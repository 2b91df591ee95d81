"""Writes heldout_prompts.jsonl (test) and validation_prompts.jsonl, from pairs of (colour, shape) training never sees."""
import json
import os
import random

import scenes
from parts import HERE


def write(name, pairs, count, seed):
    rng, lines = random.Random(seed), []
    for i, pair in enumerate(sorted(pairs) * 10):
        if len(lines) == count:
            break
        things = list(pair)
        while True:  # a scene drawn as in training, then given this pair in either order
            scene = scenes.sample_scene(rng, 256, 256, single=0.0)
            rng.shuffle(things)
            for o, (colour, shape) in zip(scene["objects"], things):
                o["colour"], o["shape"] = colour, shape
            used = {c for c, _ in pair}
            if not scene["says_background"]:
                scene["background"] = "gray" if "white" in used else "white"
            if scene["background"] not in used:
                break
        text = scenes.caption(rng, scene, explicit=True)
        lines.append({"prompt": text, "relation": scene["relation"], "background": scene["background"],
                      "objects": [{k: o[k] for k in ("colour", "shape", "size")} for o in scene["objects"]]})
    with open(os.path.join(HERE, name), "w", encoding="utf-8") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    test, validation = scenes.held_out_pairs()
    write("heldout_prompts.jsonl", test, 300, 11)
    write("validation_prompts.jsonl", validation, 142, 12)
