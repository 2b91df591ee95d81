// A compiled program.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::kernel_cache {

// One kernel of the program, with the data that a launch needs.
struct KernelInfo {
  std::string name;                            // the symbol
  std::vector<std::uint32_t> parameter_bytes;  // of each parameter, in order
  std::uint32_t shared_bytes = 0;              // static shared memory
  std::uint32_t registers = 0;                 // per thread; 0 if unknown
  std::uint32_t spill_bytes = 0;               // per thread

  bool operator==(const KernelInfo&) const = default;
};

// The kind of `code`. The numbers are part of the stored format.
enum class Kind : std::uint8_t {
  kCubin = 1,         // for one GPU architecture
  kSharedObject = 2,  // for the host's processor
  kPlan = 3,          // not code, but a measured choice in the caller's encoding
};

std::string_view kind_name(Kind kind);  // "cubin", "shared_object", "plan"

struct Entry {
  std::string region;  // "double_stream"; for display, not part of the key
  std::string arch;    // "sm_90a", "cpu"; verified on every lookup
  Kind kind = Kind::kCubin;
  std::vector<KernelInfo> kernels;
  std::string code;                // the cubin, shared object or plan, uncompressed
  std::uint64_t source_bytes = 0;  // of the source it was compiled from

  bool operator==(const Entry&) const = default;
};

// Limits of an entry. An encoded entry with larger sizes is rejected before memory is allocated.
inline constexpr std::uint64_t kMaxCodeBytes = 64u << 20;
inline constexpr std::uint32_t kMaxKernels = 4096;
inline constexpr std::uint32_t kMaxParameters = 1024;
inline constexpr std::size_t kMaxNameBytes = 4096;

}  // namespace ditfleet::kernel_cache
