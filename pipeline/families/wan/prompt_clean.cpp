#include "pipeline/families/wan/prompt_clean.h"

#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "pipeline/families/wan/html_entities.h"

namespace ditfleet::pipeline {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

// Windows-1252 for 0x80 to 0x9F; 0: not assigned.
constexpr std::array<char32_t, 32> kWindows1252 = {0x20AC, 0,      0x201A, 0x0192, 0x201E, 0x2026, 0x2020, 0x2021,
                                                   0x02C6, 0x2030, 0x0160, 0x2039, 0x0152, 0,      0x017D, 0,
                                                   0,      0x2018, 0x2019, 0x201C, 0x201D, 0x2022, 0x2013, 0x2014,
                                                   0x02DC, 0x2122, 0x0161, 0x203A, 0x0153, 0,      0x017E, 0x0178};

void append(std::string& out, char32_t c) { icu::UnicodeString(static_cast<UChar32>(c)).toUTF8String(out); }

// The lines of html_entities.txt, a name and its characters' numbers, as a map from names to texts.
std::unordered_map<std::string_view, std::string> parsed_entities() {
  std::unordered_map<std::string_view, std::string> texts;
  for (std::string_view rest = kHtmlEntities; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(line.size() + 1);
    std::size_t space = line.find(' ');
    std::string& text = texts[line.substr(0, space)];
    for (; space != line.npos; space = line.find(' ', space + 1)) {
      std::uint32_t number = 0;
      std::from_chars(line.data() + space + 1, line.data() + line.size(), number, 16);
      append(text, number);
    }
  }
  return texts;
}

std::optional<std::string_view> entity(std::string_view name) {
  static const auto texts = parsed_entities();
  const auto at = texts.find(name);
  return at != texts.end() ? std::optional<std::string_view>(at->second) : std::nullopt;
}

bool is_invalid(char32_t c) {
  return (c >= 0x1 && c <= 0x8) || c == 0xB || (c >= 0xE && c <= 0x1F) || (c >= 0x7F && c <= 0x9F) ||
         (c >= 0xFDD0 && c <= 0xFDEF) || (c & 0xFFFE) == 0xFFFE;
}

// A numeric reference, by the rules of HTML 5.
void append_number(std::string& out, char32_t c) {
  if (c == 0) return append(out, kReplacement);
  if (c >= 0x80 && c <= 0x9F) return append(out, kWindows1252[c - 0x80] ? kWindows1252[c - 0x80] : c);
  if ((c >= 0xD800 && c <= 0xDFFF) || c > 0x10FFFF) return append(out, kReplacement);
  if (c == '\r' || !is_invalid(c)) append(out, c);
}

// Python's html.unescape. `strict`: as ftfy, only references of at most 24 letters and digits that end with ';'.
std::string unescape(std::string_view text, bool strict) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] != '&') {
      out += text[i++];
      continue;
    }
    std::size_t end = i + 1;
    const auto at = [&](std::size_t j) { return j < text.size() ? text[j] : '\0'; };
    if (at(end) == '#') {
      const bool hex = at(end + 1) == 'x' || at(end + 1) == 'X';
      const std::size_t digits = end + (hex ? 2 : 1);
      std::size_t last = digits;
      char32_t number = 0;
      const auto is_digit = [&](unsigned char c) { return hex ? std::isxdigit(c) != 0 : std::isdigit(c) != 0; };
      for (; is_digit(static_cast<unsigned char>(at(last))); ++last) {
        const int c = std::tolower(at(last));
        number = std::min<char32_t>(number * (hex ? 16 : 10) + static_cast<char32_t>(c <= '9' ? c - '0' : c - 'a' + 10),
                                    0x110000);
      }
      if (last > digits && (!strict || at(last) == ';')) {
        append_number(out, number);
        i = last + (at(last) == ';' ? 1 : 0);
        continue;
      }
      out += text[i++];
      continue;
    }
    std::size_t characters = 0;
    for (; end < text.size() && characters < 32 && std::string_view("\t\n\f <&#;").find(text[end]) == text.npos; ++end)
      characters += (static_cast<unsigned char>(text[end]) & 0xC0) != 0x80;
    if (at(end) == ';') ++end;
    std::string_view name = text.substr(i + 1, end - i - 1);
    std::optional<std::string_view> found = entity(name);
    if (strict && !name.ends_with(';')) found.reset();
    while (!strict && !found && name.size() > 2) {  // the longest name that begins so
      name.remove_suffix(1);
      found = entity(name);
    }
    if (found) {
      out += *found;
      i += 1 + name.size();
    } else {
      out += text[i++];
    }
  }
  return out;
}

