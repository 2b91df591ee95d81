"""The peer of regions_gpu_bench vae: diffusers' AutoencoderKL decoder at FLUX.1's size with random weights in bf16,
eager and with torch.compile in channels-last layout. Prints CSV rows (tests/bench/README.md).

    vae_diffusers.py --revision TEXT --machine TEXT
"""
import argparse
import datetime
import statistics
import time
import warnings

import diffusers
import torch


def median_ms(what, rounds=21):
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        what()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--revision", default="unknown")
    parser.add_argument("--machine", default="unknown")
    options = parser.parse_args()

    def row(system, metric, value):
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        versions = f"torch {torch.__version__.split('+')[0]} diffusers {diffusers.__version__}"
        print(f"{now},{options.revision},{options.machine},{versions},{system},vae,{metric},{value:.6g},ms", flush=True)

    warnings.filterwarnings("ignore")  # the compiler's, about diffusers
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        up_block_types=["UpDecoderBlock2D"] * 4, down_block_types=["DownEncoderBlock2D"] * 4, block_out_channels=[128, 256, 512, 512],
        layers_per_block=2, latent_channels=16, norm_num_groups=32, use_quant_conv=False, use_post_quant_conv=False)
    vae = vae.to("cuda", torch.bfloat16).eval()
    for system in ("diffusers", "diffusers torch.compile channels_last"):
        decode = vae.decode
        if "compile" in system:
            vae = vae.to(memory_format=torch.channels_last)
            decode = torch.compile(vae.decode)
        for side in (1024, 512):
            latents = torch.randn(1, 16, side // 8, side // 8, device="cuda", dtype=torch.bfloat16)
            first = median_ms(lambda: decode(latents), 1)
            for _ in range(3):
                decode(latents)
            row(system, f"decode_{side}_first_ms", first)
            row(system, f"decode_{side}_ms", median_ms(lambda: decode(latents)))


if __name__ == "__main__":
    main()
