"""Known models: single files without a folder. The files are sparse: only their headers are read."""
import json
import math
import os
import struct
import subprocess
import tempfile
import unittest

from fleet import DITFLEET, cli

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

BF16 = 2


def linear(name, out, columns):
    return {f"{name}.weight": [out, columns], f"{name}.bias": [out]}


def transformer(guidance):
    """FLUX.1 in the names of Black Forest Labs."""
    tensors = linear("img_in", 3072, 64) | linear("txt_in", 3072, 4096) | linear("final_layer.linear", 64, 3072)
    tensors |= linear("final_layer.adaLN_modulation.1", 6144, 3072)
    for name, columns in (("time_in", 256), ("vector_in", 768)) + ((("guidance_in", 256),) if guidance else ()):
        tensors |= linear(f"{name}.in_layer", 3072, columns) | linear(f"{name}.out_layer", 3072, 3072)

    def norms(at):
        return {f"{at}.query_norm.scale": [128], f"{at}.key_norm.scale": [128]}
    for i in range(19):
        for side in ("img", "txt"):
            at = f"double_blocks.{i}.{side}_"
            tensors |= linear(at + "mod.lin", 18432, 3072) | linear(at + "attn.qkv", 9216, 3072) | linear(at + "attn.proj", 3072, 3072)
            tensors |= linear(at + "mlp.0", 12288, 3072) | linear(at + "mlp.2", 3072, 12288) | norms(at + "attn.norm")
    for i in range(38):
        at = f"single_blocks.{i}."
        tensors |= linear(at + "linear1", 21504, 3072) | linear(at + "linear2", 3072, 15360) | linear(at + "modulation.lin", 9216, 3072) | norms(at + "norm")
    return tensors


def clip():
    tensors = {"text_model.embeddings.token_embedding.weight": [49408, 768], "text_model.embeddings.position_embedding.weight": [77, 768]}

    def norm(name):
        return {f"text_model.{name}.weight": [768], f"text_model.{name}.bias": [768]}
    for i in range(12):
        at = f"encoder.layers.{i}."
        for name in "qkv":
            tensors |= linear(f"text_model.{at}self_attn.{name}_proj", 768, 768)
        tensors |= linear(f"text_model.{at}self_attn.out_proj", 768, 768) | linear(f"text_model.{at}mlp.fc1", 3072, 768) | linear(f"text_model.{at}mlp.fc2", 768, 3072)
        tensors |= norm(at + "layer_norm1") | norm(at + "layer_norm2")
    return tensors | norm("final_layer_norm")


def t5():
    tensors = {"shared.weight": [32128, 4096], "encoder.final_layer_norm.weight": [4096], "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": [32, 64]}
    for i in range(24):
        at = f"encoder.block.{i}.layer."
        tensors |= {f"{at}0.SelfAttention.{name}.weight": [4096, 4096] for name in "qkvo"} | {f"{at}{j}.layer_norm.weight": [4096] for j in (0, 1)}
        tensors |= {f"{at}1.DenseReluDense.{name}.weight": [10240, 4096] for name in ("wi_0", "wi_1")} | {f"{at}1.DenseReluDense.wo.weight": [4096, 10240]}
    return tensors


def wan(width, inner, blocks, inputs):
    """Wan's transformer in its own names."""
    tensors = {"patch_embedding.weight": [width, inputs, 1, 2, 2], "patch_embedding.bias": [width], "head.modulation": [1, 2, width]}
    tensors |= linear("text_embedding.0", width, 4096) | linear("text_embedding.2", width, width) | linear("time_embedding.0", width, 256)
    tensors |= linear("time_embedding.2", width, width) | linear("time_projection.1", 6 * width, width) | linear("head.head", 192 if inputs == 48 else 64, width)
    for i in range(blocks):
        at = f"blocks.{i}."
        tensors |= linear(at + "ffn.0", inner, width) | linear(at + "ffn.2", width, inner)
        tensors |= {at + "modulation": [1, 6, width], at + "norm3.weight": [width], at + "norm3.bias": [width]}
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                tensors |= linear(f"{at}{attention}.{name}", width, width)
            tensors |= {f"{at}{attention}.norm_{name}.weight": [width] for name in "qk"}
    return tensors


