// CUDA graphs of one model: records a call once per bucket of sizes and replays it with one launch.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace ditfleet::region {

class Graphs {
 public:
  using Body = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

  virtual ~Graphs() = default;
  // Returns body(inputs). Calls with equal `bucket` must do the same work on inputs of the same sizes and types.
  // The first call of a bucket runs the body directly, so that libraries complete set-up that cannot be recorded. The
  // second call records the body on copies of the inputs; the body must then neither copy to the host nor draw random
  // numbers. Later calls copy their inputs to these copies and replay. The caller owns the result. A body that cannot
  // be recorded always runs directly. Calls are serialized, also on the GPU, because recordings share a memory pool.
  // Thread-safe.
  virtual at::Tensor run(const std::vector<std::int64_t>& bucket, const std::vector<at::Tensor>& inputs,
                         const Body& body) = 0;
};

// For a GPU. Keeps at most `most` recordings and evicts the least recently used. Null in a build without CUDA's
// headers.
std::unique_ptr<Graphs> make_graphs(c10::Device device, std::size_t most);

}  // namespace ditfleet::region
