// Tokenizer::load_t5: the pieces and charsmap of tokenizer.json, or of spiece.model.
#include <filesystem>

#include "pipeline/tokenizers/sentencepiece_model.h"
#include "pipeline/tokenizers/t5_text.h"
#include "pipeline/tokenizers/tokenizer.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int32_t kUnknownId = 2;  // fixed in transformers' T5Tokenizer, whatever the files say

struct Pieces {
  std::vector<Unigram::Piece> vocabulary;
  std::optional<Charsmap> charsmap;
  std::vector<TokenSetting> special;  // tokens marked in the file
};

std::string extra_id(std::int64_t number) { return "<extra_id_" + std::to_string(number) + ">"; }

// The charsmap of the first Precompiled normalizer, alone or in a Sequence.
Result<std::optional<Charsmap>> read_charsmap(const json::object& file, const std::string& path) {
  const json::value* value = file.if_contains("normalizer");
  if (value == nullptr || value->is_null()) return std::optional<Charsmap>();
  const json::object* object = value->if_object();
  std::vector<const json::value*> normalizers = {value};
  if (object != nullptr) {
    if (const json::value* list = object->if_contains("normalizers"); list != nullptr && list->is_array()) {
      normalizers.clear();
      for (const json::value& normalizer : list->as_array()) normalizers.push_back(&normalizer);
    }
  }
  for (const json::value* normalizer : normalizers) {
    const json::object* fields = normalizer->if_object();
    const json::value* type = fields == nullptr ? nullptr : fields->if_contains("type");
    const json::value* blob = fields == nullptr ? nullptr : fields->if_contains("precompiled_charsmap");
    if (type == nullptr || !type->is_string() || type->as_string() != "Precompiled" || blob == nullptr) continue;
    const auto bytes = blob->is_string() ? decode_base64(blob->as_string()) : std::nullopt;
    if (!bytes) return corrupt(path, "precompiled_charsmap is not base64");
    if (bytes->empty()) return std::optional<Charsmap>();
    auto charsmap = Charsmap::parse(*bytes);
    if (!charsmap) return corrupt(path, charsmap.error().message);
    return std::optional<Charsmap>(std::move(*charsmap));
  }
  return std::optional<Charsmap>();
}

Result<Pieces> from_tokenizer_json(const json::object& file, const std::string& path) {
  const json::value* model_value = file.if_contains("model");
  const json::object* model = model_value == nullptr ? nullptr : model_value->if_object();
  const json::value* vocabulary = model == nullptr ? nullptr : model->if_contains("vocab");
  const json::array* list = vocabulary == nullptr ? nullptr : vocabulary->if_array();
  if (list == nullptr)
    return corrupt(path, "its model has no list \"vocab\" of [piece, score]; T5 needs a unigram model");
  Pieces pieces;
  pieces.vocabulary.reserve(list->size());
  for (const json::value& value : *list) {
    const json::array* pair = value.if_array();
    if (pair == nullptr || pair->size() != 2 || !(*pair)[0].is_string() || !(*pair)[1].is_number()) {
      return corrupt(path, "piece " + std::to_string(pieces.vocabulary.size()) + " is not [text, score]");
    }
    pieces.vocabulary.push_back({std::string((*pair)[0].as_string()), (*pair)[1].to_number<double>()});
  }
  auto charsmap = read_charsmap(file, path);
  if (!charsmap) return charsmap.error();
  pieces.charsmap = std::move(*charsmap);
  return pieces;
}

// `path`: for messages.
Result<Pieces> from_sentencepiece(std::string_view bytes, const std::string& path, std::int64_t extra_id_count) {
  auto model = parse_sentencepiece_model(bytes);
  if (!model) return corrupt(path, model.error().message);
  Pieces pieces;
  for (const SentencePieceModel::Piece& piece : model->pieces) {
    using Kind = SentencePieceModel::Kind;
    pieces.vocabulary.push_back({piece.text, piece.score});
    if (piece.kind != Kind::kControl && piece.kind != Kind::kUserDefined) continue;
    pieces.special.push_back({{.content = piece.text, .normalized = false, .special = piece.kind == Kind::kControl}});
  }
  for (std::int64_t i = extra_id_count; i-- > 0;) pieces.vocabulary.push_back({extra_id(i), 0.0});
  if (!model->charsmap.empty()) {
    auto charsmap = Charsmap::parse(model->charsmap);
    if (!charsmap) return corrupt(path, charsmap.error().message);
    pieces.charsmap = std::move(*charsmap);
  }
  return pieces;
}

}  // namespace

Result<Tokenizer> Tokenizer::load_t5(const std::string& dir, const std::string& otherwise) {
  const auto folder =
      read_tokenizer_folder(dir, {{"eos_token", "</s>"}, {"unk_token", "<unk>"}, {"pad_token", "<pad>"}});
  if (!folder) return folder.error();
  const std::string config_path = dir + "/tokenizer_config.json", model_path = dir + "/spiece.model";
  std::int64_t extra_id_count = 100;
  if (const json::value* value = folder->config.if_contains("extra_ids")) {
    constexpr std::int64_t kMost = 100'000;
    if (!value->is_int64() || value->as_int64() < 0 || value->as_int64() > kMost) {
      return corrupt(config_path, "extra_ids must be a whole number from 0 to " + std::to_string(kMost));
    }
    extra_id_count = value->as_int64();
  }
  std::error_code ignored;
  const bool has_model = std::filesystem::exists(model_path, ignored);
  if (!folder->tokenizer_json && !has_model && otherwise.empty()) {
    return Error{Code::kNotFound, "[tokenizer] " + dir + " has neither tokenizer.json nor spiece.model"};
  }
  Result<std::string> bytes = otherwise;
  if (!folder->tokenizer_json && has_model) bytes = read_file(model_path);
  if (!bytes) return bytes.error();
  auto pieces = folder->tokenizer_json ? from_tokenizer_json(*folder->tokenizer_json, dir + "/tokenizer.json")
                                       : from_sentencepiece(*bytes, model_path, extra_id_count);
  if (!pieces) return pieces.error();

  // The special tokens if the configuration has no extra_special_tokens: the model file's or the configuration's, plus
  // the extra ids that are not among them.
  std::optional<std::vector<TokenSetting>> listed = folder->additional_special;
  if (!folder->tokenizer_json) listed = pieces->special;
  std::vector<TokenSetting> special = listed.value_or(std::vector<TokenSetting>());
  std::int64_t listed_ids = 0;
  for (const TokenSetting& token : special)
    listed_ids += token.token.content.find("<extra_id_") != std::string::npos ? 1 : 0;
  if (listed_ids == 0) {
    for (std::int64_t i = 0; i < extra_id_count; ++i) special.push_back({{.content = extra_id(i)}, true});
  } else if (extra_id_count > 0 && extra_id_count != listed_ids) {
    return corrupt(config_path, "extra_ids is " + std::to_string(extra_id_count) + ", but " +
                                    std::to_string(listed_ids) +
                                    " of the special tokens are extra ids; the two must agree");
  }

  auto unigram = Unigram::create(std::move(pieces->vocabulary), kUnknownId);
  if (!unigram) return corrupt(dir, unigram.error().message);
  return assemble(std::make_unique<T5Text>(std::move(*unigram), std::move(pieces->charsmap)), *folder, special,
                  /*has_begin=*/false, /*has_end=*/true);
}

}  // namespace ditfleet::pipeline
