// The pipeline as the worker sees it: the only header of pipeline/ that others include. No LibTorch type
// appears here.
//
// An image is made in three stages that may run on three threads, so that text encoding and pixel
// encoding overlap the denoising of other units:
//   encode()  → Prepared   text embeddings, noise, schedule
//   denoise() → latents in the same Prepared
//   decode()  → Image
// One call per stage at a time; different stages of different units may run at once. Failures come as
// Error: kInvalidArgument (input), kOutOfMemory, kDeviceFault (end the process), kCanceled.
// Models and Prepareds must be gone before main() returns: device memory cannot be given back while the process
// ends its libraries.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pipeline/region/ahead.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/options.h"
#include "shared/core/result.h"

namespace ditfleet::pipeline {

struct EngineOptions {
  std::string device = "auto";  // auto | cpu | cuda | cuda:N; auto: a GPU if there is one
  std::string dtype = "auto";   // auto (bf16 on a GPU, fp32 on a CPU) | fp32 | bf16
  int threads = 0;              // CPU threads of one operation; 0: all cores
  region::CompileOptions compile;
  std::shared_ptr<kernel_cache::KernelCache> kernel_cache;  // of compiled regions; null: one in memory
  int max_lora_rank = 64;                                   // of one module of an adapter
  int lora_together_rank = 0;  // of what a request or batch uses at one linear: columns kept beside each that is
                               // compiled; at least max_lora_rank
  int lora_slots =
      0;  // of each model: adapters that the device holds at once; 0: none, what has adapters then runs eagerly
  std::int64_t lora_host_bytes = std::int64_t{4} << 30;  // of each model: adapters in host memory
};

// An adapter's file (safetensors; PEFT's, kohya's, BFL's or XLabs' names) and how strongly it is applied: from
// −kMostLoraScale to kMostLoraScale, as jobs have it.
inline constexpr double kMostLoraScale = 100;
struct LoraRequest {
  std::string path;
  double scale = 1.0;
  // Of the content, where the caller knows it (a digest): the adapter is known by it and its file is read once,
  // whatever becomes of it. Empty: it is known by its path, size, time and inode.
  std::string id = {};
};

// Adapters that make room for those that are brought, by LoraRequest::id, each list in the order in which they go. What
// leaves host memory leaves its slot first, too.
struct AdapterDrops {
  std::vector<std::string> from_host = {}, from_slots = {};
};

// Where a model's adapters are, by LoraRequest::id; those without one are not listed.
struct AdapterHoldings {
  int slots = 0;
  std::vector<std::string> in_slots;  // most recently used first
  std::vector<std::string> in_host;   // most recently used first; those in slots may be among them
  std::int64_t host_bytes = 0;        // room in host memory
  std::int64_t load_bytes_per_s = 0;  // from files, as measured; 0: not yet
  std::int64_t swap_us = 0;           // from host memory to a slot, as measured; 0: not yet
};

struct ImageRequest {
  std::string prompt;
  std::optional<std::string> negative_prompt;
  int width = 1024, height = 1024;
  int num_inference_steps = 28;
  double guidance_scale = 3.5;
  double true_cfg_scale = 1.0;
  int max_sequence_length = 512;
  std::int64_t seed = 0;
  std::vector<LoraRequest>
      loras;  // at most 16; added up. Unusable files: kInvalidArgument, kNotFound or kDataCorrupt, param "loras"
};

// Interleaved RGB, 8 bits, rows from the top, width·height·3 bytes.
struct Image {
  int width = 0, height = 0;
  std::vector<std::uint8_t> rgb;
};

enum class ImageFormat { kPng, kJpeg, kWebp };
// quality 0–100 for JPEG and WebP; PNG ignores it. Thread safe.
Result<std::string> encode_image(const Image& image, ImageFormat format, int quality);

struct StepProgress {
  int step = 0, total = 0;  // step = number of steps done
  // Decodes a cheap preview of the present estimate (at latent resolution × 8 or less); call it at most
  // where one is wanted: it runs on the calling thread.
  std::function<Result<Image>()> preview;
};
// Called on the denoising thread after each step; false cancels (denoise returns kCanceled).
using StepCallback = std::function<bool(const StepProgress&)>;

struct ModelInfo {
  std::string name, dir, precision, device;
  int size_multiple = 16;
  std::int64_t weight_bytes = 0;
  // Microseconds that loading took, by part: tokenizers, text_encoders, transformer, vae (weights), compile (programs
  // of its regions: compiled or taken from the kernel cache).
  std::vector<std::pair<std::string, std::int64_t>> load_us;
};

class Prepared {
 public:
  virtual ~Prepared() = default;
  // Truncated prompts and the like, for the job's warnings.
  virtual std::vector<std::string> warnings() const = 0;
  // Microseconds of each stage so far, by name: "text", "denoise", "vae".
  virtual std::vector<std::pair<std::string, std::int64_t>> phases_us() const = 0;
  // Everything an outside check wants to compare (see ditfleet-worker generate --dump): writes a
  // safetensors file with clip_ids t5_ids pooled_prompt_embeds prompt_embeds noise sigmas timesteps
  // latents image.
  virtual Result<void> dump(const std::string& path) const = 0;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;
  virtual Result<std::unique_ptr<Prepared>> encode(const ImageRequest& request) = 0;
  virtual Result<void> denoise(Prepared& prepared, const StepCallback& on_step) = 0;
  // Several pictures of one size, number of steps and max_sequence_length, all with a true CFG or none, each with its
  // own prompt, seed, guidance and adapters: together where the transformer's blocks are compiled and have room for all
  // adapters, else in turn. One result and one callback each; a callback that returns false ends its own picture alone.
  // Pictures that are not alike: kInvalidArgument for all of them.
  virtual std::vector<Result<void>> denoise_batch(const std::vector<Prepared*>& batch,
                                                  const std::vector<StepCallback>& on_step) = 0;
  virtual Result<Image> decode(Prepared& prepared) = 0;

