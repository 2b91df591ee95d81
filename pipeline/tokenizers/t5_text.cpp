#include "pipeline/tokenizers/t5_text.h"

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::string_view kMetaspace = "▁";

// Calls `use` with the parts of a word that begins with "▁", each from one "▁" up to the next.
template <class Use>
void for_each_part(std::string_view word, const Use& use) {
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t next = word.find(kMetaspace, begin + 1);
    const std::size_t end = next == std::string_view::npos ? word.size() : next;
    use(word.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace

Result<void> T5Text::tokenize(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::string word;
  const auto finish_word = [&] {
    if (word.empty()) return;
    if (!word.starts_with(kMetaspace)) word.insert(0, kMetaspace);
    for_each_part(word, [&](std::string_view part) { unigram_.encode(part, ids); });
    word.clear();
  };
  for (std::size_t at = 0; at < text.size();) {
    const auto [c, bytes] = unicode::decode(text, at);
    if (unicode::general_class(c) == unicode::GeneralClass::kWhiteSpace) {
      finish_word();
    } else {
      word.append(text, at, bytes);
    }
    at += bytes;
  }
  finish_word();
  return {};
}

}  // namespace ditfleet::pipeline
