// A loaded model, as the worker uses it. No LibTorch type appears here.
//
// A generation runs in three stages:
//   encode()   returns a Generation with text embeddings, noise and schedule
//   denoise()  computes the latents in the same Generation
//   decode()   returns Media
// Each stage must run for one unit at a time. Different stages of different units may run concurrently on different
// threads, so that one unit's text is encoded while another unit is denoised.
// Errors of every stage: kInvalidArgument (the request), kOutOfMemory, kDeviceFault (the process must end), kCanceled.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/adapters.h"
#include "pipeline/api/media.h"
#include "shared/core/result.h"
#include "shared/job/fields.h"

namespace ditfleet::pipeline {

struct GenerationRequest {
  std::string prompt;       // UTF-8
  job::FieldValues fields;  // what the family reads; a field that is not set gets the family's default
  std::int64_t seed = 0;
  int number = 0;                  // of the image among those of a job, whose seeds follow each other
  std::vector<LoraRequest> loras;  // at most 16; an unusable file is an error with param "loras"
  // The pictures of the fields "image" and "mask", of any sizes; no mask: null. encode() reads them. A mask's three
  // channels are of equal meaning: white is replaced.
  std::vector<std::shared_ptr<const Media>> images = {};
  std::shared_ptr<const Media> mask = {};
  // In a worker with several GPUs: whether one of them denoises the request, or all do. If not set, the worker chooses
  // what is faster (worker/ranks), and the pipeline uses all.
  std::optional<bool> alone = {};
};

// What the time and the memory of a request depend on.
struct RequestSize {
  int width = 0, height = 0, frames = 1;
  int text_tokens = 0;
  int steps = 0;          // those that matter for memory (engine/network.h)
  int forwards = 1;       // of a step: 2 with a negative prompt
  bool adapters = false;  // the request has some
  bool cached = false;    // steps may be skipped
  int images = 0;         // of the request
  bool masked = false;
  int gpus = 1;  // that denoise it

  auto operator<=>(const RequestSize&) const = default;
  std::int64_t pixels() const { return std::int64_t{width} * height * frames; }
};

struct StepProgress {
  int step = 0, total = 0;  // `step` steps are done
  // Decodes a small preview of the current estimate. Runs on the calling thread; valid during the callback.
  std::function<Result<Media>()> preview;
  bool skipped = false;  // this step ran only the first block for the prompt
  // What Generation::go_on_from() takes: the latents and all that later steps need. Runs on the calling thread; valid
  // during the callback. Copies some MB from the device. kPayloadTooLarge: more than `most_bytes`. kUnavailable:
  // several GPUs with a field cache.
  std::function<Result<std::string>(std::int64_t most_bytes)> state;
};
// Called on the denoising thread after each step, until denoise() returns. False cancels: denoise() returns kCanceled.
using StepCallback = std::function<bool(const StepProgress&)>;
// Called on the decoding thread with the frames of a video so far, after each group of them. After a lack of memory the
// frames come once more from the first.
using FrameCallback = std::function<void(const Media& so_far)>;

// Where a model's weights come from.
struct ModelSource {
  std::string name, dir;  // dir: a folder in diffusers' layout
  // Component → a safetensors or GGUF file with its weights, in place of the folder's: transformer, transformer_2,
  // text_encoder, text_encoder_2, image_encoder, vae.
  std::map<std::string, std::string> files = {};
  // Components to quantize while they are loaded, and the format: transformer → fp8 or nf4, text_encoder_2 → nf4.
  // {"*": "auto"}: the components that the device's memory requires.
  std::map<std::string, std::string> quantize = {};
  std::string vae_dtype = {};  // "fp32" or "bf16"; empty: the engine's
  std::string attention = {};  // "fp8": self-attention in 8 bits where the device can; empty: the engine's dtype
};

using PartTimes = std::vector<std::pair<std::string, std::chrono::microseconds>>;

struct ModelInfo {
  std::string name, dir;
  int size_multiple = 1;  // width and height are multiples of it
  bool experts = false;   // two transformers, for high and for low noise levels
  std::int64_t weight_bytes = 0;
  // Number of linears by component and format ("nf4", "fp8", "fp8 with dynamic activations", "bf16", "fp32").
  std::map<std::string, std::map<std::string, int>> linears = {};
  // How long loading took, by part: tokenizers, text_encoders, transformer, vae (weights), compile (programs of its
  // regions, compiled or taken from the kernel cache).
  PartTimes load_times;
};

// What a model can generate in the device's memory, and whether its weights are there.
struct MemoryReport {
  struct Limit {
    std::string plan;             // "resident", "model", "block"
    std::int64_t max_pixels = 0;  // width x height x frames of the largest request that this plan holds
  };
  std::vector<Limit> limits;               // fastest plan first; empty: unknown, so nothing is refused
  std::int64_t available_bytes = 0;        // device memory that this process may use
  std::int64_t bytes = 0;                  // of the weights on the device when the model is resident
  bool resident = true;                    // the weights are on the device now
  std::chrono::microseconds load_time{0};  // to bring them from host memory; 0: unknown
  std::string plan;                        // that is applied; empty: none
  // All tensors but weights while the last request was denoised and decoded, in bytes at the peak. What is observed
  // includes a request that was encoded meanwhile.
  std::int64_t predicted_bytes = 0, observed_bytes = 0;
  std::int64_t loads = 0;       // how often the weights came from host memory
  std::int64_t step_downs = 0;  // how often a stage ran out of memory and continued with another plan
};

// The state of one request between the stages. Not thread-safe.
class Generation {
 public:
  virtual ~Generation() = default;
  // For the job's warnings, such as a truncated prompt.
  virtual std::vector<std::string> warnings() const = 0;
  // Microseconds of each stage that has run: "text", "denoise", "vae".
  virtual std::vector<std::pair<std::string, std::int64_t>> phases_us() const = 0;
  // Microseconds that the device took for each stage that has run: "text", "first_step", "steady_steps", "vae". On a
  // GPU by events in the stage's stream.
  virtual const std::map<std::string, std::int64_t>& device_phases_us() const { return device_phases_us_; }
  // How many steps ran only the first block for the prompt; the forwards for a negative prompt are not counted.
  virtual int skipped_steps() const { return skipped_steps_; }
  // denoise() begins after the step at which StepProgress::state() was called for the same request, here or in another
  // process, and gives what it would have given there. Errors of denoise(): kDataCorrupt (damaged), kInvalidArgument
  // (of another request).
  virtual void go_on_from(std::string state) { from_ = std::move(state); }
  // Writes a safetensors file with the tensors of every stage so far, for comparison with a reference.
  virtual Result<void> dump(const std::string& path) const = 0;

