"""The peer of gpu.sh families: diffusers' pipeline of the folder --model, its blocks compiled by
compile_repeated_blocks, with cuDNN attention; in fp8 the linears of its blocks quantized by torchao with a scale per
row. Prints CSV rows (tests/bench/README.md).

    families_diffusers.py SCENARIO --model DIR --steps N --revision TEXT --machine TEXT

SCENARIO: NAME_bf16 | NAME_fp8  a step, and from a prompt to a PNG (level 1) alone and back to back, at 1024×1024. NAME
                                is the model's in the rows.
"""
import argparse
import importlib.metadata
import io
import statistics
import time

import diffusers
import torch
from flux_diffusers import Bench

IMAGES = 8


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
        prompts = (f"picture number {i}" for i in range(1000))
        guidance = {} if "klein" in options.scenario else {"guidance_scale": 0.0}
        steps = []

        def on_step(pipe, i, t, values):
            torch.cuda.synchronize()
            steps.append(time.perf_counter())
            return values

        def draw(**more):
            return pipe(prompt=next(prompts), height=1024, width=1024, num_inference_steps=options.steps, **guidance,
                        **more).images[0]

        def png():
            draw().save(io.BytesIO(), format="PNG", compress_level=1)

        for _ in range(2):
            png()
        times = []
        for _ in range(3):
            steps.clear()
            draw(callback_on_step_end=on_step)
            times += [b - a for a, b in zip(steps, steps[1:])]
        self.row("step_ms", statistics.median(times) * 1e3, "ms")
        self.row("prompt_to_png_s", self.median(png, 5), "s")
        self.row("back_to_back_s", self.once(lambda: [png() for _ in range(IMAGES)]) / IMAGES, "s")

    @staticmethod
    def quantize(transformer):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

        blocks = ("layers.", "noise_refiner.", "context_refiner.", "transformer_blocks.")
        quantize_(transformer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False),
                  filter_fn=lambda module, name: isinstance(module, torch.nn.Linear)
                  and any(block in name for block in blocks) and "adaLN" not in name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    for name, value in (("model", None), ("revision", "unknown"), ("machine", "unknown"), ("attention", "_native_cudnn")):
        parser.add_argument(f"--{name}", default=value)
    parser.add_argument("--steps", type=int)
    FamilyBench(parser.parse_args())
