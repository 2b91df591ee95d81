// What turns generated source into a program for one architecture: NVRTC for GPUs, the system's C++ compiler for the
// host. Both behind one interface, so that the kernel cache and the command line need not know which.
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
  // What fusion may leave to the matrix library on this compiler's devices.
  virtual FuseOptions fuse_options() const { return {}; }
  // What decides the bytes it makes, for the key: version and build of the compiler; what it compiles for (the arch,
  // on the host the processor's features); the options in order. No path, no host.
  virtual std::string identity() const = 0;
  virtual std::string target(const std::string& arch) const = 0;
  virtual std::vector<std::string> options(const std::string& arch) const = 0;
  // Thread safe; blocks for 20 ms to a few seconds. kInvalidArgument: an unknown arch; kInternal: the compiler refuses
  // the source, whose copy is kept in a file that the message names.
  virtual Result<Entry> compile(const std::string& region, const Source& source, const std::string& arch) const = 0;
};

// Of what a compiler printed, the line that says why it failed: the first with an error in it, else the first.
std::string first_error(std::string_view output);

// Keeps source that a compiler refused: the path, for the message; "" where nothing can be written.
std::string keep_source(const std::string& region, const std::string& extension, const std::string& text);

}  // namespace ditfleet::region
