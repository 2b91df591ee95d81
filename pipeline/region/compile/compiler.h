// Compiles generated source for one architecture: NVRTC for GPUs, the system's C++ compiler for the host. The kernel
// cache and the command line use both through this interface.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/region/codegen/source.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/entry.h"

namespace ditfleet::region {

using kernel_cache::Entry;
using kernel_cache::KernelInfo;

class Compiler {
 public:
  virtual ~Compiler() = default;
  virtual std::string_view name() const = 0;  // "nvrtc", "cpu_jit"
  virtual kernel_cache::Kind output_kind() const = 0;
  // How fusion should treat programs for this compiler's devices.
  virtual FuseOptions fuse_options() const { return {}; }
  // Parts of the key. Together they must determine the compiled bytes: version and build of the compiler, the target
  // (the architecture; on the host also the processor's features), and the options in order. No paths or host names.
  virtual std::string identity() const = 0;
  virtual std::string target(const std::string& arch) const = 0;
  virtual std::vector<std::string> options(const std::string& arch) const = 0;
  // Blocks for 20 ms to a few seconds. kInternal: the compiler rejects the source; the message contains the path of a
  // copy of the source. Thread-safe.
  virtual Result<Entry> compile(const std::string& region, const Source& source, const std::string& arch) const = 0;
};

// The line of a compiler's output that explains a failure: the first line with an error, else the first line.
std::string first_error(std::string_view output);

// Saves source that a compiler rejected. Returns the path for the message; empty if the file cannot be written.
std::string keep_source(const std::string& region, const std::string& extension, const std::string& text);

}  // namespace ditfleet::region
