// Character properties as the `tokenizers` library has them; see unicode.h for the functions to call.
#pragma once

#include <cstdint>
#include <span>

namespace ditfleet::pipeline::unicode {

enum class GeneralClass : std::uint8_t { kOther, kLetter, kNumber, kWhiteSpace };

// Grapheme_Cluster_Break of Unicode Standard Annex 29.
enum class GraphemeClass : std::uint8_t {
  kOther,
  kCR,
  kLF,
  kControl,
  kExtend,
  kZWJ,
  kRegionalIndicator,
  kPrepend,
  kSpacingMark,
  kL,
  kV,
  kT,
  kLV,
  kLVT,
};

// Indic_Conjunct_Break.
enum class ConjunctClass : std::uint8_t { kNone, kLinker, kConsonant, kExtend };

template <class T>
struct ClassRange {
  char32_t first, last;  // inclusive
  T value;
};

// first, first + stride … last become themselves + delta.
struct LowerRun {
  char32_t first, last;
  std::uint8_t stride;
  std::int32_t delta;
};

// Sorted, not overlapping; what is not in them has the class 0 (kOther, kNone, false). Hangul syllables are
// not in grapheme_ranges(): LV and LVT are computed. U+0130 is not in lower_runs(): it becomes two.
std::span<const ClassRange<GeneralClass>> general_ranges();
std::span<const ClassRange<GraphemeClass>> grapheme_ranges();
std::span<const ClassRange<ConjunctClass>> conjunct_ranges();
std::span<const ClassRange<bool>> pictographic_ranges();
std::span<const ClassRange<bool>> word_ranges();  // \w of the regex crate
std::span<const LowerRun> lower_runs();

}  // namespace ditfleet::pipeline::unicode
