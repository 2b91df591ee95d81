// The state of a request between two steps of denoising: what another process needs to go on from there. In a file it
// is safetensors, with the numbers in the metadata.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace ditfleet::pipeline {

// Whoever has state visits each of its parts, in either direction. Not thread-safe.
class RunState {
 public:
  // Saves at most so many bytes of tensors; more throw Failure (kPayloadTooLarge) before they are copied.
  explicit RunState(std::int64_t most_bytes) : room_(most_bytes) {}
  // Loads a file() onto the device. Throws Failure (kDataCorrupt).
  RunState(std::string_view file, c10::Device device);

  bool loads() const { return loads_; }
  // Saves the value, or replaces it by what was saved; throws Failure (kDataCorrupt) if there is none. A tensor that
  // was undefined becomes so. Saving copies to host memory, and waits for the device.
  void tensor(const std::string& name, at::Tensor& value);
  void number(const std::string& name, std::int64_t& value);

  std::string file() const;  // of what was saved

 private:
  bool loads_ = false;
  std::int64_t room_ = 0;
  std::map<std::string, at::Tensor> tensors_;
  std::map<std::string, std::string> numbers_;
};

}  // namespace ditfleet::pipeline
