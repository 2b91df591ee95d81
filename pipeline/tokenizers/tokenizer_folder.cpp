#include "pipeline/tokenizers/tokenizer_folder.h"

#include <sodium.h>

#include <algorithm>
#include <filesystem>

#include "pipeline/tokenizers/exact_json.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::array<const char*, 7> kNames = {"bos_token", "eos_token", "unk_token", "sep_token",
                                               "pad_token", "cls_token", "mask_token"};

bool is_standard_name(std::string_view key) { return std::find(kNames.begin(), kNames.end(), key) != kNames.end(); }

// The object in a JSON file; empty if the file does not exist.
Result<std::optional<json::object>> read_object(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return std::optional<json::object>();
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  Result<json::value> value = parse_exact_json(*text);
  if (!value) return corrupt(path, value.error().message);
  if (!value->is_object()) return corrupt(path, "it must be a JSON object");
  return std::optional<json::object>(std::move(value->as_object()));
}

// "…" or {"content": "…", "lstrip": …}. `special`: the default of the flag `special`.
Result<TokenSetting> read_token(const json::value& value, bool special, const std::string& path,
                                const std::string& key) {
  if (const json::string* text = value.if_string()) return TokenSetting{{.content = std::string(*text)}, true};
  const json::object* object = value.if_object();
  const json::value* content = object == nullptr ? nullptr : object->if_contains("content");
  if (content == nullptr || !content->is_string()) {
    return corrupt(path, key + " must be a string, or an object with a string field \"content\"");
  }
  TokenSetting setting{{.content = std::string(content->as_string()), .special = special}};
  AddedToken& token = setting.token;
  const auto read_flag = [&](const char* name, bool& flag) {
    const json::value* found = object->if_contains(name);
    if (found == nullptr) return true;
    if (!found->is_bool()) return false;
    flag = found->as_bool();
    return true;
  };
  bool good = read_flag("special", token.special);
  token.normalized = !token.special;
  for (const auto& [name, flag] : {std::pair<const char*, bool*>{"single_word", &token.single_word},
                                   {"lstrip", &token.lstrip},
                                   {"rstrip", &token.rstrip},
                                   {"normalized", &token.normalized}}) {
    good = read_flag(name, *flag) && good;
  }
  if (!good) return corrupt(path, key + " (\"" + token.content + "\") has a flag that is neither true nor false");
  return setting;
}

Result<std::vector<TokenSetting>> read_tokens(const json::value& value, bool special, const std::string& path,
                                              const std::string& key) {
  std::vector<TokenSetting> tokens;
  if (value.is_null()) return tokens;
  const json::array* list = value.if_array();
  if (list == nullptr) return corrupt(path, key + " must be a list of tokens");
  for (const json::value& item : *list) {
    auto token = read_token(item, special, path, key);
    if (!token) return token.error();
    tokens.push_back(std::move(*token));
  }
  return tokens;
}

bool is_used(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  return value != nullptr && !value->is_null() && !(value->is_array() && value->as_array().empty()) &&
         !(value->is_object() && value->as_object().empty());
}

// Merges the files with the precedence of transformers.
class FolderReader {
 public:
  FolderReader(const std::string& dir, const std::map<std::string, std::string>& defaults) : defaults_(defaults) {
    folder_.dir = dir;
  }

  Result<TokenizerFolder> read() {
    std::error_code ignored;
    if (!std::filesystem::is_directory(folder_.dir, ignored)) {
      return Error{Code::kNotFound, "[tokenizer] no folder " + folder_.dir};
    }
    auto config = read_object(path("tokenizer_config.json"));
    if (!config) return config.error();
    if (*config) folder_.config = std::move(**config);
    auto tokenizer_json = read_object(path("tokenizer.json"));
    if (!tokenizer_json) return tokenizer_json.error();
    folder_.tokenizer_json = std::move(*tokenizer_json);

    for (const auto& step : {&FolderReader::read_config_tokens, &FolderReader::read_added_tokens_decoder,
                             &FolderReader::read_legacy_files, &FolderReader::read_numbers}) {
      if (Result<void> done = (this->*step)(); !done) return done.error();
    }
    order_named_tokens();
    return std::move(folder_);
  }

 private:
  std::string path(const char* file) const { return folder_.dir + "/" + file; }

  Result<void> read_config_tokens() {
    const std::string file = path("tokenizer_config.json");
    json::object& config = folder_.config;
    // The old name applies if the new one is missing. An empty list counts as present.
    if (config.contains("additional_special_tokens") && !is_used(config, "extra_special_tokens")) {
      json::value tokens = std::move(config["additional_special_tokens"]);
      config.erase("additional_special_tokens");
      config["extra_special_tokens"] = std::move(tokens);
    }
    for (const auto& [key, value] : config) {
      const std::string name(key);
      const bool is_own = name.ends_with("_token") && !is_standard_name(name);
      if (is_own ? !value.is_string() : !is_standard_name(name)) continue;
      if (value.is_null()) {
        set_named(name, std::nullopt);
        continue;
      }
      auto token = read_token(value, false, file, name);
      if (!token) return token.error();
      set_named(name, std::move(*token));
    }
    if (const json::value* extra = config.if_contains("extra_special_tokens")) {
      if (const json::object* by_name = extra->if_object()) {
        for (const auto& [name, value] : *by_name) {
          auto token = read_token(value, false, file, std::string(name));
          if (!token) return token.error();
          set_named(std::string(name), std::move(*token));
        }
      } else {
        auto tokens = read_tokens(*extra, false, file, "extra_special_tokens");
        if (!tokens) return tokens.error();
        folder_.extra_special = std::move(*tokens);
      }
    }
    if (const json::value* additional = config.if_contains("additional_special_tokens")) {
      auto tokens = read_tokens(*additional, false, file, "additional_special_tokens");
      if (!tokens) return tokens.error();
      folder_.additional_special = std::move(*tokens);
    }
    return {};
  }

