// A compiled program, as the cache keeps it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::kernel_cache {

// One function of the program and what a launch must know of it.
struct KernelInfo {
  std::string name;                            // as the loader finds it
  std::vector<std::uint32_t> parameter_bytes;  // of each parameter, in order
  std::uint32_t shared_bytes = 0;              // static shared memory
  std::uint32_t registers = 0;                 // of a thread; 0 where that means nothing
  std::uint32_t spill_bytes = 0;               // of a thread

  bool operator==(const KernelInfo&) const = default;
};

// What `code` is. The numbers are part of the stored format.
enum class Kind : std::uint8_t {
  kCubin = 1,         // for one GPU architecture
  kSharedObject = 2,  // for the host's processor
  kPlan = 3,          // no code: a choice that was measured, as its owner encodes it
};

std::string_view kind_name(Kind kind);  // "cubin", "shared_object", "plan"

struct Entry {
  std::string region;  // for people: "double_stream"; no part of the identity
  std::string arch;    // "sm_90a", "cpu"; verified on every lookup
  Kind kind = Kind::kCubin;
  std::vector<KernelInfo> kernels;
  std::string code;                // the cubin, shared object or plan, uncompressed
  std::uint64_t source_bytes = 0;  // of the source it was compiled from

  bool operator==(const Entry&) const = default;
};

// What an entry may be at most; a value that claims more is refused before anything is allocated for it.
inline constexpr std::uint64_t kMaxCodeBytes = 64u << 20;
inline constexpr std::uint32_t kMaxKernels = 4096;
inline constexpr std::uint32_t kMaxParameters = 1024;
inline constexpr std::size_t kMaxNameBytes = 4096;

}  // namespace ditfleet::kernel_cache
