#include "pipeline/region/options.h"

#include <array>
#include <utility>

namespace ditfleet::region {
namespace {

constexpr std::array<std::pair<Mode, std::string_view>, 5> kModes{
    {{Mode::kNone, "none"},
     {Mode::kDefault, "default"},
     {Mode::kReduceOverhead, "reduce-overhead"},
     {Mode::kMaxAutotuneNoCudagraphs, "max-autotune-no-cudagraphs"},
     {Mode::kMaxAutotune, "max-autotune"}}};

}  // namespace

std::optional<Mode> parse_mode(std::string_view name) {
  for (const auto& [mode, known] : kModes)
    if (known == name) return mode;
  return std::nullopt;
}

std::string_view mode_name(Mode mode) { return kModes[static_cast<std::size_t>(mode)].second; }

bool runs_eagerly(const CompileOptions& options, bool cpu, bool bf16) {
  if (options.backend == "eager") return true;
  // Eager bf16 on a CPU equals diffusers bit for bit. Compiled blocks add in another order, which moves the image by
  // 1/255 in the mean and gains little speed.
  return options.backend == "auto" && cpu && bf16 && !options.fullgraph;
}

Mode mode_for(const CompileOptions& options, std::int64_t tokens, std::int64_t frames) {
  const std::string* name = &options.mode;
  for (const CompileRule& rule : options.rules) {
    if (frames < rule.min_frames || frames > rule.max_frames || tokens < rule.min_tokens || tokens > rule.max_tokens)
      continue;
    name = &rule.mode;
    break;
  }
  return parse_mode(*name).value_or(Mode::kDefault);
}

}  // namespace ditfleet::region
