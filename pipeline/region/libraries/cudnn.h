// cuDNN's attention in bf16 with any strides: softmax(q kᵀ · scale) v for each head. The library is opened at run time;
// LibTorch's CUDA part has loaded it already.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::region {

// Everything that a plan depends on. Strides in elements; the elements of a head are contiguous.
struct AttentionShape {
  struct Strides {
    std::int64_t batch = 0, token = 0, head = 0;
    auto operator<=>(const Strides&) const = default;
  };
  std::int64_t batch = 0, tokens = 0, key_tokens = 0, heads = 0, head_dim = 0;
  Strides q, k, v, out;
  bool f8 = false;  // q and k; cuDNN does not have it
  auto operator<=>(const AttentionShape&) const = default;
};

// Addresses, each a multiple of 16 bytes. q and out: [batch, tokens, heads, head_dim]; k and v: [batch, key_tokens,
// heads, head_dim].
struct AttentionOperands {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
};

// For the device that is current when it is opened. Thread-safe.
class Cudnn {
 public:
  // A kernel for one shape. cuDNN compiles it when the plan is made, which takes 60 ms. Immutable.
  class Plan;

  // kUnavailable: the library does not load, or is older than 9.15, which introduced this operation. kDeviceFault: it
  // does not start on this device.
  static Result<std::shared_ptr<const Cudnn>> open();
  ~Cudnn();
  Cudnn(const Cudnn&) = delete;
  Cudnn& operator=(const Cudnn&) = delete;

  std::size_t version() const;  // 91900 is 9.19.0
  // Makes one plan at a time; run() does not wait for plan(). kUnavailable: cuDNN has no plan for this shape on this
  // GPU.
  Result<std::shared_ptr<const Plan>> plan(const AttentionShape& shape) const;
  // Serializes a plan with its kernel; valid for this version and GPU.
  Result<std::string> save(const Plan& plan) const;
  // Reads what save() wrote, without compiling. kUnavailable: the library rejects it.
  Result<std::shared_ptr<const Plan>> restore(const std::string& saved) const;
  // Bytes of device memory that run() needs.
  static std::int64_t workspace_bytes(const Plan& plan);
  // Enqueues the attention on the stream. kDeviceFault.
  Result<void> run(const Plan& plan, const AttentionOperands& operands, float scale, void* workspace,
                   void* stream) const;

 private:
  Cudnn() = default;
  struct Library;
  class Descriptor;
  static Result<const Library*> library();
  Result<std::shared_ptr<const Plan>> finished(Descriptor plan) const;
  Result<void*> planner() const;  // planning_ is held
  const Library* library_ = nullptr;
  void* handle_ = nullptr;
  mutable std::mutex mutex_;         // one thread at a time uses a handle
  mutable void* planner_ = nullptr;  // the handle for plans; null until the first
  mutable std::mutex planning_;
};

}  // namespace ditfleet::region
