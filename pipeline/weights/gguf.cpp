#include "pipeline/weights/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

using safetensors::DType;
using safetensors::SafetensorsHeader;
using safetensors::TensorEntry;

float half_value(const unsigned char* bytes) {
  const unsigned bits = bytes[0] | bytes[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const unsigned sign = (bits & 0x8000) << 16;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return std::ldexp(static_cast<float>(fraction), -24) * (sign != 0 ? -1.0F : 1.0F);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}
float mul(float a, float b) { return a * b; }
float add(float a, float b) { return a + b; }
float sub(float a, float b) { return a - b; }
#define FUNCTION inline
#include "pipeline/weights/gguf_values.inc"
#undef FUNCTION

struct Format {
  GgufBlocks blocks;
  void (*decode)(const unsigned char* blocks, std::int64_t count, float* values);
};
template <float (*kValue)(const unsigned char*, int), int kValues, int kBytes>
void decode(const unsigned char* blocks, std::int64_t count, float* values) {
  for (std::int64_t i = 0; i < count; ++i, blocks += kBytes)
    for (int e = 0; e < kValues; ++e) *values++ = kValue(blocks, e);
}
template <float (*kValue)(const unsigned char*, int), int kValues, int kBytes>
constexpr Format format(std::string_view name, std::uint32_t id) {
  return {{name, id, kValues, kBytes}, decode<kValue, kValues, kBytes>};
}
// In the order of the kernels of gguf_program().
constexpr std::array kFormats{format<q4_0, 32, 18>("Q4_0", 2),    format<q4_1, 32, 20>("Q4_1", 3),
                              format<q5_0, 32, 22>("Q5_0", 6),    format<q5_1, 32, 24>("Q5_1", 7),
                              format<q8_0, 32, 34>("Q8_0", 8),    format<q4_k, 256, 144>("Q4_K", 12),
                              format<q5_k, 256, 176>("Q5_K", 13), format<q6_k, 256, 210>("Q6_K", 14)};

// Types whose elements are single numbers.
struct Plain {
  std::uint32_t id;
  DType dtype;
};
constexpr std::array kPlain{Plain{0, DType::kF32}, Plain{1, DType::kF16}, Plain{30, DType::kBF16},
                            Plain{28, DType::kF64}};

// Names of the types that are not read, for messages.
constexpr std::array<std::pair<std::uint32_t, std::string_view>, 20> kOthers{{
    {9, "Q8_1"},   {10, "Q2_K"},   {11, "Q3_K"},  {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"},
    {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"},  {24, "I8"},     {25, "I16"},
    {26, "I32"},   {27, "I64"},    {29, "IQ1_M"}, {34, "TQ1_0"}, {35, "TQ2_0"},   {39, "MXFP4"},
}};

constexpr std::uint64_t kMost = 100'000;  // tensors, and keys
constexpr std::size_t kMostText = 1 << 10, kMostName = 1 << 10;
constexpr std::array<std::uint64_t, 13> kValueBytes{1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // 8: text, 9: array
constexpr std::uint32_t kText = 8, kArray = 9;

struct Problem {
  std::string what;
};
struct NeedsMore {};

class Reader {
 public:
  Reader(std::string_view begin, std::uint64_t file_bytes) : begin_(begin), file_bytes_(file_bytes) {}

  std::uint64_t at() const { return at_; }
  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(std::uint64_t count) {
    if (count > file_bytes_ - at_) throw Problem{"its header goes beyond the file (is it truncated?)"};
    if (count > begin_.size() - at_) throw NeedsMore{};
    const auto bytes = begin_.substr(static_cast<std::size_t>(at_), static_cast<std::size_t>(count));
    at_ += count;
    return bytes;
  }
  std::string_view text() { return take(number<std::uint64_t>()); }
  // Skips a value of this type.
  void skip(std::uint32_t type, bool in_array = false) {
    if (type == kText) {
      text();
    } else if (type == kArray) {
      if (in_array) throw Problem{"it has an array of arrays"};
      const auto of = number<std::uint32_t>();
      const auto count = number<std::uint64_t>();
      if (of != kText && of < kValueBytes.size() && of != kArray) {
        if (count > file_bytes_) throw Problem{"its header goes beyond the file (is it truncated?)"};
        take(count * kValueBytes[of]);
      } else {
        for (std::uint64_t i = 0; i < count; ++i) skip(of, true);
      }
    } else if (type < kValueBytes.size()) {
      take(kValueBytes[type]);
    } else {
      throw Problem{"it has a value of the unknown type " + std::to_string(type)};
    }
  }

 private:
  const std::string_view begin_;
  const std::uint64_t file_bytes_;
  std::uint64_t at_ = 0;
};

std::string shown(std::string_view name) { return '"' + excerpt(name, 120) + '"'; }

// The type, and the bytes of a tensor.
std::uint64_t set_type(TensorEntry& entry, std::uint32_t id) {
  std::uint64_t values = 1;
  for (const std::int64_t side : entry.shape) {
    if (side < 0 || (side > 0 && values > (std::uint64_t{1} << 48) / static_cast<std::uint64_t>(side)))
      throw Problem{"tensor " + shown(entry.name) + " is too large"};
    values *= static_cast<std::uint64_t>(side);
  }
  for (const Plain& plain : kPlain) {
    if (plain.id != id) continue;
    entry.dtype = plain.dtype;
    return values * static_cast<std::uint64_t>(safetensors::dtype_bits(plain.dtype)) / 8;
  }
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    const GgufBlocks& blocks = kFormats[i].blocks;
    if (blocks.id != id) continue;
    entry.dtype = DType::kU8;
    entry.blocks = static_cast<std::uint8_t>(i + 1);
    const std::int64_t row = entry.shape.empty() ? 1 : entry.shape.back();
    if (row % blocks.values != 0)
      throw Problem{"tensor " + shown(entry.name) + " has rows of " + std::to_string(row) + " values, but " +
                    std::string(blocks.name) + " has blocks of " + std::to_string(blocks.values)};
    return values / static_cast<std::uint64_t>(blocks.values) * static_cast<std::uint64_t>(blocks.bytes);
  }
  const auto* other = std::find_if(kOthers.begin(), kOthers.end(), [&](const auto& one) { return one.first == id; });
  throw Problem{"tensor " + shown(entry.name) + " is of the type " +
                (other == kOthers.end() ? std::to_string(id) : std::string(other->second)) +
                "; supported are F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1 and Q4_0"};
}

SafetensorsHeader parse(Reader& reader, std::uint64_t file_bytes) {
  if (!is_gguf(reader.take(4))) throw Problem{"it does not begin as a GGUF file"};
  if (const auto version = reader.number<std::uint32_t>(); version < 2 || version > 3)
    throw Problem{"it is of version " + std::to_string(version) + "; supported are 2 and 3, little-endian"};
  const auto tensors = reader.number<std::uint64_t>(), keys = reader.number<std::uint64_t>();
  if (tensors > kMost || keys > kMost)
    throw Problem{"it claims " + std::to_string(tensors) + " tensors and " + std::to_string(keys) + " keys; at most " +
                  std::to_string(kMost) + " of each are allowed"};
  SafetensorsHeader header;
  std::uint64_t alignment = 32;
  for (std::uint64_t i = 0; i < keys; ++i) {
    const std::string key(reader.text());
    const auto type = reader.number<std::uint32_t>();
    if (type == kText) {
      const std::string_view value = reader.text();
      if (key.size() <= kMostText && value.size() <= kMostText) header.metadata.emplace(key, value);
    } else if (key == "general.alignment" && type == 4) {
      alignment = reader.number<std::uint32_t>();
      if (!std::has_single_bit(alignment) || alignment > 1 << 20)
        throw Problem{"general.alignment is " + std::to_string(alignment) + "; it must be a power of two"};
    } else {
      reader.skip(type);
    }
  }
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places;  // offset and bytes
  std::set<std::string, std::less<>> names;
  for (std::uint64_t i = 0; i < tensors; ++i) {
    TensorEntry entry;
    entry.name = reader.text();
    if (entry.name.size() > kMostName) throw Problem{"a tensor's name has more than 1024 bytes"};
    if (!names.insert(entry.name).second) throw Problem{"it has two tensors " + shown(entry.name)};
    const auto axes = reader.number<std::uint32_t>();
    if (axes > 8) throw Problem{"tensor " + shown(entry.name) + " has " + std::to_string(axes) + " axes"};
    for (std::uint32_t axis = 0; axis < axes; ++axis) {
      const auto side = reader.number<std::uint64_t>();
      entry.shape.insert(entry.shape.begin(), static_cast<std::int64_t>(std::min<std::uint64_t>(
                                                  side, std::numeric_limits<std::int64_t>::max())));
    }
    const std::uint64_t bytes = set_type(entry, reader.number<std::uint32_t>());
    entry.begin = reader.number<std::uint64_t>();
    if (entry.begin % alignment != 0)
      throw Problem{"tensor " + shown(entry.name) + " is at " + std::to_string(entry.begin) +
                    ", which is no multiple of " + std::to_string(alignment)};
    entry.end = bytes;  // until the data's place is known
    header.tensors.push_back(std::move(entry));
  }
  const std::uint64_t data = (reader.at() + alignment - 1) / alignment * alignment;
  for (TensorEntry& entry : header.tensors) {
    const std::uint64_t offset = entry.begin, bytes = entry.end;
    if (data > file_bytes || offset > file_bytes - data || bytes > file_bytes - data - offset)
      throw Problem{"tensor " + shown(entry.name) + " goes beyond the file (is it truncated?)"};
    entry.begin = data + offset;
    entry.end = entry.begin + bytes;
    if (bytes > 0) places.emplace_back(entry.begin, entry.end);
  }
  std::sort(places.begin(), places.end());
  for (std::size_t i = 1; i < places.size(); ++i)
    if (places[i].first < places[i - 1].second) throw Problem{"two of its tensors overlap"};
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  return header;
}

}  // namespace

const GgufBlocks& gguf_blocks(std::uint8_t number) { return kFormats[number - 1U].blocks; }
std::uint8_t gguf_block_count() { return static_cast<std::uint8_t>(kFormats.size()); }

void gguf_values(std::uint8_t number, const std::byte* blocks, std::int64_t count, float* values) {
  kFormats[number - 1U].decode(reinterpret_cast<const unsigned char*>(blocks), count, values);
}

Result<std::optional<SafetensorsHeader>> parse_gguf_header(std::string_view begin, std::uint64_t file_bytes,
                                                           std::string_view file_name) {
  Reader reader(begin, file_bytes);
  try {
    return std::optional(parse(reader, file_bytes));
  } catch (const NeedsMore&) {
    return std::optional<SafetensorsHeader>();
  } catch (const Problem& problem) {
    return data_corrupt("[gguf] " + std::string(file_name) + ": " + problem.what);
  }
}

}  // namespace ditfleet::pipeline
