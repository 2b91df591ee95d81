"""Writes folders with the sizes of Wan 2.2 and random weights, for gpu.sh wan.

    make_wan_size.py DIR         writes DIR/two, of A14B, and DIR/one with one transformer (41 GB)
    make_wan_size.py DIR ti2v    writes DIR/ti2v, of TI2V-5B (23 GB)

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


def write(folder, transformer, vae, flow_shift, index):
    save(folder / "transformer", transformer)
    save(folder / "text_encoder", lambda: UMT5EncoderModel(UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False)))
    save(folder / "vae", vae)
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True,
                            flow_shift=flow_shift).save_pretrained(folder / "scheduler")
    shutil.copytree(TOKENIZER, folder / "tokenizer", dirs_exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(INDEX | index, indent=2))


INDEX = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1",
         "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
         "tokenizer": ["transformers", "T5TokenizerFast"], "transformer": ["diffusers", "WanTransformer3DModel"],
         "vae": ["diffusers", "AutoencoderKLWan"]}


def ti2v(folder):
    write(folder / "ti2v",
          lambda: WanTransformer3DModel(
              patch_size=(1, 2, 2), num_attention_heads=24, attention_head_dim=128, in_channels=48, out_channels=48,
              text_dim=4096, freq_dim=256, ffn_dim=14336, num_layers=30),
          lambda: AutoencoderKLWan(
              base_dim=160, decoder_base_dim=256, z_dim=48, in_channels=12, out_channels=12, is_residual=True,
              patch_size=2, scale_factor_spatial=16, scale_factor_temporal=4, latents_mean=[0.0] * 48,
              latents_std=[1.0] * 48),
          flow_shift=5.0, index={"expand_timesteps": True})


def a14b(folder):
    two, one = folder / "two", folder / "one"
    write(two,
          lambda: WanTransformer3DModel(
              patch_size=(1, 2, 2), num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16,
              text_dim=4096, freq_dim=256, ffn_dim=13824, num_layers=40),
          AutoencoderKLWan, flow_shift=3.0,
          index={"boundary_ratio": 0.875, "transformer_2": ["diffusers", "WanTransformer3DModel"]})
    one.mkdir(exist_ok=True)
    for part in ("transformer", "text_encoder", "vae", "scheduler", "tokenizer"):
        os.symlink(two / part, one / part)
    os.symlink(two / "transformer", two / "transformer_2")
    (two / "adapters").mkdir(exist_ok=True)
    for name in ("high", "low"):
        save_file(adapter(rank=64), two / "adapters" / f"{name}.safetensors")
    (one / "model_index.json").write_text(json.dumps(INDEX, indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    (ti2v if sys.argv[2:] == ["ti2v"] else a14b)(pathlib.Path(sys.argv[1]))
