"""The parts of the video model in torch alone, for training: their state dicts and results are those of diffusers'
WanTransformer3DModel and AutoencoderKLWan and of transformers' UMT5EncoderModel. Sampling is as in WanPipeline with UniPC.
"""
import functools
import json
import math
import os
import re

import torch
import torch.nn.functional as F
from torch import nn

import clips

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT_LENGTH = 32  # tokens at the default settings
STEPS = 8
BOUNDARY = 0.875
SHIFT = 3.0

TEXT = dict(d_model=96, d_kv=32, num_heads=3, num_layers=2, d_ff=192, relative_attention_num_buckets=32,
            relative_attention_max_distance=128)
TRANSFORMER = dict(patch_size=[1, 2, 2], num_attention_heads=4, attention_head_dim=32, in_channels=16, out_channels=16,
                   text_dim=96, freq_dim=128, ffn_dim=384, num_layers=4, cross_attn_norm=True, eps=1e-6)
VAE = dict(base_dim=16, z_dim=16, dim_mult=[1, 2, 2, 3], num_res_blocks=1, temperal_downsample=[False, True, True])
LATENT = (VAE["z_dim"], (clips.FRAMES + 3) // 4, clips.HEIGHT // 8, clips.WIDTH // 8)


# ---- text ----

def vocabulary(folder=os.path.join(HERE, "model", "tokenizer")):
    with open(os.path.join(folder, "tokenizer.json"), encoding="utf-8") as f:
        return {piece: i for i, (piece, _) in enumerate(json.load(f)["model"]["vocab"])}


def token_ids(texts, length=TEXT_LENGTH):
    """Ids [N, length] of captions made by clips.caption(), padded with 0; equal to the tokenizer's."""
    pieces = vocabulary()
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in zip(ids, texts):
        words = [pieces[w if w == "." else "\u2581" + w] for w in re.findall(r"[a-z]+|\.", text)] + [1]
        row[:len(words)] = torch.tensor(words)
    return ids


class T5Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6))


