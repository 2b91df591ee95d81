#include "shared/config/sources.h"

#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "shared/config/lists.h"
#include "shared/config/options.h"
#include "shared/core/bytes.h"
#include "shared/core/nearest_name.h"

namespace ditfleet::config {
namespace {

constexpr std::size_t kMaxYamlBytes = 1u << 20;

// "file:12"; yaml-cpp counts lines from 0 and uses -1 for nodes that are not from a text.
std::string place(const std::string& file, const YAML::Mark& mark) {
  return mark.line < 0 ? file : file + ":" + std::to_string(mark.line + 1);
}

class YamlReader {
 public:
  explicit YamlReader(const std::string& file) : file_(file) {}

  // The assignments below `path`.
  std::vector<Assignment> read(const YAML::Node& node, const std::vector<std::string>& path = {}) {
    walk(node, path);
    return std::move(out_);
  }

 private:
  void wrong(const YAML::Node& node, const std::string& message) {
    out_.push_back({{""}, {}, place(file_, node.Mark()), message});
  }

  static bool is_list(const std::vector<std::string>& path) {
    return path == std::vector<std::string>{"keys"} || (path.size() == 2 && is_list_path(path));
  }

  void walk(const YAML::Node& node, const std::vector<std::string>& path) {
    const bool deep = is_list_path(path) || (!path.empty() && path[0] == "models");
    if (path.size() > (deep ? 4u : 3u)) return wrong(node, "'" + joined(path) + "' is nested too deep");
    if (node.IsNull() || (node.IsMap() && node.size() == 0)) return;  // a file or a section with nothing in it
    if (path.empty() && !node.IsMap())
      return wrong(
          node, "the file must be a map of sections, such as \"gateway:\" and below it \"  listen: 127.0.0.1:8780\"");
    if (node.IsScalar()) {
      out_.push_back({path, node.Scalar(), place(file_, node.Mark())});
      return;
    }
    if (node.IsSequence()) {
      if (!is_list(path)) {
        const std::string near = nearest_name(joined(path), {"keys", "compile.rules", "worker.warmup_classes"});
        return wrong(node, "'" + joined(path) +
                               "' is a list; only keys, compile.rules and worker.warmup_classes may be lists" +
                               (near.empty() ? "" : "; did you mean '" + near + "'?"));
      }
      for (std::size_t i = 0; i < node.size(); ++i) {
        if (!node[i].IsMap() || node[i].size() == 0)
          return wrong(node[i], "an entry of " + joined(path) + " must be a map" +
                                    (path.size() == 1 ? " with tenant and sha256" : ""));
        auto below = path;
        below.push_back(std::to_string(i));
        walk(node[i], below);
      }
      return;
    }
    if (!node.IsMap()) return wrong(node, "'" + joined(path) + "' has no value");
    if (path == std::vector<std::string>{"keys"}) return wrong(node, "keys must be a list of {tenant, sha256}");
    if (is_list(path)) return wrong(node, joined(path) + " must be a list of maps, such as [{…}, {…}]");
    std::set<std::string> seen;
    for (const auto& member : node) {
      const std::string name = member.first.IsScalar() ? member.first.Scalar() : std::string();
      if (!member.first.IsScalar()) {
        wrong(member.first, "a key must be plain text");
      } else if (!is_valid_utf8(name)) {
        wrong(member.first, "a key is not valid UTF-8");
      } else if (!seen.insert(name).second) {
        wrong(member.first, "'" + name + "' is given twice");
      } else {
        auto below = path;
        below.push_back(name);
        walk(member.second, below);
      }
    }
  }

  static std::string joined(const std::vector<std::string>& path) { return Assignment{path, {}, {}}.key(); }

  const std::string& file_;
  std::vector<Assignment> out_;
};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return text;
}

// "worker_count" means worker.count; it is refused with a suggestion of the correct name.
bool means_option(const std::string& key) {
  return std::any_of(options().begin(), options().end(), [&](const Option& option) {
    std::string name(option.key);
    std::replace(name.begin(), name.end(), '.', '_');
    return name == key;
  });
}

}  // namespace

std::string Assignment::key() const {
  std::string text;
  for (const std::string& part : path) text += (text.empty() ? "" : ".") + part;
  return text;
}

