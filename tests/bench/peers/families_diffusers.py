"""The peer of gpu.sh families: diffusers' pipeline of the folder --model, its blocks compiled by
compile_repeated_blocks, with cuDNN attention; in fp8 the linears of its blocks quantized by torchao with a scale per
row. Prints CSV rows (tests/bench/README.md).

    families_diffusers.py SCENARIO --model DIR --steps N [--size SIDE] [--pictures N] [--negative TEXT] [--words N]
                          [--once] --revision TEXT --machine TEXT

SCENARIO: NAME_bf16 | NAME_fp8  a step, and from a prompt to a PNG (level 1) alone and back to back. NAME is the model's in
                                the rows. --size: 1024 if left out. --pictures: inputs of each request. --words: more of both
                                prompts. --once: of one image after one of 3 steps, and nothing back to back.
"""
import argparse
import importlib.metadata
import io
import statistics
import time

import diffusers
import numpy as np
import PIL.Image
import torch
from flux_diffusers import Bench



class FamilyBench(Bench):
    def __init__(self, options):
        self.options = options
        torch.set_grad_enabled(False)
        self.system = "diffusers compile_repeated_blocks"
        pipe = diffusers.DiffusionPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16).to("cuda")
        pipe.set_progress_bar_config(disable=True)
        pipe.transformer.set_attention_backend(options.attention)
        if options.scenario.endswith("_fp8"):
            self.quantize(pipe.transformer)
            self.system = f"diffusers torchao {importlib.metadata.version('torchao')} compile_repeated_blocks"
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        more_words = " star" * options.words
        prompts = (f"picture number {i}" + more_words for i in range(1000))
        more = {} if "z_image" not in options.scenario else {"guidance_scale": 0.0}
        if options.pictures:
            x = np.arange(3 << 20)
            waves = (128 + 100 * np.sin((x % 3072 + x // 3072) / 200)).astype(np.uint8).reshape(1024, 1024, 3)
            pictures = [PIL.Image.fromarray(waves)] * options.pictures
            more["image"] = pictures if "klein" in options.scenario else pictures[0]
        if "kontext" in options.scenario:
            more |= {"max_area": 1024 * 1024, "guidance_scale": 3.5}
        if options.negative is not None:
            more |= {"negative_prompt": options.negative + more_words, "true_cfg_scale": 4.0}
        few, side = options.steps <= 10, options.size
        steps, images = [], 8 if few else 2

        def on_step(pipe, i, t, values):
            torch.cuda.synchronize()
            steps.append(time.perf_counter())
            return values

        def draw(count=options.steps, **callback):
            return pipe(prompt=next(prompts), height=side, width=side, num_inference_steps=count, **more,
                        **callback).images[0]

        def png(**more):
            draw(**more).save(io.BytesIO(), format="PNG", compress_level=1)

        if options.once:
            png(count=3)
            self.row("prompt_to_png_s", self.once(lambda: png(callback_on_step_end=on_step)), "s")
            self.row("step_ms", statistics.median(b - a for a, b in zip(steps, steps[1:])) * 1e3, "ms")
            return
        for _ in range(2 if few else 1):
            png()
        times = []
        for _ in range(3 if few else 1):
            steps.clear()
            draw(callback_on_step_end=on_step)
            times += [b - a for a, b in zip(steps, steps[1:])]
        self.row("step_ms", statistics.median(times) * 1e3, "ms")
        self.row("prompt_to_png_s", self.median(png, 5 if few else 2), "s")
        self.row("back_to_back_s", self.once(lambda: [png() for _ in range(images)]) / images, "s")

    @staticmethod
    def quantize(transformer):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

        blocks = ("layers.", "noise_refiner.", "context_refiner.", "transformer_blocks.")
        quantize_(transformer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False),
                  filter_fn=lambda module, name: isinstance(module, torch.nn.Linear)
                  and any(block in name for block in blocks) and "adaLN" not in name and "_mod." not in name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    for name, value in (("model", None), ("revision", "unknown"), ("machine", "unknown"), ("attention", "_native_cudnn")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pictures", type=int, default=0)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--words", type=int, default=0)
    parser.add_argument("--negative")
    parser.add_argument("--once", action="store_true")
    FamilyBench(parser.parse_args())