  Result<void> read_added_tokens_decoder() {
    const json::value* decoder = folder_.config.if_contains("added_tokens_decoder");
    if (decoder == nullptr) return {};
    const std::string file = path("tokenizer_config.json");
    if (!decoder->is_object()) return corrupt(file, "added_tokens_decoder must be an object (id → token)");
    for (const auto& [key, value] : decoder->as_object()) {
      const std::string text(key);
      if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos ||
          !value.is_object()) {
        return corrupt(file,
                       "the entry \"" + text +
                           "\" of added_tokens_decoder is invalid; its key must be a token id and its value an object");
      }
      auto token = read_token(value, false, file, "added_tokens_decoder " + text);
      if (!token) return token.error();
      add(std::stoll(text), std::move(*token));
    }
    return {};
  }

  // Applies only without added_tokens_decoder.
  Result<void> read_legacy_files() {
    if (folder_.config.if_contains("added_tokens_decoder") != nullptr) return {};
    const std::string map_file = path("special_tokens_map.json");
    auto map = read_object(map_file);
    if (!map) return map.error();
    for (const auto& [key, value] : map->value_or(json::object())) {
      const std::string name(key);
      if (name == "additional_special_tokens" || name == "extra_special_tokens") {
        auto tokens = read_tokens(value, true, map_file, name);
        if (!tokens) return tokens.error();
        auto& list = name == "extra_special_tokens" ? folder_.extra_special : folder_.additional_special;
        if (!list || name == "additional_special_tokens") list.emplace();
        for (TokenSetting& token : *tokens) {
          if (std::find(list->begin(), list->end(), token) == list->end()) list->push_back(std::move(token));
        }
      } else if (value.is_null()) {
        set_named(name, std::nullopt);
      } else if (name.ends_with("_token")) {
        auto token = read_token(value, true, map_file, name);
        if (!token) return token.error();
        if (!token->is_plain) token->token.special = true;
        set_named(name, std::move(*token));
        from_map_.insert(name);
      }
    }

    const std::string added_file = path("added_tokens.json");
    auto added = read_object(added_file);
    if (!added) return added.error();
    for (const auto& [content, id] : added->value_or(json::object())) {
      if (!id.is_int64() || id.as_int64() < 0) return corrupt(added_file, "\"" + std::string(content) + "\" has no id");
      const bool special = is_known_special(content);
      add(id.as_int64(), {{.content = std::string(content), .normalized = !special, .special = special}});
    }
    if (!folder_.tokenizer_json) return {};
    const std::string json_file = path("tokenizer.json");
    const json::value* tokens = folder_.tokenizer_json->if_contains("added_tokens");
    if (tokens == nullptr || tokens->is_null()) return {};
    if (!tokens->is_array()) return corrupt(json_file, "added_tokens must be a list");
    for (const json::value& value : tokens->as_array()) {
      const json::object* object = value.if_object();
      const json::value* id = object == nullptr ? nullptr : object->if_contains("id");
      if (id == nullptr || !id->is_int64() || id->as_int64() < 0) return corrupt(json_file, "an added token has no id");
      auto token = read_token(value, false, json_file, "added_tokens");
      if (!token) return token.error();
      add(id->as_int64(), std::move(*token));
    }
    return {};
  }

  Result<void> read_numbers() {
    const json::object& config = folder_.config;
    for (const char* key : {"model_max_length", "max_len"}) {
      const json::value* value = config.if_contains(key);
      if (value == nullptr || value->is_null() || folder_.model_max_length) continue;
      if (!value->is_number()) return corrupt(path("tokenizer_config.json"), std::string(key) + " must be a number");
      // transformers writes 1e30 for "no limit".
      if (value->is_int64() && value->as_int64() > 0) folder_.model_max_length = value->as_int64();
    }
    const auto json_direction = [&](const char* section) -> std::string {
      if (!folder_.tokenizer_json) return "";
      const json::value* found = folder_.tokenizer_json->if_contains(section);
      const json::object* object = found == nullptr ? nullptr : found->if_object();
      const json::value* direction = object == nullptr ? nullptr : object->if_contains("direction");
      return direction != nullptr && direction->is_string() ? std::string(direction->as_string()) : "";
    };
    const auto is_left = [&](const char* key, const char* section, bool& left) -> Result<void> {
      left = json_direction(section) == "Left";
      const json::value* value = config.if_contains(key);
      if (value == nullptr || value->is_null()) return {};
      if (!value->is_string() || (value->as_string() != "left" && value->as_string() != "right")) {
        return corrupt(path("tokenizer_config.json"), std::string(key) + " must be \"left\" or \"right\"");
      }
      left = value->as_string() == "left";
      return {};
    };
    if (auto done = is_left("truncation_side", "truncation", folder_.truncates_left); !done) return done;
    if (auto done = is_left("padding_side", "padding", folder_.pads_left); !done) return done;
    const json::value* splits = config.if_contains("split_special_tokens");
    folder_.splits_special = splits != nullptr && splits->is_bool() && splits->as_bool();
    return {};
  }

  void set_named(const std::string& name, std::optional<TokenSetting> token) {
    if (!named_.contains(name) && !is_standard_name(name)) own_names_.push_back(name);
    named_[name] = std::move(token);
  }

  void add(std::int64_t id, TokenSetting token) {
    by_content_[token.token.content] = token;
    folder_.added[id] = std::move(token);
  }

  // For added_tokens.json. transformers compares with the plain texts known at that point, which do not include objects
  // in tokenizer_config.json.
  bool is_known_special(std::string_view content) const {
    const auto is_text = [&](const TokenSetting& token, bool from_config) {
      return token.token.content == content && (token.is_plain || !from_config);
    };
    for (const char* name : kNames) {
      const auto it = named_.find(name);
      if (it != named_.end() && it->second && is_text(*it->second, !from_map_.contains(name))) return true;
    }
    if (!folder_.extra_special) return false;
    const auto& extra = *folder_.extra_special;
    return std::any_of(extra.begin(), extra.end(),
                       [&](const TokenSetting& token) { return is_text(token, !token.token.special); });
  }

  void order_named_tokens() {
    for (const auto& [name, content] : defaults_) {
      if (named_.contains(name)) continue;
      named_[name] = TokenSetting{{.content = content}, true};
      is_default_.insert(name);
    }
    const auto take = [&](const std::string& name) {
      const auto& token = named_.at(name);
      if (!token) return;
      const auto known = by_content_.find(token->token.content);
      const bool replace = is_standard_name(name) && !is_default_.contains(name) && known != by_content_.end();
      folder_.named.emplace_back(name, replace ? known->second : *token);
    };
    for (const char* name : kNames) {
      if (named_.contains(name)) take(name);
    }
    for (const std::string& name : own_names_) take(name);
  }

  const std::map<std::string, std::string>& defaults_;
  TokenizerFolder folder_;
  std::map<std::string, std::optional<TokenSetting>> named_;  // empty: set to null
  std::vector<std::string> own_names_;                        // non-standard names, in the files' order
  std::map<std::string, TokenSetting> by_content_;
  std::set<std::string> is_default_, from_map_;
};

}  // namespace

