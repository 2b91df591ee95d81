// The weights of one component of a diffusers folder (transformer/, vae/, text_encoder/ …): one safetensors
// file, or shards listed by an index.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// The library that the folder belongs to. If several files exist, Checkpoint opens the one that this library would
// load: diffusers prefers diffusion_pytorch_model and the index, transformers prefers model and the single file.
enum class Library { kDiffusers, kTransformers };

// A tensor that has not been read, and the open file that owns the entry.
struct StoredTensor {
  SafetensorsFile file;
  const TensorEntry* entry;
};

// Movable; const members are thread-safe.
class Checkpoint {
 public:
  // `dir` must contain diffusion_pytorch_model.safetensors or model.safetensors, or one of these names with .index.json
  // and the shards. If none exists, a single variant is accepted ("model.fp16.safetensors",
  // "model.safetensors.index.fp16.json"), or else a GGUF file. Opens every file and checks every header; reads no
  // weights. kNotFound: none of these files exists (the message lists them), or a shard is missing. kDataCorrupt: the
  // errors of SafetensorsFile::open; an index that is malformed, refers to a file outside the folder, or assigns a
  // tensor to a shard that lacks it.
  static Result<Checkpoint> open(const std::string& dir, Library library);

  // Opens one safetensors or GGUF file, such as a checkpoint of several components. If names start with one of
  // `prefixes`, only tensors with the first such prefix belong to the component, and their names here lack it;
  // "" is the prefix of all. Otherwise all tensors belong to it but those of a VAE or text encoders. Errors: those of
  // SafetensorsFile::open.
  static Result<Checkpoint> open_file(const std::string& path, const std::vector<std::string_view>& prefixes);

  const std::string& dir() const { return dir_; }  // or the path given to open_file()
  // Of all files; of keys that several files have, one value.
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  // A tensor's or layer's name in the files' metadata as a name here.
  std::string without_prefix(std::string name) const {
    return name.starts_with(prefix_) ? name.substr(prefix_.size()) : name;
  }
  std::vector<std::string> names() const;  // sorted
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // kNotFound: the message contains folder and tensor.
  Result<StoredTensor> tensor(std::string_view name) const;
  // Extent `at` of the first of these tensors that exists; -1: none exists, or it has fewer extents.
  std::int64_t extent(std::initializer_list<std::string_view> names, std::size_t at) const;
  std::uint64_t bytes() const;  // of all tensors
  // The first tensor with a NaN or an infinity, by name; empty: none. Reads all tensors. Errors: those of
  // SafetensorsFile::read().
  Result<std::string> not_finite() const;

 private:
  std::string dir_;
  void add_metadata(const SafetensorsFile& file);

  std::string prefix_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace ditfleet::pipeline
