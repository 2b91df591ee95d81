"""Writes folders with the published sizes of Z-Image-Turbo and FLUX.2-klein-4B and random weights (29 GB), for gpu.sh
families. Both share the text encoder.

    make_family_size.py DIR     writes DIR/z_image, DIR/klein and DIR/klein_kv
"""
import json
import os
import pathlib
import shutil
import sys

import torch
from diffusers import (AutoencoderKL, AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel,
                       ZImageTransformer2DModel)
from make_flux_size import save
from transformers import Qwen3Config, Qwen3ForCausalLM

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


def write(folder, pipeline, transformer, vae, scheduler, tokenizer, text, **index):
    save(folder / "transformer", transformer)
    save(folder / "vae", vae)
    scheduler.save_pretrained(folder / "scheduler")
    shutil.copytree(tokenizer, folder / "tokenizer", dirs_exist_ok=True)
    if text is not None:
        os.symlink(text.resolve(), folder / "text_encoder")
    index |= {"_class_name": pipeline, "_diffusers_version": "0.42.1",
              "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
              "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2Tokenizer"],
              "transformer": ["diffusers", TRANSFORMERS[pipeline]], "vae": ["diffusers", VAES[pipeline]]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


TRANSFORMERS = {"ZImagePipeline": "ZImageTransformer2DModel", "Flux2KleinPipeline": "Flux2Transformer2DModel"}
VAES = {"ZImagePipeline": "AutoencoderKL", "Flux2KleinPipeline": "AutoencoderKLFlux2"}


def main(folder):
    torch.set_grad_enabled(False)
    z_image, klein = folder / "z_image", folder / "klein"
    save(z_image / "text_encoder", lambda: Qwen3ForCausalLM(Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rope_theta=1000000, tie_word_embeddings=True)))
    write(z_image, "ZImagePipeline",
          lambda: ZImageTransformer2DModel(axes_lens=[1536, 512, 512]),
          lambda: AutoencoderKL(
              in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
              up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[128, 256, 512, 512], layers_per_block=2,
              latent_channels=16, norm_num_groups=32, sample_size=1024, scaling_factor=0.3611, shift_factor=0.1159,
              use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=True),
          FlowMatchEulerDiscreteScheduler(shift=3.0), FIXTURES / "z_image/turbo/model/tokenizer", None)
    write(klein, "Flux2KleinPipeline",
          lambda: Flux2Transformer2DModel(num_layers=5, num_single_layers=20, num_attention_heads=24,
                                          joint_attention_dim=7680, guidance_embeds=False),
          AutoencoderKLFlux2,
          FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0), FIXTURES / "flux2/klein/model/tokenizer",
          z_image / "text_encoder", is_distilled=True)
    # The same weights as a model that computes keys and values of references once.
    cached = folder / "klein_kv"
    cached.mkdir()
    for part in klein.iterdir():
        if part.is_dir():
            os.symlink(part.resolve(), cached / part.name)
    index = (klein / "model_index.json").read_text()
    (cached / "model_index.json").write_text(index.replace("Flux2KleinPipeline", "Flux2KleinKVPipeline"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
