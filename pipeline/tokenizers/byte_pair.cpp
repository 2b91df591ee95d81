#include "pipeline/tokenizers/byte_pair.h"

#include <queue>

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {
namespace {

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

std::string BytePairEncoder::byte_spelling(unsigned char byte) {
  // openai/gpt-2, encoder.py, bytes_to_unicode: printable Latin-1 unchanged, the others from U+0100 in order.
  const auto printable = [](int b) { return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; };
  char32_t c = byte;
  if (!printable(byte)) {
    c = 0x100;
    for (int b = 0; b < byte; ++b) c += printable(b) ? 0 : 1;
  }
  std::string spelling;
  unicode::append(spelling, c);
  return spelling;
}

Result<BytePairEncoder> BytePairEncoder::create(Vocabulary vocabulary, const Merges& merges,
                                                const std::string& unknown_token, const std::string& end_of_word) {
  BytePairEncoder encoder;
  encoder.vocabulary_ = std::move(vocabulary);
  for (std::size_t i = 0; i < merges.size(); ++i) {
    const auto& [left, right] = merges[i];
    const auto left_id = encoder.id_of(left), right_id = encoder.id_of(right), merged = encoder.id_of(left + right);
    if (!left_id || !right_id || !merged) {
      const std::string& absent = !left_id ? left : !right_id ? right : left + right;
      return Error{Code::kDataCorrupt, "merge " + std::to_string(i + 1) + " (\"" + left + " " + right + "\") needs \"" +
                                           absent + "\", which the vocabulary does not have"};
    }
    encoder.merges_[pair_key(*left_id, *right_id)] = {static_cast<std::uint32_t>(i), *merged};
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto i = static_cast<std::size_t>(byte);
    const std::string spelling = byte_spelling(static_cast<unsigned char>(byte));
    encoder.inner_[i] = encoder.id_of(spelling);
    encoder.last_[i] = encoder.id_of(spelling + end_of_word);
  }
  encoder.unknown_token_ = unknown_token;
  if (!unknown_token.empty()) encoder.unknown_id_ = encoder.id_of(unknown_token);
  return encoder;
}

std::optional<std::int32_t> BytePairEncoder::id_of(std::string_view token) const {
  const auto it = vocabulary_.find(std::string(token));
  if (it == vocabulary_.end()) return std::nullopt;
  return it->second;
}

const BytePairEncoder::Merge* BytePairEncoder::merge_of(std::int32_t left, std::int32_t right) const {
  const auto it = merges_.find(pair_key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

Result<void> BytePairEncoder::encode(std::string_view word, std::vector<std::int32_t>& ids) const {
  struct Symbol {
    std::int32_t id = 0;
    std::ptrdiff_t previous = -1, next = -1;
    bool merged_away = false;
  };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (std::size_t i = 0; i < word.size(); ++i) {
    const auto& known = i + 1 == word.size() ? last_ : inner_;
    auto id = known[static_cast<unsigned char>(word[i])];
    if (!id) id = unknown_id_;
    if (!id && unknown_token_.empty()) continue;
    if (!id) {
      return Error{Code::kDataCorrupt, "the vocabulary has neither \"" +
                                           byte_spelling(static_cast<unsigned char>(word[i])) +
                                           "\" nor the unknown token \"" + unknown_token_ + "\""};
    }
    const auto at = static_cast<std::ptrdiff_t>(symbols.size());
    symbols.push_back({*id, at - 1, at + 1});
  }
  if (!symbols.empty()) symbols.back().next = -1;

  // The best-ranked pair first, then the leftmost. Entries whose pair no longer exists are skipped.
  struct Candidate {
    std::uint32_t rank;
    std::ptrdiff_t left;
    std::int32_t id;
    bool operator<(const Candidate& other) const {  // priority_queue returns the greatest first
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::priority_queue<Candidate> queue;
  const auto offer = [&](std::ptrdiff_t left) {
    if (left < 0) return;
    const Symbol& symbol = symbols[static_cast<std::size_t>(left)];
    if (symbol.next < 0) return;
    const Merge* merge = merge_of(symbol.id, symbols[static_cast<std::size_t>(symbol.next)].id);
    if (merge != nullptr) queue.push({merge->rank, left, merge->id});
  };
  for (std::size_t i = 0; i < symbols.size(); ++i) offer(static_cast<std::ptrdiff_t>(i));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<std::size_t>(top.left)];
    if (left.merged_away || left.next < 0) continue;
    Symbol& right = symbols[static_cast<std::size_t>(left.next)];
    const Merge* merge = merge_of(left.id, right.id);
    if (merge == nullptr || merge->id != top.id) continue;
    left.id = top.id;
    left.next = right.next;
    right.merged_away = true;
    if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = top.left;
    offer(left.previous);
    offer(top.left);
  }
  for (const Symbol& symbol : symbols) {
    if (!symbol.merged_away) ids.push_back(symbol.id);
  }
  return {};
}

}  // namespace ditfleet::pipeline
