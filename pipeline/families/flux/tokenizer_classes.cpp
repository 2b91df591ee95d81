#include "pipeline/families/flux/tokenizer_classes.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "shared/core/bytes.h"
#include "shared/core/json.h"

namespace ditfleet::pipeline {

Result<void> check_tokenizer_classes(const std::string& dir) {
  const std::string path = dir + "/model_index.json";
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  const Result<json::value> index = parse_json(*text);
  const json::object* object = index ? index->if_object() : nullptr;
  if (object == nullptr) {
    return Error{Code::kDataCorrupt,
                 "[tokenizer] " + path + ": " + (index ? "it must be a JSON object" : index.error().message)};
  }
  struct Component {
    const char* name;
    std::array<std::string_view, 2> classes;
  };
  for (const Component& component : {Component{"tokenizer", {"CLIPTokenizer", "CLIPTokenizerFast"}},
                                     Component{"tokenizer_2", {"T5Tokenizer", "T5TokenizerFast"}}}) {
    const json::value* entry = object->if_contains(component.name);
    const json::array* pair = entry == nullptr ? nullptr : entry->if_array();
    const bool is_class = pair != nullptr && pair->size() == 2 && (*pair)[1].is_string();
    const std::string_view name = is_class ? std::string_view((*pair)[1].as_string()) : std::string_view();
    if (std::find(component.classes.begin(), component.classes.end(), name) == component.classes.end()) {
      return Error{Code::kDataCorrupt, "[tokenizer] " + path + ": " + component.name + " is " +
                                           (is_class ? "a " + std::string(name) : "missing") + "; a FLUX model has a " +
                                           std::string(component.classes[0])};
    }
  }
  return {};
}

}  // namespace ditfleet::pipeline
