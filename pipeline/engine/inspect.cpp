#include <algorithm>
#include <map>
#include <set>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/weights/gguf.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"
#include "shared/safetensors/adapter_keys.h"

namespace ditfleet::pipeline {
namespace {

// What is before `name` at the end of a tensor's name ("model.diffusion_model."); nothing if no tensor has it.
std::optional<std::string> prefix_of(const std::vector<std::string>& names, std::string_view name) {
  std::optional<std::string> found;
  for (const std::string& one : names) {
    if (one == name) return std::string();
    if (!found && one.size() > name.size() && one.ends_with(name) && one[one.size() - name.size() - 1] == '.')
      found = one.substr(0, one.size() - name.size());
  }
  return found;
}

// "blocks.7.ffn.0.weight is missing": what most blocks of a list have and one lacks. Empty: nothing. What is directly
// below a number is of a step: text_embedding has steps 0 and 2, adaLN_modulation 1.
std::string missing_in_blocks(const std::vector<std::string>& names) {
  std::map<std::string, std::map<std::int64_t, std::set<std::string>>> lists;  // by what is before the number
  for (const std::string& name : names)
    for (auto at = name.find('.'); at != name.npos; at = name.find('.', at + 1)) {
      const auto end = name.find('.', at + 1);
      if (end == name.npos) break;
      if (const auto number = number_of(name.substr(at + 1, end - at - 1), std::int64_t{0}, std::int64_t{9999})) {
        lists[name.substr(0, at + 1)][*number].insert(name.substr(end));
        break;
      }
    }
  for (const auto& [list, blocks] : lists) {
    std::map<std::string, std::size_t> counts;
    for (const auto& [number, parts] : blocks)
      for (const std::string& part : parts)
        if (part.find('.', 1) != part.npos) ++counts[part];
    const std::int64_t last = blocks.rbegin()->first;
    for (std::int64_t i = 0; i <= last; ++i)
      for (const auto& [part, count] : counts)
        if (const auto block = blocks.find(i);
            2 * count > blocks.size() && (block == blocks.end() || !block->second.contains(part)))
          return list + std::to_string(i) + part + " is missing";
  }
  return {};
}

// "304 in BF16, 2 in F32": tensors by type, the most frequent first.
std::string types_of(const Checkpoint& file) {
  std::map<std::string, int> counts;
  for (const std::string& name : file.names()) {
    const TensorEntry& entry = *unwrap(file.tensor(name)).entry;
    ++counts[std::string(entry.blocks != 0 ? gguf_blocks(entry.blocks).name : dtype_name(entry.dtype))];
  }
  std::vector<std::pair<int, std::string>> sorted;
  for (const auto& [type, count] : counts) sorted.emplace_back(-count, type);
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  for (const auto& [count, type] : sorted) text += (text.empty() ? "" : ", ") + std::to_string(-count) + " in " + type;
  return text;
}

std::vector<std::string> keys_of(const Family& family, const Component& one) {
  std::vector<std::string> keys{std::string(one.name)};
  for (const Component& other : family.components)
    if (other.name == std::string(one.name) + "_2" && other.class_name == one.class_name) keys.emplace_back(other.name);
  return keys;
}

// What is before the names of the component's tensors; nothing if the file has none of known_by.
std::optional<std::string> prefix_of(const std::vector<std::string>& names, const Component& one) {
  for (const std::string_view name : one.known_by) {
    if (auto prefix = prefix_of(names, name)) return prefix;
    if (!name.ends_with(".weight")) continue;
    const std::string module(name.substr(0, name.size() - 7));
    if (auto prefix = prefix_of(names, module + "._weight_qdata")) return prefix;  // as torchao stores it
  }
  return {};
}

// "x-00001-of-00004.safetensors".
bool is_shard(std::string_view path) {
  constexpr std::string_view kEnd = "-00000-of-00000.safetensors";
  if (path.size() < kEnd.size()) return false;
  const std::string_view end = path.substr(path.size() - kEnd.size());
  return std::equal(end.begin(), end.end(), kEnd.begin(),
                    [](char c, char right) { return right == '0' ? c >= '0' && c <= '9' : c == right; });
}

// The components in the file, or why there is none.
void find_components(const Families& families, const std::string& path, const std::vector<std::string>& names,
                     FileReport& report) {
  std::string unsupported;
  for (const Family* family : families)
    for (const Component& one : family->components) {
      const auto prefix = prefix_of(names, one);
      if (!prefix) continue;
      const Checkpoint part = unwrap(Checkpoint::open_file(path, {*prefix}));
      const auto [text, problem, known] = family->about(one.name, part);
      if (text.empty()) continue;
      const std::string missing = one.name == "vae" ? "" : missing_in_blocks(part.names());
      if (!problem.empty())
        unsupported = text + ": " + problem;
      else if (!missing.empty())
        report.problem = text + ": " + missing;
      else
        report.components.push_back(
            {std::string(family->description->name), text + " (" + types_of(part) + ")", keys_of(*family, one), known});
    }
  if (report.components.empty() && report.problem.empty()) report.problem = unsupported;
}

}  // namespace

Result<FileReport> Engine::inspect(const Families& families, const std::string& path) {
  return result_of("inspect " + path, [&] {
    const std::vector<std::string> names = unwrap(Checkpoint::open_file(path, {""})).names();
    if (is_shard(path))
      return FileReport{.problem = "it is one of several shards; a model's folder has all of them and their index"};
    std::vector<std::string> of_transformers;  // VAEs of any model have similar names
    std::copy_if(names.begin(), names.end(), std::back_inserter(of_transformers),
                 [](const std::string& name) { return name.find("encoder.down_blocks.") == name.npos; });
    if (const auto other = safetensors::other_model_of(of_transformers); !other.empty())
      return FileReport{.problem = "weights of " + std::string(other) + ", which is not supported"};
    FileReport report;
    find_components(families, path, names, report);
    if (!report.components.empty() || !report.problem.empty()) return report;
    const bool adapts = std::any_of(names.begin(), names.end(), [](const std::string& name) {
      return safetensors::parse_adapter_key(name).kind != safetensors::AdapterKind::kUnknown;
    });
    if (!adapts)
      report.problem = names.empty() ? "it has no tensors"
                                     : "it is neither a component of a supported model nor an adapter: its " +
                                           std::to_string(names.size()) + " tensors are such as " +
                                           excerpt(names[names.size() / 2], 100);
    for (const Family* family : families)
      if (adapts && safetensors::have_part(names, family->description->adapter_parts))
        report.adapter_of.emplace_back(family->description->name);
    return report;
  });
}

}  // namespace ditfleet::pipeline
