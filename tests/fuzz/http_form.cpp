// libFuzzer: any body as a form, after a first line with its Content-Type. The parts lie in the body, in order, and are
// the same if the body arrives in pieces.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/gateway/http/multipart.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  std::string_view body(reinterpret_cast<const char*>(data), size);
  const std::string_view type = body.substr(0, body.find('\n'));
  body.remove_prefix(std::min(type.size() + 1, body.size()));
  auto reader = gateway::FormReader::open(type);
  std::vector<std::pair<std::string, std::string>> read;
  bool good = reader.ok();
  for (std::size_t at = 0; at < body.size() && good; at += 7)
    good = reader
               ->feed(
                   body.substr(at, 7),
                   [&](const gateway::FormReader::Part& part) -> Result<void> {
                     read.emplace_back(part.name, "");
                     return {};
                   },
                   [&](std::string_view contents) -> Result<void> {
                     read.back().second += contents;
                     return {};
                   })
               .ok();
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
    // Where a part is empty, parse_form() does without a line break.
    if (part.contents.empty()) return 0;
  }
  if (!good || !reader->is_complete() || read.size() != parts->size()) std::abort();
  for (std::size_t i = 0; i < read.size(); ++i)
    if (read[i].first != (*parts)[i].name || read[i].second != (*parts)[i].contents) std::abort();
  return 0;
}
