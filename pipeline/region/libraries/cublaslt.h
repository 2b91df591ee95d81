// The matrix product of a linear by cuBLASLt: out = x · weightᵀ + bias (+ out), with an epilogue. The library is
// opened at run time; LibTorch's CUDA part also needs it.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>

#include "pipeline/region/ir/program.h"
#include "shared/core/result.h"

namespace ditfleet::region {

enum class GemmEpilogue : std::uint8_t {
  kBias,
  kBiasGelu,  // tanh GELU of the fp32 sum, rounded once
  kPlain,     // no bias
};

// Everything that determines the library's choice of an algorithm. Strides between rows are in elements; all matrices
// are row-major, weight is [out, in].
struct GemmShape {
  ElementType type = ElementType::kBF16;  // of out, bias and, without f8, x and weight
  bool f8 = false;                        // x and weight are f8 with one scale per row
  GemmEpilogue epilogue = GemmEpilogue::kBias;
  std::int64_t rows = 0, in = 0, out = 0;
  std::int64_t x_stride = 0, weight_stride = 0, out_stride = 0;
  bool accumulates = false;                  // adds to the elements of `out`
  std::array<std::uint16_t, 3> alignment{};  // of x, weight and out: bytes, a power of two up to 256
  auto operator<=>(const GemmShape&) const = default;
};

struct GemmOperands {
  const void *x = nullptr, *weight = nullptr, *bias = nullptr;
  const float *x_scales = nullptr, *weight_scales = nullptr;  // of f8; aligned to 16 bytes
  void* out = nullptr;
};

// A kernel and its settings, as the library encodes them; valid for this library version and GPU.
struct GemmAlgorithm {
  std::array<std::uint64_t, 8> words{};
  std::uint64_t workspace_bytes = 0;
};

// For the device that is current when it is opened. Thread-safe.
class CublasLt {
 public:
  // kUnavailable: the library does not load. kDeviceFault: it does not start on this device.
  static Result<std::shared_ptr<const CublasLt>> open();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // The algorithm that the library expects to be fastest with at most `workspace_bytes`; does not read the operands'
  // memory. kUnavailable: the library has no algorithm for this shape on this GPU.
  Result<GemmAlgorithm> algorithm(const GemmShape& shape, const GemmOperands& operands,
                                  std::uint64_t workspace_bytes) const;
  // Enqueues the product on the stream. `workspace`: algorithm.workspace_bytes, 256-byte aligned. kDeviceFault.
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
