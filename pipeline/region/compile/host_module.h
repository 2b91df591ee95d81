// A compiled region loaded into this process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"

namespace ditfleet::region {

// See generate_cpp().
using HostKernel = void (*)(const long long* instance, long long first_row, long long end_row);

class HostModule {
 public:
  // The entry's kernels, in its order. kDataCorrupt: it is no shared object, or lacks a kernel. Needs /proc.
  static Result<std::shared_ptr<const HostModule>> load(const kernel_cache::Entry& entry);
  ~HostModule();
  HostModule(const HostModule&) = delete;
  HostModule& operator=(const HostModule&) = delete;

  HostKernel kernel(std::size_t index) const { return kernels_[index]; }

 private:
  HostModule() = default;
  // Open as long as the library is: its path is its name to the loader, and must not be another's meanwhile.
  int file_ = -1;
  void* library_ = nullptr;
  std::vector<HostKernel> kernels_;
};

}  // namespace ditfleet::region
