// Weights that enter and leave the device together, such as those of a repeated block.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ditfleet::pipeline {

// Whether the tensor's part is on the device.
inline bool is_on_device(const at::Tensor& tensor) { return tensor.storage().data() != nullptr; }

// Moves storages; all tensors that share a storage move with it. Tensors of a part that is off the device have no
// memory and must not be read. Not thread-safe.
class WeightPart {
 public:
  explicit WeightPart(c10::Device device) : device_(device) {}
  // Parts with equal keys share one host copy, also across processes. Call it before the first leave().
  void share(std::string key) { key_ = std::move(key); }
  WeightPart(const WeightPart&) = delete;
  WeightPart& operator=(const WeightPart&) = delete;

  // Ignores undefined tensors and storages already added. Call it before the first leave().
  void add(const at::Tensor& tensor);
  std::int64_t bytes() const { return bytes_; }  // on the device

  bool on_device() const { return on_device_; }
  bool has_host_copy() const { return host_ != nullptr; }
  // Moves the tensors into one allocation, on the current stream, because loading leaves gaps between them. Call it
  // before the first leave().
  void pack();
  // Allocates memory on the device and copies the tensors there, both on the current stream. Throws
  // c10::OutOfMemoryError and leaves the part off the device.
  void enter();
  // Frees the memory on the device. The first call copies the tensors to host memory before. The part stays if the copy
  // throws, as host_memory() and LibTorch do. The stream of enter() must wait for kernels on other streams, unless they
  // have finished.
  void leave();

 private:
  struct Piece {
    c10::Storage storage;
    std::size_t offset, bytes;
  };
  void use(c10::DataPtr memory);

  const c10::Device device_;
  std::vector<Piece> pieces_;
  std::int64_t bytes_ = 0;
  std::string key_;                  // empty: not shared
  std::shared_ptr<std::byte> host_;  // null before the first leave()
  c10::DataPtr memory_;
  bool on_device_ = true;
};

}  // namespace ditfleet::pipeline
