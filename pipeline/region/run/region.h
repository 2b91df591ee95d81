// A block's compiled form: one program for all copies of the block and all sizes, behind a guard.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/region/compile/cached.h"
#include "pipeline/region/counters.h"
#include "pipeline/region/ir/program.h"
#include "pipeline/region/options.h"
#include "pipeline/region/run/executor.h"

namespace ditfleet::region {

// What the regions of one engine share.
struct RegionHost {
  CompileOptions options;
  std::shared_ptr<const Compiler> compiler;  // null: eager
  std::string arch;
  int device = 0;  // a GPU's index
  std::shared_ptr<kernel_cache::KernelCache> cache;
  std::shared_ptr<RegionCounters> counters = std::make_shared<RegionCounters>();
  std::shared_ptr<const Gemm> gemm;  // null: LibTorch's
  AttentionBackend attention = AttentionBackend::kAuto;
  std::shared_ptr<const DirectAttention> direct_attention;  // null: LibTorch's alone
  std::shared_ptr<const TimedAttention>
      timed_attention;  // null: an attention is asked for by name, or there is nothing to choose from
  WorkspacePool pool;
  // When a failed compiler may be asked again; tests bring their own time.
  std::function<std::chrono::steady_clock::time_point()> now = &std::chrono::steady_clock::now;

  // What a region that cannot run compiled comes to: with fullgraph an error (Failure, kInvalidArgument, param
  // "compile.fullgraph"), else it is counted, and logged the first time for this region and reason. Thread safe.
  void fall_back(const std::string& region, const std::string& reason, const std::string& message);

 private:
  std::mutex mutex_;
  std::set<std::pair<std::string, std::string>> fallen_back_;
};

// The compiler for this backend and device, and a cache in memory if none is given. Throws pipeline::Failure:
// kInvalidArgument for an unknown backend, mode or limit; kUnavailable where a backend that is asked for by name cannot
// be had. auto falls back to eager, counted. Without a C++ compiler cpu_jit can be had where the cache has programs for
// this processor: only a miss wants one then.
std::shared_ptr<RegionHost> make_region_host(CompileOptions options, c10::Device device,
                                             std::shared_ptr<kernel_cache::KernelCache> cache);

// How long a region whose compiler failed, for the nth time in a row, runs op by op before it is asked again: half a
// minute that doubles up to an hour, and ten times what the attempt took, since a call waits for the next one.
std::chrono::steady_clock::duration pause_after(int failures, std::chrono::steady_clock::duration attempt);

class Region {
 public:
  using Recipe = std::function<Result<Program>(ElementType)>;

  // `block` is for messages. Compiles nothing yet.
  Region(std::string block, Recipe recipe, std::shared_ptr<RegionHost> host);

  // The program for `type` compiled now, so that the first call finds it. With dynamic off nothing can be compiled
  // before sizes are known. Throws as run() does.
  void prepare(ElementType type, c10::Device device);

  // A call of these sizes (by symbol) is to come: what a library lacks for it is made meanwhile. Nothing before
  // prepare(), and where the program runs op by op. Does not wait. Throws what resolving sizes that do not fit throws.
  // Thread safe.
  void expect(ElementType type, c10::Device device, const Sizes& sizes);

  // inputs and outputs: see execute(). A call whose guard fails (another element type, with dynamic off another size)
  // compiles once more as far as the options allow, else runs op by op; so it does after a failed compile, until
  // pause_after() has passed. Throws pipeline::Failure: kInvalidArgument for inputs that are no call of this block;
  // with fullgraph or error_on_recompile what they promise; and what LibTorch throws. Thread safe.
  void run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs, Mode mode = Mode::kDefault);

  // The names of the inputs in order, for whoever fills pointer tables.
  std::vector<std::string> input_names() const;

 private:
  // One compiled program: what it was compiled for, and how to launch it.
  struct Compiled {
    ElementType type;
    c10::DeviceType device;
    Sizes bound;  // with dynamic off
    Plan plan;
    std::unique_ptr<RowLauncher> launcher;  // null: this program runs op by op
    bool failed = false;                    // because its compiler failed, which may pass
  };
  // A compiled program with its numbers for one descriptor.
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
  Result<std::unique_ptr<RowLauncher>> make_launcher(const Plan& plan, const std::string& reason) const;
  Result<std::unique_ptr<RowLauncher>> load(const Plan& plan, const Source& source, const Entry& entry) const;
  void forget_failed();  // once the pause is over
  std::shared_ptr<const Compiled> eager(Plan plan, ElementType type, c10::DeviceType device, const Sizes& bound);

  const std::string block_;
  const Recipe recipe_;
  const std::shared_ptr<RegionHost> host_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Compiled>> compiled_;
  std::vector<std::shared_ptr<const Variant>> variants_;  // most recently added first
  std::shared_ptr<const Variant> last_;
  int programs_ = 0;                                                // compiled ones, which recompile_limit bounds
  int failures_ = 0;                                                // of the compiler, in a row
  std::optional<std::chrono::steady_clock::time_point> ask_again_;  // where some of compiled_ have failed
};

}  // namespace ditfleet::region
