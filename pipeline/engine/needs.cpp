#include "pipeline/engine/needs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/engine/adapt.h"
#include "pipeline/memory/dry_run.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/weights/safetensors.h"
#include "shared/core/sha256.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kMostSizes = 1024;

std::unique_ptr<Network> load_dry(const Family& family, LoadContext context, std::int64_t& bytes) {
  const std::lock_guard lock(dry_run_mutex());
  const c10::InferenceMode inference(true);
  context.regions = region::make_dry_host(*context.regions);
  context.placement = {.device = kDryDevice, .dtype = context.placement.dtype, .stands_for = context.placement.device};
  const std::int64_t before = dry_bytes();
  Folder folder(family, context, nullptr);
  auto network = load_network(folder);
  Transformer::compile(network->transformers(), context.regions);
  bytes = dry_bytes() - before;
  return network;
}

// Its transformers get adapters that fill the columns.
std::unique_ptr<Network> with_adapters(const Network& network) {
  auto copy = network.clone();
  for (Transformer* transformer : copy->transformers()) {
    TransformerWeights weights = transformer->weights();
    for (const NamedLinear& linear : transformer->named_linears(weights)) {
      LinearSlot& slot = *linear.slot;
      const std::int64_t rank = slot.lora_columns.count;
      if (rank > 0 && slot.low_rank.empty())
        slot.low_rank = {{at::empty({rank, slot.in()}, slot.wide.options()),
                          at::empty({slot.out(), rank}, slot.wide.options()), 0, 1}};
    }
    transformer->adapt(std::move(weights));
  }
  return copy;
}

// A hash of all that the bytes and the layout of the weights depend on.
std::string host_key(const Family& family, const LoadContext& context, const ModelSource& source) {
  std::string key = std::string(family.description->name) + '/' +
                    std::to_string(static_cast<int>(context.placement.dtype)) + '/' +
                    std::to_string(context.adapter_columns) + '/' + context.regions->options.backend;
  for (const auto& [component, format] : source.quantize) key += '/' + component + '=' + format;
  std::vector<std::string> files;
  for (const auto& [component, file] : source.files) files.push_back(file);
  for (const auto& file : std::filesystem::recursive_directory_iterator(source.dir))
    if (file.is_regular_file()) files.push_back(file.path().string());
  std::sort(files.begin(), files.end());
  for (const auto& file : files) key += '/' + file_identity(file);
  Sha256 hash;
  hash.update(key);
  return hash.hex();
}

using Formats = std::map<std::string, std::string>;  // component → format, as ModelSource::quantize

// The most precise first.
std::vector<Formats> formats_to_try(const Family& family, ModelSource source, c10::Device device) {
  if (!source.quantize.contains("*")) return {source.quantize};
  source.quantize.clear();
  std::vector<Formats> formats{{}};
  if (const auto stored = stored_formats(family, source); stored.gguf || stored.other) return formats;
  std::string text_encoder;
  for (const Component& one : family.components)
    if (one.library == Library::kTransformers && !one.formats.empty()) text_encoder = one.name;
  if (device.is_cpu() || region::has_fp8_products(device))
    formats.push_back({{"transformer", "fp8"}, {text_encoder, "nf4"}});
  formats.push_back({{"transformer", "nf4"}, {text_encoder, "nf4"}});
  return formats;
}

}  // namespace

Settings settings_of(const Network& network, const GenerationRequest& request) {
  Settings settings = read_settings(request, network.entry);
  network.complete(settings);
  return settings;
}

RequestSize size_of(const Network& network, const Settings& s, int gpus) {
  return {.width = s.width(),
          .height = s.height(),
          .frames = s.frames(),
          .text_tokens = s.text_tokens(),
          .steps = std::min(s.steps(), network.steps_in_memory()),
          .forwards = s.negative ? 2 : 1,
          .adapters = !s.loras.empty(),
          .cached = s.cache_threshold > 0,
          .images = static_cast<int>(s.images.size()),
          .masked = s.mask != nullptr,
          .gpus = gpus};
}

// A picture of the size by which requests without a size are scheduled.
std::shared_ptr<const Media> blank_picture(const job::ModelEntry& entry) {
  Media blank{.width = std::max(entry.free_width, 1), .height = std::max(entry.free_height, 1), .rgb = {}};
  blank.rgb.resize(static_cast<std::size_t>(blank.width) * static_cast<std::size_t>(blank.height) * 3);
  return std::make_shared<const Media>(std::move(blank));
}

