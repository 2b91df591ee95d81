// The compiled form of a block: its programs and the guard that selects one. Normally one program serves all copies and
// sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/region/ir/program.h"
#include "pipeline/region/options.h"
#include "pipeline/region/run/executor.h"
#include "pipeline/region/run/region_host.h"

namespace ditfleet::region {

// How long a region runs eagerly after its compiler failed for the nth time in a row: half a minute, doubling up to an
// hour, but at least ten times as long as the failed attempt took, because every attempt blocks a call.
std::chrono::steady_clock::duration pause_after(int failures, std::chrono::steady_clock::duration attempt);

class Region {
 public:
  using Recipe = std::function<Result<Program>(ElementType)>;

  // `block` is for messages. `f8_heads`: for the values of 8-bit attention. Does not compile yet.
  Region(std::string block, Recipe recipe, std::shared_ptr<const RegionHost> host, F8Heads f8_heads = fp8_heads);

  // Compiles the program for `type` before the first call. Does nothing with dynamic off, because the sizes are not
  // known yet. Throws as run() does.
  void prepare(ElementType type, c10::Device device);

  // Prewarms library plans for a call of these sizes (by symbol) in the background. Does nothing before prepare(), or
  // if the program runs eagerly. Does not block. Throws if the sizes do not fit the program. Thread-safe.
  void prewarm(ElementType type, c10::Device device, const Sizes& sizes);

  // `inputs` and `outputs`: see execute(). If the guard fails (a new element type, or with dynamic off a new size), the
  // call compiles another program if the options allow it, else it runs eagerly. After a failed compilation calls run
  // eagerly until pause_after() has passed. Throws what LibTorch throws, and pipeline::Failure: kInvalidArgument for
  // inputs that do not fit the block, for a fallback with fullgraph and for a second program with error_on_recompile.
  // Throws what Sequence throws if there are several ranks. Thread-safe.
  // `sequence`: how ranks share the tokens; `inputs` has this rank's tokens. Null: one rank.
  void run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs,
           const pipeline::parallel::Sequence* sequence = nullptr);

  // The names of the inputs, in the order of pointer tables.
  std::vector<std::string> input_names() const;

 private:
  // A compiled program, what it was compiled for, and how to launch it.
  struct Compiled {
    ElementType type;
    c10::DeviceType device;
    Sizes bound;                            // with dynamic off
    Plan plan;                              // without steps if it runs eagerly
    std::unique_ptr<RowLauncher> launcher;  // null: this program runs eagerly
    bool failed = false;                    // its compiler failed; a later attempt may succeed
  };
  // A compiled program with its sizes for one descriptor.
  struct Variant {
    std::vector<std::int64_t> descriptor;
    std::shared_ptr<const Compiled> compiled;
    Resolved resolved;
  };

  static std::vector<std::int64_t> describe(const std::vector<at::Tensor>& inputs);
  std::shared_ptr<const Variant> find(const std::vector<std::int64_t>& descriptor);
  std::shared_ptr<const Variant> add_variant(std::vector<std::int64_t> descriptor,
                                             const std::vector<at::Tensor>& inputs);
  std::shared_ptr<const Compiled> compile(ElementType type, c10::DeviceType device, const Sizes& bound,
                                          const std::string& guard, const std::string& reason);
  Result<std::unique_ptr<RowLauncher>> make_launcher(const Plan& plan, c10::DeviceType device,
                                                     const std::string& reason) const;
  Result<std::unique_ptr<RowLauncher>> load(const Plan& plan, const Source& source, const Entry& entry) const;
  void forget_failed();  // after the pause

  const std::string block_;
  const Recipe recipe_;
  const std::shared_ptr<const RegionHost> host_;
  const F8Heads f8_heads_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Compiled>> compiled_;
  std::vector<std::shared_ptr<const Variant>> variants_;  // most recently added first
  std::shared_ptr<const Variant> last_;
  int programs_ = 0;                                                // compiled ones; recompile_limit bounds them
  int failures_ = 0;                                                // of the compiler, in a row
  std::optional<std::chrono::steady_clock::time_point> ask_again_;  // set if some of compiled_ have failed
};

}  // namespace ditfleet::region
