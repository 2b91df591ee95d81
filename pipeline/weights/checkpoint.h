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
  // "model.safetensors.index.fp16.json"). Opens every file and checks every header; reads no weights.
  // kNotFound: none of these files exists (the message lists them), or a shard is missing.
  // kDataCorrupt: the errors of SafetensorsFile::open; an index that is malformed, refers to a file outside the folder,
  // or assigns a tensor to a shard that lacks it.
  static Result<Checkpoint> open(const std::string& dir, Library library);

  const std::string& dir() const { return dir_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // kNotFound: the message contains folder and tensor.
  Result<StoredTensor> tensor(std::string_view name) const;
  std::uint64_t bytes() const;  // of all tensors

 private:
  std::string dir_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace ditfleet::pipeline