class T5SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        inner = c["num_heads"] * c["d_kv"]
        self.heads, self.buckets, self.furthest = c["num_heads"], c["relative_attention_num_buckets"], c["relative_attention_max_distance"]
        self.q, self.k, self.v = (nn.Linear(c["d_model"], inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, c["d_model"], bias=False)
        self.relative_attention_bias = nn.Embedding(self.buckets, self.heads)
        nn.init.normal_(self.q.weight, std=(c["d_model"] * c["d_kv"]) ** -0.5)  # the scores are not scaled
        nn.init.normal_(self.relative_attention_bias.weight, std=0.1)

    def bias(self, n, device):
        apart = torch.arange(n, device=device)[None] - torch.arange(n, device=device)[:, None]
        half, exact = self.buckets // 2, self.buckets // 4
        distance = apart.abs()
        far = exact + (torch.log(distance.clamp(min=1).float() / exact) / math.log(self.furthest / exact) * (half - exact)).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=half - 1)) + (apart > 0) * half
        return self.relative_attention_bias(bucket).permute(2, 0, 1)

    def forward(self, x, mask):
        b, n, _ = x.shape
        q, k, v = (m(x).view(b, n, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = (q @ k.mT).float() + self.bias(n, x.device) + mask
        return self.o((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


class T5FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(c["d_model"], c["d_ff"], bias=False) for _ in range(2))
        self.wo = nn.Linear(c["d_ff"], c["d_model"], bias=False)

    def forward(self, x):
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class TextEncoder(nn.Module):
    def __init__(self, c=TEXT):
        super().__init__()
        self.shared = nn.Embedding(len(vocabulary()), c["d_model"])
        self.encoder = nn.Module()
        self.encoder.block = nn.ModuleList()
        for _ in range(c["num_layers"]):
            block = nn.Module()
            block.layer = nn.ModuleList([nn.Module(), nn.Module()])
            block.layer[0].SelfAttention, block.layer[0].layer_norm = T5SelfAttention(c), T5Norm(c["d_model"])
            block.layer[1].DenseReluDense, block.layer[1].layer_norm = T5FeedForward(c), T5Norm(c["d_model"])
            self.encoder.block.append(block)
        self.encoder.final_layer_norm = T5Norm(c["d_model"])

    def forward(self, ids):
        """Ids [B, N] -> embeddings [B, N, d_model], zeros after the end mark."""
        mask = torch.where(ids == 0, torch.finfo(torch.float32).min, 0.0)[:, None, None]
        x = self.shared(ids)
        for block in self.encoder.block:
            x = x + block.layer[0].SelfAttention(block.layer[0].layer_norm(x), mask)
            x = x + block.layer[1].DenseReluDense(block.layer[1].layer_norm(x))
        return self.encoder.final_layer_norm(x) * (ids != 0)[..., None]


# ---- transformer ----

class Attention(nn.Module):
    def __init__(self, dim, heads, eps):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q, self.norm_k = (nn.RMSNorm(dim, eps=eps) for _ in range(2))

    def forward(self, x, context, rope=None):
        q, k, v = self.norm_q(self.to_q(x).float()), self.norm_k(self.to_k(context).float()), self.to_v(context)
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        x = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.to_out[0](x.transpose(1, 2).flatten(2))


def rotate(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


@functools.cache
def rope_tables(shape, head_dim, device):
    """cos and sin [frames * rows * columns, head_dim / 2] of a grid of tokens."""
    side = 2 * (head_dim // 6)
    parts = []
    for axis, dim in enumerate((head_dim - 2 * side, side, side)):
        angles = torch.outer(torch.arange(shape[axis], dtype=torch.float64),
                             1.0 / 10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
        view = [1, 1, 1, -1]
        view[axis] = shape[axis]
        parts.append(angles.view(view).expand(*shape, -1))
    angles = torch.cat(parts, -1).reshape(math.prod(shape), -1).to(device)
    return angles.cos().float(), angles.sin().float()


class Block(nn.Module):
    def __init__(self, dim, heads, ffn, eps):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.attn1, self.attn2 = Attention(dim, heads, eps), Attention(dim, heads, eps)
        self.norm2 = nn.LayerNorm(dim, eps)
        self.ffn = nn.Module()
        self.ffn.net = nn.ModuleList([nn.Module(), nn.Identity(), nn.Linear(ffn, dim)])
        self.ffn.net[0].proj = nn.Linear(dim, ffn)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, dim))

    def norm(self, x, scale, shift):
        return F.layer_norm(x.float(), (self.dim,), eps=self.eps) * (1 + scale) + shift

    def forward(self, x, context, time, cos, sin):
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.scale_shift_table + time.float()).chunk(6, 1)
        y = self.norm(x, scale, shift)
        x = x + self.attn1(y, y, (cos, sin)) * gate
        x = x + self.attn2(self.norm2(x), context)
        y = self.ffn.net[2](F.gelu(self.ffn.net[0].proj(self.norm(x, ffn_scale, ffn_shift)), approximate="tanh"))
        return x + y * ffn_gate


class Transformer(nn.Module):
    """One expert. Blocks begin as identities apart from cross-attention, and the output as zero."""

    def __init__(self, c=TRANSFORMER):
        super().__init__()
        dim = c["num_attention_heads"] * c["attention_head_dim"]
        self.c, self.dim = c, dim
        self.patch_embedding = nn.Conv3d(c["in_channels"], dim, c["patch_size"], c["patch_size"])
        e = self.condition_embedder = nn.Module()
        e.time_embedder, e.text_embedder = nn.Module(), nn.Module()
        e.time_embedder.linear_1, e.time_embedder.linear_2 = nn.Linear(c["freq_dim"], dim), nn.Linear(dim, dim)
        e.time_proj = nn.Linear(dim, 6 * dim)
        e.text_embedder.linear_1, e.text_embedder.linear_2 = nn.Linear(c["text_dim"], dim), nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, c["num_attention_heads"], c["ffn_dim"], c["eps"]) for _ in range(c["num_layers"]))
        self.proj_out = nn.Linear(dim, c["out_channels"] * math.prod(c["patch_size"]))
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, dim))
        for m in (e.time_proj, self.proj_out):
            nn.init.zeros_(m.weight)
            nn.init.zeros_(m.bias)

    def forward(self, latents, timestep, text):
        """Latents [B, C, T, H, W], timesteps [B] of 0 to 1000, text [B, N, D] -> velocities [B, C, T, H, W], fp32."""
        e, (_, p, q) = self.condition_embedder, self.c["patch_size"]
        b, _, t, h, w = latents.shape
        # A convolution whose kernel is its stride is a linear layer over patches.
        x = latents.view(b, -1, t, h // p, p, w // q, q).permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        x = F.linear(x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias).float()
        half = self.c["freq_dim"] // 2
        angles = timestep.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        with torch.autocast(x.device.type, enabled=False):
            time = e.time_embedder.linear_2(F.silu(e.time_embedder.linear_1(torch.cat([angles.cos(), angles.sin()], -1))))
        steps = e.time_proj(F.silu(time)).unflatten(1, (6, -1))
        context = e.text_embedder.linear_2(F.gelu(e.text_embedder.linear_1(text), approximate="tanh"))
        cos, sin = rope_tables((t, h // p, w // q), self.c["attention_head_dim"], x.device)
        for block in self.blocks:
            x = block(x, context, steps, cos, sin)
        shift, scale = (self.scale_shift_table + time[:, None]).chunk(2, 1)
        x = self.proj_out(F.layer_norm(x.float(), (self.dim,), eps=self.c["eps"]) * (1 + scale) + shift)
        x = x.view(b, t, h // p, w // q, p, q, -1).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(latents.shape).float()


# ---- autoencoder: whole videos at once, with the results of diffusers' frame cache ----

class CausalConv3d(nn.Conv3d):
    def __init__(self, i, o, kernel, stride=1):
        kernel = (kernel,) * 3 if isinstance(kernel, int) else kernel
        super().__init__(i, o, kernel, stride, padding=(0, kernel[1] // 2, kernel[2] // 2))

    def forward(self, x):
        return super().forward(F.pad(x, (0, 0, 0, 0, self.kernel_size[0] - 1, 0)))


class RMSNorm(nn.Module):
    def __init__(self, dim, axes):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * axes))

    def forward(self, x):
        return F.normalize(x.float(), dim=1).to(x.dtype) * (self.gamma * self.gamma.shape[0] ** 0.5).to(x.dtype)


class ResidualBlock(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm1, self.conv1 = RMSNorm(i, 3), CausalConv3d(i, o, 3)
        self.norm2, self.conv2 = RMSNorm(o, 3), CausalConv3d(o, o, 3)
        self.conv_shortcut = CausalConv3d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class AttentionBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.to_qkv, self.proj = RMSNorm(dim, 2), nn.Conv2d(dim, 3 * dim, 1), nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = self.norm(x.transpose(1, 2).flatten(0, 1))
        q, k, v = self.to_qkv(y).flatten(2).mT.contiguous().unsqueeze(1).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).mT.reshape(b * t, c, h, w)
        return x + self.proj(y).view(b, t, c, h, w).transpose(1, 2)


class MidBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attentions = nn.ModuleList([AttentionBlock(dim)])
        self.resnets = nn.ModuleList([ResidualBlock(dim, dim), ResidualBlock(dim, dim)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


def per_frame(conv, x, stride=1, padding=0):
    return F.conv3d(x, conv.weight.unsqueeze(2), conv.bias, (1, stride, stride), (0, padding, padding))


class Downsample(nn.Module):
    def __init__(self, dim, temporal):
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = nn.Conv3d(dim, dim, (3, 1, 1), (2, 1, 1)) if temporal else None

    def forward(self, x):
        x = per_frame(self.resample[1], F.pad(x, (0, 1, 0, 1)), stride=2)
        return x if self.time_conv is None else torch.cat([x[:, :, :1], self.time_conv(x)], 2)


class Upsample(nn.Module):
    def __init__(self, dim, temporal):
        super().__init__()
        self.resample = nn.Sequential(nn.Identity(), nn.Conv2d(dim, dim // 2, 3, padding=1))
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if temporal else None

    def forward(self, x):
        if self.time_conv is not None:
            later = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
            x = torch.cat([x[:, :, :1], later], 2)
        return per_frame(self.resample[1], F.interpolate(x, scale_factor=(1, 2, 2)), padding=1)


class Autoencoder(nn.Module):
    def __init__(self, c=VAE):
        super().__init__()
        assert c["num_res_blocks"] == 1
        dims = [c["base_dim"] * m for m in [1, *c["dim_mult"]]]
        z, last, down = c["z_dim"], len(c["dim_mult"]) - 1, c["temperal_downsample"]
        e = self.encoder = nn.Module()
        e.conv_in, e.down_blocks = CausalConv3d(3, dims[0], 3), nn.ModuleList()
        for k, (i, o) in enumerate(zip(dims, dims[1:])):
            e.down_blocks.append(ResidualBlock(i, o))
            if k != last:
                e.down_blocks.append(Downsample(o, down[k]))
        e.mid_block, e.norm_out, e.conv_out = MidBlock(dims[-1]), RMSNorm(dims[-1], 3), CausalConv3d(dims[-1], 2 * z, 3)
        self.quant_conv, self.post_quant_conv = CausalConv3d(2 * z, 2 * z, 1), CausalConv3d(z, z, 1)
        d = self.decoder = nn.Module()
        dims = [dims[-1], *dims[:0:-1]]
        d.conv_in, d.mid_block, d.up_blocks = CausalConv3d(z, dims[0], 3), MidBlock(dims[0]), nn.ModuleList()
        for k, (i, o) in enumerate(zip(dims, dims[1:])):
            block = nn.Module()
            block.resnets = nn.ModuleList([ResidualBlock(i // 2 if k else i, o), ResidualBlock(o, o)])
            if k != last:
                block.upsamplers = nn.ModuleList([Upsample(o, down[last - 1 - k])])
            d.up_blocks.append(block)
        d.norm_out, d.conv_out = RMSNorm(dims[-1], 3), CausalConv3d(dims[-1], 3, 3)

    def encode(self, x):
        """Videos [B, 3, T, H, W] in [-1, 1] -> mean and log variance [B, z, T', H / 8, W / 8]."""
        e = self.encoder
        x = e.conv_in(x)
        for block in e.down_blocks:
            x = block(x)
        x = e.conv_out(F.silu(e.norm_out(e.mid_block(x))))
        mean, log_variance = self.quant_conv(x).float().chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, z):
        d = self.decoder
        x = d.mid_block(d.conv_in(self.post_quant_conv(z)))
        for block in d.up_blocks:
            x = block.resnets[1](block.resnets[0](x))
            if hasattr(block, "upsamplers"):
                x = block.upsamplers[0](x)
        return d.conv_out(F.silu(d.norm_out(x))).float()


# ---- sampling ----

def noise_levels(steps):
    """UniPC's noise levels with flow_shift, a final 0 appended, and its whole-number timesteps."""
    s = torch.linspace(1, 1 / 1000, steps + 1, dtype=torch.float64)[:-1]
    s = SHIFT * s / (1 + (SHIFT - 1) * s)
    s[0] -= 1e-6
    return [*s.float().double().tolist(), 0.0], (1000 * s).floor().float().tolist()


@torch.no_grad()
def denoise(experts, latents, text, empty, steps=STEPS, guidance=1.0):
    """UniPC of order 2 (bh2) over both experts. Latents [B, C, T, H, W] and text [B, N, D] in fp32."""
    levels, times = noise_levels(steps)
    lam = lambda s: math.log1p(-s) - math.log(s) if s else math.inf
    x, last, clean, orders = latents, None, [], []
    for i, t in enumerate(times):
        expert = experts[0 if t >= BOUNDARY * 1000 else 1]
        time = torch.full((len(x),), t, device=x.device)
        v = expert(x, time, text)
        if guidance > 1:
            u = expert(x, time, empty)
            v = u + guidance * (v - u)
        x0 = x - levels[i] * v
        if i:  # the corrector, with the previous step's order
            x = unipc_step(last, clean, levels, lam, i - 1, orders[-1], x0)
        clean.append(x0)
        orders.append(1 if i in (0, steps - 1) else 2)
        last, x = x, unipc_step(x, clean, levels, lam, i, orders[-1])
    return x


def unipc_step(x, clean, levels, lam, i, order, corrected=None):
    """The step from level i to i + 1: the predictor, or with `corrected`, the clean latents at i + 1, the corrector."""
    now, then = levels[i], levels[i + 1]
    h = lam(then) - lam(now)
    phi = math.expm1(-h)  # bh2's B_h, too
    m0 = clean[i]
    result = then / now * x - (1 - then) * phi * m0
    if order == 2:
        rk = (lam(levels[i - 1]) - lam(now)) / h
        d1 = (clean[i - 1] - m0) / rk
    if corrected is None:
        return result - (1 - then) * phi * 0.5 * d1 if order == 2 else result
    if order == 1:
        return result - (1 - then) * phi * 0.5 * (corrected - m0)
    p1 = phi / -h - 1
    p2 = p1 / -h - 0.5
    b1, b2 = p1 / phi, 2 * p2 / phi
    c1 = (b2 - b1) / (rk - 1)  # solves c1 + c2 = b1, rk c1 + c2 = b2
    return result - (1 - then) * phi * (c1 * d1 + (b1 - c1) * (corrected - m0))