// Those of the smallest request. A plan needs no pictures: blank ones stand for them.
std::vector<std::shared_ptr<const Media>> least_pictures(const job::ModelEntry& entry) {
  const auto image = entry.fields.find(job::Field("image"));
  if (image == entry.fields.end() || !image->second.required) return {};
  return {static_cast<std::size_t>(std::max<std::int64_t>(1, image->second.low)), blank_picture(entry)};
}

RequestSize size_of(const Network& network, GenerationRequest request, const parallel::Team& team) {
  if (request.images.empty()) request.images = least_pictures(network.entry);
  return size_of(network, settings_of(network, request), request.alone.value_or(false) ? 1 : team.count);
}

Needs::Needs(const Family& family, const LoadContext& context)
    : network_(load_dry(family, context, weights_.fixed)), team_(parallel::Team::all(context.regions->ranks)) {
  for (const TextEncoder* text : network_->text_encoders()) {
    weights_.text.bytes += text->parts().bytes();
    weights_.text.ahead = std::max(weights_.text.ahead, text->parts().ahead_bytes());
  }
  for (const Transformer* transformer : network_->transformers()) {
    const PartSequence& blocks = *transformer->parts().blocks;
    weights_.other_blocks += std::min(weights_.blocks.bytes, blocks.bytes());
    weights_.blocks = {std::max(weights_.blocks.bytes, blocks.bytes()),
                       std::max(weights_.blocks.ahead, blocks.ahead_bytes())};
    if (const auto& apart = transformer->parts().apart)
      weights_.modulation = {weights_.modulation.bytes + apart->bytes(),
                             std::max(weights_.modulation.ahead, apart->ahead_bytes())};
  }
  weights_.fixed -= weights_.text.bytes + weights_.modulation.bytes + weights_.blocks.bytes + weights_.other_blocks;
  // The first request allocates memory for values of quantized weights, which stays.
  const std::int64_t before = dry_bytes();
  measure(smallest());
  weights_.fixed = std::max<std::int64_t>(0, weights_.fixed + dry_bytes() - before);
  if (context.adapters.slots > 0)
    weights_.fixed += AdapterStore(lora_base(*network_), context.placement, context.adapters).slot_bytes();
}

// With the model's defaults, rounded to what it takes.
Settings Needs::example(int width, int height, int frames) const {
  Settings settings{.fields = entry().defaults};
  for (const auto& [field, value] :
       {std::pair(job::Field("width"), width), {job::Field("height"), height}, {job::Field("frames"), frames}}) {
    const auto limits = entry().fields.find(field);
    if (limits == entry().fields.end()) continue;
    const std::int64_t multiple = limits->second.remainder > 0 ? 1 : limits->second.multiple_of;
    settings.fields.set(field, std::max(limits->second.low, value / multiple * multiple));
  }
  network_->complete(settings);
  return settings;
}

RequestSize Needs::size_of(const Family::Extent& extent) const {
  Settings settings = example(extent.width, extent.height, extent.frames);
  settings.images = least_pictures(entry());
  return pipeline::size_of(*network_, settings, team_.count);
}

RequestSize Needs::smallest() const {
  RequestSize size = size_of({1, 1, 1});
  size.text_tokens = size.steps = 1;
  return size;
}

MemoryNeeds Needs::of(const RequestSize& size) {
  const std::lock_guard lock(mutex_);
  if (const auto known = known_.find(size); known != known_.end()) return known->second;
  if (known_.size() >= kMostSizes) known_.clear();
  return known_[size] = measure(size);
}

