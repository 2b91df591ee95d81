#include "pipeline/tokenizers/byte_pair_files.h"

#include <filesystem>
#include <limits>

#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

using Vocabulary = BytePairEncoder::Vocabulary;
using Merges = BytePairEncoder::Merges;

struct BytePairs {
  Vocabulary vocabulary;
  Merges merges;
};

Result<Vocabulary> read_vocabulary(const json::value* value, const std::string& path) {
  const json::object* object = value == nullptr ? nullptr : value->if_object();
  if (object == nullptr) return corrupt(path, "its vocabulary must be an object (token → id)");
  Vocabulary vocabulary;
  vocabulary.reserve(object->size());
  for (const auto& [token, id] : *object) {
    if (!id.is_int64() || id.as_int64() < 0 || id.as_int64() > std::numeric_limits<std::int32_t>::max()) {
      return corrupt(path, "the id of token \"" + std::string(token) + "\" must be a whole number from 0");
    }
    vocabulary.emplace(token, static_cast<std::int32_t>(id.as_int64()));
  }
  if (vocabulary.empty()) return corrupt(path, "its vocabulary is empty");
  return vocabulary;
}

// "left right".
std::optional<std::pair<std::string, std::string>> split_merge(std::string_view line) {
  const std::size_t space = line.find(' ');
  if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) return std::nullopt;
  return std::pair(std::string(line.substr(0, space)), std::string(line.substr(space + 1)));
}

Result<BytePairs> from_tokenizer_json(const json::object& file, const std::string& path) {
  const json::value* model_value = file.if_contains("model");
  const json::object* model = model_value == nullptr ? nullptr : model_value->if_object();
  if (model == nullptr) return corrupt(path, "it has no object \"model\"");
  BytePairs pairs;
  auto vocabulary = read_vocabulary(model->if_contains("vocab"), path);
  if (!vocabulary) return vocabulary.error();
  pairs.vocabulary = std::move(*vocabulary);
  const json::value* merges = model->if_contains("merges");
  if (merges == nullptr || !merges->is_array())
    return corrupt(path, "its model has no list \"merges\"; byte pairs need it");
  for (const json::value& merge : merges->as_array()) {
    std::optional<std::pair<std::string, std::string>> pair;
    if (const json::string* text = merge.if_string()) {
      pair = split_merge(*text);
    } else if (const json::array* list = merge.if_array();
               list != nullptr && list->size() == 2 && (*list)[0].is_string() && (*list)[1].is_string()) {
      pair.emplace((*list)[0].as_string(), (*list)[1].as_string());
    }
    if (!pair) return corrupt(path, "merge " + std::to_string(pairs.merges.size() + 1) + " is not two tokens");
    pairs.merges.push_back(std::move(*pair));
  }
  return pairs;
}

Result<BytePairs> from_text_files(const std::string& dir) {
  const std::string vocabulary_path = dir + "/vocab.json", merges_path = dir + "/merges.txt";
  const Result<std::string> vocabulary_text = read_file(vocabulary_path);
  if (!vocabulary_text) return vocabulary_text.error();
  const Result<std::string> merges_text = read_file(merges_path);
  if (!merges_text) return merges_text.error();
  const Result<json::value> json = parse_json(*vocabulary_text);
  if (!json) return corrupt(vocabulary_path, json.error().message);
  BytePairs pairs;
  auto vocabulary = read_vocabulary(&*json, vocabulary_path);
  if (!vocabulary) return vocabulary.error();
  pairs.vocabulary = std::move(*vocabulary);
  std::size_t number = 0;
  for (std::string_view rest = *merges_text; !rest.empty();) {
    const std::size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    ++number;
    if (line.starts_with("#version")) continue;
    auto pair = split_merge(line);
    if (!pair)
      return corrupt(merges_path, "line " + std::to_string(number) + " is not two tokens with one space between");
    pairs.merges.push_back(std::move(*pair));
  }
  return pairs;
}

}  // namespace

Result<BytePairEncoder> read_byte_pairs(const TokenizerFolder& folder, const std::string& unknown_token,
                                        const std::string& end_of_word) {
  const std::string& dir = folder.dir;
  std::error_code ignored;
  const bool has_text_files =
      std::filesystem::exists(dir + "/vocab.json", ignored) && std::filesystem::exists(dir + "/merges.txt", ignored);
  if (!folder.tokenizer_json && !has_text_files) {
    return Error{Code::kNotFound, "[tokenizer] " + dir + " has neither tokenizer.json nor vocab.json with merges.txt"};
  }
  auto pairs = folder.tokenizer_json ? from_tokenizer_json(*folder.tokenizer_json, dir + "/tokenizer.json")
                                     : from_text_files(dir);
  if (!pairs) return pairs.error();
  auto encoder = BytePairEncoder::create(std::move(pairs->vocabulary), pairs->merges, unknown_token, end_of_word);
  if (!encoder) return corrupt(dir, encoder.error().message);
  return encoder;
}

}  // namespace ditfleet::pipeline