Error corrupt(const std::string& path, const std::string& what) {
  return Error{Code::kDataCorrupt, "[tokenizer] " + path + ": " + what};
}

std::optional<std::string> TokenizerFolder::named_content(const std::string& key) const {
  for (const auto& [name, token] : named) {
    if (name == key) return token.token.content;
  }
  return std::nullopt;
}

std::vector<AddedToken> TokenizerFolder::tokens_to_add(const std::vector<TokenSetting>& class_extra) const {
  std::vector<TokenSetting> settings;
  for (const auto& [id, token] : added) settings.push_back(token);
  std::set<std::string> known;
  for (const TokenSetting& token : settings) known.insert(token.token.content);
  // The same text with other flags is added again and the last one wins, like in transformers.
  const auto offer = [&](const TokenSetting& token) {
    if (known.contains(token.token.content)) return;
    if (std::find(settings.begin(), settings.end(), token) == settings.end()) settings.push_back(token);
  };
  for (const auto& [name, token] : named) offer(token);
  const std::vector<TokenSetting>& extra = extra_special ? *extra_special : class_extra;
  for (const TokenSetting& token : extra) offer(token);

  std::vector<AddedToken> tokens;
  for (const TokenSetting& setting : settings) {
    AddedToken token = setting.token;
    if (setting.is_plain) {
      token.special = true;
      token.normalized = false;
    }
    const auto same_content = [&](const auto& entry) { return entry.second.token.content == token.content; };
    if (std::any_of(named.begin(), named.end(), same_content)) token.special = true;
    tokens.push_back(std::move(token));
  }
  return tokens;
}

Result<TokenizerFolder> read_tokenizer_folder(const std::string& dir,
                                              const std::map<std::string, std::string>& defaults) {
  return FolderReader(dir, defaults).read();
}

std::optional<std::string> decode_base64(std::string_view text) {
  std::string bytes(text.size() / 4 * 3 + 3, '\0');
  std::size_t size = 0;
  const int failed = sodium_base642bin(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(), text.data(),
                                       text.size(), "\r\n \t", &size, nullptr, sodium_base64_VARIANT_ORIGINAL);
  if (failed != 0) return std::nullopt;
  bytes.resize(size);
  return bytes;
}

}  // namespace ditfleet::pipeline
