// The weights of one component of a diffusers folder (transformer/, vae/, text_encoder/ …): one safetensors
// file, or shards listed by an index.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/weights/safetensors.h"

namespace ditfleet::pipeline {

// Whose folder it is, and so which file counts where there are several, as that library chooses: diffusers takes
// diffusion_pytorch_model and of one name the index, transformers model and of one name the single file.
enum class Library { kDiffusers, kTransformers };

// Movable; const members may be called from any thread. Views are valid while it lives.
class Checkpoint {
 public:
  // `dir` holds diffusion_pytorch_model.safetensors or model.safetensors, or one of these names with
  // .index.json and its shards beside it; or, if it has none of them, one variant ("model.fp16.safetensors",
  // "model.safetensors.index.fp16.json"). Maps every file and checks every header; reads no weights.
  // kNotFound: none of the names is there (the message lists them), or a shard is missing.
  // kDataCorrupt: what SafetensorsFile::open refuses; an index that is not what it should be, leaves the
  // folder, or says a tensor is in a shard that lacks it.
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