std::vector<std::string> split_key(std::string_view key) {
  const auto dot = key.find('.');
  if (dot == std::string_view::npos) return {std::string(key)};
  std::string section(key.substr(0, dot)), rest(key.substr(dot + 1));
  if (section != "models" && section != "tenants") return {section, rest};
  // Names may contain dots.
  if (const auto at = rest.rfind(".quantize."); section == "models" && at != std::string::npos && at > 0)
    return {section, rest.substr(0, at), "quantize", rest.substr(at + 10)};
  std::vector<std::string> leaves{".path", ".quantize", ".vae_dtype", ".attention", ".weight"};
  for (const char* component : kFileComponents) leaves.push_back(std::string(".") + component);
  for (const std::string& leaf : leaves)
    if ((leaf == ".weight") == (section == "tenants") && rest.size() > leaf.size() && rest.ends_with(leaf))
      return {section, rest.substr(0, rest.size() - leaf.size()), leaf.substr(1)};
  return {section, rest};
}

namespace {

// Finds where a document's content begins.
class ContentStart final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override { begun_ = false; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override { note(mark); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { note(mark); }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t, const std::string&) override { note(mark); }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    note(mark);
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
    note(mark);
  }
  void OnMapEnd() override {}
  YAML::Mark at;

 private:
  void note(const YAML::Mark& mark) {
    if (!std::exchange(begun_, true)) at = mark;
  }
  bool begun_ = false;
};

// Not YAML::LoadAll, which returns an endless sequence of empty documents for text such as ",".
std::optional<YAML::Mark> second_document(std::string_view text) {
  std::istringstream in{std::string(text)};
  YAML::Parser parser(in);
  ContentStart start;
  if (!parser.HandleNextDocument(start) || !parser.HandleNextDocument(start)) return std::nullopt;
  return start.at;
}

}  // namespace

Result<std::vector<Assignment>> from_yaml(std::string_view text, const std::string& file) {
  if (text.size() > kMaxYamlBytes)
    return invalid_argument(file + ": has " + std::to_string(text.size()) + " bytes; the limit is " +
                            std::to_string(kMaxYamlBytes));
  if (!is_valid_utf8(text)) return invalid_argument(file + ": is not valid UTF-8");
  try {
    if (const auto second = second_document(text))
      return invalid_argument(place(file, *second) +
                              ": a second YAML document begins here; the file must have only one");
    return YamlReader(file).read(YAML::Load(std::string(text)));
  } catch (const YAML::Exception& e) {
    // yaml-cpp may quote a single byte of a multi-byte character.
    std::string why = e.msg;
    if (!is_valid_utf8(why)) std::erase_if(why, [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
    return invalid_argument(place(file, e.mark) + ": not valid YAML: " + why);
  }
}

Result<std::vector<Assignment>> from_list_text(const Assignment& list) {
  if (list.value.size() > kMaxYamlBytes || !is_valid_utf8(list.value))
    return invalid_argument(list.where + ": " + list.key() + " is too long or not valid UTF-8");
  try {
    const YAML::Node root = YAML::Load(list.value);
    if (root.IsNull()) return std::vector<Assignment>{};
    if (!root.IsSequence())
      return invalid_argument(list.where + ": " + list.key() + " must be a list of maps, such as [{…}, {…}]");
    auto parts = YamlReader(list.where).read(root, list.path);
    for (Assignment& part : parts) part.where = list.where;
    return parts;
  } catch (const YAML::Exception& e) {
    return invalid_argument(list.where + ": " + list.key() +
                            " is not a YAML list; it must be a list of maps, such as [{…}, {…}]");
  }
}

Result<std::vector<Assignment>> from_sets(const std::vector<std::string>& sets) {
  std::vector<Assignment> out;
  for (const std::string& set : sets) {
    const auto equals = set.find('=');
    if (equals == std::string::npos || equals == 0) {
      return invalid_argument("--set '" + set + "' must be key=value, such as worker.count=2");
    }
    const std::string key = set.substr(0, equals);
    out.push_back({split_key(key), set.substr(equals + 1), "--set " + key});
  }
  return out;
}

std::vector<Assignment> from_environment() {
  constexpr std::string_view kPrefix = "DITFLEET_";
  std::vector<Assignment> out;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text(*variable);
    const auto equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    const std::string name(text.substr(0, equals));
    std::string key = lower(name.substr(kPrefix.size()));
    const auto section_end = key.find("__");
    if (section_end == std::string::npos) {
      if (!find_option(key) && !means_option(key)) continue;  // DITFLEET_LIBTORCH and the like
    } else {
      for (auto at = key.find("__"); at != std::string::npos; at = key.find("__", at)) key.replace(at, 2, ".");
    }
    out.push_back({split_key(key), std::string(text.substr(equals + 1)), name});
  }
  // Makes the order of errors deterministic.
  std::sort(out.begin(), out.end(), [](const Assignment& a, const Assignment& b) { return a.where < b.where; });
  return out;
}

}  // namespace ditfleet::config
