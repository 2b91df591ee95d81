"""Writes folders with the published sizes of models and random weights, for gpu.sh families.

    make_family_size.py DIR small   DIR/z_image, DIR/klein and DIR/klein_kv, of Z-Image-Turbo and FLUX.2-klein-4B (29 GB);
                                    they share the text encoder
    make_family_size.py DIR qwen    DIR/qwen_image and DIR/qwen_edit, of Qwen-Image and Qwen-Image-Edit (58 GB), which
                                    have the same weights
"""
import json
import os
import pathlib
import shutil
import sys

import torch
from diffusers import (AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler,
                       Flux2Transformer2DModel, QwenImageTransformer2DModel, ZImageTransformer2DModel)
from make_flux_size import save
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

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


def small(folder):
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


def adapter(rank=64, blocks=60, width=3072):
    """Of the linears of Qwen-Image's blocks that Lightning changes, with values small enough to leave the image finite."""
    sizes = {f"attn.{to}": (width, width) for to in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj",
                                                     "add_v_proj", "to_add_out")}
    for mlp in ("img_mlp", "txt_mlp"):
        sizes |= {f"{mlp}.net.0.proj": (width, 4 * width), f"{mlp}.net.2": (4 * width, width)}
    tensors = {}
    for block in range(blocks):
        for name, (inputs, outputs) in sizes.items():
            at = f"transformer.transformer_blocks.{block}.{name}.lora_"
            tensors[at + "A.weight"] = 0.01 * torch.randn(rank, inputs, dtype=torch.bfloat16)
            tensors[at + "B.weight"] = 0.01 * torch.randn(outputs, rank, dtype=torch.bfloat16)
    return tensors


def qwen(folder):
    image, edit, fixture = folder / "qwen_image", folder / "qwen_edit", FIXTURES / "qwen_image/image/model"
    # Ids of the fixture's tokenizer; all other values are those of Qwen2.5-VL-7B.
    ids = json.loads((fixture / "text_encoder/config.json").read_text())
    config = Qwen2_5_VLConfig(
        text_config=dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                         num_attention_heads=28, num_key_value_heads=4, rms_norm_eps=1e-6,
                         rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])),
        vision_config=dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584,
                           window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
        **{key: ids[key] for key in ids if key.endswith("_token_id")})
    save(image / "text_encoder", lambda: Qwen2_5_VLForConditionalGeneration(config))
    save(image / "transformer", QwenImageTransformer2DModel)
    save(image / "vae", lambda: AutoencoderKLQwenImage(latents_mean=[0.0] * 16, latents_std=[1.0] * 16))
    FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift=1.0, base_shift=0.5, max_shift=0.9, base_image_seq_len=256,
        max_image_seq_len=8192, shift_terminal=0.02, time_shift_type="exponential").save_pretrained(image / "scheduler")
    for part in ("tokenizer", "processor"):
        shutil.copytree(fixture / part, image / part)
    processor = json.loads((image / "processor/preprocessor_config.json").read_text())
    processor["size"]["longest_edge"] = 12845056
    (image / "processor/preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    save_file(adapter(), image / "adapter.safetensors")
    edit.mkdir()
    for part in image.iterdir():
        os.symlink(part.resolve(), edit / part.name)
    for at, name in ((image, "image"), (edit, "edit")):
        shutil.copy(FIXTURES / f"qwen_image/{name}/model/model_index.json", at)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    {"small": small, "qwen": qwen}[sys.argv[2]](pathlib.Path(sys.argv[1]))
