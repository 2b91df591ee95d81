"""The world of the demo model: scenes of one or two coloured shapes, and the captions that describe them.

A scene is a plain dict:
  objects     list of 1 or 2 dicts {shape, colour, size, x, y, radius}; x, y, radius in pixels
  relation    where the first object lies seen from the second (above, below, left, right), None for one object
  background  a colour, never that of an object
  says_background  whether the caption names it (unnamed: white, or gray behind a white object)
  width, height    pixels

`size` is small, large or None. Only named sizes are small or large; an object whose size the caption
leaves out is of medium size, so that a caption without sizes asks for one thing only.
"""
import random

SHAPES = ["circle", "square", "triangle", "diamond", "cross", "ring"]
COLOURS = {
    "red": (222, 38, 38), "green": (34, 150, 62), "blue": (38, 74, 224), "yellow": (250, 216, 40),
    "orange": (252, 132, 16), "purple": (128, 40, 176), "pink": (252, 132, 196), "cyan": (44, 204, 214),
    "black": (18, 18, 18), "white": (250, 250, 250),
}
BACKGROUNDS = {**COLOURS, "gray": (142, 142, 142)}
RELATIONS = ["above", "below", "left", "right"]
OPPOSITE = {"above": "below", "below": "above", "left": "right", "right": "left"}
RADII = {"small": (28.0, 31.0), None: (36.0, 39.0), "large": (45.0, 49.0)}  # pixels at 256 x 256
# Half the width and height of each shape's bounding box over its radius.
HALF_EXTENT = {"circle": (1.0, 1.0), "square": (0.9, 0.9), "triangle": (1.0, 0.9), "diamond": (1.05, 1.05),
               "cross": (1.0, 1.0), "ring": (1.0, 1.0)}

SHAPE_WORDS = {"circle": ["circle", "circle", "circle", "disc", "disk", "dot"], "square": ["square", "square", "square", "box"],
               "triangle": ["triangle"], "diamond": ["diamond", "diamond", "rhombus"],
               "cross": ["cross", "cross", "plus"], "ring": ["ring", "ring", "ring", "donut", "hoop"]}
COLOUR_WORDS = {"purple": ["purple", "purple", "violet"], "gray": ["gray", "grey"],
                "cyan": ["cyan", "cyan", "turquoise"]}
SIZE_WORDS = {"small": ["small", "small", "little", "tiny"], "large": ["large", "big", "big", "huge"]}
RELATION_PHRASES = {
    "above": ["above", "above", "over", "on top of"],
    "below": ["below", "below", "under", "beneath", "underneath"],
    "left": ["to the left of", "to the left of", "left of", "on the left of"],
    "right": ["to the right of", "to the right of", "right of", "on the right of"],
}
WITH_PHRASES = {  # "A with B ...": where B lies, by where A lies
    "above": ["below it", "under it", "beneath it", "underneath"], "below": ["above it", "over it", "on top of it"],
    "left": ["to its right", "on its right", "to the right", "on the right"],
    "right": ["to its left", "on its left", "to the left", "on the left"],
}
SIDES = {"above": ("at the top", "at the bottom"), "below": ("at the bottom", "at the top"),
         "left": ("on the left", "on the right"), "right": ("on the right", "on the left")}
OPENINGS = ["a picture of ", "an image of ", "a drawing of ", "a painting of ", "a photo of ", "an illustration of ",
            "draw ", "show ", "please draw "]
CLOSINGS = [", simple", ", minimalist", ", flat design", ", vector art", ", high quality", ", digital art", ", geometric shapes"]


def pair_key(scene):
    """The unordered pair of (colour, shape) of a scene, the thing that held-out prompts never share with training."""
    return tuple(sorted((o["colour"], o["shape"]) for o in scene["objects"]))


def held_out_pairs(seed=20261121, test=0.10, validation=0.04):
    """Two disjoint sets of pair keys, for testing and for validation; training uses neither."""
    things = sorted((c, s) for c in COLOURS for s in SHAPES)
    pairs = [(a, b) for i, a in enumerate(things) for b in things[i + 1:]]
    random.Random(seed).shuffle(pairs)
    n_test, n_val = round(test * len(pairs)), round(validation * len(pairs))
    return set(pairs[:n_test]), set(pairs[n_test:n_test + n_val])


def scale_of(width, height):
    """Pixels of a radius of 1 at this image size."""
    return (min(width, height) / 256.0) ** 0.78


