#include "shared/config/edit.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <utility>

#include "shared/config/sources.h"
#include "shared/core/text.h"

namespace ditfleet::config {
namespace {

std::string emitted(const std::string& name, const ModelSetting& model, YAML::EMITTER_MANIP format) {
  YAML::Emitter out;
  out.SetMapFormat(format);
  out << YAML::BeginMap << YAML::Key << name << YAML::Value;
  emit_model(out, model);
  out << YAML::EndMap;
  return out.c_str();
}

std::string indented(const std::string& block, std::size_t by) {
  std::string out;
  for (const auto line : split(block, '\n')) out += std::string(by, ' ') + std::string(line) + "\n";
  return out;
}

class Text {
 public:
  explicit Text(const std::string& text) : text_(text) {}

  std::size_t line(const YAML::Mark& mark) const {
    std::size_t at = 0;
    for (int i = 0; i < mark.line; ++i) at = std::min(text_.find('\n', at), text_.size() - 1) + 1;
    return at;
  }
  std::size_t at(const YAML::Mark& mark) const { return line(mark) + static_cast<std::size_t>(mark.column); }
  // Where the entry before `end`, whose key is in this column, ends. Blank lines and comments that are not indented
  // more belong to what follows.
  std::size_t end_of_entry(std::size_t end, std::size_t column) const {
    while (end > 0) {
      const auto before = end >= 2 ? text_.rfind('\n', end - 2) : text_.npos;
      const std::size_t begin = before == text_.npos ? 0 : before + 1;
      const auto first = text_.find_first_not_of(" \t\r\n", begin);
      if (first < end && (text_[first] != '#' || first - begin > column)) break;
      end = begin;
    }
    return end;
  }
  // With `more` in place of [from, to), on lines of its own.
  std::string with_lines(std::size_t from, std::size_t to, const std::string& more) const {
    return text_.substr(0, from) + (from > 0 && text_[from - 1] != '\n' ? "\n" : "") + more + text_.substr(to);
  }

 private:
  const std::string& text_;
};

// The text with the entry, if the layout is one of those that people write. The caller checks the result.
std::string inserted(const std::string& yaml, const std::string& name, const ModelSetting& model, bool& taken) {
  const Text text(yaml);
  const YAML::Node root = YAML::Load(yaml);
  YAML::Node key, models;
  std::size_t end = yaml.size();  // of models
  for (const auto& member : root) {
    if (!key.IsNull()) {
      end = text.line(member.first.Mark());
      break;
    }
    if (member.first.IsScalar() && member.first.Scalar() == "models") {
      key.reset(member.first);
      models.reset(member.second);
    }
  }
  const std::string block = model_yaml(name, model);
  if (key.IsNull()) return text.with_lines(end, end, (yaml.empty() ? "" : "\n") + ("models:\n" + indented(block, 2)));
  if (!models.IsMap() || models.size() == 0) {
    const auto line_end = std::min(yaml.find('\n', text.at(key.Mark())), yaml.size() - 1) + 1;
    std::string made = text.with_lines(line_end, line_end, indented(block, 2));
    if (auto open = text.at(models.Mark()), close = made.find('}', open); models.IsMap() && close < line_end) {
      while (made[open - 1] == ' ') --open;
      made.erase(open, close + 1 - open);
    }
    return made;
  }
  // Entries begin with their keys. A new one comes last in a block, and first in {…}.
  const bool flow = models.Style() == YAML::EmitterStyle::Flow;
  const YAML::Mark first = models.begin()->first.Mark();
  const auto column = static_cast<std::size_t>(first.column);
  std::size_t from = flow ? text.at(first) : text.end_of_entry(end, column), to = from;
  bool last = false;
  for (auto member = models.begin(); member != models.end() && !taken; ++member) {
    if (!member->first.IsScalar() || member->first.Scalar() != name) continue;
    taken = true;
    const YAML::Mark own = member->first.Mark();
    auto next = member;
    last = ++next == models.end();
    from = flow ? text.at(own) : text.line(own);
    if (flow)
      to = last ? yaml.rfind('}', end - 1) : text.at(next->first.Mark());
    else
      to = text.end_of_entry(last ? end : text.line(next->first.Mark()), column);
  }
  if (!flow) return text.with_lines(from, to, indented(block, column));
  const std::string whole = emitted(name, model, YAML::Flow);
  return yaml.substr(0, from) + whole.substr(1, whole.size() - 2) + (last ? "" : ", ") +
         yaml.substr(std::min(to, yaml.size()));
}

using Values = std::vector<std::pair<std::vector<std::string>, std::string>>;

Values values_of(const std::vector<Assignment>& assignments) {
  Values values;
  for (const Assignment& a : assignments) values.emplace_back(a.path, a.value + a.problem);
  std::sort(values.begin(), values.end());
  return values;
}

}  // namespace

void emit_model(YAML::Emitter& out, const ModelSetting& model) {
  out << YAML::BeginMap << YAML::Key << "path" << YAML::Value << YAML::DoubleQuoted << model.path;
  for (const auto& [component, file] : model.files)
    out << YAML::Key << component << YAML::Value << YAML::DoubleQuoted << file;
  if (model.quantize.contains("*"))
    out << YAML::Key << "quantize" << YAML::Value << "auto";
  else if (!model.quantize.empty())
    out << YAML::Key << "quantize" << YAML::Value << model.quantize;
  if (!model.vae_dtype.empty()) out << YAML::Key << "vae_dtype" << YAML::Value << model.vae_dtype;
  if (!model.attention.empty()) out << YAML::Key << "attention" << YAML::Value << model.attention;
  if (model.objective_s > 0) out << YAML::Key << "objective_s" << YAML::Value << model.objective_s;
  out << YAML::EndMap;
}

std::string model_yaml(const std::string& name, const ModelSetting& model) {
  return emitted(name, model, YAML::Block) + "\n";
}

Result<std::string> with_model(const std::string& text, const std::string& file, const std::string& name,
                               const ModelSetting& model, bool replace) {
  auto expected = from_yaml(text, file);
  if (!expected) return expected.error();
  bool taken = false;
  std::string made = inserted(text, name, model, taken);
  if (taken && !replace)
    return Error{Code::kConflict,
                 file + " has a model '" + name + "'; choose another name, or replace it with --replace"};
  const std::string entry = "models:\n" + indented(model_yaml(name, model), 2);
  std::erase_if(*expected,
                [&](const Assignment& a) { return a.path.size() > 1 && a.path[0] == "models" && a.path[1] == name; });
  if (const auto own = from_yaml(entry, file)) expected->insert(expected->end(), own->begin(), own->end());
  // Aliases, multi-line values and the like: nothing else may have changed.
  const auto read = from_yaml(made, file);
  if (!read || values_of(*read) != values_of(*expected))
    return invalid_argument(file + ": cannot insert the model into this layout; write it by hand:\n" + entry);
  return made;
}

}  // namespace ditfleet::config
