"""Draws batches of clips with torch, on the device of the triples' numbers."""
import torch

import clips
import render
from scenes import BACKGROUNDS, SHAPES

_NAMES = list(BACKGROUNDS)
_TRIPLES = torch.tensor([[SHAPES.index(s), _NAMES.index(c), *clips.DIRECTIONS[d]] for s, c, d in clips.triples()])


def draw(numbers, size=None):
    """Random clips of the triples [N] -> videos [N, 3, FRAMES, HEIGHT, WIDTH] in [-1, 1], or windows of size x size."""
    n, device = len(numbers), numbers.device
    shape, colour, dx, dy = _TRIPLES.to(device)[numbers].unbind(1)

    def between(low, high):
        return low + (high - low) * torch.rand(n, device=device)

    moves = (dx != 0) | (dy != 0)
    travel, along, across = between(40, 48), between(-5, 5), between(-10, 10)
    x = clips.WIDTH / 2 + torch.where(moves & (dx == 0), across, torch.where(moves, along, across))
    y = clips.HEIGHT / 2 + torch.where(moves & (dy == 0), across, torch.where(moves, along, between(-10, 10)))
    progress = torch.linspace(-0.5, 0.5, clips.FRAMES, device=device)
    table = torch.zeros(n, clips.FRAMES, 13, device=device)
    table[..., 0] = 1
    table[..., 1], table[..., 2], table[..., 5] = (v[:, None].float() for v in (shape, colour, between(14, 17)))
    table[..., 3] = x[:, None] + progress * (travel * dx)[:, None]
    table[..., 4] = y[:, None] + progress * (travel * dy)[:, None]
    table[..., 9:11], table[..., 11] = -1e3, 1  # no second object
    table[..., 12] = _NAMES.index(clips.BACKGROUND)
    origin = None
    if size:
        corner = (torch.rand(n, 1, 2, device=device) * (torch.tensor([clips.WIDTH, clips.HEIGHT], device=device) - size)).round()
        origin = corner.expand(-1, clips.FRAMES, -1).flatten(0, 1)
    images = render.render(table.flatten(0, 1), size or clips.WIDTH, size or clips.HEIGHT, origin=origin)
    return images.unflatten(0, (n, clips.FRAMES)).transpose(1, 2)


def pixels(videos):
    """[N, 3, T, H, W] in [-1, 1] -> uint8 [N, T, H, W, 3] on the CPU."""
    return ((videos.float().clamp(-1, 1) * 0.5 + 0.5) * 255).round().byte().permute(0, 2, 3, 4, 1).cpu().numpy()
