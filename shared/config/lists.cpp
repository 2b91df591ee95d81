#include "shared/config/lists.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "shared/config/options.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/nearest_name.h"
#include "shared/core/text.h"

namespace ditfleet::config {
namespace {

constexpr int kMaxTokens = 1 << 24, kMaxFrames = 1 << 20, kMaxSide = 16384;
constexpr std::size_t kMaxEntries = 256;

template <class Item>
struct Field {
  std::string_view name;
  std::variant<std::string Item::*, std::optional<int> Item::*, bool Item::*> at;
  std::string_view description;
  int low = 0, high = 0;          // bounds of numbers, inclusive
  std::string_view choices = {};  // values of strings: "a|b|c"; empty: any name
};

template <class Item>
struct List {
  std::string_view section, name, description;
  std::vector<Item>& (*at)(Settings&);
  std::vector<Field<Item>> fields;

  std::string key() const { return std::string(section) + "." + std::string(name); }
};

const auto& lists() {
  static const std::tuple all{
      List<CompileRule>{
          "compile",
          "rules",
          "Compilation modes by class. The first rule whose bounds match a call's image tokens and frames sets the "
          "mode; if none matches, compile.mode does. Example: \"[{max_frames: 49, mode: reduce-overhead}, "
          "{min_frames: 81, mode: none}]\".",
          +[](Settings& s) -> std::vector<CompileRule>& { return s.compile.rules; },
          {{"mode", &CompileRule::mode, "Mode of matching calls; none runs eagerly.", 0, 0,
            "none|default|reduce-overhead|max-autotune-no-cudagraphs|max-autotune"},
           {"min_frames", &CompileRule::min_frames, "Minimum number of frames; an image has one.", 1, kMaxFrames},
           {"max_frames", &CompileRule::max_frames, "Maximum number of frames.", 1, kMaxFrames},
           {"min_tokens", &CompileRule::min_tokens,
            "Minimum number of image tokens, without text; 4096 for 1024x1024 at 16x16 pixels per token.", 1,
            kMaxTokens},
           {"max_tokens", &CompileRule::max_tokens, "Maximum number of image tokens.", 1, kMaxTokens}}},
      List<WarmupClass>{
          "worker",
          "warmup_classes",
          "Classes to run before a worker reports ready, in addition to the smallest image of each model. Each one "
          "delays the start. Example: \"[{width: 1024, height: 1024}, {model: dev, width: 512, height: 512}]\".",
          +[](Settings& s) -> std::vector<WarmupClass>& { return s.worker.warmup_classes; },
          {{"model", &WarmupClass::model, "Name of a model; if empty, every model."},
           {"width", &WarmupClass::width, "Pixels.", 1, kMaxSide},
           {"height", &WarmupClass::height, "Pixels.", 1, kMaxSide},
           {"frames", &WarmupClass::frames, "Frames of a video; if absent, the model's default.", 1, kMaxFrames},
           {"max_sequence_length", &WarmupClass::max_sequence_length, "Text tokens; if absent, the model's default.", 1,
            1024},
           {"true_cfg", &WarmupClass::true_cfg, "With a negative prompt, which runs the transformer twice per step."},
           {"gpus", &WarmupClass::gpus,
            "With worker.gpus above 1: 1 or worker.gpus, which units of this class then use. If absent, what is faster "
            "at the start.",
            1, 32}}}};
  return all;
}

// Calls `with` for the list at this path; returns false if the path is not a list.
template <class With>
bool with_list(const std::vector<std::string>& path, With&& with) {
  if (path.size() < 2) return false;
  return std::apply(
      [&](const auto&... list) {
        return ((path[0] == list.section && path[1] == list.name ? (with(list), true) : false) || ...);
      },
      lists());
}

Error wrong(const Assignment& a, const std::string& message) { return invalid_argument(a.where + ": " + message); }

template <class Item>
std::string type_of(const Field<Item>& field) {
  if (std::holds_alternative<bool Item::*>(field.at)) return "true or false";
  if (std::holds_alternative<std::string Item::*>(field.at))
    return field.choices.empty() ? "a name" : choices_text(field.choices);
  return "an integer from " + std::to_string(field.low) + " to " + std::to_string(field.high);
}

template <class Item>
bool put(const Field<Item>& field, const std::string& text, Item& item) {
  if (const auto* at = std::get_if<bool Item::*>(&field.at)) {
    if (text != "true" && text != "false") return false;
    item.** at = text == "true";
    return true;
  }
  if (const auto* at = std::get_if<std::string Item::*>(&field.at)) {
    if (field.choices.empty() ? !is_valid_utf8(text) || text.size() > 64 : !is_one_of(field.choices, text))
      return false;
    item.** at = text;
    return true;
  }
  const auto value = number_of(text, field.low, field.high);
  if (value) item.*std::get<std::optional<int> Item::*>(field.at) = value;
  return value.has_value();
}

template <class Item>
Result<void> apply_field(const List<Item>& list, const Assignment& a, Settings& settings) {
  auto& items = list.at(settings);
  const auto place = number_of<std::size_t>(a.path[2], 0, items.size());
  if (a.path.size() != 4 || !place)
    return wrong(a, "'" + a.key() + "' is not a field of an entry; " + list.key() + " is a list of maps");
  if (*place >= kMaxEntries) return wrong(a, list.key() + " has more than " + std::to_string(kMaxEntries) + " entries");
  if (*place == items.size()) items.emplace_back();
  std::vector<std::string> known;
  for (const auto& field : list.fields) {
    known.emplace_back(field.name);
    if (field.name != a.path[3]) continue;
    if (put(field, a.value, items[*place])) return {};
    return wrong(a, a.key() + " is '" + excerpt(a.value, 100) + "'; it must be " + type_of(field));
  }
  return wrong(a, "unknown key '" + a.key() + "'" + suggestion(a.path[3], known));
}

template <class Item>
Result<void> apply_whole(const List<Item>& list, const Assignment& a, Settings& settings) {
  auto parts = from_list_text(a);
  if (!parts) return parts.error();
  list.at(settings).clear();
  for (const Assignment& part : *parts) {
    if (!part.problem.empty()) return wrong(part, part.problem);
    if (auto r = apply_field(list, part, settings); !r) return r;
  }
  return {};
}

template <class Item>
void emit(YAML::Emitter& out, const List<Item>& list, const Settings& settings) {
  out << YAML::Key << std::string(list.name) << YAML::Value << YAML::Flow << YAML::BeginSeq;
  for (const Item& item : list.at(const_cast<Settings&>(settings))) {  // the accessor only names the member
    out << YAML::Flow << YAML::BeginMap;
    for (const auto& field : list.fields) {
      std::string text;
      if (const auto* at = std::get_if<bool Item::*>(&field.at)) {
        if (item.**at) text = "true";
      } else if (const auto* name = std::get_if<std::string Item::*>(&field.at)) {
        text = item.**name;
      } else if (const auto& number = item.*std::get<std::optional<int> Item::*>(field.at)) {
        text = std::to_string(*number);
      }
      if (!text.empty()) out << YAML::Key << std::string(field.name) << YAML::Value << text;
    }
    out << YAML::EndMap;
  }
  out << YAML::EndSeq;
}

Result<void> ordered(const std::string& at, const char* what, const std::optional<int>& low,
                     const std::optional<int>& high) {
  if (!low || !high || *low <= *high) return {};
  return invalid_argument(at + " has min_" + what + " " + std::to_string(*low) + " and max_" + what + " " +
                          std::to_string(*high) + "; the minimum must not be above the maximum");
}

}  // namespace

bool is_list_path(const std::vector<std::string>& path) {
  return with_list(path, [](const auto&) {});
}

Result<void> apply_list(const Assignment& a, Settings& settings) {
  Result<void> out;
  with_list(a.path, [&](const auto& list) {
    out = a.path.size() == 2 ? apply_whole(list, a, settings) : apply_field(list, a, settings);
  });
  return out;
}

Result<void> check_lists(const Settings& s) {
  for (std::size_t i = 0; i < s.compile.rules.size(); ++i) {
    const auto& rule = s.compile.rules[i];
    const std::string at = "compile.rules." + std::to_string(i);
    if (rule.mode.empty())
      return invalid_argument(at + " has no mode; a rule looks like {max_frames: 49, mode: reduce-overhead}");
    if (auto r = ordered(at, "frames", rule.min_frames, rule.max_frames); !r) return r;
    if (auto r = ordered(at, "tokens", rule.min_tokens, rule.max_tokens); !r) return r;
  }
  for (std::size_t i = 0; i < s.worker.warmup_classes.size(); ++i) {
    const auto& one = s.worker.warmup_classes[i];
    const std::string at = "worker.warmup_classes." + std::to_string(i);
    if (!one.width || !one.height)
      return invalid_argument(at + " has no " + (one.width ? "height" : "width") +
                              "; a class looks like {width: 1024, height: 1024}");
    if (one.gpus && *one.gpus != 1 && *one.gpus != s.worker.gpus)
      return invalid_argument(at + ".gpus is " + std::to_string(*one.gpus) +
                              "; it must be 1 or worker.gpus, which is " + std::to_string(s.worker.gpus));
    if (!one.model.empty() && !s.models.empty() && !s.models.contains(one.model)) {
      std::vector<std::string> names;
      for (const auto& [name, model] : s.models) names.push_back(name);
      return invalid_argument(at + ".model is '" + one.model + "', which is not in models" +
                              suggestion(one.model, names));
    }
  }
  return {};
}

void emit_lists(YAML::Emitter& out, const Settings& settings, std::string_view section) {
  std::apply([&](const auto&... list) { ((list.section == section ? emit(out, list, settings) : void()), ...); },
             lists());
}

std::vector<OptionHelp> list_help() {
  std::vector<OptionHelp> rows;
  std::apply(
      [&](const auto&... list) {
        const auto add = [&](const auto& one) {
          rows.push_back({one.key(), "a list of maps", "", std::string(one.description), environment_name(one.key())});
          for (const auto& field : one.fields)
            rows.push_back(
                {one.key() + "[]." + std::string(field.name), type_of(field), "", std::string(field.description), ""});
        };
        (add(list), ...);
      },
      lists());
  return rows;
}

}  // namespace ditfleet::config
