// Computes the values of quantized weights on a GPU, one launch per matrix.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace ditfleet::region {

struct RegionHost;

// value = code · scale in fp32, rounded once. All tensors are contiguous and on the GPU.
struct Dequantization {
  // NF4: uint8, two codes per byte, the first one in the high nibble. fp8: float8_e4m3fn or float8_e5m2 [rows, in].
  at::Tensor codes;
  at::Tensor scales;        // fp32. NF4: one for each 64 values. fp8: one per row. GGUF: none.
  at::Tensor to;            // [rows, in], bf16 or fp32
  std::uint8_t blocks = 0;  // of GGUF: `codes` are blocks of this format (pipeline/weights/gguf.h)
};

class Dequantizer {
 public:
  virtual ~Dequantizer() = default;
  // Runs on the calling thread's current stream. Throws pipeline::Failure. Thread-safe.
  virtual void run(const Dequantization& one) const = 0;
};

// For weights of GGUF or for the others. The program comes from the kernel cache. Null: the backend is not nvrtc, or
// the program is not available, which counts as a fallback.
std::shared_ptr<const Dequantizer> make_dequantizer(const RegionHost& host, bool gguf = false);

}  // namespace ditfleet::region
