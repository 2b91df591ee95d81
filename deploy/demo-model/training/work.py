"""What every stage of the training shares: the image sizes, the seed, the work folder, the clock and the rates."""
import os
import random
import time

import torch

SIZES = [(256, 256), (320, 192), (192, 320)]  # width, height in pixels
SEED = 20261121


def save(a, name, value):
    torch.save(value, os.path.join(a.work, name + ".part"))
    os.replace(os.path.join(a.work, name + ".part"), os.path.join(a.work, name))


def load(a, name):
    return torch.load(os.path.join(a.work, name), map_location="cpu", weights_only=True)


def say(*words):
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def rate(progress, hold, warm=0.02):
    """Share of the peak rate: short warm-up, held, then linear to zero."""
    return min(1.0, progress / warm, max(0.0, (1.0 - progress) / (1.0 - hold)))


def autocast(a):
    return torch.autocast(a.device, dtype=torch.bfloat16, enabled=a.device == "cuda")


def set_up(a):
    torch.manual_seed(SEED)
    random.seed(SEED)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward fails with heads of 32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = True  # a block that does not compile runs as it is
    if a.device == "cpu":
        torch.set_num_threads(a.threads)


def synchronized(a):
    if a.device == "cuda":
        torch.cuda.synchronize()
    return time.time()