// Runs what DiffusionModel runs.
MemoryNeeds Needs::measure(const RequestSize& size) const {
  const std::lock_guard lock(dry_run_mutex());
  const c10::InferenceMode inference(true);
  const std::unique_ptr<Network> adapted = size.adapters ? with_adapters(*network_) : nullptr;
  const Network& network = adapted ? *adapted : *network_;
  const parallel::Team team = size.gpus > 1 ? team_ : parallel::Team();
  Settings settings = example(size.width, size.height, size.frames);
  settings.fields.set("num_inference_steps", std::int64_t{size.steps});
  settings.fields.set("max_sequence_length", std::int64_t{size.text_tokens});
  settings.images.assign(static_cast<std::size_t>(size.images), blank_picture(entry()));
  if (size.masked) settings.mask = settings.images[0];
  settings.negative = size.forwards > 1 ? std::optional(std::string()) : std::nullopt;
  Schedule schedule;  // any: a model's own may need more steps
  for (int step = 0; step <= size.steps; ++step)
    schedule.sigmas.push_back(1 - static_cast<float>(step) / static_cast<float>(size.steps));
  for (int step = 0; step < size.steps; ++step)
    schedule.timesteps.push_back(1000 * schedule.sigmas[static_cast<std::size_t>(step)]);

  MemoryNeeds needs = weights_;
  needs.passes = size.forwards;
  const std::int64_t before = dry_bytes();
  const auto peak_of = [&](const auto& stage) {
    start_dry_peak();
    stage();
    return dry_peak() - before;
  };
  Conditions conditions;
  std::unique_ptr<Denoiser> denoiser;
  needs.encode = peak_of([&] {
    conditions = encode_conditions(
        network, settings, [&](const std::string&) { return network.encode(network.longest_ids(settings), settings); });
    denoiser = network.denoiser(settings, schedule, conditions);
  });
  at::Tensor latents;
  needs.denoise = peak_of([&] {
    latents = network.first_latents(conditions, schedule).clone();
    const auto sampler = network.sampler(settings, schedule);
    BlockCaches caches(1);
    // The last step finds the sampler and the caches with all tensors that they keep.
    for (std::int64_t step = 0; step < size.steps; ++step) {
      const at::Tensor velocity =
          step + (size.cached ? 2 : 1) < size.steps
              ? at::empty_like(latents, network.placement.dtype)
              : guided_velocity(*denoiser, step, latents, size.forwards > 1, team, size.cached ? &caches : nullptr);
      latents = denoiser->stepped(sampler->step(latents, velocity, step), step);
    }
    latents = network.finished(latents, settings);
  });
  needs.decode =
      peak_of([&] { network.decode(latents, settings, [](const at::Tensor& frames) { unit_range(frames); }); });
  return needs;
}

Fit fit(const Family& family, LoadContext context, bool always) {
  const std::vector<Formats> formats = formats_to_try(family, context.source, context.placement.device);
  Fit fitted{context.source, nullptr};
  fitted.source.quantize = formats.front();
  if (!context.memory->limited() && !always) return fitted;
  std::vector<std::shared_ptr<Needs>> needs(formats.size());
  // `extent`: null: the smallest request.
  const auto plan = [&](std::size_t i, const Family::Extent* extent) {
    context.source.quantize = formats[i];
    if (!needs[i]) needs[i] = std::make_shared<Needs>(family, context);
    return context.memory->plan(needs[i]->of(extent ? needs[i]->size_of(*extent) : needs[i]->smallest())).choice.plan;
  };
  std::optional<std::size_t> chosen;
  const auto choose_resident = [&](const Family::Extent* extent) {
    for (std::size_t i = 0; !chosen && i < formats.size(); ++i)
      if (const auto made = plan(i, extent); made && made->kind != PlanKind::kBlock) chosen = i;
  };
  choose_resident(&family.typical);
  if (constexpr std::size_t kFp8 = 1; !chosen && formats.size() == 3)
    if (const auto made = plan(kFp8, &family.typical);
        made && 2 * made->keep_blocks >= needs[kFp8]->of(needs[kFp8]->smallest()).blocks.bytes)
      chosen = kFp8;
  choose_resident(&family.small);
  choose_resident(nullptr);
  for (std::size_t i = 0; !chosen && i < formats.size(); ++i)
    if (plan(i, nullptr)) chosen = i;
  const std::size_t best = chosen.value_or(formats.size() - 1);
  plan(best, nullptr);
  fitted.source.quantize = formats[best];
  fitted.needs = needs[best];
  return fitted;
}

Placement fitted_placement(const Family& family, const LoadContext& context, const Fit& fit) {
  if (!fit.needs) return context.placement;
  if (const PlanReport plan = context.memory->plan(fit.needs->of(fit.needs->smallest())); !plan.choice.plan)
    fail(Code::kOutOfMemory, budget_text(plan.needs, plan.choice, plan.available));
  Placement placement = context.placement;
  placement.host_key = host_key(family, context, fit.source);
  placement.on_host = !context.memory->fits_beside(fit.needs->of(fit.needs->size_of(family.typical)));
  return placement;
}

}  // namespace ditfleet::pipeline
