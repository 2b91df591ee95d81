// The FLUX transformer: packed latents and text in, velocity out.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "pipeline/families/flux/modulation.h"
#include "pipeline/parallel/sequence.h"
#include "pipeline/region/ir/program.h"
#include "pipeline/region/options.h"

namespace ditfleet::region {
struct RegionHost;
class Graphs;
}  // namespace ditfleet::region

namespace ditfleet::pipeline {

class FluxRegions;
struct FluxAdapters;

class FluxTransformer {
 public:
  // The weights in `dir`, or those in `file` unless it is empty.
  static Parameters open(const std::string& dir, const std::string& file, Placement placement);
  // Reads config.json and the weights in `dir`, or those in `file`, in diffusers' or BFL's names, unless it is empty.
  // `quantize`: empty, "fp8" (the linears of the blocks but modulation) or "nf4" (all linears). The blocks are compiled
  // if the backend of `regions` is not eager. Compiled blocks reserve `adapter_rank` columns for adapters next to each
  // weight. Throws what ConfigFile, Parameters and Region throw.
  static FluxTransformer load(const std::string& dir, Placement placement,
                              std::shared_ptr<region::RegionHost> regions = nullptr, std::int64_t adapter_rank = 0,
                              const std::string& file = {}, const std::string& quantize = {});
  // The programs of the blocks, without and with adapters, that load() with the same arguments compiles. Reads
  // configuration and headers. `fp8_products`: see Parameters::set_fp8_products. Throws what load() throws.
  static std::vector<region::Program> programs(const std::string& dir, Placement placement, const std::string& file,
                                               const std::string& quantize, bool fp8_products);
  // Uses parameters that are already loaded.
  FluxTransformer(FluxConfig config, FluxSlots slots, std::int64_t bytes, Placement placement,
                  std::shared_ptr<region::RegionHost> regions, FluxParts parts = {});

  // A copy with other parameter structs: those of this transformer with terms of adapters added. If the columns of
  // compiled blocks are too few, the blocks run eagerly. Throws what RegionHost::fall_back throws.
  FluxTransformer adapted(FluxSlots slots) const;
  // Copies the adapters of `adapted`, which adapted() of this transformer returned, to where the blocks read them. Call
  // it before velocity() of `adapted`, on the same stream, and for one request at a time.
  void load_adapters(const FluxTransformer& adapted);
  // Overwrites what load_adapters() copied with zeros. Call it while no request with adapters runs.
  void clear_adapters();

  const FluxConfig& config() const { return config_; }
  const FluxParts& parts() const { return parts_; }
  const parallel::Team& team() const { return team_; }  // all ranks of the region host
  const FluxSlots& slots() const { return slots_; }
  std::int64_t bytes() const { return bytes_; }
  const std::map<std::string, int>& linears() const { return linears_; }  // as Parameters::linears()
  // Time in load() until the programs were available.
  std::chrono::microseconds compile_time() const { return compile_time_; }

  // Prepares velocity() for a new size in the background (the plan of attention). Does not block. Thread-safe.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const;

  // The modulation for `timesteps` ([n] fp32, on the device). See ModulationTable.
  ModulationTable modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const;
  // Converts text tokens [1, S_text, joint_attention_dim] to the blocks' input [1, S_text, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // `latents`: [batch, S_image, in_channels]. `text`: from embed_text(). `rope`: from rope_table(). Returns [batch,
  // S_image, in_channels]. `team`: the ranks that share the forward; each gets the whole result. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, const parallel::Team& team = {}) const;

 private:
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, region::Mode mode, const parallel::Team& team) const;
  void open_libraries(Placement placement, const region::RegionHost& host) const;

  FluxConfig config_{};
  FluxSlots slots_;
  FluxParts parts_;
  std::shared_ptr<FluxRegions> regions_;    // null: blocks run eagerly (blocks.h)
  std::shared_ptr<region::Graphs> graphs_;  // null: not available on this device or in this build
  std::int64_t bytes_ = 0;
  Placement placement_;
  parallel::Team team_;
  std::map<std::string, int> linears_;
  std::chrono::microseconds compile_time_{0};
  std::shared_ptr<const FluxAdapters> adapters_;  // null: no adapters, or they are added eagerly
};

}  // namespace ditfleet::pipeline
