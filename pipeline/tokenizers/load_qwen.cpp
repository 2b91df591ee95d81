// Tokenizer::load_qwen.
#include <filesystem>

#include "pipeline/tokenizers/byte_pair_files.h"
#include "pipeline/tokenizers/qwen_text.h"
#include "pipeline/tokenizers/tokenizer.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

// Templates are not run; this one must be of the kind whose text qwen_chat() writes. The file has precedence, as in
// transformers.
Result<void> check_template(const TokenizerFolder& folder) {
  const std::string config = folder.dir + "/tokenizer_config.json", file = folder.dir + "/chat_template.jinja";
  std::error_code ignored;
  const bool has_file = std::filesystem::exists(file, ignored);
  const json::value* value = folder.config.if_contains("chat_template");
  if (!has_file && (value == nullptr || !value->is_string())) {
    return corrupt(config,
                   "it has no text \"chat_template\", and there is no chat_template.jinja beside it; copy the "
                   "file that has it from the published model");
  }
  const Result<std::string> text = has_file ? read_file(file) : std::string(value->as_string());
  if (!text) return text.error();
  for (const char* part : {"<|im_start|>", "enable_thinking"}) {
    if (text->find(part) == std::string::npos) {
      return corrupt(has_file ? file : config, std::string("the chat template is not Qwen3's, which contains \"") +
                                                   part + "\"; copy the file from the published model");
    }
  }
  return {};
}

}  // namespace

Result<Tokenizer> Tokenizer::load_qwen(const std::string& dir, bool qwen3) {
  const auto folder = read_tokenizer_folder(
      dir, {{"unk_token", "<|endoftext|>"}, {"eos_token", "<|endoftext|>"}, {"pad_token", "<|endoftext|>"}});
  if (!folder) return folder.error();
  if (qwen3)
    if (auto done = check_template(*folder); !done) return done.error();
  const json::value* prefix = folder->config.if_contains("add_prefix_space");
  if (prefix != nullptr && prefix->is_bool() && prefix->as_bool())
    return corrupt(dir + "/tokenizer_config.json", "add_prefix_space must be false");
  auto encoder = read_byte_pairs(*folder, "", "");
  if (!encoder) return encoder.error();
  const auto class_extra = folder->additional_special.value_or(std::vector<TokenSetting>());
  auto tokenizer = assemble(std::make_unique<QwenText>(std::move(*encoder)), *folder, class_extra, /*has_begin=*/false,
                            /*has_end=*/false);
  if (!tokenizer) return tokenizer;
  // transformers' class adds the named and the extra tokens again, without flags.
  std::vector<AddedToken> again;
  for (const auto& [name, setting] : folder->named)
    again.push_back({.content = setting.token.content, .normalized = false, .special = true});
  for (const TokenSetting& setting : folder->extra_special.value_or(class_extra))
    again.push_back({.content = setting.token.content, .normalized = false, .special = true});
  if (auto done = tokenizer->added_.add(again, *tokenizer->model_); !done) return corrupt(dir, done.error().message);
  return tokenizer;
}

}  // namespace ditfleet::pipeline
