// cuDNN's attention as one operation whose result may lie anywhere: softmax(q kᵀ · scale) v for each head, in bf16. The
// library is opened at run time, beside LibTorch's CUDA part, which needs it anyway.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::region {

// All that a plan depends on. Strides in elements; heads' own elements are adjacent.
struct AttentionShape {
  struct Strides {
    std::int64_t batch = 0, token = 0, head = 0;
    auto operator<=>(const Strides&) const = default;
  };
  std::int64_t batch = 0, tokens = 0, heads = 0, head_dim = 0;
  Strides q, k, v, out;
  auto operator<=>(const AttentionShape&) const = default;
};

// Addresses of [batch, tokens, heads, head_dim], each a multiple of 16 bytes.
struct AttentionOperands {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
};

// For the device that is current when it is opened. Thread safe.
class Cudnn {
 public:
  // A kernel for one shape, which cuDNN compiles when the plan is made: 60 ms. Immutable.
  class Plan;

  // kUnavailable: the library does not load, or is older than this operation (9.15). kDeviceFault: it does not start on
  // this device.
  static Result<std::shared_ptr<const Cudnn>> open();
  ~Cudnn();
  Cudnn(const Cudnn&) = delete;
  Cudnn& operator=(const Cudnn&) = delete;

  std::size_t version() const;  // 91900 is 9.19.0
  // Plans are made one at a time, and no run() waits for one. kUnavailable: there is none for this shape on this GPU.
  Result<std::shared_ptr<const Plan>> plan(const AttentionShape& shape) const;
  // A plan as text, its kernel included; valid for this version and GPU.
  Result<std::string> save(const Plan& plan) const;
  // The plan that save() wrote, without compiling. kUnavailable: the library does not take it.
  Result<std::shared_ptr<const Plan>> restore(const std::string& saved) const;
  // Bytes of device memory that run() wants.
  static std::int64_t workspace_bytes(const Plan& plan);
  // Puts the attention into the stream's order. kDeviceFault.
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
  mutable std::mutex mutex_;         // a handle is one thread's at a time
  mutable void* planner_ = nullptr;  // the handle that plans are made with; null: none was made yet
  mutable std::mutex planning_;
};

}  // namespace ditfleet::region
