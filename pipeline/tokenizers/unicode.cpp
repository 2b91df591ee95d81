#include "pipeline/tokenizers/unicode.h"

#include <unicode/brkiter.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>
#include <unicode/unistr.h>
#include <unicode/utext.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace ditfleet::pipeline::unicode {
namespace {

constexpr char32_t kDottedCapitalI = 0x130;

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

// Letters and numbers of Unicode 15.1 and 16, which the `tokenizers` library supports and ICU 72 does not.
struct Range {
  char32_t first, last;
};
constexpr Range kNewLetters[] = {{0x1C89, 0x1C8A},   {0xA7CB, 0xA7CD},   {0xA7DA, 0xA7DC},   {0x105C0, 0x105F3},
                                 {0x10D4A, 0x10D65}, {0x10D6F, 0x10D85}, {0x10EC2, 0x10EC4}, {0x11380, 0x11389},
                                 {0x1138B, 0x1138B}, {0x1138E, 0x1138E}, {0x11390, 0x113B5}, {0x113B7, 0x113B7},
                                 {0x113D1, 0x113D1}, {0x113D3, 0x113D3}, {0x11BC0, 0x11BE0}, {0x13460, 0x143FA},
                                 {0x16100, 0x1611D}, {0x16D40, 0x16D6C}, {0x18CFF, 0x18CFF}, {0x1E5D0, 0x1E5ED},
                                 {0x1E5F0, 0x1E5F0}, {0x2EBF0, 0x2EE5D}};
constexpr Range kNewNumbers[] = {{0x10D40, 0x10D49}, {0x116D0, 0x116E3}, {0x11BF0, 0x11BF9}, {0x16130, 0x16139},
                                 {0x16D70, 0x16D79}, {0x1CCF0, 0x1CCF9}, {0x1E5F1, 0x1E5FA}};

bool is_in(std::span<const Range> ranges, char32_t c) {
  return std::any_of(ranges.begin(), ranges.end(), [c](Range r) { return r.first <= c && c <= r.last; });
}

bool is_of(char32_t c, std::uint32_t categories) {
  const std::uint32_t own = U_GET_GC_MASK(static_cast<UChar32>(c));
  if (own != U_GC_CN_MASK) return (own & categories) != 0;
  return ((categories & U_GC_L_MASK) != 0 && is_in(kNewLetters, c)) ||
         ((categories & U_GC_ND_MASK) != 0 && is_in(kNewNumbers, c));
}

// The text with each run of combining marks in canonical order. ICU takes quadratic time for it.
std::string with_ordered_marks(std::string_view text, const icu::Normalizer2& normalizer) {
  std::string ordered;
  ordered.reserve(text.size());
  std::vector<std::pair<std::uint8_t, char32_t>> run;  // combining class, character; of class 0: only the first
  const auto append_run = [&] {
    std::stable_sort(run.begin(), run.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [combining_class, c] : run) append(ordered, c);
    run.clear();
  };
  const auto add = [&](char32_t c) {
    const std::uint8_t combining_class = normalizer.getCombiningClass(static_cast<UChar32>(c));
    if (combining_class == 0) append_run();
    run.emplace_back(combining_class, c);
  };
  for (std::size_t at = 0; at < text.size();) {
    const auto [c, bytes] = decode(text, at);
    at += bytes;
    if (c == 0xF73 || c == 0xF75 || c == 0xF81) {  // the only characters of class 0 that decompose to marks
      add(0xF71);
      add(c - 1);
    } else {
      add(c);
    }
  }
  append_run();
  return ordered;
}

}  // namespace

Decoded decode(std::string_view text, std::size_t at) {
  std::size_t end = at;
  UChar32 c = 0;
  U8_NEXT_UNSAFE(text.data(), end, c);
  return {static_cast<char32_t>(c), end - at};
}

void append(std::string& text, char32_t c) {
  char bytes[U8_MAX_LENGTH];
  std::size_t length = 0;
  U8_APPEND_UNSAFE(bytes, length, c);
  text.append(bytes, length);
}

GeneralClass general_class(char32_t c) {
  if (u_isUWhiteSpace(static_cast<UChar32>(c))) return GeneralClass::kWhiteSpace;
  if (is_of(c, U_GC_L_MASK)) return GeneralClass::kLetter;
  return is_of(c, U_GC_N_MASK) ? GeneralClass::kNumber : GeneralClass::kOther;
}

std::size_t run_end(std::string_view text, std::size_t at, GeneralClass wanted) {
  while (at < text.size()) {
    const auto [c, bytes] = decode(text, at);
    if (general_class(c) != wanted) break;
    at += bytes;
  }
  return at;
}

bool is_word_character(char32_t c) {
  const auto code_point = static_cast<UChar32>(c);
  return u_isUAlphabetic(code_point) || is_of(c, U_GC_L_MASK | U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK) ||
         u_hasBinaryProperty(code_point, UCHAR_JOIN_CONTROL);
}

std::string lower_case(std::string_view text) {
  std::string lower;
  lower.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto [c, bytes] = decode(text, at);
    at += bytes;
    append(lower, static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))));
    if (c == kDottedCapitalI) append(lower, 0x307);
  }
  return lower;
}

std::string nfc(std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  // Filtered to the characters of Unicode 9, as ICU recommends for a fixed version. Both objects are never destroyed
  // and thread-safe.
  struct Unicode9 {
    icu::UnicodeSet assigned;
    std::unique_ptr<icu::FilteredNormalizer2> normalizer;
    Unicode9() {
      UErrorCode error = U_ZERO_ERROR;
      const icu::Normalizer2* newest = icu::Normalizer2::getNFCInstance(error);
      assigned.applyPattern(u"[:age=9.0:]", error);
      assigned.freeze();
      if (U_SUCCESS(error)) normalizer = std::make_unique<icu::FilteredNormalizer2>(*newest, assigned);
    }
  };
  static const Unicode9* const unicode9 = new Unicode9;           // never destroyed: threads may outlive main
  if (unicode9->normalizer == nullptr) return std::string(text);  // ICU without its data; it is part of the library
  UErrorCode error = U_ZERO_ERROR;
  const std::string ordered = with_ordered_marks(text, *unicode9->normalizer);
  const icu::UnicodeString source = icu::UnicodeString::fromUTF8(ordered);
  icu::UnicodeString composed;
  unicode9->normalizer->normalize(source, composed, error);
  if (U_FAILURE(error)) return std::string(text);
  std::string result;
  composed.toUTF8String(result);
  return result;
}

void for_each_cluster(std::string_view text, const std::function<void(std::string_view)>& use) {
  // Iterators have state, so each call clones one.
  static const icu::BreakIterator* const prototype = [] {
    UErrorCode error = U_ZERO_ERROR;
    return icu::BreakIterator::createCharacterInstance(icu::Locale::getRoot(), error);
  }();
  if (prototype == nullptr) return use(text);  // ICU without its data
  const std::unique_ptr<icu::BreakIterator> iterator(prototype->clone());
  UErrorCode error = U_ZERO_ERROR;
  UText* const source = utext_openUTF8(nullptr, text.data(), static_cast<std::int64_t>(text.size()), &error);
  iterator->setText(source, error);
  std::int32_t begin = iterator->first();
  for (std::int32_t end = iterator->next(); end != icu::BreakIterator::DONE; begin = end, end = iterator->next())
    use(text.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
  utext_close(source);
}

}  // namespace ditfleet::pipeline::unicode
