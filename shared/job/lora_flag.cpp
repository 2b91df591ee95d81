#include "shared/job/lora_flag.h"

#include <charconv>
#include <cmath>
#include <string>

namespace ditfleet::job {

std::optional<LoraUse> parse_lora_flag(std::string_view text) {
  LoraUse use;
  const auto colon = text.rfind(':');
  use.name = text.substr(0, colon);
  use.scale = 1.0;
  if (colon == std::string_view::npos) return use;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data() + colon + 1, end, use.scale);
  const bool good = error == std::errc() && at == end && std::abs(use.scale) <= kMaxLoraScale;  // not of NaN
  return good ? std::optional(use) : std::nullopt;
}

}  // namespace ditfleet::job
