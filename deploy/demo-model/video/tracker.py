"""Recognizes the clip in the frames of a video (numpy only) and compares it with what a caption asked for."""
import collections

import numpy as np

import clips
import checker  # the pictures' checker, beside this folder; `clips` puts it on the path

SHARE = 0.75      # of the frames that must show the same single object
STILL_BELOW = 8   # pixels between the first and the last frames
MOVES_ABOVE = 20
ATTRIBUTES = ["shape", "colour", "direction"]


def read(frames):
    """Frames uint8 [T, H, W, 3] -> {shape, colour, direction}; "unclear" where the frames do not agree."""
    seen = [checker.read(frame) for frame in frames]
    single = [(i, s["objects"][0]) for i, s in enumerate(seen)
              if len(s["objects"]) == 1 and s["background"] == clips.BACKGROUND]

    def common(name):
        value, count = collections.Counter(o[name] for _, o in single).most_common(1)[0]
        return value if count >= SHARE * len(frames) else "unclear"

    if len(single) < SHARE * len(frames):
        return dict.fromkeys(ATTRIBUTES, "unclear")
    third = len(frames) / 3
    ends = [[(o["x"], o["y"]) for i, o in single if inside(i)]
            for inside in (lambda i: i < third, lambda i: i >= len(frames) - third)]
    direction = "unclear"
    if all(ends):
        # The ends are averages over a third of the frames, so they are two thirds of the way apart.
        dx, dy = (np.mean(ends[1], 0) - np.mean(ends[0], 0)) * 1.5
        along, across = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
        if along < STILL_BELOW:
            direction = "still"
        elif along > MOVES_ABOVE and across < along / 3:
            direction = ("right" if dx > 0 else "left") if abs(dx) > abs(dy) else ("down" if dy > 0 else "up")
    return {"shape": common("shape"), "colour": common("colour"), "direction": direction}


def compare(asked, frames):
    """Attribute -> right or wrong; "all" is all of them. `asked` has shape, colour and direction."""
    seen = read(frames)
    result = {k: seen[k] == asked[k] for k in ATTRIBUTES}
    result["all"] = all(result.values())
    return result


def percentages(results):
    return {k: round(100.0 * sum(r[k] for r in results) / len(results), 2) for k in ATTRIBUTES + ["all"]}
