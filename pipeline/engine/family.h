// A model family inside the pipeline: how one kind of diffusers pipeline is loaded, compiled ahead of time and run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/engine.h"
#include "pipeline/lora/adapter.h"
#include "pipeline/memory/model_memory.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {

struct LoadContext {
  ModelSource source;
  Placement placement;
  std::shared_ptr<region::RegionHost> regions;
  AdapterStore::Limits adapters;
  std::int64_t adapter_columns = 0;  // reserved beside each linear of the blocks; 0: none
  std::shared_ptr<DeviceMemory> memory;
};

// The functions throw Failure and what LibTorch throws. kNotFound and kDataCorrupt: the message contains the file and
// the problem.
struct Family {
  std::vector<std::string_view> class_names;  // _class_name in model_index.json
  std::unique_ptr<Model> (*load)(const LoadContext& context);
  // The programs that workers look up on one architecture. Reads only configuration files and headers.
  region::AheadPrograms (*programs)(const ModelSource& source, region::ElementType type, region::ArchFeatures arch,
                                    const region::CompileOptions& options);
  std::unique_ptr<Tokenizers> (*load_tokenizers)(const std::string& dir);
  // How a request would run, before the model is loaded. Reads only configuration files and headers. Null: unknown.
  PlanReport (*plan)(const LoadContext& context, const GenerationRequest& request) = nullptr;
};

// The family of the folder, according to its model_index.json. Throws Failure: kNotFound (no such file), kDataCorrupt
// (no family has its _class_name; the message lists the supported names).
const Family& family_of(const Families& families, const std::string& dir);

}  // namespace ditfleet::pipeline
