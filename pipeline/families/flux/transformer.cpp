#include "pipeline/families/flux/transformer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/block_programs.h"
#include "pipeline/families/flux/blocks.h"
#include "pipeline/families/flux/regions.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/region/run/graphs.h"
#include "shared/core/background_threads.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kMostGraphs = 16;  // buckets; each keeps its inputs, a few MB

bool takes_fp8(std::string_view linear) {
  return linear.find("transformer_blocks.") != std::string_view::npos && linear.find(".norm") == std::string_view::npos;
}
bool takes_nf4(std::string_view) { return true; }

void set_up(Parameters& parameters, const FluxConfig& config, const std::string& quantize) {
  parameters.set_file_names(flux_file_names(config, parameters));
  if (!quantize.empty()) parameters.quantize_on_load(quantize, quantize == "fp8" ? takes_fp8 : takes_nf4);
}

}  // namespace

Parameters FluxTransformer::open(const std::string& dir, const std::string& file, Placement placement) {
  if (file.empty()) return Parameters::open(dir, Library::kDiffusers, placement);
  return Parameters(unwrap(Checkpoint::open_file(file, {"model.diffusion_model.", "diffusion_model."})), placement);
}

FluxTransformer FluxTransformer::load(const std::string& dir, Placement placement,
                                      std::shared_ptr<region::RegionHost> regions, std::int64_t adapter_rank,
                                      const std::string& file, const std::string& quantize) {
  const FluxConfig config = read_flux_config(ConfigFile(dir + "/config.json"));
  auto team = parallel::Team::all(regions ? regions->ranks : nullptr);
  team.check_heads(config.heads);
  auto parameters = open(dir, file, placement);
  set_up(parameters, config, quantize);
  parameters.set_regions(regions);
  const bool compiled = regions && regions->compiler && regions->options.transformer;
  if (adapter_rank > region::kMostAdapterColumns)
    fail(Code::kInvalidArgument,
         "room for adapters of rank " + std::to_string(adapter_rank) + " is asked for; at most " +
             std::to_string(region::kMostAdapterColumns),
         "max_lora_rank");
  const FluxParts parts{std::make_shared<PartSequence>(placement, "modulation", /*repeats=*/false),
                        std::make_shared<PartSequence>(placement, "blocks", /*repeats=*/true)};
  FluxSlots slots = bind_flux_slots(config, parameters, compiled ? adapter_rank : 0, parts);
  parameters.finish("");
  if (compiled && parameters.computes_in_other_type() && placement.dtype == c10::ScalarType::Float) {
    regions->fall_back("flux.double", "unsupported_op", "[flux] NF4 weights compute in another type than fp32");
    regions = nullptr;
  }
  FluxTransformer made(config, std::move(slots), parameters.bytes(), placement, std::move(regions), parts);
  made.linears_ = parameters.linears();
  made.team_ = std::move(team);
  return made;
}

std::vector<region::Program> FluxTransformer::programs(const std::string& dir, Placement placement,
                                                       const std::string& file, const std::string& quantize,
                                                       bool fp8_products) {
  const FluxConfig config = read_flux_config(ConfigFile(dir + "/config.json"));
  auto parameters = [&] {
    try {
      return open(dir, file, placement);
    } catch (const Failure& failure) {  // configuration without weights: nothing is stored quantized
      if (failure.error().code != Code::kNotFound || !file.empty()) throw;
      return Parameters(Checkpoint(), placement);
    }
  }();
  set_up(parameters, config, quantize);
  parameters.set_fp8_products(fp8_products);
  return FluxRegions::programs(config, flux_formats(config, parameters), placement);
}

