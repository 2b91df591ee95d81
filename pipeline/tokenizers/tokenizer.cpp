#include "pipeline/tokenizers/tokenizer.h"

#include <limits>

#include "shared/core/bytes.h"

namespace ditfleet::pipeline {

Result<Tokenizer> Tokenizer::assemble(std::unique_ptr<TextModel> model, const TokenizerFolder& folder,
                                      const std::vector<TokenSetting>& class_extra, bool has_begin, bool has_end) {
  Tokenizer tokenizer;
  tokenizer.model_ = std::move(model);
  if (auto added = tokenizer.added_.add(folder.tokens_to_add(class_extra), *tokenizer.model_); !added) {
    return corrupt(folder.dir, added.error().message);
  }
  tokenizer.added_.ignore_special(folder.splits_special);
  tokenizer.truncates_left_ = folder.truncates_left;
  tokenizer.pads_left_ = folder.pads_left;
  if (folder.model_max_length && *folder.model_max_length <= std::numeric_limits<int>::max()) {
    tokenizer.model_max_length_ = static_cast<int>(*folder.model_max_length);
  }
  const auto named_id = [&](const char* key) -> Result<std::int32_t> {
    const auto content = folder.named_content(key);
    const auto id = content ? tokenizer.id_of(*content) : std::nullopt;
    if (id) return *id;
    return corrupt(
        folder.dir + "/tokenizer_config.json",
        key + (content ? " is \"" + *content + "\", which has no id" : std::string(" is null; it must be a token")));
  };
  if (has_begin) {
    const auto begin = named_id("bos_token");
    if (!begin) return begin.error();
    tokenizer.begin_ = {*begin};
  }
  if (has_end) {
    const auto end = named_id("eos_token");
    if (!end) return end.error();
    tokenizer.end_ = {*end};
  }
  const auto pad = named_id("pad_token");
  if (!pad) return pad.error();
  tokenizer.pad_id_ = *pad;
  return tokenizer;
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto added = added_.id_of(token);
  return added ? added : model_->id_of(token);
}

Result<void> Tokenizer::append_ids(std::string_view text, std::vector<std::int32_t>& ids) const {
  for (const AddedTokens::Piece& raw : added_.split(text, false)) {
    if (raw.id) {
      ids.push_back(*raw.id);
      continue;
    }
    const std::string normalized = model_->normalize(raw.text);
    for (const AddedTokens::Piece& piece : added_.split(normalized, true)) {
      if (piece.id) {
        ids.push_back(*piece.id);
      } else if (auto done = model_->tokenize(piece.text, ids); !done) {
        return done;
      }
    }
  }
  return {};
}

Result<Tokenized> Tokenizer::encode(std::string_view text, int max_length) const {
  const std::size_t marks = begin_.size() + end_.size();
  if (max_length < 0 || static_cast<std::size_t>(max_length) < marks) {
    return invalid_argument("[tokenizer] max_sequence_length is " + std::to_string(max_length) +
                                "; it must be at least " + std::to_string(marks),
                            "max_sequence_length");
  }
  if (!is_valid_utf8(text)) return invalid_argument("[tokenizer] the prompt is not valid UTF-8", "prompt");
  std::vector<std::int32_t> ids;
  if (auto done = append_ids(text, ids); !done) return done.error();

  Tokenized result;
  const std::size_t space = static_cast<std::size_t>(max_length) - marks;
  if (ids.size() > space) {
    result.dropped = ids.size() - space;
    const auto kept_from = ids.begin() + static_cast<std::ptrdiff_t>(truncates_left_ ? result.dropped : 0);
    ids = std::vector<std::int32_t>(kept_from, kept_from + static_cast<std::ptrdiff_t>(space));
  }
  result.ids = begin_;
  result.ids.insert(result.ids.end(), ids.begin(), ids.end());
  result.ids.insert(result.ids.end(), end_.begin(), end_.end());
  return result;
}

std::vector<std::int32_t> Tokenizer::padded(std::vector<std::int32_t> ids, std::size_t length,
                                            std::optional<std::int32_t> filler) const {
  if (ids.size() < length)
    ids.insert(pads_left_ ? ids.begin() : ids.end(), length - ids.size(), filler.value_or(pad_id_));
  return ids;
}

}  // namespace ditfleet::pipeline
