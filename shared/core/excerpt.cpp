#include "shared/core/excerpt.h"

#include "shared/core/bytes.h"

namespace ditfleet {

std::string excerpt(std::string_view text, std::size_t max_bytes) {
  if (!is_valid_utf8(text)) return "?";
  if (text.size() > max_bytes) {
    while (max_bytes > 0 && (static_cast<unsigned char>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
    text = text.substr(0, max_bytes);
  }
  return std::string(text);
}

}  // namespace ditfleet
