#include "pipeline/tokenizers/added_tokens.h"

#include <algorithm>

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {
namespace {

using unicode::GeneralClass;

// First byte of the character that ends before `end`.
std::size_t previous_character(std::string_view text, std::size_t end) {
  std::size_t at = end - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool is_white_space(char32_t c) { return unicode::general_class(c) == GeneralClass::kWhiteSpace; }

std::size_t skip_spaces_left(std::string_view text, std::size_t end) {
  while (end > 0) {
    const std::size_t at = previous_character(text, end);
    if (!is_white_space(unicode::decode(text, at).code_point)) break;
    end = at;
  }
  return end;
}

std::size_t skip_spaces_right(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const auto [c, bytes] = unicode::decode(text, begin);
    if (!is_white_space(c)) break;
    begin += bytes;
  }
  return begin;
}

bool touches_word(std::string_view text, std::size_t begin, std::size_t end) {
  const bool before =
      begin > 0 && unicode::is_word_character(unicode::decode(text, previous_character(text, begin)).code_point);
  const bool after = end < text.size() && unicode::is_word_character(unicode::decode(text, end).code_point);
  return before || after;
}

}  // namespace

Result<void> AddedTokens::add(const std::vector<AddedToken>& tokens, const TextModel& model) {
  std::int32_t next_id = model.vocabulary_size();
  if (!token_of_.empty()) next_id = std::max(next_id, token_of_.rbegin()->first + 1);
  for (const AddedToken& token : tokens) {
    if (token.content.empty()) continue;
    std::optional<std::int32_t> id = id_of(token.content);
    if (!id) id = model.id_of(token.content);
    if (!id) id = next_id++;
    id_of_[token.content] = *id;
    token_of_[*id] = token;
    if (token.special) special_.insert(token.content);
  }

  raw_.clear();
  normalized_.clear();
  for (const auto& [id, token] : token_of_) {
    const std::string pattern = token.normalized ? model.normalize(token.content) : token.content;
    if (pattern.empty()) continue;
    auto& same_start = (token.normalized ? normalized_ : raw_)[static_cast<unsigned char>(pattern[0])];
    for (const auto& [other, other_id] : same_start) {
      if (other == pattern) {
        return Error{Code::kDataCorrupt, "the added tokens \"" + token.content + "\" (" + std::to_string(id) +
                                             ") and \"" + token_of_.at(other_id).content + "\" (" +
                                             std::to_string(other_id) + ") both match \"" + pattern + "\""};
      }
    }
    same_start.emplace_back(pattern, id);
  }
  for (Patterns* patterns : {&raw_, &normalized_}) {
    for (auto& [byte, same_start] : *patterns) {
      std::sort(same_start.begin(), same_start.end(),
                [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
    }
  }
  return {};
}

std::optional<std::int32_t> AddedTokens::id_of(std::string_view content) const {
  const auto it = id_of_.find(content);
  if (it == id_of_.end()) return std::nullopt;
  return it->second;
}

std::vector<AddedTokens::Piece> AddedTokens::split(std::string_view text, bool normalized) const {
  const Patterns& patterns = normalized ? normalized_ : raw_;
  std::vector<Piece> pieces;
  std::size_t done = 0;  // end of the last piece
  for (std::size_t at = 0; at < text.size();) {
    const auto same_start = patterns.find(static_cast<unsigned char>(text[at]));
    const std::pair<std::string, std::int32_t>* match = nullptr;
    if (same_start != patterns.end()) {
      for (const auto& candidate : same_start->second) {
        if (text.substr(at).starts_with(candidate.first)) {
          match = &candidate;
          break;
        }
      }
    }
    if (match == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + match->first.size();
    at = end;  // even a match that is rejected below hides matches that begin inside it
    const AddedToken& token = token_of_.at(match->second);
    if (ignore_special_ && special_.contains(token.content)) continue;
    if (token.single_word && touches_word(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(skip_spaces_left(text, begin), done);
    if (token.rstrip) end = skip_spaces_right(text, end);
    if (done < begin) pieces.push_back({text.substr(done, begin - done), std::nullopt});
    pieces.push_back({text.substr(begin, end - begin), match->second});
    done = end;
  }
  if (done < text.size()) pieces.push_back({text.substr(done), std::nullopt});
  return pieces;
}

}  // namespace ditfleet::pipeline
