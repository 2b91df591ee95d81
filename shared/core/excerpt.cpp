#include "shared/core/excerpt.h"

#include "shared/core/bytes.h"

namespace ditfleet {

std::string escaped(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    auto c = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F are controls as well: C2 80 to C2 9F in UTF-8.
    const bool c1 = c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                    static_cast<unsigned char>(text[i + 1]) < 0xA0;
    if (c1) c = static_cast<unsigned char>(text[++i]);
    if (c == '\n') {
      out += "\\n";
    } else if (c1 || c < 0x20 || c == 0x7F) {
      constexpr char kDigits[] = "0123456789abcdef";
      out += c1 ? "\\u00" : "\\x";
      out += {kDigits[c >> 4], kDigits[c & 15]};
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string excerpt(std::string_view text, std::size_t max_bytes) {
  if (!is_valid_utf8(text)) return "?";
  if (text.size() > max_bytes) {
    while (max_bytes > 0 && (static_cast<unsigned char>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
    text = text.substr(0, max_bytes);
  }
  return escaped(text);
}

}  // namespace ditfleet