FluxTransformer::FluxTransformer(FluxConfig config, FluxSlots slots, std::int64_t bytes, Placement placement,
                                 std::shared_ptr<region::RegionHost> regions, FluxParts parts)
    : config_(config), slots_(std::move(slots)), parts_(std::move(parts)), bytes_(bytes), placement_(placement) {
  if (!regions || !regions->compiler || !regions->options.transformer) return;
  const auto begun = std::chrono::steady_clock::now();
  BackgroundThreads threads("gpu_libraries", 1);  // loads the libraries while the programs compile
  std::future<void> libraries;
  if (placement.device.is_cuda())
    libraries = threads.run([&, host = regions] {
      try {
        open_libraries(placement, *host);
      } catch (...) {  // no harm: what could not be loaded now is loaded when it is needed, or fails there
        spdlog::warn("cannot load the GPU's libraries ahead of time; the first step will take longer: {}",
                     error_in_flight("libraries").message);
      }
    });
  regions_ = std::make_shared<FluxRegions>(config_, slots_, placement, std::move(regions), parts_.blocks);
  if (libraries.valid()) libraries.get();
  if (placement.device.is_cuda()) graphs_ = region::make_graphs(placement.device, kMostGraphs);
  compile_time_ = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
}

FluxTransformer FluxTransformer::adapted(FluxSlots slots) const {
  FluxTransformer made = *this;
  made.slots_ = std::move(slots);
  if (!made.regions_) return made;
  if (const std::string problem = made.regions_->adapter_problem(made.slots_); !problem.empty()) {
    made.regions_->leave_adapters(problem);
    made.regions_ = nullptr;
  } else {
    made.adapters_ = made.regions_->plan(made.slots_);
  }
  return made;
}

void FluxTransformer::load_adapters(const FluxTransformer& adapted) {
  if (adapted.adapters_) regions_->load(*adapted.adapters_);
}

void FluxTransformer::clear_adapters() {
  if (regions_) regions_->clear_adapters();
}

// The first use of cuBLAS, of cuDNN and of each of LibTorch's kernels loads it: half a second in all. So whatever a
// request needs beside its blocks is done here once, on next to nothing.
void FluxTransformer::open_libraries(Placement placement, const region::RegionHost& host) const {
  const c10::InferenceMode inference(true);
  const c10::DeviceGuard guard(placement.device);
  region::open_attention(placement.device, placement.dtype, config_.heads, config_.head_dim, host.attention,
                         host.direct_attention.get());
  const auto options = at::TensorOptions(placement.dtype).device(placement.device);
  const at::Tensor text = embed_text(at::zeros({1, 8, config_.joint_attention_dim}, options));
  const at::Tensor image = apply_linear(slots_.image_in, at::zeros({1, 4, config_.in_channels}, options));
  const auto rows = modulation(at::ones({1}, options.dtype(c10::ScalarType::Float)), 1,
                               at::zeros({1, config_.pooled_projection_dim}, options))
                        .step(0);
  rope_table(config_, 8, 2, 2, placement);
  apply_linear(slots_.image_out, modulated_norm(at::cat({text, image}, 1).slice(1, 8), rows.final));
  synchronize(placement.device);
}

void FluxTransformer::prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const {
  if (!regions_ || regions_->mode_for(image_tokens, 1) == region::Mode::kNone) return;
  regions_->prewarm(placement_, text_tokens, image_tokens);
}

ModulationTable FluxTransformer::modulation(const at::Tensor& timesteps, double guidance,
                                            const at::Tensor& pooled) const {
  return ModulationTable(config_, slots_, timesteps, guidance, pooled, parts_.modulation.get());
}

at::Tensor FluxTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  return apply_linear(slots_.text_in, prompt_embeds);
}

