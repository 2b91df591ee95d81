"""A model folder of the family that only tests have (tests/test_family)."""
import json
import struct


def write_network(folder, weight, bias):
    """Writes the 3 → 3 linear of one network in diffusers' layout."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    tensors = {"proj.weight": ([3, 3], [weight if i % 4 == 0 else 0.0 for i in range(9)]), "proj.bias": ([3], bias)}
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_video_model(folder):
    write_network(folder / "transformer", 0.5, [0.1, 0.2, 0.3])
    write_network(folder / "transformer_2", 0.25, [-0.3, 0.0, 0.2])
    (folder / "model_index.json").write_text('{"_class_name": "TestVideoPipeline"}')
