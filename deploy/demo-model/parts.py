"""The parts of the demo model: their configurations, building them, and sampling with them as FluxPipeline does."""
import math
import os

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT_LENGTH = 32   # T5 tokens at the default settings
VAE_FACTOR = 8
PATCH = 2 * VAE_FACTOR  # pixels per image token

TRANSFORMER = dict(
    patch_size=1, in_channels=32, num_layers=2, num_single_layers=6, attention_head_dim=32, num_attention_heads=6,
    joint_attention_dim=128, pooled_projection_dim=96, guidance_embeds=False, axes_dims_rope=[4, 14, 14])
VAE = dict(
    in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
    block_out_channels=[16, 32, 64, 64], layers_per_block=1, act_fn="silu", latent_channels=8, norm_num_groups=8,
    sample_size=256, use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
    scaling_factor=1.0, shift_factor=0.0)
SCHEDULER = dict(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                 base_image_seq_len=256, max_image_seq_len=4096)


def tokenizers(folder=os.path.join(HERE, "model")):
    return (CLIPTokenizer.from_pretrained(os.path.join(folder, "tokenizer")),
            T5Tokenizer.from_pretrained(os.path.join(folder, "tokenizer_2")))


def clip_config(clip_tokenizer):
    return CLIPTextConfig(
        vocab_size=len(clip_tokenizer), hidden_size=96, intermediate_size=384, projection_dim=96, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=77, hidden_act="quick_gelu",
        bos_token_id=clip_tokenizer.bos_token_id, eos_token_id=clip_tokenizer.eos_token_id,
        pad_token_id=clip_tokenizer.pad_token_id)


def t5_config(t5_tokenizer):
    return T5Config(
        vocab_size=len(t5_tokenizer), d_model=128, d_kv=32, num_heads=4, d_ff=192, num_layers=3,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, is_encoder_decoder=False, use_cache=False,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)


def build():
    """Fresh parts in fp32 on the CPU: dict transformer, vae, text_encoder, text_encoder_2."""
    clip_tokenizer, t5_tokenizer = tokenizers()
    transformer = FluxTransformer2DModel(**TRANSFORMER)
    for name, module in transformer.named_modules():  # blocks start as identities, the output as zero
        if name.endswith("norm1.linear") or name.endswith("norm1_context.linear") or name.endswith("norm.linear") \
                or name in ("proj_out", "norm_out.linear"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return {"transformer": transformer, "vae": AutoencoderKL(**VAE),
            "text_encoder": CLIPTextModel(clip_config(clip_tokenizer)),
            "text_encoder_2": T5EncoderModel(t5_config(t5_tokenizer))}


def pack(latents):
    """[B, C, H, W] -> [B, H/2 * W/2, 4C], channel order (C, 2, 2)."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h // 2 * (w // 2), 4 * c)


def unpack(tokens, height, width):
    """The inverse of pack; height and width in pixels."""
    b, _, c = tokens.shape
    h, w = height // PATCH, width // PATCH
    return tokens.view(b, h, w, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c // 4, 2 * h, 2 * w)


def image_ids(height, width, device, dtype=torch.float32):
    h, w = height // PATCH, width // PATCH
    ids = torch.zeros(h, w, 3, device=device)
    ids[..., 1] = torch.arange(h, device=device)[:, None]
    ids[..., 2] = torch.arange(w, device=device)[None]
    return ids.view(-1, 3).to(dtype)


def sigmas(steps, tokens):
    """Noise levels of the flow-match Euler scheduler with dynamic shift, a final 0 appended."""
    s = SCHEDULER
    slope = (s["max_shift"] - s["base_shift"]) / (s["max_image_seq_len"] - s["base_image_seq_len"])
    mu = tokens * slope + s["base_shift"] - slope * s["base_image_seq_len"]
    t = torch.linspace(1.0, 1.0 / steps, steps)
    return torch.cat([math.exp(mu) / (math.exp(mu) + (1.0 / t - 1.0)), torch.zeros(1)])


@torch.no_grad()
def encode_text(p, clip_ids, t5_ids):
    pooled = p["text_encoder"](input_ids=clip_ids).pooler_output
    return pooled, p["text_encoder_2"](input_ids=t5_ids).last_hidden_state


def token_ids(prompts, text_length=TEXT_LENGTH, clip_length=77):
    clip_tokenizer, t5_tokenizer = tokenizers()
    keep = dict(padding="max_length", truncation=True, return_tensors="pt")
    return (clip_tokenizer(prompts, max_length=clip_length, **keep).input_ids,
            t5_tokenizer(prompts, max_length=text_length, **keep).input_ids)


@torch.no_grad()
def sample(p, prompts, width=256, height=256, steps=20, cfg=4.0, seed=0, text_length=TEXT_LENGTH, batch=256, noise=None):
    """Images uint8 [N, H, W, 3] for prompts, in the parts' own dtype and device, empty negative prompt."""
    device, dtype = p["transformer"].device, p["transformer"].dtype
    generator = torch.Generator("cpu").manual_seed(seed)
    empty = [x.to(device) for x in token_ids([""], text_length)]
    images = []
    for start in range(0, len(prompts), batch):
        part = prompts[start:start + batch]
        n = len(part)
        pooled, text = encode_text(p, *(x.to(device) for x in token_ids(part, text_length)))
        if cfg > 1:
            no_pooled, no_text = encode_text(p, *empty)
            pooled = torch.cat([pooled, no_pooled.expand(n, -1)])
            text = torch.cat([text, no_text.expand(n, -1, -1)])
        z = torch.randn(n, TRANSFORMER["in_channels"] // 4, height // 8, width // 8, generator=generator)
        z = pack(z).to(device, dtype)
        ids, text_ids = image_ids(height, width, device, dtype), torch.zeros(text_length, 3, device=device, dtype=dtype)
        levels = sigmas(steps, z.shape[1])
        for i in range(steps):
            both = torch.cat([z, z]) if cfg > 1 else z
            t = levels[i].to(device, dtype).expand(both.shape[0])
            v = p["transformer"](hidden_states=both, timestep=t, pooled_projections=pooled, encoder_hidden_states=text,
                                 txt_ids=text_ids, img_ids=ids, return_dict=False)[0]
            if cfg > 1:
                v, v0 = v.chunk(2)
                v = v0 + cfg * (v - v0)
            z = (z.float() + (levels[i + 1] - levels[i]).item() * v.float()).to(dtype)
        config = p["vae"].config
        z = unpack(z, height, width) / config.scaling_factor + config.shift_factor
        x = torch.cat([p["vae"].decode(c, return_dict=False)[0] for c in z.split(64)])
        images.append(((x.float() * 0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu())
    return torch.cat(images).numpy()
