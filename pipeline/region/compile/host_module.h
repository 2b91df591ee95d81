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
  // Loads the entry's kernels. kDataCorrupt: not a shared object, or a kernel is missing. Needs /proc.
  static Result<std::shared_ptr<const HostModule>> load(const kernel_cache::Entry& entry);
  ~HostModule();
  HostModule(const HostModule&) = delete;
  HostModule& operator=(const HostModule&) = delete;

  HostKernel kernel(std::size_t index) const { return kernels_[index]; }

 private:
  HostModule() = default;
  // Stays open as long as the library is loaded: the loader identifies the library by this path, which another library
  // must not reuse meanwhile.
  int file_ = -1;
  void* library_ = nullptr;
  std::vector<HostKernel> kernels_;
};

}  // namespace ditfleet::region
