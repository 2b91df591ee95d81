#include "pipeline/tokenizers/unigram.h"

#include <algorithm>
#include <limits>

#include "pipeline/tokenizers/unicode.h"

namespace ditfleet::pipeline {

Result<Unigram> Unigram::create(std::vector<Piece> pieces, std::int32_t unknown_id) {
  if (unknown_id < 0 || static_cast<std::size_t>(unknown_id) >= pieces.size()) {
    return Error{Code::kDataCorrupt, "the vocabulary has " + std::to_string(pieces.size()) +
                                         " pieces, but the unknown piece has id " + std::to_string(unknown_id)};
  }
  constexpr double kUnknownPenalty = 10.0;  // as in SentencePiece, unigram_model.cc
  Unigram model;
  model.unknown_id_ = unknown_id;
  model.ends_.push_back(-1);
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto id = static_cast<std::int32_t>(i);
    least = std::min(least, pieces[i].score);
    model.id_of_[pieces[i].text] = id;
    std::uint32_t node = 0;
    for (const char c : pieces[i].text) {
      const std::uint64_t key = std::uint64_t{node} << 8 | static_cast<unsigned char>(c);
      const auto [it, is_new] = model.children_.emplace(key, static_cast<std::uint32_t>(model.ends_.size()));
      if (is_new) model.ends_.push_back(-1);
      node = it->second;
    }
    model.ends_[node] = id;
  }
  model.unknown_score_ = least - kUnknownPenalty;
  model.pieces_ = std::move(pieces);
  return model;
}

std::optional<std::int32_t> Unigram::id_of(std::string_view text) const {
  const auto it = id_of_.find(text);
  if (it == id_of_.end()) return std::nullopt;
  return it->second;
}

void Unigram::encode(std::string_view word, std::vector<std::int32_t>& ids) const {
  // The best path to each byte position. A later candidate must be strictly better, so of equal ones the one that
  // begins earliest stays.
  struct Best {
    double score = 0;
    std::ptrdiff_t begin = -1;  // -1: not reached yet
    std::int32_t id = 0;
  };
  std::vector<Best> best(word.size() + 1);
  const auto offer = [&](std::size_t begin, std::size_t end, double score, std::int32_t id) {
    Best& target = best[end];
    if (target.begin < 0 || score > target.score) target = {score, static_cast<std::ptrdiff_t>(begin), id};
  };
  for (std::size_t at = 0; at < word.size();) {
    const double so_far = best[at].score;
    const std::size_t character = unicode::decode(word, at).bytes;
    bool covered = false;  // by a piece of exactly this character
    std::uint32_t node = 0;
    for (std::size_t end = at; end < word.size();) {
      const auto child = children_.find(std::uint64_t{node} << 8 | static_cast<unsigned char>(word[end]));
      if (child == children_.end()) break;
      node = child->second;
      ++end;
      const std::int32_t id = ends_[node];
      if (id < 0) continue;
      offer(at, end, pieces_[static_cast<std::size_t>(id)].score + so_far, id);
      covered = covered || end - at == character;
    }
    if (!covered) offer(at, at + character, unknown_score_ + so_far, unknown_id_);
    at += character;
  }

  const std::size_t first = ids.size();
  for (std::size_t end = word.size(); end > 0;) {
    auto begin = static_cast<std::size_t>(best[end].begin);
    if (best[end].id == unknown_id_) {
      while (begin > 0 && best[begin].id == unknown_id_) begin = static_cast<std::size_t>(best[begin].begin);
      // Adjacent unknown characters may form a piece whose score is too low to be chosen.
      ids.push_back(id_of(word.substr(begin, end - begin)).value_or(unknown_id_));
    } else {
      ids.push_back(best[end].id);
    }
    end = begin;
  }
  std::reverse(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
}

}  // namespace ditfleet::pipeline
