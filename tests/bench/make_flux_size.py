"""Writes a folder with the sizes of FLUX.1-dev and random weights (34 GB), for gpu.sh precision.

    make_flux_size.py DIR [CLASS]    CLASS of the pipeline: FluxPipeline if left out
"""
import json
import pathlib
import shutil
import sys

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

TOKENIZERS = pathlib.Path(__file__).parents[1] / "fixtures/flux/dev/model"


def randomize(model, scale=0.02):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("gamma"):
            parameter.fill_(1.0 if "norm" in name and not name.endswith("bias") else 0.0)
        else:
            parameter.normal_(0, scale)
    return model


def save(folder, make):
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = randomize(make())
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def main(folder, pipeline="FluxPipeline"):
    torch.set_grad_enabled(False)
    save(folder / "transformer", lambda: FluxTransformer2DModel(guidance_embeds=True))
    save(folder / "text_encoder_2", lambda: T5EncoderModel(T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False)))
    save(folder / "text_encoder", lambda: CLIPTextModel(CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        max_position_embeddings=77, projection_dim=768, eos_token_id=2)))
    save(folder / "vae", lambda: AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[128, 256, 512, 512], layers_per_block=2,
        latent_channels=16, norm_num_groups=32, sample_size=1024, scaling_factor=0.3611, shift_factor=0.1159,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=True))
    FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15,
                                    base_image_seq_len=256, max_image_seq_len=4096).save_pretrained(folder / "scheduler")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(TOKENIZERS / name, folder / name, dirs_exist_ok=True)
    index = {"_class_name": pipeline, "_diffusers_version": "0.42.1",
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
             "text_encoder": ["transformers", "CLIPTextModel"], "text_encoder_2": ["transformers", "T5EncoderModel"],
             "tokenizer": ["transformers", "CLIPTokenizer"], "tokenizer_2": ["transformers", "T5TokenizerFast"],
             "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
