// libFuzzer: any body as a form, after a first line with its Content-Type. The parts lie in the body, in order.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "coordinator/gateway/http/multipart.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  std::string_view body(reinterpret_cast<const char*>(data), size);
  const std::string_view type = body.substr(0, body.find('\n'));
  body.remove_prefix(std::min(type.size() + 1, body.size()));
  const auto parts = gateway::parse_form(type, body);
  if (!parts) {
    if (parts.error().message.empty()) std::abort();
    return 0;
  }
  const char* after = body.data();
  for (const auto& part : *parts) {
    if (part.name.empty() || part.contents.data() < after) std::abort();
    after = part.contents.data() + part.contents.size();
    if (after > body.data() + body.size()) std::abort();
  }
  return 0;
}