def sample_scene(rng, width, height, pairs=None, single=0.08):
    """Draws a scene. `pairs(key)` says whether a pair of (colour, shape) may be used."""
    while True:
        count = 1 if rng.random() < single else 2
        objects = [{"shape": rng.choice(SHAPES), "colour": rng.choice(list(COLOURS)),
                    "size": rng.choices([None, "small", "large"], [0.5, 0.22, 0.28])[0]} for _ in range(count)]
        scene = {"objects": objects, "width": width, "height": height,
                 "relation": rng.choice(RELATIONS) if count == 2 else None}
        key = pair_key(scene)
        if count == 2 and (key[0] == key[1] or (pairs is not None and not pairs(key))):
            continue
        break
    used = {o["colour"] for o in objects}
    scene["says_background"] = rng.random() < 0.6
    if scene["says_background"]:
        scene["background"] = rng.choice([b for b in BACKGROUNDS if b not in used])
    else:
        scene["background"] = "gray" if "white" in used else "white"
    place(rng, scene)
    return scene


def place(rng, scene):
    """Gives the objects of a scene their radius and place: apart from each other and from the border."""
    width, height, scale = scene["width"], scene["height"], scale_of(scene["width"], scene["height"])
    objects = scene["objects"]
    for o in objects:
        o["radius"] = rng.uniform(*RADII[o["size"]]) * scale
    if len(objects) == 1:
        objects[0]["x"] = width * (0.5 + rng.uniform(-0.06, 0.06))
        objects[0]["y"] = height * (0.5 + rng.uniform(-0.06, 0.06))
        return
    vertical = scene["relation"] in ("above", "below")
    length, across = (height, width) if vertical else (width, height)
    first, second = objects if scene["relation"] in ("above", "left") else objects[::-1]
    a, b = 1.05 * first["radius"], 1.05 * second["radius"]
    room = length - 2 * (a + b)
    gap = min(rng.uniform(14.0, 36.0), room - 8.0) + 0.10 * max(0.0, length - 256.0)
    start = (room - gap) / 2
    start += rng.uniform(-1.0, 1.0) * max(0.0, min(0.05 * length, start - 4.0))
    along = (start + a, start + 2 * a + gap + b)
    middle = across * (0.5 + rng.uniform(-0.05, 0.05))
    for o, position in zip((first, second), along):
        side = middle + across * rng.uniform(-0.03, 0.03)
        o["x"], o["y"] = (side, position) if vertical else (position, side)


def noun(rng, o, bare=0.12):
    words = [rng.choice(COLOUR_WORDS.get(o["colour"], [o["colour"]])), rng.choice(SHAPE_WORDS[o["shape"]])]
    if o["size"]:
        words.insert(0, rng.choice(SIZE_WORDS[o["size"]]))
    kind = rng.random()
    if kind < 0.78 - bare:
        words.insert(0, "an" if words[0][0] in "aeiou" else "a")
    elif kind < 0.92 - bare:
        words.insert(0, "the")
    elif kind < 1.0 - bare:
        words.insert(0, "one")
    return " ".join(words)


def caption(rng, scene, explicit=None):
    """One of the many captions of a scene; `explicit`: only those that say (True) or do not say (False) the relation."""
    objects, relation = scene["objects"], scene["relation"]
    a = noun(rng, objects[0])
    if len(objects) == 1:
        body = a if rng.random() < 0.8 else "there is " + a
    else:
        b = noun(rng, objects[1])
        phrase = rng.choice(RELATION_PHRASES[relation])
        kind = rng.random()
        if explicit is not None:
            kind = 0.90 * kind if explicit else 0.90 + 0.10 * kind
        if kind < 0.46:
            body = f"{a} {phrase} {b}"
        elif kind < 0.56:
            body = f"{a} is {phrase} {b}"
        elif kind < 0.64:
            body = f"there is {a} {phrase} {b}"
        elif kind < 0.77:
            body = f"{a} with {b} {rng.choice(WITH_PHRASES[relation])}"
        elif kind < 0.90:
            first, second = SIDES[relation]
            body = f"{a} {first}{rng.choice([' and ', ' and ', ', '])}{b} {second}"
        elif kind < 0.96 or relation in ("above", "below"):
            body = f"{a} and {b}"
        else:
            body = f"{a} {rng.choice(['next to', 'beside'])} {b}"
    is_sentence = body.startswith("there is") or " is " in body
    if not is_sentence and rng.random() < 0.25:
        body = rng.choice(OPENINGS) + body
    if scene["says_background"]:
        colour = rng.choice(COLOUR_WORDS.get(scene["background"], [scene["background"]]))
        article = "an" if colour[0] in "aeiou" else "a"
        kind = rng.random()
        if kind < 0.55:
            body += f" on {article} {colour} background"
        elif kind < 0.63:
            body += f" on {colour} background"
        elif kind < 0.73:
            body += f", {colour} background"
        elif kind < 0.80:
            body += f" against {article} {colour} background"
        elif kind < 0.88:
            body += f" with {article} {colour} background"
        else:
            body = f"on {article} {colour} background, {body}"
    if rng.random() < 0.08:
        body += rng.choice(CLOSINGS)
    if rng.random() < 0.15:
        body += "."
    return body
