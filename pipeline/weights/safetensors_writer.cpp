#include "pipeline/weights/safetensors_writer.h"

#include <algorithm>
#include <cstdint>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/output_file.h"
#include "shared/safetensors/header.h"

namespace ditfleet::pipeline {

using safetensors::dtype_name;
using safetensors::kMaxSafetensorsHeaderBytes;
using safetensors::shape_text;
using safetensors::tensor_bytes;

Result<std::string> encode_safetensors(std::vector<TensorToWrite> tensors,
                                       const std::map<std::string, std::string>& metadata) {
  // Widest elements first, like the reference writer: with a padded header every tensor is aligned.
  std::sort(tensors.begin(), tensors.end(), [](const TensorToWrite& a, const TensorToWrite& b) {
    const int a_bits = dtype_bits(a.dtype), b_bits = dtype_bits(b.dtype);
    return a_bits != b_bits ? a_bits > b_bits : a.name < b.name;
  });
  json::object header;
  if (!metadata.empty()) {
    json::object& values = header["__metadata__"].emplace_object();
    for (const auto& [key, value] : metadata) {
      if (!is_valid_utf8(key) || !is_valid_utf8(value)) {
        return invalid_argument("[safetensors] the metadata of \"" + key + "\" is not UTF-8");
      }
      values[key] = value;
    }
  }
  std::uint64_t at = 0;
  for (const TensorToWrite& tensor : tensors) {
    const std::string where = "[safetensors] tensor \"" + tensor.name + "\"";
    if (tensor.name.empty() || tensor.name == "__metadata__" || !is_valid_utf8(tensor.name)) {
      return invalid_argument(where + ": a name must be UTF-8, not empty, and not __metadata__");
    }
    if (header.contains(tensor.name)) return invalid_argument(where + " is given twice");
    const Result<std::uint64_t> size = tensor_bytes(tensor.dtype, tensor.shape);
    if (!size) return invalid_argument(where + ": " + size.error().message);
    if (*size != tensor.bytes.size()) {
      return invalid_argument(where + " is " + std::string(dtype_name(tensor.dtype)) + " " + shape_text(tensor.shape) +
                              " needs " + std::to_string(*size) + " bytes, but " + std::to_string(tensor.bytes.size()) +
                              " were given");
    }
    json::array shape(tensor.shape.begin(), tensor.shape.end());
    header[tensor.name] = json::object{{"dtype", dtype_name(tensor.dtype)},
                                       {"shape", std::move(shape)},
                                       {"data_offsets", json::array{at, at + *size}}};
    at += *size;
  }
  std::string text = json::serialize(header);
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxSafetensorsHeaderBytes) {
    return invalid_argument("[safetensors] too many tensors: the header would have " + std::to_string(text.size()) +
                            " bytes");
  }
  std::string file;
  file.reserve(8 + text.size() + at);
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  file += text;
  for (const TensorToWrite& tensor : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return file;
}

Result<void> write_safetensors(const std::string& path, std::vector<TensorToWrite> tensors,
                               const std::map<std::string, std::string>& metadata) {
  const Result<std::string> file = encode_safetensors(std::move(tensors), metadata);
  if (!file) return file.error();
  return write_output_file(path, *file);
}

}  // namespace ditfleet::pipeline
