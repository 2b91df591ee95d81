// Reads the settings of a tokenizer folder (tokenizer/ and tokenizer_2/ of a diffusers model) like transformers 5:
// tokenizer_config.json and, if that has no added_tokens_decoder, special_tokens_map.json, added_tokens.json and the
// added tokens of tokenizer.json.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/tokenizers/added_tokens.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::pipeline {

// A token in a file: plain text, or text with flags. Plain text becomes a special token when it is added.
struct TokenSetting {
  AddedToken token;
  bool is_plain = false;
  bool operator==(const TokenSetting&) const = default;
};

struct TokenizerFolder {
  std::string dir;
  json::object config;                         // tokenizer_config.json; empty if missing
  std::optional<json::object> tokenizer_json;  // the whole of tokenizer.json
  std::map<std::int64_t, TokenSetting> added;  // by their id in the files
  // The named tokens that are set, in this order: bos_token, eos_token, unk_token, sep_token, pad_token, cls_token,
  // mask_token, then names that only this model has.
  std::vector<std::pair<std::string, TokenSetting>> named;
  std::optional<std::vector<TokenSetting>> extra_special, additional_special;
  std::optional<std::int64_t> model_max_length;
  bool truncates_left = false, pads_left = false, splits_special = false;

  // Content of a named token; empty if it is not set.
  std::optional<std::string> named_content(const std::string& key) const;
  // The tokens to add to the tokenizer, in order. `class_extra` applies if the files list no extra tokens.
  std::vector<AddedToken> tokens_to_add(const std::vector<TokenSetting>& class_extra) const;
};

// `defaults`: the named tokens of the tokenizer's class. kNotFound: no such folder. kDataCorrupt: the message contains
// the file and the key.
Result<TokenizerFolder> read_tokenizer_folder(const std::string& dir,
                                              const std::map<std::string, std::string>& defaults);

// kDataCorrupt: what is wrong in a tokenizer's file or folder.
Error corrupt(const std::string& path, const std::string& what);

// Decodes base64 (RFC 4648 §4), ignoring line breaks. Empty if it is not base64.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace ditfleet::pipeline