  // Brings adapters to where a request will need them: into host memory, then into slots, as far as requests under way
  // leave any free. Where there is no room `drops` go first, then the least recently used. encode() does the same for
  // what is not there yet. Blocks while files are read; may run beside all stages, on any thread. Errors: those of
  // encode() about loras.
  virtual Result<void> prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops = {}) = 0;
  // Those that stay in host memory whatever comes (what finds no room beside them is not kept there), and in a slot as
  // long as any other slot may be taken. Replaces what was said before. Thread safe, does not block.
  virtual void pin_adapters(const std::set<std::string>& ids) = 0;
  // Forgets an adapter (as soon as no request under way needs it) and overwrites its slot, and what was beside the
  // weights. Thread safe; waits for a file that is being read.
  virtual void forget_adapter(const std::string& id) = 0;
  virtual AdapterHoldings adapters() const = 0;  // thread safe, does not block
};

struct TokenIds {
  std::vector<std::int32_t> clip, t5;  // with begin and end marks, not padded, truncated as in the pipeline
};

class Tokenizers {
 public:
  virtual ~Tokenizers() = default;
  virtual Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const = 0;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options);
  virtual ~Engine() = default;
  virtual std::string device() const = 0;                  // "cpu", "cuda:0"
  virtual std::string device_name() const = 0;             // "NVIDIA H200", the processor's name
  virtual std::string precision() const = 0;               // "fp32" | "bf16"
  virtual std::string compile_backend() const = 0;         // what auto came to: "cpu_jit", "eager"
  virtual region::RegionCounts region_counts() const = 0;  // of all models since create(); thread safe
  // Loads a diffusers FLUX folder. kNotFound / kDataCorrupt name the file and what is wrong with it.
  virtual Result<std::unique_ptr<Model>> load_model(const std::string& name, const std::string& dir) = 0;
  // The regions of a folder's transformer, compiled into `cache` for these architectures ("sm_90a", "cpu"); reads the
  // configuration alone and needs no GPU. dtype: auto (bf16 for a GPU, fp32 for cpu), fp32 or bf16. Where
  // the options leave blocks to run eagerly, as on a CPU in bf16 with auto, nothing is compiled, and the report says
  // so. Errors: those of load_model and region::compile_ahead, which takes the options.
  static Result<region::AheadReport> compile_regions(const std::string& dir, const std::string& dtype,
                                                     const std::vector<std::string>& architectures,
                                                     kernel_cache::KernelCache& cache,
                                                     const region::CompileOptions& options);
  // The folder's tokenizers alone, without weights.
  static Result<std::unique_ptr<Tokenizers>> load_tokenizers(const std::string& dir);
};

}  // namespace ditfleet::pipeline
