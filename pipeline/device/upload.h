// Copies bytes that are read from files to a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "shared/core/background_threads.h"

namespace ditfleet::pipeline {

// Reads on eight threads into pinned memory and copies each piece while the next ones are read. Holds at most 128 MiB
// of pinned memory. Not thread-safe.
class Upload {
 public:
  // `read` fills a piece of host memory with the bytes from an offset on. Several threads call it at a time.
  using Read = std::function<void(std::int64_t begin, std::span<std::byte> bytes)>;

  explicit Upload(c10::Device gpu);
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // Fills a contiguous tensor of bytes on the GPU. Work that is enqueued on the current stream afterwards sees them.
  // Throws what `read` throws and what the device reports.
  void fill(const at::Tensor& to, const Read& read);

 private:
  struct Lane;
  const c10::Device device_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  BackgroundThreads threads_;  // last: its work uses the other members
};

}  // namespace ditfleet::pipeline
