// CUDA graphs of one model: a call recorded once for each bucket of sizes, then started by one launch.
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
  // What `body` makes of the inputs. `bucket` says which calls are alike: same sizes and types of all inputs, same
  // work. The first call of a bucket runs the body as it is, so that libraries and tuning have done what cannot be
  // recorded; the second records it on inputs of its own, for which it must make no copy to the host and draw no random
  // numbers; later ones copy the inputs there and start the recording. The result is the caller's. What cannot be
  // recorded runs as it is, ever after. Calls wait for one another, on the GPU too: recordings share one pool of
  // memory. Thread safe.
  virtual at::Tensor run(const std::vector<std::int64_t>& bucket, const std::vector<at::Tensor>& inputs,
                         const Body& body) = 0;
};

// For a GPU; at most `most` recordings, the least recently used goes. Null where this build has none (it lacked CUDA's
// headers).
std::unique_ptr<Graphs> make_graphs(c10::Device device, std::size_t most);

}  // namespace ditfleet::region
