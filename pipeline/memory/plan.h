// Decides which weights stay on the device for a request of some size. Plain arithmetic; no LibTorch.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::pipeline {

// What a model needs of the device's memory for a request, in bytes.
struct MemoryNeeds {
  // Weights that can leave the device. `ahead`: the most of them on the device at a time while they come and go.
  struct Group {
    std::int64_t bytes = 0, ahead = 0;
  };
  Group text;                     // text encoders; used while a request is encoded
  Group modulation;               // used while a request is encoded
  Group blocks;                   // used in each step; of one transformer if steps use one of several
  std::int64_t other_blocks = 0;  // bytes of the blocks of the other transformers, as `blocks`
  std::int64_t fixed = 0;         // all other weights, and the adapters' slots and columns
  // All other tensors, at the peak of the stage. One request is encoded while another is denoised or decoded.
  std::int64_t encode = 0, denoise = 0, decode = 0;
  // As `encode`, for a request of another model. Includes that model's weights that come and go.
  std::int64_t others_encode = 0;
  int passes = 1;  // through the blocks in a step

  // The most bytes of text encoders or of modulation that are on the device at a time while they come and go.
  std::int64_t encode_ahead() const { return text.ahead > modulation.ahead ? text.ahead : modulation.ahead; }
  std::int64_t weight_bytes() const { return text.bytes + modulation.bytes + blocks.bytes + other_blocks + fixed; }
};

// offload: auto | none | model | block
struct MemoryOptions {
  std::string offload = "auto";
  std::int64_t limit = 0;    // most bytes that this process takes on the device; 0: all that is free
  std::int64_t reserve = 0;  // bytes of the device to leave free
};

inline constexpr std::int64_t kNoMemoryLimit = std::numeric_limits<std::int64_t>::max() / 4;  // sums stay in range

enum class PlanKind { kResident, kModel, kExpert, kBlock };
std::string_view name_of(PlanKind kind);  // "resident", "model", "expert", "block"

struct MemoryPlan {
  PlanKind kind = PlanKind::kResident;
  bool keep_encoders = true;      // text encoders and modulation stay
  std::int64_t keep_blocks = 0;   // bytes of blocks that stay; the others are copied in each step
  bool keep_other_blocks = true;  // false: blocks of one transformer leave for those of another
  bool leave_to_decode = false;   // blocks leave for decode(), as far as they do not fit beside it
  std::int64_t bytes = 0;         // predicted peak
};

// The predicted peak.
std::int64_t plan_bytes(const MemoryNeeds& needs, const MemoryPlan& plan);
// Bytes of blocks that may stay on the device during decode().
std::int64_t blocks_beside_decode(const MemoryNeeds& needs, const MemoryPlan& plan, std::int64_t available);
// Bytes of weights that are copied to the device for each request and in each step.
std::int64_t copied_per_request(const MemoryNeeds& needs, const MemoryPlan& plan);
std::int64_t copied_per_step(const MemoryNeeds& needs, const MemoryPlan& plan);

// The plans for these needs, the fastest first. The kBlock plan keeps no block. `offload`: the value of memory.offload
// that allows the plan; auto allows all plans.
struct Candidate {
  MemoryPlan plan;
  std::string_view offload;
};
std::vector<Candidate> candidates(const MemoryNeeds& needs);

struct PlanChoice {
  std::optional<MemoryPlan> plan;  // empty: nothing fits
  struct Rejected {
    PlanKind plan;
    std::string reason;
  };
  std::vector<Rejected> rejected;  // the faster plans
};

// The fastest plan that fits into `available` bytes and that `offload` allows:
//   resident  all weights stay: auto, none
//   model     text encoders and modulation come and go: auto, model
//   expert    in addition only the blocks of the transformer in use are on the device: auto, model
//   block     in addition some blocks are copied in each step: auto, block. auto keeps as many blocks as fit. block
//             keeps fewer: copies of `hidden` bytes cost nothing, because the step takes as long.
PlanChoice choose_plan(const MemoryNeeds& needs, std::int64_t available, const std::string& offload,
                       std::int64_t hidden = 0);

// The answer to whether and how a request fits, before anything is loaded.
struct PlanReport {
  MemoryNeeds needs;
  PlanChoice choice;
  std::int64_t available = 0;                   // bytes that tensors may take; may be kNoMemoryLimit
  std::int64_t driver = 0;                      // bytes that the driver takes beside them
  std::map<std::string, std::string> quantize;  // component → format that it is quantized to on load
  double bandwidth = 0;                         // of copies from host memory, in bytes per second
  std::string mode;                             // compile mode of the steps (compile.mode, compile.rules)
};

// Why no plan fits: the bytes by part, and each plan with its reason. `problem`: what the device reported, or empty.
std::string budget_text(const MemoryNeeds& needs, const PlanChoice& choice, std::int64_t available,
                        const std::string& problem = {});

// "1.50 GiB", "3.2 MiB"
std::string bytes_text(std::int64_t bytes);

}  // namespace ditfleet::pipeline
