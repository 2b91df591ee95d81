// libFuzzer: any bytes as a safetensors file. The parser must refuse or describe only what the bytes hold.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "shared/safetensors/header.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet::safetensors;
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto header = parse_safetensors_header(file, "fuzz");
  if (!header) return 0;
  // What was accepted covers the data part exactly, so that every view into it is in bounds.
  std::uint64_t total = 0, first = size;
  for (const TensorEntry& tensor : header->tensors) {
    const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
    if (!bytes || tensor.begin > tensor.end || tensor.end > size || *bytes != tensor.end - tensor.begin) std::abort();
    total += *bytes;
    if (tensor.begin < first) first = tensor.begin;
  }
  if (total != size - first) std::abort();
  return 0;
}
