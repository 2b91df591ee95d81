"""Draws batches of scenes with torch, anti-aliased, from signed distances; flat or in one of the adapters' styles."""
import torch

from scenes import BACKGROUNDS, SHAPES

STYLES = ["flat", "outline", "checkerboard", "pastel", "night"]
_PALETTE = torch.tensor(list(BACKGROUNDS.values()), dtype=torch.float32) / 127.5 - 1.0
_NAMES = list(BACKGROUNDS)


def scene_table(scenes):
    """[N, 13] float32: per object (present, shape, colour, x, y, radius), then the background."""
    rows = []
    for scene in scenes:
        row = []
        for i in range(2):
            if i < len(scene["objects"]):
                o = scene["objects"][i]
                row += [1.0, SHAPES.index(o["shape"]), _NAMES.index(o["colour"]), o["x"], o["y"], o["radius"]]
            else:
                row += [0.0, 0.0, 0.0, -1e3, -1e3, 1.0]
        rows.append(row + [_NAMES.index(scene["background"])])
    return torch.tensor(rows, dtype=torch.float32)


def _distance(shape, dx, dy, r):
    """Signed distance in pixels (negative inside) of every pixel, for objects all of one shape."""
    ax, ay = dx.abs(), dy.abs()
    if shape == "circle":
        return (dx * dx + dy * dy).sqrt() - r
    if shape == "square":
        return torch.maximum(ax, ay) - 0.9 * r
    if shape == "triangle":  # apex (0, -0.9r), base from (-r, 0.9r) to (r, 0.9r)
        slope = (1.8 * 1.8 + 1.0) ** 0.5
        return torch.maximum(dy - 0.9 * r, (1.8 * ax - (dy + 0.9 * r)) / slope)
    if shape == "diamond":
        return (ax + ay - 1.05 * r) * 0.70710678
    if shape == "cross":
        arm = 0.36 * r
        return torch.minimum(torch.maximum(ax - arm, ay - r), torch.maximum(ax - r, ay - arm))
    return ((dx * dx + dy * dy).sqrt() - 0.76 * r).abs() - 0.24 * r  # ring


def render(table, width, height, style="flat", origin=None):
    """Images [N, 3, height, width] in [-1, 1] on the table's device. `origin` [N, 2] shifts each window (x, y)."""
    device, n = table.device, table.shape[0]
    palette = _PALETTE.to(device)
    ys = torch.arange(height, device=device, dtype=torch.float32).view(1, -1, 1) + 0.5
    xs = torch.arange(width, device=device, dtype=torch.float32).view(1, 1, -1) + 0.5
    if origin is not None:
        xs, ys = xs + origin[:, 0].view(-1, 1, 1), ys + origin[:, 1].view(-1, 1, 1)
    ground = palette[table[:, 12].long()].view(n, 3, 1, 1)
    if style == "night":  # black behind everything, black objects white
        black, white = _NAMES.index("black"), _NAMES.index("white")
        table = table.clone()
        table[:, [2, 8]] = torch.where(table[:, [2, 8]] == black, float(white), table[:, [2, 8]])
        ground = palette[black].view(1, 3, 1, 1).expand(n, 3, 1, 1)
    if style == "checkerboard":
        other = torch.where(ground.mean(1, keepdim=True) > 0, ground - 0.45, ground + 0.45).clamp(-1, 1)
        tile = ((xs / 32).floor() + (ys / 32).floor()).remainder(2).unsqueeze(1)
        ground = ground * (1 - tile) + other * tile
    image = ground.expand(n, 3, height, width).clone()
    for i in range(2):
        part = table[:, 6 * i:6 * i + 6]
        x, y, r = (part[:, k].view(-1, 1, 1) for k in (3, 4, 5))
        dx, dy = xs - x, ys - y
        distance = torch.zeros(n, height, width, device=device)
        for k, shape in enumerate(SHAPES):
            rows = (part[:, 1] == k).nonzero().squeeze(1)
            if rows.numel():
                distance[rows] = _distance(shape, dx[rows].expand(-1, height, width), dy[rows].expand(-1, height, width), r[rows])
        inside = (0.5 - distance).clamp(0, 1).unsqueeze(1) * part[:, 0].view(-1, 1, 1, 1)
        fill = palette[part[:, 2].long()].view(n, 3, 1, 1).expand_as(image)
        if style == "outline":  # a dark border, light around black objects
            edge = torch.where(part[:, 2] == _NAMES.index("black"), 0.9, -0.95).view(n, 1, 1, 1)
            core = (0.5 - distance - 6.0).clamp(0, 1).unsqueeze(1)
            fill = fill * core + edge * (1 - core)
        image = image * (1 - inside) + fill * inside
    if style == "pastel":
        image = 0.45 * image + 0.42
    return image
