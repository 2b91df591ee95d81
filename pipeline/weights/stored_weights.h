// The linears of a component that its files store quantized: which ones, in which format, and their scales. Formats:
// bitsandbytes NF4, torchao's Float8Tensor, ComfyUI's scaled fp8 (old and new names, one scale per tensor or row),
// ModelOpt's and LightX2V's fp8, fp8 without scales, and the blocks of GGUF. Any other format is an error that contains
// its name.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/weights/checkpoint.h"
#include "shared/core/json.h"

namespace ditfleet::pipeline {

// Bytes and scales per value of the formats are those of QuantizedRows (nn/quantized.h).
struct StoredWeight {
  std::string codes;                // tensor of NF4 or fp8 codes
  std::vector<std::int64_t> shape;  // [out, in]
  bool nf4 = false;                 // false: fp8, in the type of `codes`, unless it has `blocks`
  std::uint8_t blocks = 0;          // of GGUF: see TensorEntry
  bool dynamic = false;             // fp8: products quantize their inputs by row
  std::string scales;               // tensor; empty: fp8 without scales
  // NF4 with double quantization: `scales` are U8 codes in blocks of 256.
  std::string nested_absmax, nested_map;
  float nested_offset = 0;
  std::vector<std::string> tensors = {};  // all tensors that belong to the weight
};

class StoredWeights {
 public:
  // `config`: quantization_config of config.json, or null. Reads small tensors only.
  // kDataCorrupt: another format; tensors of a format that are missing, or have a wrong type, shape or content.
  static Result<StoredWeights> find(const Checkpoint& checkpoint, const json::object* config);

  // The weight of the linear with this name, or null if it is not quantized.
  const StoredWeight* find(std::string_view linear) const;
  bool empty() const { return weights_.empty(); }
  // Whether fp8 weights have scales in this component, so that one without is damaged.
  bool has_scales() const { return has_scales_; }
  bool all_gguf() const;  // none is of another format
  // bnb_4bit_compute_dtype: "float32", "bfloat16" or "float16"; empty without a quantization_config.
  const std::string& nf4_compute() const { return nf4_compute_; }

  // The scales as fp32: of each 64 values (NF4) or of each row (fp8). kDataCorrupt: one is negative or not finite.
  static Result<std::vector<float>> scales(const Checkpoint& checkpoint, const StoredWeight& weight);

 private:
  friend class StoredWeightsReader;
  std::map<std::string, StoredWeight, std::less<>> weights_;  // by the linear's name
  bool has_scales_ = false;
  std::string nf4_compute_;
};

// Whether a tensor with this name holds scales or other data of a quantization format.
bool is_quantization_tensor(std::string_view name);

}  // namespace ditfleet::pipeline
