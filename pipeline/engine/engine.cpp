#include "pipeline/engine.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/model.h"
#include "pipeline/region/blocks/blocks.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::pipeline {
namespace {

class TorchEngine final : public Engine {
 public:
  TorchEngine(DeviceChoice choice, c10::ScalarType dtype, std::shared_ptr<region::RegionHost> regions,
              AdapterStore::Limits adapters, std::int64_t columns)
      : choice_(std::move(choice)),
        dtype_(dtype),
        regions_(std::move(regions)),
        adapters_(adapters),
        columns_(columns) {
    regions_->counters->show(compile_backend());
  }

  std::string device() const override { return device_text(choice_.device); }
  std::string device_name() const override { return choice_.name; }
  std::string precision() const override { return dtype_ == c10::ScalarType::Float ? "fp32" : "bf16"; }

  std::string compile_backend() const override {
    return regions_->compiler ? std::string(regions_->compiler->name()) : "eager";
  }
  region::RegionCounts region_counts() const override { return regions_->counters->counts(); }

  Result<std::unique_ptr<Model>> load_model(const std::string& name, const std::string& dir) override {
    const Placement placement{choice_.device, dtype_};
    try {
      StageScope scope(choice_.device);
      const auto begun = std::chrono::steady_clock::now();
      auto prompts = Prompts::load(dir);
      const auto tokenizers_us =
          std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun).count();
      auto folder = load_flux_folder(dir, placement, regions_, adapters_.slots > 0 ? columns_ : 0);
      if (prompts.clip_length() > folder.clip.config().max_position_embeddings)
        fail(Code::kDataCorrupt, dir + "/tokenizer/tokenizer_config.json: model_max_length is " +
                                     std::to_string(prompts.clip_length()) + "; text_encoder has positions for " +
                                     std::to_string(folder.clip.config().max_position_embeddings));
      scope.finish();
      ModelInfo info;
      info.name = name;
      info.dir = dir;
      info.precision = precision();
      info.device = device();
      info.size_multiple = folder.size_multiple();
      info.weight_bytes = folder.weight_bytes();
      info.load_us = folder.load_us;
      info.load_us.insert(info.load_us.begin(), {"tokenizers", tokenizers_us});
      return std::unique_ptr<Model>(
          std::make_unique<FluxModel>(std::move(info), placement, std::move(folder), std::move(prompts), adapters_));
    } catch (...) {
      const Error error = error_in_flight("load " + dir);
      if (error.code == Code::kOutOfMemory) release_cached_memory(choice_.device);
      return error;
    }
  }

 private:
  const DeviceChoice choice_;
  const c10::ScalarType dtype_;
  const std::shared_ptr<region::RegionHost> regions_;
  const AdapterStore::Limits adapters_;
  const std::int64_t columns_;  // beside each linear of the blocks
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options) {
  try {
    if (options.dtype != "auto" && options.dtype != "fp32" && options.dtype != "bf16")
      fail(Code::kInvalidArgument, "dtype is \"" + options.dtype + "\"; it takes auto, fp32 or bf16", "dtype");
    if (options.threads < 0)
      fail(Code::kInvalidArgument, "threads is " + std::to_string(options.threads) + "; it takes 0 (all cores) or more",
           "threads");
    if (options.max_lora_rank < 1)
      fail(Code::kInvalidArgument, "max_lora_rank is " + std::to_string(options.max_lora_rank) + "; it takes 1 or more",
           "max_lora_rank");
    if (options.lora_together_rank < 0)
      fail(Code::kInvalidArgument,
           "lora_together_rank is " + std::to_string(options.lora_together_rank) + "; it takes 0 or more",
           "lora_together_rank");
    if (options.lora_slots < 0 || options.lora_host_bytes < 0)
      fail(Code::kInvalidArgument, "lora_slots and lora_host_bytes must not be below 0",
           options.lora_slots < 0 ? "lora_slots" : "lora_host_bytes");
    DeviceChoice choice = load_device(options.device);
    if (options.threads > 0) at::set_num_threads(options.threads);
    const bool bf16 = options.dtype == "bf16" || (options.dtype == "auto" && !choice.device.is_cpu());
    region::CompileOptions compile = options.compile;
    if (region::runs_eagerly(compile, choice.device.is_cpu(), bf16)) compile.backend = "eager";
    auto regions = region::make_region_host(std::move(compile), choice.device, options.kernel_cache);
    return std::unique_ptr<Engine>(std::make_unique<TorchEngine>(
        std::move(choice), bf16 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float, std::move(regions),
        AdapterStore::Limits{options.max_lora_rank, options.lora_slots, options.lora_host_bytes},
        std::max(options.lora_together_rank, options.max_lora_rank)));
  } catch (...) {
    return error_in_flight("engine");
  }
}

Result<region::AheadReport> Engine::compile_regions(const std::string& dir, const std::string& dtype,
                                                    const std::vector<std::string>& architectures,
                                                    kernel_cache::KernelCache& cache,
                                                    const region::CompileOptions& options) {
  try {
    if (dtype != "auto" && dtype != "fp32" && dtype != "bf16")
      fail(Code::kInvalidArgument, "dtype is \"" + dtype + "\"; it takes auto, fp32 or bf16", "dtype");
    const FluxConfig config = read_flux_config(ConfigFile(dir + "/transformer/config.json"));
    // Refuses an architecture that is not known before the first one is compiled.
    if (auto known = region::check_architectures(architectures); !known) return known.error();
    region::AheadReport report;
    for (const auto& arch : architectures) {
      const bool wide = dtype == "fp32" || (dtype == "auto" && arch == "cpu");
      if (region::runs_eagerly(options, arch == "cpu", !wide)) {
        report.op_by_op.push_back(arch);
        continue;
      }
      const region::BlockShape shape{.heads = config.heads,
                                     .head_dim = config.head_dim,
                                     .type = wide ? region::ElementType::kF32 : region::ElementType::kBF16};
      auto one =
          region::compile_ahead(shape, config.num_layers > 0, config.num_single_layers > 0, arch, cache, options);
      if (!one) return one.error();
      report.compiled += one->compiled;
      report.hits += one->hits;
      for (auto& made : one->regions) report.regions.push_back(std::move(made));
      for (auto& note : one->notes) report.notes.push_back(std::move(note));
    }
    return report;
  } catch (...) {
    return error_in_flight("compile " + dir);
  }
}

}  // namespace ditfleet::pipeline