def with_clip(tensors, both=False):
    """Wan 2.1 image to video; both: first and last frame."""
    width, blocks = tensors["patch_embedding.bias"][0], sum(name.endswith("ffn.0.bias") for name in tensors)
    more = linear("img_emb.proj.1", 1280, 1280) | linear("img_emb.proj.3", width, 1280)
    for number, size in ((0, 1280), (4, width)):
        more |= {f"img_emb.proj.{number}.{part}": [size] for part in ("weight", "bias")}
    for i in range(blocks):
        at = f"blocks.{i}.cross_attn."
        more |= linear(at + "k_img", width, width) | linear(at + "v_img", width, width) | {at + "norm_k_img.weight": [width]}
    return tensors | more | ({"img_emb.emb_pos": [1, 514, 1280]} if both else {})


def clip_vision():
    tensors = {"vision_model.embeddings.class_embedding": [1280], "vision_model.embeddings.patch_embedding.weight": [1280, 3, 14, 14],
               "vision_model.embeddings.position_embedding.weight": [257, 1280]}

    def norm(name):
        return {f"vision_model.{name}.{part}": [1280] for part in ("weight", "bias")}
    for i in range(32):
        at = f"encoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            tensors |= linear(f"vision_model.{at}self_attn.{name}_proj", 1280, 1280)
        tensors |= linear(f"vision_model.{at}mlp.fc1", 5120, 1280) | linear(f"vision_model.{at}mlp.fc2", 1280, 5120)
        tensors |= norm(at + "layer_norm1") | norm(at + "layer_norm2")
    return tensors | norm("pre_layrnorm") | norm("post_layernorm")


def umt5():
    tensors = {"shared.weight": [256384, 4096], "encoder.final_layer_norm.weight": [4096]}
    for i in range(24):
        at = f"encoder.block.{i}.layer."
        tensors |= {f"{at}0.SelfAttention.{name}.weight": [4096, 4096] for name in "qkvo"} | {f"{at}{j}.layer_norm.weight": [4096] for j in (0, 1)}
        tensors |= {f"{at}1.DenseReluDense.{name}.weight": [10240, 4096] for name in ("wi_0", "wi_1")} | {f"{at}1.DenseReluDense.wo.weight": [4096, 10240]}
        tensors[f"{at}0.SelfAttention.relative_attention_bias.weight"] = [32, 64]
    return tensors


def vae():
    """The decoder, in the names of Black Forest Labs."""
    tensors = {}

    def conv(name, out, channels, side=3):
        tensors.update({f"decoder.{name}.weight": [out, channels, side, side], f"decoder.{name}.bias": [out]})

    def norm(name, channels):
        tensors.update({f"decoder.{name}.weight": [channels], f"decoder.{name}.bias": [channels]})

    def block(name, out, channels):
        norm(f"{name}.norm1", channels), conv(f"{name}.conv1", out, channels), norm(f"{name}.norm2", out), conv(f"{name}.conv2", out, out)
        if out != channels:
            conv(f"{name}.nin_shortcut", out, channels, 1)
    conv("conv_in", 512, 16), block("mid.block_1", 512, 512), block("mid.block_2", 512, 512), norm("mid.attn_1.norm", 512)
    for name in ("q", "k", "v", "proj_out"):
        conv(f"mid.attn_1.{name}", 512, 512, 1)
    channels = 512
    for level, out in ((3, 512), (2, 512), (1, 256), (0, 128)):
        for j in range(3):
            block(f"up.{level}.block.{j}", out, channels)
            channels = out
        if level:
            conv(f"up.{level}.upsample.conv", out, out)
    norm("norm_out", 128), conv("conv_out", 3, 128)
    return tensors


def write(path, tensors):
    header, end = {}, 0
    for name, shape in tensors.items():
        begin = end
        end += BF16 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
    return path


