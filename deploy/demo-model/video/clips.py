"""The world of the video model: one coloured shape on white that moves in one direction or stays still, and its captions.

A clip is a triple (shape, colour, direction). Training never uses the triples of held_out(), but every pair of two of
their attributes.
"""
import itertools
import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from scenes import SHAPES, noun  # noqa: E402

COLOURS = ["red", "green", "blue", "yellow", "orange", "purple", "pink", "black"]
BACKGROUND = "white"
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}  # y points down
WIDTH = HEIGHT = 96
FRAMES = 17

VERBS = [("moves", "moving")] * 8 + [("goes", "going")] * 2 + [
    ("slides", "sliding"), ("glides", "gliding"), ("travels", "traveling"), ("drifts", "drifting"), ("flies", "flying"),
    ("rolls", "rolling"), ("runs", "running")]
WHERE = {
    "right": ["right", "right", "right", "to the right", "to the right", "rightward", "rightwards", "towards the right",
              "from left to right"],
    "left": ["left", "left", "left", "to the left", "to the left", "leftward", "leftwards", "towards the left",
             "from right to left"],
    "up": ["up", "up", "up", "upward", "upwards", "to the top", "towards the top", "from bottom to top"],
    "down": ["down", "down", "down", "downward", "downwards", "to the bottom", "towards the bottom", "from top to bottom"],
}
OWN_VERBS = {"up": [("rises", "rising"), ("climbs", "climbing")],
             "down": [("falls", "falling"), ("sinks", "sinking"), ("drops", "dropping")],
             "still": [("stays still", "staying still"), ("stands still", "standing still"), ("does not move", "not moving"),
                       ("stays in place", "staying in place"), ("rests", "resting")]}
OPENINGS = ["a video of", "a clip of", "an animation of", "a movie of", "show", "there is"]


def triples():
    return list(itertools.product(SHAPES, COLOURS, DIRECTIONS))


def held_out():
    """The 48 triples that training never uses: one direction of every pair of shape and colour."""
    directions = list(DIRECTIONS)
    return [(s, c, directions[(2 * i + j) % len(directions)]) for i, s in enumerate(SHAPES) for j, c in enumerate(COLOURS)]


def caption(rng, clip):
    """One of the many captions of a clip."""
    shape, colour, direction = clip
    thing = noun(rng, {"shape": shape, "colour": colour, "size": None})
    if direction == "still" and rng.random() < 0.15:
        text = thing
    else:
        if direction == "still" or direction in OWN_VERBS and rng.random() < 0.2:
            (does, doing), where = rng.choice(OWN_VERBS[direction]), ""
        else:
            (does, doing), where = rng.choice(VERBS), " " + rng.choice(WHERE[direction])
        kind = rng.random()
        if kind < 0.5:
            text = f"{thing} {does}{where}"
        elif kind < 0.6:
            text = f"{thing} is {doing}{where}"
        else:
            text = f"{thing} {doing}{where}"
            if kind < 0.8:
                text = f"{rng.choice(OPENINGS)} {text}"
    if rng.random() < 0.06:
        text += f" on a {BACKGROUND} background"
    return text + "." if rng.random() < 0.15 else text
