"""Writes folders with the sizes of Wan 2.2 A14B and random weights (41 GB), for gpu.sh wan.

    make_wan_size.py DIR     writes DIR/two, and DIR/one with one transformer

Both transformers have the same files, to which the second one's are links: what is measured does not depend on values.
"""
import json
import os
import pathlib
import shutil
import sys

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from make_flux_size import save
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

TOKENIZER = pathlib.Path(__file__).parents[1] / "fixtures/wan/two/model/tokenizer"


def adapter(rank):
    """Of all linears in the blocks, with random values small enough to leave the video finite."""
    width, inner = 5120, 13824
    sizes = {f"{attn}.{to}": (width, width) for attn in ("attn1", "attn2") for to in ("to_q", "to_k", "to_v", "to_out.0")}
    sizes |= {"ffn.net.0.proj": (width, inner), "ffn.net.2": (inner, width)}
    tensors = {}
    for block in range(40):
        for name, (inputs, outputs) in sizes.items():
            at = f"transformer.blocks.{block}.{name}.lora_"
            tensors[at + "A.weight"] = 0.01 * torch.randn(rank, inputs, dtype=torch.bfloat16)
            tensors[at + "B.weight"] = 0.01 * torch.randn(outputs, rank, dtype=torch.bfloat16)
    return tensors


def main(folder):
    torch.set_grad_enabled(False)
    two, one = folder / "two", folder / "one"
    save(two / "transformer", lambda: WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16,
        text_dim=4096, freq_dim=256, ffn_dim=13824, num_layers=40))
    save(two / "text_encoder", lambda: UMT5EncoderModel(UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False)))
    save(two / "vae", AutoencoderKLWan)
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0).save_pretrained(
        two / "scheduler")
    shutil.copytree(TOKENIZER, two / "tokenizer", dirs_exist_ok=True)
    one.mkdir(exist_ok=True)
    for part in ("transformer", "text_encoder", "vae", "scheduler", "tokenizer"):
        os.symlink(two / part, one / part)
    os.symlink(two / "transformer", two / "transformer_2")
    (two / "adapters").mkdir(exist_ok=True)
    for name in ("high", "low"):
        save_file(adapter(rank=64), two / "adapters" / f"{name}.safetensors")
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1",
             "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
             "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", "WanTransformer3DModel"],
             "vae": ["diffusers", "AutoencoderKLWan"]}
    (one / "model_index.json").write_text(json.dumps(index, indent=2))
    index |= {"boundary_ratio": 0.875, "transformer_2": ["diffusers", "WanTransformer3DModel"]}
    (two / "model_index.json").write_text(json.dumps(index, indent=2))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
