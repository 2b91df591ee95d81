#include "pipeline/tokenizers/unicode.h"

#include <unicode/normalizer2.h>
#include <unicode/uniset.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <memory>

namespace ditfleet::pipeline::unicode {
namespace {

// The range that holds the code point, or null.
template <class Range>
const Range* find(std::span<const Range> ranges, char32_t code_point) {
  const auto it = std::upper_bound(ranges.begin(), ranges.end(), code_point,
                                   [](char32_t c, const Range& range) { return c < range.first; });
  if (it == ranges.begin()) return nullptr;
  const Range& range = *(it - 1);
  return code_point <= range.last ? &range : nullptr;
}

constexpr char32_t kDottedCapitalI = 0x130;

GraphemeClass grapheme_class(char32_t c) {
  if (c >= 0x20 && c < 0x7F) return GraphemeClass::kOther;
  constexpr char32_t kFirstSyllable = 0xAC00, kLastSyllable = 0xD7A3, kTrailing = 28;
  if (c >= kFirstSyllable && c <= kLastSyllable) {
    return (c - kFirstSyllable) % kTrailing == 0 ? GraphemeClass::kLV : GraphemeClass::kLVT;
  }
  const auto* range = find(grapheme_ranges(), c);
  return range == nullptr ? GraphemeClass::kOther : range->value;
}

ConjunctClass conjunct_class(char32_t c) {
  const auto* range = find(conjunct_ranges(), c);
  return range == nullptr ? ConjunctClass::kNone : range->value;
}

// What the rules of UAX 29 need to know of the cluster so far.
class ClusterState {
 public:
  explicit ClusterState(char32_t first) { take(first, grapheme_class(first)); }

  // Whether c belongs to the cluster; takes it in if so.
  bool joins(char32_t c) {
    const GraphemeClass next = grapheme_class(c);
    if (!no_break(c, next)) return false;
    take(c, next);
    return true;
  }

 private:
  bool no_break(char32_t c, GraphemeClass next) const {
    using G = GraphemeClass;
    if (last_ == G::kCR) return next == G::kLF;                                 // GB3, GB4
    if (last_ == G::kLF || last_ == G::kControl) return false;                  // GB4
    if (next == G::kCR || next == G::kLF || next == G::kControl) return false;  // GB5
    if (last_ == G::kL && (next == G::kL || next == G::kV || next == G::kLV || next == G::kLVT)) return true;  // GB6
    if ((last_ == G::kLV || last_ == G::kV) && (next == G::kV || next == G::kT)) return true;                  // GB7
    if ((last_ == G::kLVT || last_ == G::kT) && next == G::kT) return true;                                    // GB8
    if (next == G::kExtend || next == G::kZWJ || next == G::kSpacingMark) return true;          // GB9, GB9a
    if (last_ == G::kPrepend) return true;                                                      // GB9b
    if (conjunct_linked_ && conjunct_class(c) == ConjunctClass::kConsonant) return true;        // GB9c
    if (emoji_joined_ && find(pictographic_ranges(), c) != nullptr) return true;                // GB11
    return last_ == G::kRegionalIndicator && next == G::kRegionalIndicator && odd_indicators_;  // GB12, GB13
  }

  void take(char32_t c, GraphemeClass next) {
    const ConjunctClass conjunct = conjunct_class(c);
    if (conjunct == ConjunctClass::kConsonant) {
      conjunct_open_ = true;
      conjunct_linked_ = false;
    } else if (conjunct == ConjunctClass::kLinker) {
      conjunct_linked_ = conjunct_open_;
    } else if (conjunct == ConjunctClass::kNone) {
      conjunct_open_ = conjunct_linked_ = false;
    }
    emoji_joined_ = emoji_open_ && next == GraphemeClass::kZWJ;
    if (find(pictographic_ranges(), c) != nullptr) {
      emoji_open_ = true;
    } else if (next != GraphemeClass::kExtend) {
      emoji_open_ = false;
    }
    odd_indicators_ = next == GraphemeClass::kRegionalIndicator && !odd_indicators_;
    last_ = next;
  }

  GraphemeClass last_ = GraphemeClass::kOther;
  bool conjunct_open_ = false;    // consonant (extend | linker)*
  bool conjunct_linked_ = false;  // … with a linker among them
  bool emoji_open_ = false;       // pictographic extend*
  bool emoji_joined_ = false;     // … ZWJ
  bool odd_indicators_ = false;
};

}  // namespace

Decoded decode(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  const char32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  if (first < 0xE0) return {(first & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (first < 0xF0) return {(first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}

void append(std::string& text, char32_t c) {
  if (c < 0x80) {
    text.push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    text.push_back(static_cast<char>(0xC0 | c >> 6));
    text.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    text.push_back(static_cast<char>(0xE0 | c >> 12));
    text.push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    text.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    text.push_back(static_cast<char>(0xF0 | c >> 18));
    text.push_back(static_cast<char>(0x80 | (c >> 12 & 0x3F)));
    text.push_back(static_cast<char>(0x80 | (c >> 6 & 0x3F)));
    text.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

GeneralClass general_class(char32_t c) {
  const auto* range = find(general_ranges(), c);
  return range == nullptr ? GeneralClass::kOther : range->value;
}

bool is_word_character(char32_t c) { return find(word_ranges(), c) != nullptr; }

std::string lower_case(std::string_view text) {
  std::string lower;
  lower.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto [c, bytes] = decode(text, at);
    at += bytes;
    if (c == kDottedCapitalI) {
      append(lower, U'i');
      append(lower, 0x307);
      continue;
    }
    const LowerRun* run = find(lower_runs(), c);
    const bool changes = run != nullptr && (c - run->first) % run->stride == 0;
    append(lower, changes ? static_cast<char32_t>(static_cast<std::int32_t>(c) + run->delta) : c);
  }
  return lower;
}

std::string nfc(std::string_view text) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; })) {
    return std::string(text);
  }
  // Filtered to what Unicode 9 had assigned, as ICU recommends for fixing a version. Both objects live as
  // long as the program and are safe to share.
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
  const icu::UnicodeString source =
      icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size())));
  icu::UnicodeString composed;
  unicode9->normalizer->normalize(source, composed, error);
  if (U_FAILURE(error)) return std::string(text);
  std::string result;
  composed.toUTF8String(result);
  return result;
}

std::size_t cluster_bytes(std::string_view text, std::size_t at) {
  const Decoded first = decode(text, at);
  std::size_t end = at + first.bytes;
  ClusterState cluster(first.code_point);
  while (end < text.size()) {
    const Decoded next = decode(text, end);
    if (!cluster.joins(next.code_point)) break;
    end += next.bytes;
  }
  return end - at;
}

}  // namespace ditfleet::pipeline::unicode
