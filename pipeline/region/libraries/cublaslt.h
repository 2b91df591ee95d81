// cuBLASLt as matrix product of a linear: out = x · weightᵀ + bias, with an epilogue. The library is opened at run
// time, beside LibTorch's CUDA part, which needs it anyway.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include "pipeline/region/ir/program.h"
#include "shared/core/result.h"

namespace ditfleet::region {

enum class GemmEpilogue : std::uint8_t {
  kBias,
  kBiasGelu,  // tanh GELU of the fp32 sum, rounded once
  kAdd,       // onto what `out` holds; no bias
  kPlain,     // no bias
};

// All that decides which algorithms there are, and how fast they are. Strides in elements; x and out are row-major with
// rows that far apart, weight is [out, in] with rows that far apart.
struct GemmShape {
  ElementType type = ElementType::kBF16;
  GemmEpilogue epilogue = GemmEpilogue::kBias;
  std::int64_t rows = 0, in = 0, out = 0;
  std::int64_t x_stride = 0, weight_stride = 0, out_stride = 0;
  std::array<std::uint16_t, 3> alignment{};  // of x, weight and out: bytes, a power of two up to 256
  auto operator<=>(const GemmShape&) const = default;
};

struct GemmOperands {
  const void *x = nullptr, *weight = nullptr, *bias = nullptr;
  void* out = nullptr;
};

// Which kernel and how, as the library encodes it: valid for its version and the GPU that it was asked on.
struct GemmAlgorithm {
  std::array<std::uint64_t, 8> words{};
  std::uint64_t workspace_bytes = 0;
};

// For the device that is current when it is opened. Thread safe.
class CublasLt {
 public:
  // kUnavailable: the library does not load. kDeviceFault: it does not start on this device.
  static Result<std::shared_ptr<const CublasLt>> open();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  std::size_t version() const;
  // At most `most` algorithms that need no more workspace, by the library's own estimate of their speed. kUnavailable:
  // there is none for this shape.
  Result<std::vector<GemmAlgorithm>> algorithms(const GemmShape& shape, std::uint64_t workspace_bytes, int most) const;
  // Puts the product into the stream's order. `workspace`: algorithm.workspace_bytes, 256-byte aligned. kDeviceFault.
  Result<void> run(const GemmShape& shape, const GemmOperands& operands, const GemmAlgorithm& algorithm,
                   void* workspace, void* stream) const;

 private:
  CublasLt() = default;
  struct Library;
  struct Descriptors;
  static Result<const Library*> library();
  const Library* library_ = nullptr;
  void* handle_ = nullptr;
};

}  // namespace ditfleet::region
