// The FLUX transformer: packed latents and text in, velocity out.
#pragma once

#include <memory>
#include <string>

#include "pipeline/families/flux/modulation.h"
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
  // Reads DIR/config.json and the weights beside it. Throws what ConfigFile and Parameters throw. With a host whose
  // backend is not eager its blocks run as compiled regions, which are compiled here: throws what Region throws, too.
  // With room for adapters of `adapter_rank` beside the blocks' weights (0: none), if they run as regions.
  static FluxTransformer load(const std::string& dir, Placement placement,
                              std::shared_ptr<region::RegionHost> regions = nullptr, std::int64_t adapter_rank = 0);
  // The same with parameters that are in place already.
  FluxTransformer(FluxConfig config, FluxSlots slots, std::int64_t bytes, Placement placement,
                  std::shared_ptr<region::RegionHost> regions);

  // The same with other slots: this one's with terms of adapters added. Blocks that run as regions and have no room
  // for them run eagerly instead: throws what RegionHost::fall_back throws.
  FluxTransformer adapted(FluxSlots slots) const;
  // Copies the adapters of `adapted`, which adapted() of this transformer returned, to where the blocks read them. Call
  // it before velocity() of `adapted`, on the same stream, and for one request at a time.
  void load_adapters(const FluxTransformer& adapted);
  // Overwrites what load_adapters() copied with zeros. Call it while no request with adapters runs.
  void clear_adapters();

  const FluxConfig& config() const { return config_; }
  const FluxSlots& slots() const { return slots_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t compile_us() const { return compile_us_; }  // of load(): until the regions' programs were there

  // Prepares in the background what velocity() needs for a new size (attention's plan). Does not wait. Thread safe.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const;

  // Rows for `timesteps` ([n] fp32, on the device), see ModulationTable.
  ModulationTable modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const;
  // Text tokens as the blocks take them: [1, S_text, joint_attention_dim] → [1, S_text, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // latents [batch, S_image, in_channels]; text from embed_text; rope from rope_table. Returns [batch, S_image,
  // in_channels]. Const and thread safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope) const;

 private:
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, region::Mode mode) const;
  void open_libraries(Placement placement, const region::RegionHost& host) const;

  FluxConfig config_{};
  FluxSlots slots_;
  std::shared_ptr<FluxRegions> regions_;    // null: blocks run eagerly (blocks.h)
  std::shared_ptr<region::Graphs> graphs_;  // null: none on this device or in this build
  std::int64_t bytes_ = 0, compile_us_ = 0;
  std::shared_ptr<const FluxAdapters> adapters_;  // null: none, or they are added eagerly
};

}  // namespace ditfleet::pipeline
