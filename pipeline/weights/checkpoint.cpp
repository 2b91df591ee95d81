#include "pipeline/weights/checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <span>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/safetensors/values.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

// Beside a transformer in one file.
constexpr std::array<std::string_view, 4> kOtherComponents = {"vae.", "text_encoders.", "first_stage_model.",
                                                              "cond_stage_model."};
constexpr std::array<const char*, 2> kStems = {"diffusion_pytorch_model", "model"};

Error corrupt(const std::string& path, const std::string& what) {
  return Error{Code::kDataCorrupt, "[checkpoint] " + path + ": " + what};
}

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

struct Weights {
  std::string path;
  bool is_index = false;
};

// The word between `begin` and `end`; empty if the name has another form.
std::string_view between(std::string_view name, std::string_view begin, std::string_view end) {
  if (name.size() <= begin.size() + end.size() || !name.starts_with(begin) || !name.ends_with(end)) return {};
  const std::string_view word = name.substr(begin.size(), name.size() - begin.size() - end.size());
  return word.find_first_of(".-") == std::string_view::npos ? word : std::string_view();  // shards have "-00001-of-"
}

// The only variant in a folder without plain files, as left by downloading just "fp16", is the model.
Result<Weights> find_variant(const std::string& dir) {
  std::map<std::string, Weights> variants;  // by the variant's name
  std::string pickle, gguf;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(dir, ignored)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".gguf")) gguf = name;
    if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".ckpt")) pickle = name;
    for (const char* stem : kStems) {
      const std::string index = std::string(stem) + ".safetensors.index.", single = std::string(stem) + ".";
      if (const auto word = between(name, index, ".json"); !word.empty())
        variants[std::string(word)] = {entry.path(), true};
      else if (const auto other = between(name, single, ".safetensors"); !other.empty())
        variants.try_emplace(std::string(other), Weights{entry.path()});
    }
  }
  if (variants.size() == 1) return variants.begin()->second;
  if (variants.empty() && !gguf.empty()) return Weights{dir + "/" + gguf};
  std::string message = "[checkpoint] " + dir +
                        " has no weights: diffusion_pytorch_model.safetensors, model.safetensors, or one of them with "
                        ".index.json and its shards";
  if (!variants.empty()) {
    message += "; it has several variants (";
    for (const auto& [name, weights] : variants) message += (name == variants.begin()->first ? "" : ", ") + name;
    message += "): keep one, or rename one";
  } else if (!pickle.empty()) {
    message += "; " + pickle + " is a pickle, which may run code when it is read: convert it to safetensors";
  }
  return Error{Code::kNotFound, message};
}

Result<Weights> find_weights(const std::string& dir, Library library) {
  std::error_code ignored;
  if (!fs::is_directory(dir, ignored)) return Error{Code::kNotFound, "[checkpoint] no folder " + dir};
  auto stems = kStems;
  if (library == Library::kTransformers) std::reverse(stems.begin(), stems.end());
  for (const char* stem : stems) {
    const std::string single = dir + "/" + stem + ".safetensors";
    const std::string index = single + ".index.json";
    const bool whole = fs::exists(single, ignored), sharded = fs::exists(index, ignored);
    if (sharded && !(whole && library == Library::kTransformers)) return Weights{index, true};
    if (whole) return Weights{single, false};
  }
  return find_variant(dir);
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
  if (map == nullptr) return corrupt(path, "it must be an object with the object weight_map (tensor name → file name)");
  std::vector<std::pair<std::string, std::string>> entries;
  for (const auto& [name, file] : *map) {
    const json::string* file_name = file.if_string();
    if (file_name == nullptr) return corrupt(path, "weight_map has no file for tensor \"" + std::string(name) + "\"");
    if (!is_plain_file_name(*file_name)) {
      return corrupt(path, "weight_map puts tensor \"" + std::string(name) + "\" into \"" + std::string(*file_name) +
                               "\"; shards must be in the same folder");
    }
    entries.emplace_back(name, *file_name);
  }
  if (entries.empty()) return corrupt(path, "weight_map is empty");
  return entries;
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& dir, Library library) {
  Checkpoint checkpoint;
  checkpoint.dir_ = dir;
  const auto weights = find_weights(dir, library);
  if (!weights) return weights.error();
  if (!weights->is_index) {
    Result<SafetensorsFile> file = SafetensorsFile::open(weights->path);
    if (!file) return file.error();
    for (const TensorEntry& entry : file->entries())
      checkpoint.tensors_.emplace(entry.name, StoredTensor{*file, &entry});
    checkpoint.add_metadata(*file);
    return checkpoint;
  }
  const std::string& index = weights->path;
  const auto entries = read_index(index);
  if (!entries) return entries.error();
  std::map<std::string, SafetensorsFile> shards;  // by file name
  for (const auto& [name, file_name] : *entries) {
    auto shard = shards.find(file_name);
    if (shard == shards.end()) {
      Result<SafetensorsFile> file = SafetensorsFile::open(dir + "/" + file_name);
      if (!file) {
        if (file.error().code != Code::kNotFound) return file.error();
        return Error{Code::kNotFound,
                     "[checkpoint] " + index + " refers to the shard " + file_name + ", which is not in the folder"};
      }
      shard = shards.emplace(file_name, std::move(*file)).first;
    }
    const TensorEntry* entry = shard->second.find(name);
    if (!entry)
      return corrupt(index, "it assigns tensor \"" + name + "\" to " + file_name + ", which lacks this tensor");
    checkpoint.tensors_.emplace(name, StoredTensor{shard->second, entry});
  }
  // Like diffusers, also loads tensors that the index does not list.
  for (const auto& [file_name, file] : shards) {
    for (const TensorEntry& entry : file.entries()) checkpoint.tensors_.emplace(entry.name, StoredTensor{file, &entry});
    checkpoint.add_metadata(file);
  }
  return checkpoint;
}

