// libFuzzer: any bytes as a configuration file. What loads must be shown as a file that loads as the same.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "shared/config/settings.h"
#include "shared/core/bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  const auto settings = config::load_text(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz.yaml");
  if (!settings) {
    if (settings.error().message.empty() || !is_valid_utf8(settings.error().message)) std::abort();
    return 0;
  }
  const std::string text = config::to_yaml(*settings, true);
  const auto again = config::load_text(text, "again.yaml");
  if (!again || config::to_yaml(*again, true) != text) std::abort();
  return 0;
}
