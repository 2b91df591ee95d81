"""Reads a scene back out of an image (numpy only) and compares it with what a caption asked for.

A pixel belongs to the nearest palette colour; a region is a 4-connected set of pixels whose 3x3
neighbourhood is of one colour, so that blended edges form no region; an object is a region that is not
background; its shape is that of the six templates, stretched to the region's box, with the largest
overlap (intersection over union), which must reach 0.7.
"""
import numpy as np

from scenes import BACKGROUNDS, HALF_EXTENT, SHAPES, scale_of

NAMES = list(BACKGROUNDS)
PALETTE = np.array([BACKGROUNDS[n] for n in NAMES], dtype=np.float32)
MIN_REGION = 90     # pixels at 256 x 256
MIN_OVERLAP = 0.7
SMALL_BELOW, LARGE_ABOVE = 33.5, 42.0  # radius at 256 x 256
ATTRIBUTES = ["count", "colours", "shapes", "sizes", "relation", "background"]


def _regions(labels):
    """4-connected regions of equal label: int32 map of region numbers from 0 and the label of each region."""
    height, width = labels.shape
    breaks = np.ones((height, width), dtype=bool)
    breaks[:, 1:] = labels[:, 1:] != labels[:, :-1]
    runs = (np.cumsum(breaks.ravel()) - 1).reshape(height, width)
    parent = list(range(int(runs[-1, -1]) + 1))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    same = labels[1:] == labels[:-1]
    count = len(parent)
    for touching in np.unique(runs[:-1][same].astype(np.int64) * count + runs[1:][same]).tolist():
        a, b = root(touching // count), root(touching % count)
        if a != b:
            parent[max(a, b)] = min(a, b)
    roots = np.array([root(i) for i in range(len(parent))])
    numbers, dense = np.unique(roots, return_inverse=True)
    run_label = labels.ravel()[np.flatnonzero(breaks.ravel())]
    return dense[runs].astype(np.int32), run_label[numbers]


def _template(shape, height, width):
    v, u = np.meshgrid((np.arange(height) + 0.5) / height * 2 - 1, (np.arange(width) + 0.5) / width * 2 - 1, indexing="ij")
    rho = np.sqrt(u * u + v * v)
    if shape == "circle":
        return rho <= 1
    if shape == "square":
        return np.ones((height, width), dtype=bool)
    if shape == "triangle":
        return np.abs(u) <= (v + 1) / 2
    if shape == "diamond":
        return np.abs(u) + np.abs(v) <= 1
    if shape == "cross":
        return (np.abs(u) <= 0.36) | (np.abs(v) <= 0.36)
    return (rho <= 1) & (rho >= 0.52)  # ring


def read(image):
    """Image uint8 [H, W, 3] -> {"background": colour, "objects": [{colour, shape, overlap, x, y, radius}]}."""
    height, width = image.shape[:2]
    scale = scale_of(width, height)
    pixels = image.reshape(-1, 3).astype(np.float32)
    distance = (PALETTE * PALETTE).sum(1)[None] - 2.0 * pixels @ PALETTE.T
    labels = distance.argmin(1).reshape(height, width).astype(np.int16)
    border = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    counts = np.bincount(border, minlength=len(NAMES))
    background = int(counts.argmax())
    core = np.ones((height, width), dtype=bool)
    padded = np.pad(labels, 1, mode="edge")
    for dy in range(3):
        for dx in range(3):
            core &= padded[dy:dy + height, dx:dx + width] == labels
    regions, region_label = _regions(np.where(core, labels, -1))
    areas = np.bincount(regions.ravel(), minlength=len(region_label))
    objects = []
    for k in np.flatnonzero((areas >= MIN_REGION * scale * scale) & (region_label >= 0) & (region_label != background)):
        mask = np.pad(regions == k, 1)
        grown = mask.copy()  # undo the erosion
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                grown |= np.roll(mask, (dy, dx), (0, 1))
        rows, columns = np.flatnonzero(grown.any(1)), np.flatnonzero(grown.any(0))
        box = grown[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
        overlaps = []
        for shape in SHAPES:
            template = _template(shape, *box.shape)
            overlaps.append((box & template).sum() / (box | template).sum())
        best = int(np.argmax(overlaps))
        shape = SHAPES[best] if overlaps[best] >= MIN_OVERLAP else "unclear"
        half = HALF_EXTENT.get(shape, (1.0, 1.0))
        objects.append({"colour": NAMES[region_label[k]], "shape": shape, "overlap": round(float(overlaps[best]), 3),
                        "x": float(columns[0] + columns[-1]) / 2 - 0.5, "y": float(rows[0] + rows[-1]) / 2 - 0.5,
                        "radius": float(np.sqrt(box.shape[0] * box.shape[1] / (4 * half[0] * half[1])) / scale)})
    return {"background": NAMES[background] if counts[background] >= 0.9 * border.size else "unclear", "objects": objects}


def _size_right(asked, radius):
    return asked is None or (radius < SMALL_BELOW if asked == "small" else radius > LARGE_ABOVE)


def relation_between(first, second):
    """Where `first` lies seen from `second`: the larger of the two differences of their centres decides."""
    dx, dy = first["x"] - second["x"], first["y"] - second["y"]
    if abs(dy) > abs(dx):
        return "above" if dy < 0 else "below"
    return "left" if dx < 0 else "right"


def compare(asked, seen):
    """Attribute -> right or wrong, the matching of objects chosen that gets most right; "all" is all of them.

    `asked` has objects [{shape, colour, size}], relation (None: not asked) and background (None: not asked).
    """
    wanted, found = asked["objects"], seen["objects"]
    best = None
    orders = [(0, 1), (1, 0)] if len(wanted) == 2 else [(0,)]
    for order in orders:
        matched = [found[i] if i < len(found) else None for i in order]
        result = {
            "count": len(found) == len(wanted),
            "colours": all(m and m["colour"] == w["colour"] for w, m in zip(wanted, matched)),
            "shapes": all(m and m["shape"] == w["shape"] for w, m in zip(wanted, matched)),
            "sizes": all(m and _size_right(w["size"], m["radius"]) for w, m in zip(wanted, matched)),
            "relation": len(wanted) == 1 or asked["relation"] is None or
                        (all(matched) and relation_between(*matched) == asked["relation"]),
            "background": asked["background"] is None or seen["background"] == asked["background"],
        }
        if best is None or sum(result.values()) > sum(best.values()):
            best = result
    best["all"] = all(best.values())
    return best


def asked_of(scene):
    """What a scene's (explicit) caption asks for."""
    return {"objects": [{k: o[k] for k in ("shape", "colour", "size")} for o in scene["objects"]],
            "relation": scene["relation"], "background": scene["background"]}


def percentages(results):
    """Per attribute and of "all" over what compare() gave."""
    return {k: round(100.0 * sum(r[k] for r in results) / len(results), 2) for k in ATTRIBUTES + ["all"]}


def score(asked, images):
    """Percentages over pairs of an asked scene and an image."""
    return percentages([compare(a, read(p)) for a, p in zip(asked, images)])
