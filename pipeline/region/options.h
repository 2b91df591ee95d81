// How regions are compiled: the configuration's compile.* as the pipeline takes it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::region {

// What a call is to be run with.
enum class Mode { kNone, kDefault, kReduceOverhead, kMaxAutotuneNoCudagraphs, kMaxAutotune };

std::string_view name_of(Mode mode);  // none | default | reduce-overhead | max-autotune-no-cudagraphs | max-autotune
std::optional<Mode> parse_mode(std::string_view name);
constexpr bool uses_graphs(Mode mode) { return mode == Mode::kReduceOverhead || mode == Mode::kMaxAutotune; }
constexpr bool autotunes(Mode mode) { return mode == Mode::kMaxAutotuneNoCudagraphs || mode == Mode::kMaxAutotune; }

// A mode for the calls within inclusive bounds.
struct CompileRule {
  std::int64_t min_frames = 0, max_frames = std::numeric_limits<std::int64_t>::max();
  std::int64_t min_tokens = 0, max_tokens = std::numeric_limits<std::int64_t>::max();
  std::string mode = "default";  // name_of(Mode)
};

struct CompileOptions {
  // auto: nvrtc on a GPU, cpu_jit on a CPU with a C++ compiler, where that is not to be had (and, without fullgraph,
  // for an engine in bf16 on a CPU) eager. A backend named here must be there.
  std::string backend = "eager";  // auto | nvrtc | cpu_jit | eager
  // default | reduce-overhead | max-autotune-no-cudagraphs | max-autotune
  std::string mode = "default";
  std::string attention = "auto";   // auto | cudnn | flash | efficient | math: run/attention.h
  bool fullgraph = false;           // a block that would fall back to eager is an error
  bool dynamic = true;              // one program for all sizes; false: one for each
  bool error_on_recompile = false;  // a second program for a region is an error
  int recompile_limit = 8;          // programs a region may have; beyond it eager (an error with fullgraph)
  // Which components are compiled. The VAE is on a GPU alone: unset, it is where it can be.
  bool transformer = true, text_encoders = false;
  std::optional<bool> vae;
  std::vector<CompileRule> rules;  // by class; see mode_for
  std::string cxx, nvrtc;  // the C++ compiler, libnvrtc's file; empty: DITFLEET_CXX, DITFLEET_NVRTC, else looked for
};

// Whether an engine with these options runs its blocks op by op on such a device, before anyone looks for a compiler.
bool runs_op_by_op(const CompileOptions& options, bool cpu, bool bf16);

// The mode of a call on `tokens` tokens of the picture (text aside) and `frames` frames (an image has one): that of the
// first rule whose bounds hold, options.mode where none does. A name that is no mode counts as default
// (make_region_host refuses it).
Mode mode_for(const CompileOptions& options, std::int64_t tokens, std::int64_t frames);

}  // namespace ditfleet::region
