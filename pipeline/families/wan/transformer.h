// Wan's transformer (diffusers WanTransformer3DModel): latents, timestep and text to a velocity.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "pipeline/families/wan/slots.h"
#include "pipeline/nn/adapter_columns.h"
#include "pipeline/parallel/sequence.h"
#include "pipeline/region/ir/program.h"

namespace ditfleet::region {
struct RegionHost;
enum class Mode;
}  // namespace ditfleet::region

namespace ditfleet::pipeline {

class WanRegions;

// Immutable after loading; copies share the weights. The functions may be called from any thread.
class WanTransformer {
 public:
  // Reads config.json and the weights in `dir`. `quantize`: empty, "fp8" (the linears of the blocks) or "nf4" (all
  // linears in the placement's type). `regions`: see Parameters::set_regions. `name`: of the blocks' parts. If the
  // blocks will be compiled, reserves `adapter_rank` columns for adapters next to each weight; the most that compiled
  // blocks take if it is more. Throws what ConfigFile and Parameters throw.
  static WanTransformer load(const std::string& dir, Placement placement,
                             std::shared_ptr<region::RegionHost> regions = nullptr, const std::string& quantize = {},
                             const std::string& name = "transformer", std::int64_t adapter_rank = 0);

  // Compiles the blocks of one or two experts, which share their programs, unless the host runs transformers eagerly.
  // `second` may be null. Throws what WanRegions and RegionHost::fall_back throw.
  static void compile(WanTransformer& first, WanTransformer* second, const std::shared_ptr<region::RegionHost>& host);
  // The programs of the blocks, without and with adapters, that compile() uses after load() with the same arguments.
  // Reads configuration and headers. `fp8_products`: see Parameters::set_fp8_products. Throws what load() throws.
  static std::vector<region::Program> programs(const std::string& dir, Placement placement, const std::string& quantize,
                                               bool fp8_products);

  // A copy with other parameter structs: those of this transformer with terms of adapters added. If the columns of
  // compiled blocks are too few, the blocks run eagerly. Throws what RegionHost::fall_back throws.
  WanTransformer adapted(WanSlots slots) const;
  // Copies the copy's adapters to where compiled blocks read them. Call it on what adapted() returned, before
  // velocity(), on the same stream, and for one request at a time.
  void load_adapters() const;
  // Overwrites what load_adapters() copied with zeros. Call it while no request with adapters runs.
  void clear_adapters() const;

  const WanConfig& config() const { return config_; }
  const WanSlots& slots() const { return slots_; }
  PartSequence& parts() const { return *parts_; }       // one for each block
  const parallel::Team& team() const { return team_; }  // all ranks of the region host
  std::int64_t bytes() const { return bytes_; }
  const std::map<std::string, int>& linears() const { return linears_; }  // as Parameters::linears()

  // Prewarms library plans for velocity() of latents of this size in the background, on request also with adapters.
  // Does not block. Thread-safe.
  void prewarm(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t text, bool adapters) const;

  // Converts prompt_embeds [1, L, text_dim] to the blocks' input [1, L, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // The table that velocity() needs for latents [1, C, frames, rows, columns]. Throws what wan_rope_table throws.
  at::Tensor rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const;
  // `latents`: [1, in_channels, F, h, w] with even h and w; rounded to the model's type. `timestep`: 0 to 1000, not
  // rounded. `text`: from embed_text(). `rope`: from rope(). Returns [1, out_channels, F, h, w] in the model's type.
  // `team`: the ranks that share the forward; each gets the whole result.
  // Not thread-safe if compiled blocks have quantized weights.
  // Throws Failure: kInvalidArgument for another shape; the group's errors.
  at::Tensor velocity(const at::Tensor& latents, double timestep, const at::Tensor& text, const at::Tensor& rope,
                      const parallel::Team& team = {}) const;

 private:
  WanTransformer() = default;
  at::Tensor run_blocks(at::Tensor x, const at::Tensor& text, const at::Tensor& time, const at::Tensor& rope,
                        region::Mode mode, const parallel::Sequence* sequence) const;
  region::Mode mode_for(std::int64_t frames, std::int64_t tokens) const;  // frames and tokens of the latents

  WanConfig config_{};
  WanSlots slots_;
  std::shared_ptr<PartSequence> parts_;
  std::int64_t bytes_ = 0;
  Placement placement_;
  parallel::Team team_;
  std::map<std::string, int> linears_;
  bool computes_in_other_type_ = false;                     // as in Parameters
  std::shared_ptr<const WanRegions> regions_;               // of both experts; null: blocks run eagerly
  std::size_t expert_ = 0;                                  // in regions_
  std::shared_ptr<const AdapterColumns::Layout> adapters_;  // null: no adapters, or they are added eagerly
  at::Tensor tables_;                                       // [num_layers, 6, D]: of all blocks, if they are compiled
};

}  // namespace ditfleet::pipeline
