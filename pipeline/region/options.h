// How regions are compiled: compile.* of the configuration.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::region {

// How a call runs. Graph modes replay CUDA graphs. What PyTorch's autotune modes would time is always chosen here, by
// measurement (attention) or by cuBLASLt, so max-autotune-no-cudagraphs equals default.
enum class Mode { kNone, kDefault, kReduceOverhead, kMaxAutotuneNoCudagraphs, kMaxAutotune };

// none | default | reduce-overhead | max-autotune-no-cudagraphs | max-autotune
std::optional<Mode> parse_mode(std::string_view name);
std::string_view mode_name(Mode mode);
constexpr bool uses_graphs(Mode mode) { return mode == Mode::kReduceOverhead || mode == Mode::kMaxAutotune; }

// The mode of calls within inclusive bounds.
struct CompileRule {
  std::int64_t min_frames = 0, max_frames = std::numeric_limits<std::int64_t>::max();
  std::int64_t min_tokens = 0, max_tokens = std::numeric_limits<std::int64_t>::max();
  std::string mode = "default";  // see parse_mode()
};

struct CompileOptions {
  // auto selects nvrtc on a GPU and cpu_jit on a CPU. It falls back to eager if that backend is not available and,
  // without fullgraph, for an engine in bf16 on a CPU. Any other backend must be available.
  std::string backend = "eager";  // auto | nvrtc | cpu_jit | eager
  // default | reduce-overhead | max-autotune-no-cudagraphs | max-autotune
  std::string mode = "default";
  std::string attention = "auto";   // auto | cudnn | fa3 | flash | efficient | math: libraries/attention.h
  bool fullgraph = false;           // a block that would fall back to eager is an error
  bool dynamic = true;              // one program for all sizes; false: one per size
  bool error_on_recompile = false;  // a second program for a region is an error
  int recompile_limit = 8;          // programs per region; above it calls run eagerly (an error with fullgraph)
  // Which components are compiled. The VAE can be compiled on a GPU only; unset: compiled if possible.
  bool transformer = true;
  std::optional<bool> vae;
  std::vector<CompileRule> rules;  // see mode_for()
  std::string cxx, nvrtc;          // C++ compiler, libnvrtc's file; empty: DITFLEET_CXX, DITFLEET_NVRTC, else searched
};

// Whether an engine with these options runs its blocks eagerly on a device of this kind, even if compilers are
// available.
bool runs_eagerly(const CompileOptions& options, bool cpu, bool bf16);

// The mode of a call with `tokens` image tokens (without text) and `frames` frames (1 for an image): the mode of the
// first matching rule, else options.mode. An unknown name counts as default; the configuration rejects it.
Mode mode_for(const CompileOptions& options, std::int64_t tokens, std::int64_t frames);

}  // namespace ditfleet::region