 private:
  friend class DiffusionModel;
  std::map<std::string, std::int64_t> device_phases_us_;
  int skipped_steps_ = 0;
  std::string from_;  // see go_on_from(); empty: the beginning
};

// Must not outlive the Engine that loaded it, and must be destroyed before main() returns.
class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;
  virtual MemoryReport memory() const { return {}; }  // thread-safe, does not block
  // Thread-safe, does not block. Errors: kInvalidArgument.
  virtual Result<RequestSize> size_of(const GenerationRequest& request) const = 0;
  virtual Result<std::unique_ptr<Generation>> encode(const GenerationRequest& request) = 0;
  virtual Result<void> denoise(Generation& generation, const StepCallback& on_step) = 0;
  virtual Result<Media> decode(Generation& generation, const FrameCallback& on_frames = {}) = 0;

  // Loads adapters into host memory and into slots that no running request uses. Evicts `drops` first, then the least
  // recently used adapters. encode() loads adapters that are still missing. Blocks while files are read. Thread-safe;
  // may run concurrently with all stages. Errors: those of encode() about loras.
  virtual Result<void> prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops = {}) = 0;
  // Replaces the set of pinned adapters. A pinned adapter is never evicted from host memory, and from its slot only if
  // no other slot is available. Thread-safe, does not block.
  virtual void pin_adapters(const std::set<std::string>& ids) = 0;
  // Evicts an adapter as soon as no request uses it, and overwrites its slot and its columns beside the weights.
  // Thread-safe; waits for a file that is being read.
  virtual void forget_adapter(const std::string& id) = 0;
  virtual AdapterHoldings adapters() const = 0;  // thread-safe, does not block
};

// The token ids of one prompt by text encoder, in the family's order. They include begin and end tokens, are truncated
// as in the pipeline, and are not padded.
using TokenIds = std::vector<std::pair<std::string, std::vector<std::int32_t>>>;

// What the text encoders get of a prompt. The names are those of the dump.
struct PromptIds {
  std::map<std::string, std::vector<std::int32_t>> ids;
  std::vector<std::string> warnings;  // "prompt: …" for each encoder whose ids were truncated
};

class Tokenizers {
 public:
  virtual ~Tokenizers() = default;
  // Thread-safe. Throws Failure (kInvalidArgument).
  virtual PromptIds ids(const std::string& prompt, int max_sequence_length) const = 0;
  virtual Result<TokenIds> tokenize(const std::string& prompt, int max_sequence_length) const = 0;
};

}  // namespace ditfleet::pipeline
