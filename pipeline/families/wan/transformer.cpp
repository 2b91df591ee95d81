#include "pipeline/families/wan/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/block_program.h"
#include "pipeline/families/wan/blocks.h"
#include "pipeline/families/wan/regions.h"
#include "pipeline/families/wan/rope.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kMaxPeriod = 10000;

// [1, count] fp32: cosines, then sines. The timestep is fp32, as in diffusers.
at::Tensor sinusoids(double timestep, std::int64_t count, c10::Device device) {
  const auto fp32 = at::TensorOptions(c10::ScalarType::Float).device(device);
  const at::Tensor frequencies =
      at::exp(-std::log(kMaxPeriod) * at::arange(0, count / 2, fp32) / static_cast<double>(count / 2));
  const at::Tensor angles = (static_cast<float>(timestep) * frequencies).unsqueeze(0);
  return at::cat({at::cos(angles), at::sin(angles)}, 1);
}

bool takes_fp8(std::string_view linear) { return linear.starts_with("blocks."); }
bool takes_nf4(std::string_view) { return true; }

void set_up(Parameters& parameters, const std::string& quantize) {
  if (!quantize.empty()) parameters.quantize_on_load(quantize, quantize == "fp8" ? takes_fp8 : takes_nf4);
}

bool same_blocks(const WanConfig& a, const WanConfig& b) {
  const auto of = [](const WanConfig& c) {
    return std::tuple(c.heads, c.head_dim, c.ffn_dim, c.eps, c.cross_attn_norm);
  };
  return of(a) == of(b);
}

}  // namespace

WanTransformer WanTransformer::load(const std::string& dir, Placement placement,
                                    std::shared_ptr<region::RegionHost> regions, const std::string& quantize,
                                    const std::string& name, std::int64_t adapter_rank) {
  const bool compiled = regions && regions->compiler && regions->options.transformer;
  WanTransformer made;
  made.config_ = read_wan_config(ConfigFile(dir + "/config.json"));
  made.placement_ = placement;
  made.team_ = parallel::Team::all(regions ? regions->ranks : nullptr);
  made.team_.check_heads(made.config_.heads);
  auto parameters = Parameters::open(dir, Library::kDiffusers, placement);
  set_up(parameters, quantize);
  parameters.set_regions(std::move(regions));
  made.parts_ = std::make_shared<PartSequence>(placement, name, /*repeats=*/true);
  made.slots_ = bind_wan_slots(made.config_, parameters, *made.parts_,
                               compiled ? std::min(adapter_rank, region::kMostAdapterColumns) : 0);
  parameters.finish("");
  made.bytes_ = parameters.bytes();
  made.linears_ = parameters.linears();
  made.computes_in_other_type_ = parameters.computes_in_other_type();
  return made;
}

std::vector<region::Program> WanTransformer::programs(const std::string& dir, Placement placement,
                                                      const std::string& quantize, bool fp8_products) {
  const WanConfig config = read_wan_config(ConfigFile(dir + "/config.json"));
  auto parameters = [&] {
    try {
      return Parameters::open(dir, Library::kDiffusers, placement);
    } catch (const Failure& failure) {  // configuration without weights: nothing is stored quantized
      if (failure.error().code != Code::kNotFound) throw;
      return Parameters(Checkpoint(), placement);
    }
  }();
  set_up(parameters, quantize);
  parameters.set_fp8_products(fp8_products);
  return WanRegions::programs(config, wan_formats(config, parameters), placement);
}

void WanTransformer::compile(WanTransformer& first, WanTransformer* second,
                             const std::shared_ptr<region::RegionHost>& host) {
  if (!host || !host->compiler || !host->options.transformer) return;
  if (second && !same_blocks(first.config_, second->config_)) {
    compile(first, nullptr, host);
    return compile(*second, nullptr, host);
  }
  std::vector<WanTransformer*> experts{&first};
  if (second) experts.push_back(second);
  std::vector<WanRegions::Expert> parts;
  for (const WanTransformer* expert : experts) {
    if (expert->computes_in_other_type_ && expert->placement_.dtype == c10::ScalarType::Float)
      return host->fall_back("wan", "unsupported_op", "[wan] NF4 weights compute in another type than fp32");
    parts.push_back({&expert->slots_, expert->parts_});
  }
  const auto regions = std::make_shared<const WanRegions>(first.config_, parts, first.placement_, host);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    std::vector<at::Tensor> tables;
    for (const WanBlockSlots& block : experts[i]->slots_.blocks) tables.push_back(block.table);
    experts[i]->tables_ = at::cat(tables);
    experts[i]->regions_ = regions;
    experts[i]->expert_ = i;
  }
}

WanTransformer WanTransformer::adapted(WanSlots slots) const {
  WanTransformer made = *this;
  made.slots_ = std::move(slots);
  if (!regions_) return made;
  const auto terms = WanRegions::terms_of(made.slots_);
  const AdapterColumns* columns = regions_->columns(expert_);
  if (const std::string problem = AdapterColumns::problem(columns, terms); !problem.empty()) {
    made.regions_->leave("adapters", problem);
    made.regions_ = nullptr;
  } else if (columns) {
    made.adapters_ = columns->plan(terms);
  }
  return made;
}

