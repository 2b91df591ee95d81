// The interface of the pipeline: the only header of pipeline/ that code outside it includes, apart from families.cpp.
// No LibTorch type appears here.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/memory/plan.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/options.h"
#include "pipeline/region/programs/ahead.h"
#include "shared/core/result.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::pipeline {

struct Family;  // pipeline/engine/family.h; a program lists its families in one file
using Families = std::vector<const Family*>;

// One of several processes that share each forward of a transformer. Rank r has the GPU r after EngineOptions::device.
// All load the same models and denoise the same requests in the same order; each gets the same latents. If a rank
// fails, Model::denoise() returns kDeviceFault in all.
struct RankOptions {
  int memory = -1;  // from Engine::create_rank_memory(); create() does not keep it
  int rank = 0, size = 1;
  std::chrono::milliseconds wait{0};  // as given to create_rank_memory()
  bool copy_engines = true;           // GPUs exchange attention's rows by them if they can; false: by NCCL
};

// A component in a file of weights.
struct FilePart {
  std::string family;             // the `kind` of models in GET /v1/models
  std::string text;               // the variant, and the types of its tensors
  std::vector<std::string> keys;  // of models.NAME in the configuration; any of them, if there are several
  // The models that DiTFleet ships for it ("known:…" as a path): with one such file, and with two if that is another.
  std::vector<std::string> known = {};
};

// What a file of weights is.
struct FileReport {
  std::vector<FilePart> components;     // what a model can take from it
  std::string problem;                  // why the file is of no use, or what it lacks; empty: none was seen
  std::vector<std::string> adapter_of;  // families whose linears have such names, if the file is an adapter
};

struct EngineOptions {
  std::string device = "auto";  // auto | cpu | cuda | cuda:N; auto: a GPU if there is one
  std::string dtype = "auto";   // auto (bf16 on a GPU, fp32 on a CPU) | fp32 | bf16
  int threads = 0;              // CPU threads of one operation; 0: all cores
  region::CompileOptions compile;
  std::shared_ptr<kernel_cache::KernelCache> kernel_cache;  // of compiled regions; null: one in memory
  int max_lora_rank = 64;                                   // of one module of an adapter
  // Largest combined rank of the adapters of a request at one linear: the number of columns reserved next to each
  // compiled linear. Must be at least max_lora_rank.
  int lora_together_rank = 0;
  // Slots for adapters on the device, per model. With 0, requests with adapters run eagerly.
  int lora_slots = 0;
  std::int64_t lora_host_bytes = std::int64_t{4} << 30;  // per model: adapters in host memory
  MemoryOptions memory;
  RankOptions ranks;
};

class Engine {
 public:
  // Errors: kInvalidArgument (the message contains the option), kUnavailable (a device or library is missing).
  // With several ranks all call it at the same time.
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options, Families families);
  // The memory through which `size` ranks meet, for rank 0 to create before it starts the others, which inherit it.
  // `wait`: how long one waits for the others while they denoise, before that is an error.
  // Errors: kInvalidArgument (more than 32 ranks), kUnavailable (no memory).
  static Result<UniqueFd> create_rank_memory(int size, std::chrono::milliseconds wait);
  // Ends what this process waits for from other ranks. Thread-safe.
  virtual void abort_ranks() noexcept {}
  virtual ~Engine() = default;
  virtual std::string device() const = 0;                  // "cpu", "cuda:0"
  virtual std::string device_name() const = 0;             // "NVIDIA H200", the processor's name
  virtual std::string precision() const = 0;               // "fp32" | "bf16"
  virtual std::string compile_backend() const = 0;         // what auto resolved to: "nvrtc", "cpu_jit", "eager"
  virtual std::string software() const = 0;                // "LibTorch 2.9.1, g++ 12.2.0": what computes, and compiles
  virtual region::RegionCounts region_counts() const = 0;  // of all models since create(); thread-safe
  // Loads a folder in diffusers' layout. Its model_index.json determines the family. Errors: kNotFound, kDataCorrupt;
  // the message contains the file and the problem. kInvalidArgument: `quantize` is not possible.
  virtual Result<std::unique_ptr<Model>> load_model(const ModelSource& source) = 0;
  // How a request would run in the device's memory if the model were loaded now. Reads configuration and headers.
  // Errors: those of load_model() and, for the request's fields, of Model::encode().
  virtual Result<PlanReport> plan(const ModelSource& source, const GenerationRequest& request) = 0;
  // Compiles the region programs of a model into `cache` for these architectures ("sm_90a", "cpu"). Reads only the
  // configuration files and needs no GPU. dtype: auto (bf16 for a GPU, fp32 for cpu), fp32 or bf16. If `options` makes
  // blocks run eagerly on an architecture, nothing is compiled for it and the report lists it. Errors: those of
  // load_model() and region::compile_ahead().
  static Result<region::AheadReport> compile_regions(const Families& families, const ModelSource& source,
                                                     const std::string& dtype,
                                                     const std::vector<std::string>& architectures,
                                                     kernel_cache::KernelCache& cache,
                                                     const region::CompileOptions& options);
  // Tells from names and shapes what a safetensors or GGUF file is. Reads its header only. Errors: those of
  // SafetensorsFile::open.
  static Result<FileReport> inspect(const Families& families, const std::string& path);
  // Loads the folder's tokenizers without its weights.
  static Result<std::unique_ptr<Tokenizers>> load_tokenizers(const Families& families, const std::string& dir);
};

}  // namespace ditfleet::pipeline