class KnownModels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="ditfleet-known-")
        cls.files = {name: write(os.path.join(cls.folder.name, name + ".safetensors"), tensors) for name, tensors in
                     (("dev", transformer(True)), ("schnell", transformer(False)), ("clip_l", clip()), ("t5xxl", t5()), ("ae", vae()), ("umt5", umt5()),
                      ("small", wan(1536, 8960, 30, 16)), ("t2v", wan(5120, 13824, 40, 16)), ("t2v_low_noise", wan(5120, 13824, 40, 16)),
                      ("t2v_high_noise", wan(5120, 13824, 40, 16)), ("i2v_high_noise", wan(5120, 13824, 40, 36)), ("i2v_low_noise", wan(5120, 13824, 40, 36)),
                      ("ti2v", wan(3072, 14336, 30, 48)), ("clip_vision", clip_vision()), ("i2v_clip", with_clip(wan(5120, 13824, 40, 36))),
                      ("flf2v", with_clip(wan(5120, 13824, 40, 36), both=True)))}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def add(self, *names):
        config = os.path.join(self.folder.name, "config.yaml")
        if os.path.exists(config):
            os.remove(config)
        return cli("models", "add", "m", *(self.files[name] for name in names), "--config", config, "--json"), config

    def test_files_alone_make_an_entry(self):
        for name, known in (("dev", "known:FLUX.1-dev"), ("schnell", "known:FLUX.1-schnell")):
            with self.subTest(name):
                added, config = self.add(name, "clip_l", "t5xxl", "ae")
                self.assertEqual(added.returncode, 0, added.stderr)
                told = json.loads(added.stdout)
                self.assertEqual(told["entry"], {"path": known, "transformer": self.files[name], "text_encoder": self.files["clip_l"],
                                                 "text_encoder_2": self.files["t5xxl"], "vae": self.files["ae"]})
                self.assertEqual(cli("config", "check", "--config", config).returncode, 0)

    def test_wan_is_known_by_its_transformers(self):
        """The VAE is missing, so that the message names the folder that was chosen."""
        for names, known in ((("small",), "Wan2.1-T2V-1.3B"), (("t2v",), "Wan2.1-T2V-14B"), (("t2v_high_noise", "t2v_low_noise"), "Wan2.2-T2V-A14B"),
                             (("i2v_high_noise", "i2v_low_noise"), "Wan2.2-I2V-A14B"), (("ti2v",), "Wan2.2-TI2V-5B"),
                             (("i2v_clip", "clip_vision"), "Wan2.1-I2V-14B-480P"), (("flf2v", "clip_vision"), "Wan2.1-FLF2V-14B-720P")):
            with self.subTest(known):
                added, _ = self.add(*names, "umt5")
                self.assertIn(f"{known}/vae", added.stderr)

    def test_a_model_that_needs_an_image_is_planned_without(self):
        config = os.path.join(self.folder.name, "image.yaml")
        added = cli("models", "add", "i2v", os.path.join(SOURCE, "tests/fixtures/wan/i2v/model"), "--config", config)
        self.assertEqual(added.returncode, 0, added.stderr)

    def test_a_part_that_is_missing_is_named(self):
        added, config = self.add("dev", "clip_l", "ae")
        self.assertEqual((added.returncode != 0, os.path.exists(config)), (True, False))
        self.assertIn("text_encoder_2", added.stderr)
        added, _ = self.add("clip_l", "t5xxl", "ae")
        self.assertIn("a model folder is missing", added.stderr)

    def test_prompts_have_the_ids_of_transformers(self):
        worker = os.path.join(os.path.dirname(DITFLEET), "ditfleet-worker")
        prompts = "\n".join(map(json.dumps, ("a photo of a cat", "translate English to German: The house is wonderful.")))
        for known in ("FLUX.1-dev", "FLUX.1-schnell"):
            done = subprocess.run([worker, "tokenize", "--model", f"known:{known}"], input=prompts, text=True, capture_output=True, check=True)
            cat, house = (json.loads(line) for line in done.stdout.splitlines())
            self.assertEqual(cat, {"clip": [49406, 320, 1125, 539, 320, 2368, 49407], "t5": [3, 9, 1202, 13, 3, 9, 1712, 1]})
            self.assertEqual(house["t5"], [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1])
        done = subprocess.run([worker, "tokenize", "--model", "known:FLUX"], input=prompts, text=True, capture_output=True)
        self.assertIn("there are FLUX.1-dev, FLUX.1-schnell", done.stderr)


if __name__ == "__main__":
    unittest.main()