void WanTransformer::load_adapters() const {
  if (adapters_) regions_->columns(expert_)->load(adapters_);
}

void WanTransformer::clear_adapters() const {
  if (regions_ && regions_->columns(expert_)) regions_->columns(expert_)->clear();
}

// Rules count the frames of the video; the VAE makes four of each latent frame but the first.
region::Mode WanTransformer::mode_for(std::int64_t frames, std::int64_t tokens) const {
  return regions_ ? regions_->mode_for(tokens, 4 * (frames - 1) + 1) : region::Mode::kNone;
}

void WanTransformer::prewarm(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t text,
                             bool adapters) const {
  const std::int64_t tokens = frames * (rows / 2) * (columns / 2);
  if (mode_for(frames, tokens) != region::Mode::kNone) regions_->prewarm(tokens, text, adapters);
}

at::Tensor WanTransformer::run_blocks(at::Tensor x, const at::Tensor& text, const at::Tensor& time,
                                      const at::Tensor& rope, region::Mode mode,
                                      const parallel::Sequence* sequence) const {
  PartSequence::Pass pass(parts_.get());
  if (mode == region::Mode::kNone) {
    for (std::size_t i = 0; i < slots_.blocks.size(); ++i) {
      pass.begin(i);
      x = wan_block(std::move(x), text, time, rope, slots_.blocks[i], config_, sequence);
      pass.end(i);
    }
    return x;
  }
  const at::Tensor rows = tables_ + time.to(c10::ScalarType::Float), table = WanRegions::rope_rows(rope);
  rows.select(1, 1).add_(1);  // the blocks multiply by 1 + scale
  rows.select(1, 4).add_(1);
  for (std::size_t i = 0; i < slots_.blocks.size(); ++i) {
    pass.begin(i);
    regions_->block(expert_, i, x, text, rows.narrow(0, static_cast<std::int64_t>(i), 1), table, mode, slots_.blocks[i],
                    adapters_.get(), sequence);
    pass.end(i);
  }
  return x;
}

at::Tensor WanTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  const at::Tensor inner = at::gelu(apply_linear(slots_.text_first, prompt_embeds.to(placement_.dtype)), "tanh");
  return apply_linear(slots_.text_second, inner);
}

at::Tensor WanTransformer::rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const {
  return wan_rope_table(config_, frames, rows / 2, columns / 2, placement_.device);
}

at::Tensor WanTransformer::velocity(const at::Tensor& latents, double timestep, const at::Tensor& text,
                                    const at::Tensor& rope, const parallel::Team& team) const {
  if (latents.dim() != 5 || latents.size(0) != 1 || latents.size(1) != config_.in_channels ||
      latents.size(3) % 2 != 0 || latents.size(4) % 2 != 0) {
    std::string shape;
    for (const std::int64_t size : latents.sizes()) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    fail(Code::kInvalidArgument, "latents have shape [" + shape + "]; this transformer needs [1, " +
                                     std::to_string(config_.in_channels) + ", frames, even rows, even columns]");
  }
  const std::int64_t frames = latents.size(2), rows = latents.size(3) / 2, columns = latents.size(4) / 2;
  const at::Tensor patches = latents.to(placement_.dtype)
                                 .reshape({config_.in_channels, frames, rows, 2, columns, 2})
                                 .permute({1, 2, 4, 0, 3, 5})
                                 .reshape({1, frames * rows * columns, 4 * config_.in_channels});
  // With fewer tokens than ranks each rank computes all.
  std::optional<parallel::Sequence> sequence;
  if (team && patches.size(1) >= team.count) sequence.emplace(team, patches.size(1));
  at::Tensor x = apply_linear(slots_.patch_in, sequence ? sequence->own(patches) : patches);
  const at::Tensor sines = sinusoids(timestep, config_.freq_dim, placement_.device);
  const at::Tensor conditioning =
      apply_linear(slots_.time_second, at::silu(apply_linear(slots_.time_first, sines))).to(placement_.dtype);
  const at::Tensor time = apply_linear(slots_.time_proj, at::silu(conditioning)).unflatten(1, {6, config_.width()});
  x = run_blocks(std::move(x), text, time, sequence ? sequence->own(rope) : rope,
                 mode_for(frames, frames * rows * columns), sequence ? &*sequence : nullptr);
  const std::vector<at::Tensor> head = (slots_.table + conditioning.unsqueeze(1)).chunk(2, 1);
  x = apply_linear(slots_.patch_out, wan_modulated_norm(x, head[0], head[1], config_.eps));
  return (sequence ? sequence->gather(x) : x)
      .view({frames, rows, columns, 2, 2, config_.out_channels})
      .permute({5, 0, 1, 3, 2, 4})
      .reshape({1, config_.out_channels, frames, 2 * rows, 2 * columns});
}

}  // namespace ditfleet::pipeline
