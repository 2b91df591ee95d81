// The pipeline as the worker sees it: the only header of pipeline/ that others include. No LibTorch type appears here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/region/ahead.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/options.h"
#include "shared/core/result.h"

namespace ditfleet::pipeline {

struct Family;  // pipeline/engine/family.h; a program names its families in one file
using Families = std::vector<const Family*>;

struct EngineOptions {
  std::string device = "auto";  // auto | cpu | cuda | cuda:N; auto: a GPU if there is one
  std::string dtype = "auto";   // auto (bf16 on a GPU, fp32 on a CPU) | fp32 | bf16
  int threads = 0;              // CPU threads of one operation; 0: all cores
  region::CompileOptions compile;
  std::shared_ptr<kernel_cache::KernelCache> kernel_cache;  // of compiled regions; null: one in memory
  int max_lora_rank = 64;                                   // of one module of an adapter
  // Combined rank of the adapters in use at one linear: the columns reserved beside each compiled linear. At least
  // max_lora_rank.
  int lora_together_rank = 0;
  // Adapters that the device holds at once, per model. With 0, requests with adapters run eagerly.
  int lora_slots = 0;
  std::int64_t lora_host_bytes = std::int64_t{4} << 30;  // per model: adapters in host memory
};

class Engine {
 public:
  // Errors: kInvalidArgument names the option, kUnavailable the device or library that is missing.
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options, Families families);
  virtual ~Engine() = default;
  virtual std::string device() const = 0;                  // "cpu", "cuda:0"
  virtual std::string device_name() const = 0;             // "NVIDIA H200", the processor's name
  virtual std::string precision() const = 0;               // "fp32" | "bf16"
  virtual std::string compile_backend() const = 0;         // what auto resolved to: "nvrtc", "cpu_jit", "eager"
  virtual region::RegionCounts region_counts() const = 0;  // of all models since create(); thread-safe
  // Loads a folder in diffusers' layout. Its model_index.json decides the family. Errors: kNotFound and kDataCorrupt
  // name the file and what is wrong with it.
  virtual Result<std::unique_ptr<Model>> load_model(const std::string& name, const std::string& dir) = 0;
  // Compiles the region programs of a folder into `cache` for these architectures ("sm_90a", "cpu"). Reads only the
  // configuration files and needs no GPU. dtype: auto (bf16 for a GPU, fp32 for cpu), fp32 or bf16. Architectures on
  // which `options` run blocks eagerly are listed in the report and nothing is compiled for them. Errors: those of
  // load_model() and region::compile_ahead().
  static Result<region::AheadReport> compile_regions(const Families& families, const std::string& dir,
                                                     const std::string& dtype,
                                                     const std::vector<std::string>& architectures,
                                                     kernel_cache::KernelCache& cache,
                                                     const region::CompileOptions& options);
  // Loads the folder's tokenizers without its weights.
  static Result<std::unique_ptr<Tokenizers>> load_tokenizers(const Families& families, const std::string& dir);
};

}  // namespace ditfleet::pipeline
