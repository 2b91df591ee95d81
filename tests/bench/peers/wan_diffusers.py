"""diffusers with random weights in Wan 2.2 A14B's size, bf16, 832x480. gpu.sh wan runs it.

    wan_diffusers.py forward   one transformer, blocks compiled regionally: first and steady forwards with 49, 81 and 61
                               frames
    wan_diffusers.py vae       81 frames decoded with the decoder compiled
    wan_diffusers.py ti2v      TI2V-5B's size, 1280x704, 121 frames, a timestep for each token: a forward, and the decoder
                               compiled
"""
import argparse
import datetime
import time

import diffusers
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

parser = argparse.ArgumentParser()
parser.add_argument("scenario")
parser.add_argument("--attention", help="diffusers' attention backend")
parser.add_argument("--revision", default="unknown")
parser.add_argument("--machine", default="unknown")
flags = parser.parse_args()
torch.set_grad_enabled(False)
generator = torch.Generator("cuda").manual_seed(0)


def row(scenario, metric, value, unit):
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    versions = f"torch {torch.__version__} diffusers {diffusers.__version__}"
    system = "diffusers regional" + (f" {flags.attention}" if flags.attention else "")
    print(f"{now},{flags.revision},{flags.machine},{versions},{system},{scenario},{metric},{value:.6g},{unit}",
          flush=True)


def seconds(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median(values):
    return sorted(values)[len(values) // 2]


def transformer(**config):
    with torch.device("meta"):
        model = WanTransformer3DModel(patch_size=(1, 2, 2), attention_head_dim=128, text_dim=4096, freq_dim=256,
                                      **config).to(torch.bfloat16)
    rope = type(model.rope)(model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len)
    model = model.to_empty(device="cuda").eval()
    model.rope = rope.to("cuda")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            parameter.normal_(0, 0.02, generator=generator)
        if any(key in name for key in model._keep_in_fp32_modules):
            parameter.data = parameter.data.float()
    if flags.attention:
        model.set_attention_backend(flags.attention)
    model.compile_repeated_blocks(fullgraph=True)
    return model


def forward():
    model = transformer(num_attention_heads=40, in_channels=16, out_channels=16, ffn_dim=13824, num_layers=40)
    for frames in (49, 81, 61):
        inputs = dict(hidden_states=torch.randn(1, 16, (frames - 1) // 4 + 1, 60, 104, generator=generator,
                                                device="cuda", dtype=torch.bfloat16),
                      timestep=torch.tensor([500], device="cuda"),
                      encoder_hidden_states=torch.randn(1, 512, 4096, generator=generator, device="cuda",
                                                        dtype=torch.bfloat16), return_dict=False)
        first = seconds(lambda: model(**inputs))
        model(**inputs)
        steady = median([seconds(lambda: model(**inputs)) for _ in range(3)])
        if frames != 61:
            row("forward", f"{frames}_s", steady, "s")
        if frames == 49:
            row("cold", "extra_s", first - steady, "s")
        if frames == 61:
            row("warm", "new_frames_extra_s", first - steady, "s")
    row("forward", "peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")


def decoding(latents, **config):
    """Seconds of a decode, and how much longer the first one takes."""
    model = AutoencoderKLWan(**config).to("cuda", torch.bfloat16).eval()
    model.decoder = torch.compile(model.decoder)
    latents = torch.randn(1, *latents, generator=generator, device="cuda", dtype=torch.bfloat16)
    first = seconds(lambda: model.decode(latents))
    steady = median([seconds(lambda: model.decode(latents)) for _ in range(3)])
    return steady, first - steady


def vae():
    steady, extra = decoding((16, 21, 60, 104))
    row("vae", "decode_81_s", steady, "s")
    row("vae", "first_extra_s", extra, "s")


def ti2v():
    model = transformer(num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30)
    inputs = dict(hidden_states=torch.randn(1, 48, 31, 44, 80, generator=generator, device="cuda", dtype=torch.bfloat16),
                  timestep=torch.full((1, 31 * 22 * 40), 500.0, device="cuda"),
                  encoder_hidden_states=torch.randn(1, 512, 4096, generator=generator, device="cuda",
                                                    dtype=torch.bfloat16), return_dict=False)
    for _ in range(2):
        model(**inputs)
    row("ti2v", "step_121_s", median([seconds(lambda: model(**inputs)) for _ in range(3)]), "s")
    del model
    steady, _ = decoding((48, 31, 44, 80), base_dim=160, decoder_base_dim=256, z_dim=48, in_channels=12, out_channels=12,
                         is_residual=True, patch_size=2, scale_factor_spatial=16, scale_factor_temporal=4,
                         latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
    row("ti2v", "decode_121_s", steady, "s")


{"forward": forward, "vae": vae, "ti2v": ti2v}[flags.scenario]()