// Terminal escapes such as "\033[1;31m".
std::string without_escapes(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    if (text.substr(i, 2) == "\033[") {
      std::size_t end = i + 2;
      while (end < text.size() && (std::isdigit(static_cast<unsigned char>(text[end])) || text[end] == ';')) ++end;
      if (end < text.size() && std::isalpha(static_cast<unsigned char>(text[end]))) {
        i = end + 1;
        continue;
      }
    }
    out += text[i++];
  }
  return out;
}

bool is_control(char32_t c) {
  return c <= 0x8 || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || (c >= 0x206A && c <= 0x206F) || c == 0xFEFF ||
         (c >= 0xFFF9 && c <= 0xFFFC);
}

// The digraphs and ligatures of Latin letters that ftfy takes apart.
std::optional<std::string_view> ligature(char32_t c) {
  switch (c) {
    case 0x132: return "IJ";
    case 0x133: return "ij";
    case 0x149: return "\xCA\xBCn";
    case 0x1F1: return "DZ";
    case 0x1F2: return "Dz";
    case 0x1F3: return "dz";
    case 0x1C4: return "D\xC5\xBD";
    case 0x1C5: return "D\xC5\xBE";
    case 0x1C6: return "d\xC5\xBE";
    case 0x1C7: return "LJ";
    case 0x1C8: return "Lj";
    case 0x1C9: return "lj";
    case 0x1CA: return "NJ";
    case 0x1CB: return "Nj";
    case 0x1CC: return "nj";
    case 0xFB00: return "ff";
    case 0xFB01: return "fi";
    case 0xFB02: return "fl";
    case 0xFB03: return "ffi";
    case 0xFB04: return "ffl";
    case 0xFB05: return "\xC5\xBFt";
    case 0xFB06: return "st";
    default: return std::nullopt;
  }
}

std::string normalized(const icu::Normalizer2* form, const icu::UnicodeString& text) {
  UErrorCode error = U_ZERO_ERROR;
  std::string out;
  form->normalize(text, error).toUTF8String(out);
  return out;
}

// One round of ftfy's fixes.
std::string fixed(const std::string& text) {
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(error);
  const icu::Normalizer2* nfkc = icu::Normalizer2::getNFKCInstance(error);
  const auto decoded = icu::UnicodeString::fromUTF8(text.find('<') == std::string::npos ? unescape(text, true) : text);
  std::string out;
  for (std::int32_t i = 0; i < decoded.length(); i = decoded.moveIndex32(i, 1)) {
    auto c = static_cast<char32_t>(decoded.char32At(i));
    if (c >= 0x80 && c <= 0x9F && kWindows1252[c - 0x80]) c = kWindows1252[c - 0x80];
    if (const auto parts = ligature(c)) {
      out += *parts;
    } else if (c == 0x3000) {
      out += ' ';
    } else if (c >= 0xFF01 && c < 0xFFF0 && u_isdefined(static_cast<UChar32>(c))) {
      out += normalized(nfkc, icu::UnicodeString(static_cast<UChar32>(c)));
    } else if (c == 0x2BC || (c >= 0x2018 && c <= 0x201B)) {
      out += '\'';
    } else if (c >= 0x201C && c <= 0x201F) {
      out += '"';
    } else if (c == '\r' || c == 0x2028 || c == 0x2029 || c == 0x85) {
      out += '\n';
    } else {
      append(out, c);
    }
  }
  const auto mapped = icu::UnicodeString::fromUTF8(without_escapes(out));
  icu::UnicodeString kept;
  for (std::int32_t i = 0; i < mapped.length(); i = mapped.moveIndex32(i, 1))
    if (!is_control(static_cast<char32_t>(mapped.char32At(i)))) kept.append(mapped.char32At(i));
  return normalized(nfc, kept);
}

// What Python's str.isspace() and the \s of its regular expressions accept.
bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace

std::string prompt_clean(const std::string& prompt) {
  std::string text = prompt;
  for (std::string before; before != text;) {
    before = text;
    text = fixed(text);
  }
  text = unescape(unescape(text, false), false);
  const auto decoded = icu::UnicodeString::fromUTF8(text);
  std::string out;
  bool space = false;
  for (std::int32_t i = 0; i < decoded.length(); i = decoded.moveIndex32(i, 1)) {
    const auto c = static_cast<char32_t>(decoded.char32At(i));
    if (is_space(c)) {
      space = true;
      continue;
    }
    if (std::exchange(space, false) && !out.empty()) out += ' ';
    append(out, c);
  }
  return out;
}

}  // namespace ditfleet::pipeline
