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

// Moves tensors without replacing them: all tensors that share a storage with a tensor of the part follow it. While the
// part is away, they have no memory and must not be read. Not thread-safe.
class WeightPart {
 public:
  explicit WeightPart(c10::Device device) : device_(device) {}
  // Before the first leave(): parts with the same key, of other processes too, have the same bytes in host memory.
  void share(std::string key) { key_ = std::move(key); }
  WeightPart(const WeightPart&) = delete;
  WeightPart& operator=(const WeightPart&) = delete;

  // Before the first leave(). Does nothing for an undefined tensor and for a storage that the part has.
  void add(const at::Tensor& tensor);
  std::int64_t bytes() const { return bytes_; }  // on the device

  bool on_device() const { return on_device_; }
  bool has_host_copy() const { return host_ != nullptr; }
  // Before the first leave(): moves the tensors into one allocation, on the current stream. Loading leaves gaps between
  // them that nothing else fits into.
  void pack();
  // Allocates memory on the device and copies the tensors there, both on the current stream. Throws
  // c10::OutOfMemoryError; the part is away then.
  void enter();
  // Frees the memory on the device. The first call copies the tensors to host memory before; it throws what
  // host_memory() and LibTorch throw, and the part stays then. Kernels on other streams than the one of enter() must be
  // finished, or that stream must wait for them.
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
