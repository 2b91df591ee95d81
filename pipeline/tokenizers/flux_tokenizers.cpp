// Engine::load_tokenizers: both tokenizers of a diffusers FLUX folder.
#include <algorithm>
#include <array>

#include "pipeline/engine.h"
#include "pipeline/tokenizers/tokenizer.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"

namespace ditfleet::pipeline {
namespace {

class FluxTokenizers final : public Tokenizers {
 public:
  FluxTokenizers(Tokenizer clip, Tokenizer t5) : clip_(std::move(clip)), t5_(std::move(t5)) {}

  Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const override {
    auto clip = clip_.encode(prompt, *clip_.model_max_length());
    if (!clip) return clip.error();
    auto t5 = t5_.encode(prompt, max_sequence_length);
    if (!t5) return t5.error();
    return TokenIds{std::move(clip->ids), std::move(t5->ids)};
  }

 private:
  Tokenizer clip_, t5_;
};

// model_index.json must name the classes that are built here: another class reads the same files otherwise.
Result<void> check_classes(const std::string& dir) {
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
                                           (is_class ? "a " + std::string(name) : "missing") +
                                           "; a FLUX model has a " + std::string(component.classes[0])};
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Tokenizers>> Engine::load_tokenizers(const std::string& dir) {
  if (auto checked = check_classes(dir); !checked) return checked.error();
  auto clip = Tokenizer::load_clip(dir + "/tokenizer");
  if (!clip) return clip.error();
  auto t5 = Tokenizer::load_t5(dir + "/tokenizer_2");
  if (!t5) return t5.error();
  return std::unique_ptr<Tokenizers>(std::make_unique<FluxTokenizers>(std::move(*clip), std::move(*t5)));
}

}  // namespace ditfleet::pipeline
