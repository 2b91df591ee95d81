// The models that may be asked for. It comes from the configuration (models.NAME…), not from the workers
// that happen to be alive, so that a job for a model waits while none is up.
#pragma once

#include <map>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::job {

// What a request for this model may contain and what it gets where it says nothing.
struct ModelEntry {
  std::string name;
  std::string dir;  // diffusers folder; may not exist on the coordinator's host
  std::string kind = "flux";
  int size_multiple = 16;  // width and height must be multiples (VAE factor × 2)
  int min_side = 16, max_side = 2048;
  long max_pixels = 2048L * 2048L;
  int max_steps = 200;
  int max_sequence_length_limit = 512;
  bool guidance_embeds = true;  // FLUX.1-dev; schnell ignores guidance_scale
  // Defaults, from the folder's ditfleet.json where there is one, else diffusers' FluxPipeline's.
  int width = 1024, height = 1024;
  int num_inference_steps = 28;
  double guidance_scale = 3.5;
  double true_cfg_scale = 1.0;
  bool has_negative_prompt = false;
  std::string negative_prompt;
  int max_sequence_length = 512;
};

// Ordered by name; the configured default model is `default_model`.
struct Catalogue {
  std::map<std::string, ModelEntry> models;
  std::string default_model;
};

// Reads what the folder says (model_index.json, vae/config.json, transformer/config.json, ditfleet.json).
// kNotFound or kDataCorrupt names the file. Blocks on the disk.
Result<ModelEntry> read_model_entry(const std::string& name, const std::string& dir);

}  // namespace ditfleet::job
