// The weights of one component of a diffusers folder (transformer/, vae/, text_encoder/ …): one safetensors
// file, or shards listed by an index.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// The library whose folder it is. If several files exist, the one that this library would load wins: diffusers prefers
// diffusion_pytorch_model and the index, transformers prefers model and the single file.
enum class Library { kDiffusers, kTransformers };

// Movable; const members may be called from any thread. Views are valid while it lives.
class Checkpoint {
 public:
  // `dir` holds diffusion_pytorch_model.safetensors or model.safetensors, or one of these names with .index.json and
  // its shards. Otherwise it may hold a single variant ("model.fp16.safetensors", "model.safetensors.index.fp16.json").
  // Maps every file and checks every header; reads no weights.
  // kNotFound: none of these files exists (the message lists them), or a shard is missing.
  // kDataCorrupt: the errors of SafetensorsFile::open; a malformed index, one that leaves the folder, or one that names
  // a shard without the tensor.
  static Result<Checkpoint> open(const std::string& dir, Library library);

  const std::string& dir() const { return dir_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // kNotFound names the folder and the tensor.
  Result<TensorView> tensor(std::string_view name) const;
  std::uint64_t bytes() const;  // of all tensors

 private:
  std::string dir_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, TensorView, std::less<>> tensors_;
};

}  // namespace ditfleet::pipeline