Result<Checkpoint> Checkpoint::open_file(const std::string& path, const std::vector<std::string_view>& prefixes) {
  Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file) return file.error();
  Checkpoint checkpoint;
  checkpoint.dir_ = path;
  const auto has = [&](std::string_view prefix) {
    return std::any_of(file->entries().begin(), file->entries().end(),
                       [&](const TensorEntry& entry) { return entry.name.starts_with(prefix); });
  };
  const auto prefix = std::find_if(prefixes.begin(), prefixes.end(), has);
  const bool found = prefix != prefixes.end();
  if (found) checkpoint.prefix_ = *prefix;
  const auto belongs = [&](const std::string& name) {
    if (found) return name.starts_with(checkpoint.prefix_);
    return std::none_of(kOtherComponents.begin(), kOtherComponents.end(),
                        [&](std::string_view other) { return name.starts_with(other); });
  };
  for (const TensorEntry& entry : file->entries())
    if (belongs(entry.name))
      checkpoint.tensors_.emplace(checkpoint.without_prefix(entry.name), StoredTensor{*file, &entry});
  checkpoint.add_metadata(*file);
  return checkpoint;
}

void Checkpoint::add_metadata(const SafetensorsFile& file) {
  for (const auto& [key, value] : file.metadata()) metadata_.emplace(without_prefix(key), value);
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(tensors_.size());
  for (const auto& [name, stored] : tensors_) names.push_back(name);
  return names;
}

Result<StoredTensor> Checkpoint::tensor(std::string_view name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return Error{Code::kNotFound,
                 "[checkpoint] the weights in " + dir_ + " have no tensor \"" + std::string(name) + "\""};
  }
  return it->second;
}

std::int64_t Checkpoint::extent(std::initializer_list<std::string_view> names, std::size_t at) const {
  for (const std::string_view name : names)
    if (const auto it = tensors_.find(name); it != tensors_.end()) {
      const auto& shape = it->second.entry->shape;
      return at < shape.size() ? shape[at] : -1;
    }
  return -1;
}

std::uint64_t Checkpoint::bytes() const {
  std::uint64_t total = 0;
  for (const auto& [name, stored] : tensors_) total += stored.entry->end - stored.entry->begin;
  return total;
}

Result<std::string> Checkpoint::not_finite() const {
  constexpr std::uint64_t kChunk = 4 << 20;
  std::vector<std::byte> memory(kChunk);
  for (const auto& [name, stored] : tensors_) {
    const std::uint64_t size = stored.entry->end - stored.entry->begin;
    for (std::uint64_t begin = 0; begin < size; begin += kChunk) {
      const std::span chunk(memory.data(), static_cast<std::size_t>(std::min(kChunk, size - begin)));
      if (auto read = stored.file.read(*stored.entry, begin, chunk); !read) return read.error();
      if (safetensors::all_finite(stored.entry->dtype, chunk) == false) return name;
    }
  }
  return std::string();
}

}  // namespace ditfleet::pipeline
