"""The peer of gpu.sh precision: diffusers' FLUX transformer at FLUX.1-dev's size with random weights, its blocks' linears
quantized by torchao to fp8 with a scale per row, compiled by compile_repeated_blocks without Inductor's coordinate
tuning, with cuDNN attention. Prints CSV rows (tests/bench/README.md).

    precision_diffusers.py SCENARIO --revision TEXT --machine TEXT

SCENARIO: fp8 | bf16              first forward with the contents of TORCHINDUCTOR_CACHE_DIR, steps, 28 steps
          trajectory              latents of the trained model --model in fp8 relative to bf16, after each of 20 steps
          whole_fp8 | whole_bf16  from a prompt to a PNG (level 1) with the folder --model: alone and back to back
"""
import importlib.metadata
import io
import json

import diffusers
import torch
from flux_diffusers import STEPS, Bench, parse

IMAGES = 8


def quantize(transformer):
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    quantize_(transformer, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False),
              filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "blocks." in name
              and ".norm" not in name)


class PrecisionBench(Bench):
    def __init__(self, options):
        self.options = options
        kind, _, self.format = options.scenario.rpartition("_")
        if options.scenario == "trajectory":
            kind, self.format = "trajectory", "fp8"
        if not kind:
            super().__init__(options)
        torch.set_grad_enabled(False)
        self.options.scenario = self.format
        self.system = "diffusers compile_repeated_blocks"
        if self.format == "fp8":
            self.system = f"diffusers torchao {importlib.metadata.version('torchao')} compile_repeated_blocks"
        if options.attention != "_native_cudnn":
            self.system += " " + options.attention
        {"": self.transformer, "whole": self.whole, "trajectory": self.trajectory}[kind]()

    def transformer(self):
        if self.format == "fp8":
            quantize(self.model)
        at_1024 = self.inputs(1024, 1024)

        def first():
            self.model.compile_repeated_blocks(fullgraph=True)
            self.model(**at_1024)

        self.row("first_forward_s", self.once(first), "s")

        def step():
            return self.model(**at_1024)[0]

        for _ in range(4):
            step()
        self.row("step_ms", self.median(step, 21) * 1e3, "ms")

        def image():
            x = at_1024["hidden_states"]
            for _ in range(STEPS):
                x = x + 0.01 * self.model(**{**at_1024, "hidden_states": x})[0]

        self.row("image_28_s", self.median(image, 3), "s")

    def whole(self):
        pipe = diffusers.FluxPipeline.from_pretrained(self.options.model, torch_dtype=torch.bfloat16).to("cuda")
        pipe.set_progress_bar_config(disable=True)
        pipe.transformer.set_attention_backend(self.options.attention)
        if self.format == "fp8":
            quantize(pipe.transformer)
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        prompts = (f"picture number {i}" for i in range(1000))

        def draw():
            return pipe(next(prompts), height=1024, width=1024, num_inference_steps=STEPS, guidance_scale=3.5).images[0]

        def png():
            draw().save(io.BytesIO(), format="PNG", compress_level=1)

        for _ in range(2):
            png()
        self.row("prompt_to_png_s", self.median(png, 3), "s")
        self.row("prompt_to_pixels_s", self.median(draw, 3), "s")
        self.row("back_to_back_s", self.once(lambda: [png() for _ in range(IMAGES)]) / IMAGES, "s")

    def trajectory(self):
        with open(self.options.prompts, encoding="utf-8") as file:
            prompts = [json.loads(next(file))["prompt"] for _ in range(16)]
        made = {}
        for quantized in (False, True):
            pipe = diffusers.FluxPipeline.from_pretrained(self.options.model, torch_dtype=torch.bfloat16).to("cuda")
            pipe.set_progress_bar_config(disable=True)
            if quantized:
                quantize(pipe.transformer)
            steps = made[quantized] = []
            for seed, prompt in enumerate(prompts):
                pipe(prompt, height=256, width=256, num_inference_steps=20, max_sequence_length=32, output_type="latent",
                     generator=torch.Generator("cpu").manual_seed(seed),
                     callback_on_step_end=lambda pipe, i, t, values: steps.append(
                         values["latents"].float().flatten().clone()) or values)
        cosine = torch.stack([torch.nn.functional.cosine_similarity(a, b, dim=0)
                              for a, b in zip(made[False], made[True])])
        self.row("trajectory_cosine", cosine.view(len(prompts), -1).mean(0).min().item(), "1")


if __name__ == "__main__":
    PrecisionBench(parse(["fp8", "bf16", "trajectory", "whole_fp8", "whole_bf16"]))
