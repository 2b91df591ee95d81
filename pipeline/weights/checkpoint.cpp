#include "pipeline/weights/checkpoint.h"

#include <array>
#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/json.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

// diffusers prefers an index to a single file of the same name, transformers the single file; a folder that
// has both for one name is only ever met half-converted, and the index is the safer reading.
constexpr std::array<const char*, 2> kStems = {"diffusion_pytorch_model", "model"};

Error corrupt(const std::string& path, const std::string& what) {
  return Error{Code::kDataCorrupt, "[checkpoint] " + path + ": " + what};
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

// tensor → shard, in the index's order.
Result<std::vector<std::pair<std::string, std::string>>> read_index(const std::string& path) {
  const Result<std::string> text = read_file(path);
  if (!text) return text.error();
  const Result<json::value> value = parse_json(*text);
  if (!value) return corrupt(path, value.error().message);
  const json::object* object = value->if_object();
  const json::value* map_value = object == nullptr ? nullptr : object->if_contains("weight_map");
  const json::object* map = map_value == nullptr ? nullptr : map_value->if_object();
  if (map == nullptr)
    return corrupt(path, "it must be an object with the object weight_map (tensor name → file name)");
  std::vector<std::pair<std::string, std::string>> entries;
  for (const auto& [name, file] : *map) {
    const json::string* file_name = file.if_string();
    if (file_name == nullptr)
      return corrupt(path, "weight_map names no file for tensor \"" + std::string(name) + "\"");
    if (!is_plain_file_name(*file_name)) {
      return corrupt(path, "weight_map puts tensor \"" + std::string(name) + "\" into \"" +
                               std::string(*file_name) + "\"; shards must lie in the same folder");
    }
    entries.emplace_back(name, *file_name);
  }
  if (entries.empty()) return corrupt(path, "weight_map is empty");
  return entries;
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& dir) {
  Checkpoint checkpoint;
  checkpoint.dir_ = dir;
  std::error_code ignored;
  if (!fs::is_directory(dir, ignored)) {
    return Error{Code::kNotFound, "[checkpoint] there is no folder " + dir};
  }
  for (const char* stem : kStems) {
    const std::string single = dir + "/" + stem + ".safetensors";
    const std::string index = single + ".index.json";
    if (fs::exists(index, ignored)) {
      const auto entries = read_index(index);
      if (!entries) return entries.error();
      std::map<std::string, std::size_t> shard_of;  // file name → position in files_
      for (const auto& [name, file_name] : *entries) {
        const auto [it, is_new] = shard_of.emplace(file_name, checkpoint.files_.size());
        if (is_new) {
          Result<SafetensorsFile> file = SafetensorsFile::open(dir + "/" + file_name);
          if (!file) {
            if (file.error().code != Code::kNotFound) return file.error();
            return Error{Code::kNotFound, "[checkpoint] " + index + " names the shard " + file_name +
                                              ", which is not in the folder"};
          }
          checkpoint.files_.push_back(std::move(*file));
        }
        const SafetensorsFile& file = checkpoint.files_[it->second];
        const Result<TensorView> view = file.tensor(name);
        if (!view) {
          return corrupt(index,
                         "it says tensor \"" + name + "\" is in " + file_name + ", which does not have it");
        }
        checkpoint.tensors_.emplace(name, *view);
      }
      // Tensors that the index forgot are loaded too, as diffusers does.
      for (const SafetensorsFile& file : checkpoint.files_) {
        for (const TensorEntry& entry : file.entries())
          checkpoint.tensors_.emplace(entry.name, file.view(entry));
      }
      return checkpoint;
    }
    if (fs::exists(single, ignored)) {
      Result<SafetensorsFile> file = SafetensorsFile::open(single);
      if (!file) return file.error();
      for (const TensorEntry& entry : file->entries())
        checkpoint.tensors_.emplace(entry.name, file->view(entry));
      checkpoint.files_.push_back(std::move(*file));
      return checkpoint;
    }
  }
  return Error{Code::kNotFound,
               "[checkpoint] " + dir +
                   " has no weights: diffusion_pytorch_model.safetensors, model.safetensors, or one of "
                   "them with .index.json and its shards"};
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, view] : tensors_) names.push_back(name);
  return names;
}

Result<TensorView> Checkpoint::tensor(std::string_view name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return Error{Code::kNotFound,
                 "[checkpoint] the weights in " + dir_ + " have no tensor \"" + std::string(name) + "\""};
  }
  return it->second;
}

std::uint64_t Checkpoint::bytes() const {
  std::uint64_t total = 0;
  for (const auto& [name, view] : tensors_) total += view.bytes.size();
  return total;
}

}  // namespace ditfleet::pipeline
