"""The peer of gpu.sh regions: diffusers' FLUX transformer at FLUX.1-dev's size with random weights, compiled by
compile_repeated_blocks, with cuDNN attention. Prints CSV rows (tests/bench/README.md).

    flux_diffusers.py SCENARIO --revision TEXT --machine TEXT

SCENARIO: cold (first forward with the contents of TORCHINDUCTOR_CACHE_DIR, then steps, new sizes, a new batch size,
          memory), shared_cache (first forward only)
"""
import argparse
import datetime
import statistics
import time

import diffusers
import torch

TEXT, STEPS = 512, 28


class Bench:
    def __init__(self, options):
        self.options = options
        self.system = "diffusers compile_repeated_blocks"
        torch.set_grad_enabled(False)
        with torch.device("meta"):
            model = diffusers.FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
        self.model = model.to_empty(device="cuda").eval()
        generator = torch.Generator(device="cuda").manual_seed(0)
        for name, parameter in self.model.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02, generator=generator)
        self.model.set_attention_backend(options.attention)
        torch.cuda.synchronize()

    def row(self, metric, value, unit, scenario=None):
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        versions = f"torch {torch.__version__.split('+')[0]} diffusers {diffusers.__version__}"
        print(f"{now},{self.options.revision},{self.options.machine},{versions},{self.system},"
              f"{scenario or self.options.scenario},{metric},{value:.6g},{unit}", flush=True)

    def inputs(self, height, width, batch=1):
        rows, columns = height // 16, width // 16
        like = {"device": "cuda", "dtype": torch.bfloat16}
        ids = torch.zeros(rows, columns, 3, **like)
        ids[..., 1] += torch.arange(rows, device="cuda")[:, None]
        ids[..., 2] += torch.arange(columns, device="cuda")[None]
        return {
            "hidden_states": torch.randn(batch, rows * columns, 64, **like),
            "encoder_hidden_states": torch.randn(batch, TEXT, 4096, **like),
            "pooled_projections": torch.randn(batch, 768, **like),
            "timestep": torch.full((batch,), 0.5, **like),
            "guidance": torch.full((batch,), 3.5, device="cuda", dtype=torch.float32),
            "img_ids": ids.reshape(rows * columns, 3),
            "txt_ids": torch.zeros(TEXT, 3, **like),
            "return_dict": False,
        }

    def once(self, what):
        torch.cuda.synchronize()
        start = time.perf_counter()
        what()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def median(self, what, rounds):
        return statistics.median(self.once(what) for _ in range(rounds))

    def first_forward(self):
        at_1024 = self.inputs(1024, 1024)

        def first():
            self.model.compile_repeated_blocks(fullgraph=True)
            self.model(**at_1024)

        self.row("first_forward_s", self.once(first), "s")
        return at_1024

    def steps(self, at_1024):
        def step():
            return self.model(**at_1024)[0]

        for _ in range(4):
            step()
        self.row("step_1024_ms", self.median(step, 21) * 1e3, "ms", "warm")

        def image():
            x = at_1024["hidden_states"]
            for _ in range(STEPS):
                x = x + 0.01 * self.model(**{**at_1024, "hidden_states": x})[0]

        self.row("image_1024_28_s", self.median(image, 3), "s", "warm")
        free, total = torch.cuda.mem_get_info()
        self.row("default_peak_gb", (total - free) / 1e9, "GB", "memory")

    def new_sizes(self):
        worst = 0
        for height, width in ((768, 1360), (1360, 768), (512, 512), (832, 1216), (1216, 832), (640, 1536)):
            inputs = self.inputs(height, width)
            first = self.once(lambda: self.model(**inputs))
            steady = self.median(lambda: self.model(**inputs), 9)
            worst = max(worst, first - steady)
            self.row(f"first_{height}x{width}_ms", first * 1e3, "ms", "warm")
            if height == 512:
                self.row("step_512_ms", steady * 1e3, "ms", "warm")
        self.row("new_resolution_extra_s", worst, "s", "warm")
        inputs = self.inputs(1024, 1024, 2)
        first = self.once(lambda: self.model(**inputs))
        steady = self.median(lambda: self.model(**inputs), 7)
        self.row("new_batch_extra_s", first - steady, "s", "warm")
        self.row("step_1024_batch_2_ms", steady * 1e3, "ms", "warm")


def parse(scenarios):
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", choices=scenarios)
    parser.add_argument("--model", help="a model folder, for scenarios of whole images")
    parser.add_argument("--prompts", help="a file of prompts, for scenarios of trained models")
    parser.add_argument("--attention", default="_native_cudnn", help="diffusers' attention backend")
    parser.add_argument("--revision", default="unknown")
    parser.add_argument("--machine", default="unknown")
    return parser.parse_args()


def main():
    bench = Bench(parse(["cold", "shared_cache"]))
    at_1024 = bench.first_forward()
    if bench.options.scenario == "cold":
        bench.steps(at_1024)
        bench.new_sizes()


if __name__ == "__main__":
    main()