at::Tensor FluxTransformer::velocity(const at::Tensor& latents, const at::Tensor& text,
                                     const StepModulation& modulation, const at::Tensor& rope,
                                     const parallel::Team& team) const {
  // Images have one frame.
  const region::Mode mode = regions_ ? regions_->mode_for(latents.size(1), 1) : region::Mode::kNone;
  // A recording keeps addresses. Adapters of the first and the last linear are read from their slots, which change.
  const bool reads_slots = !slots_.image_in.low_rank.empty() || !slots_.image_out.low_rank.empty();
  const bool blocks_stay = !parts_.blocks || parts_.blocks->all_stay();
  if (graphs_ && region::uses_graphs(mode) && !blocks_stay) {
    static std::once_flag told;
    std::call_once(told, [] { spdlog::warn("blocks are copied in each step, so CUDA graphs are not used"); });
  }
  if (!graphs_ || !region::uses_graphs(mode) || reads_slots || !blocks_stay || team)
    return velocity(latents, text, modulation, rope, mode, team);
  std::vector<std::int64_t> bucket{static_cast<std::int64_t>(mode), parts_.blocks ? parts_.blocks->moves() : 0};
  for (const at::Tensor* t : {&latents, &text}) bucket.insert(bucket.end(), t->sizes().begin(), t->sizes().end());
  if (adapters_) regions_->join_adapters();
  if (adapters_) bucket.insert(bucket.end(), adapters_->signature.begin(), adapters_->signature.end());
  return graphs_->run(bucket, {latents, text, modulation.all, rope}, [&](const std::vector<at::Tensor>& in) {
    return velocity(in[0], in[1],
                    ModulationTable::views(in[2], slots_.double_blocks.size(), slots_.single_blocks.size()), in[3],
                    mode, {});
  });
}

at::Tensor FluxTransformer::velocity(const at::Tensor& latents, const at::Tensor& text_tokens,
                                     const StepModulation& modulation, const at::Tensor& rope, region::Mode mode,
                                     const parallel::Team& team) const {
  // With fewer tokens than ranks each rank computes all.
  if (team && std::min(latents.size(1), text_tokens.size(1)) < team.count)
    return velocity(latents, text_tokens, modulation, rope, mode, {});
  std::optional<parallel::Sequence> of_image, sequence;
  at::Tensor own_rope = rope, text = text_tokens;
  if (team) {
    const std::int64_t text_count = text_tokens.size(1);
    const parallel::Sequence of_text(team, text_count);
    of_image.emplace(team, latents.size(1));
    sequence.emplace(of_text, *of_image);
    own_rope = at::cat({of_text.own(rope.slice(1, 0, text_count)), of_image->own(rope.slice(1, text_count))}, 1);
    text = of_text.own(text_tokens);
  }
  const parallel::Sequence* const shared = sequence ? &*sequence : nullptr;
  const BlockGeometry geometry{config_.heads, config_.head_dim};
  const FluxRegions* regions = mode != region::Mode::kNone ? regions_.get() : nullptr;
  const at::Tensor rope_rows = regions ? FluxRegions::rope_rows(own_rope) : at::Tensor();
  at::Tensor image = apply_linear(slots_.image_in, of_image ? of_image->own(latents) : latents);
  PartSequence::Pass pass(parts_.blocks.get());
  std::size_t part = 0;
  for (std::size_t i = 0; i < slots_.double_blocks.size(); ++i) {
    pass.begin(part);
    // The first block's text is the caller's, who needs it for the next step.
    if (regions)
      regions->double_block(i, image, text, i > 0, modulation.double_blocks[i], rope_rows, mode, adapters_.get(),
                            shared);
    else
      double_block(image, text, slots_.double_blocks[i], modulation.double_blocks[i], own_rope, geometry, shared);
    pass.end(part++);
  }
  if (!slots_.single_blocks.empty()) {
    at::Tensor tokens = at::cat({text, image}, 1);
    for (std::size_t i = 0; i < slots_.single_blocks.size(); ++i) {
      pass.begin(part);
      if (regions)
        regions->single_block(i, tokens, modulation.single_blocks[i], rope_rows, mode, adapters_.get(), shared);
      else
        single_block(tokens, slots_.single_blocks[i], modulation.single_blocks[i], own_rope, geometry, shared);
      pass.end(part++);
    }
    image = tokens.slice(1, text.size(1));
  }
  image = apply_linear(slots_.image_out, modulated_norm(image, modulation.final));
  return of_image ? of_image->gather(image) : image;
}

}  // namespace ditfleet::pipeline
