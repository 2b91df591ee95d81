#include "pipeline/engine.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <spdlog/spdlog.h>
#include <torch/headeronly/version.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine/diffusion_model.h"
#include "pipeline/parallel/copy_engines.h"
#include "pipeline/parallel/nccl.h"
#include "pipeline/parallel/shared_memory.h"
#include "shared/core/missing_peer.h"

namespace ditfleet::pipeline {

namespace {

void check_dtype(const std::string& dtype) {
  if (dtype != "auto" && dtype != "fp32" && dtype != "bf16")
    fail(Code::kInvalidArgument, "dtype is \"" + dtype + "\"; it must be auto, fp32 or bf16", "dtype");
}

// Sets the limit. It must leave something after the driver's memory and the reserve.
void check_memory(const MemoryOptions& memory, c10::Device device) {
  const auto& offload = memory.offload;
  if (offload != "auto" && offload != "none" && offload != "model" && offload != "block")
    fail(Code::kInvalidArgument, "memory.offload is \"" + offload + "\"; it must be auto, none, model or block",
         "memory.offload");
  remove_unused_host_copies();
  if (memory.limit == 0 && memory.reserve == 0) return;
  const std::int64_t most = memory.limit > 0 ? memory.limit : available_memory(device, 0, 0);
  const std::int64_t rest = most - driver_memory(device) - memory.reserve;
  if (rest <= 0)
    fail(Code::kInvalidArgument,
         std::string(memory.limit > 0 ? "memory.limit is " : "the device's free memory is ") + bytes_text(most) +
             ", which leaves nothing: the driver takes " + bytes_text(driver_memory(device)) + " and memory.reserve " +
             bytes_text(memory.reserve),
         memory.limit > 0 ? "memory.limit" : "memory.reserve");
  limit_memory(device, rest);
}

// Through shared memory on CPUs, which on GPUs carries NCCL's id. GPUs exchange attention's rows by copy engines if
// they can.
std::shared_ptr<parallel::Group> join_ranks(const RankOptions& ranks, c10::Device device) {
  std::shared_ptr<parallel::HostGroup> host = unwrap(parallel::join_group_memory(ranks.memory, ranks.rank));
  if (device.is_cpu()) return host;
  parallel::NcclId id{};
  if (ranks.rank == 0) id = unwrap(parallel::make_nccl_id());
  if (auto sent = host->broadcast(at::from_blob(id.bytes.data(), {sizeof id.bytes}, at::kByte), 0); !sent)
    throw Failure(sent.error());
  auto nccl = unwrap(parallel::join_nccl(id, ranks.rank, ranks.size, device, ranks.wait, host));
  auto exchange = ranks.copy_engines ? parallel::open_copy_engines(*host, device) : unavailable("not wanted");
  if (!exchange && host->failure()) throw Failure(exchange.error());
  if (ranks.rank == 0)
    spdlog::info("{} GPUs exchange the rows of attention by {}", ranks.size,
                 exchange ? "copy engines" : "NCCL: " + exchange.error().message);
  if (!exchange) return nccl;
  return parallel::add_exchange(std::move(nccl), std::move(host), std::move(*exchange), device);
}

class TorchEngine final : public Engine {
 public:
  // `base`: without a source.
  TorchEngine(std::string name, LoadContext base, Families families)
      : name_(std::move(name)), base_(std::move(base)), families_(std::move(families)) {
    base_.regions->counters->show(compile_backend());
  }

  std::string device() const override { return device_text(base_.placement.device); }
  std::string device_name() const override { return name_; }
  std::string precision() const override { return base_.placement.dtype == c10::ScalarType::Float ? "fp32" : "bf16"; }

  std::string compile_backend() const override {
    return base_.regions->compiler ? std::string(base_.regions->compiler->name()) : "eager";
  }
  std::string software() const override {
    return std::string("LibTorch ") + TORCH_VERSION +
           (base_.regions->compiler ? ", " + base_.regions->compiler->identity() : "");
  }
  region::RegionCounts region_counts() const override { return base_.regions->counters->counts(); }
  void abort_ranks() noexcept override {
    if (base_.regions->ranks) base_.regions->ranks->abort();
  }

  Result<std::unique_ptr<Model>> load_model(const ModelSource& source) override {
    auto model = result_of("load " + source.dir, [&] {
      StageScope scope(base_.placement.device);
      auto loaded = DiffusionModel::load(family_of(families_, source.dir), context_of(source));
      scope.finish();
      return loaded;
    });
    if (model || model.error().code == Code::kOutOfMemory)  // quantizing leaves some
      release_cached_memory(base_.placement.device);
    return model;
  }

  Result<PlanReport> plan(const ModelSource& source, const GenerationRequest& request) override {
    return result_of("plan " + source.dir, [&] {
      const StageScope scope(base_.placement.device);
      return DiffusionModel::plan(family_of(families_, source.dir), context_of(source), request);
    });
  }

 private:
  LoadContext context_of(const ModelSource& source) const {
    LoadContext context = base_;
    context.source = source;
    return context;
  }

  const std::string name_;  // of the device
  const LoadContext base_;
  const Families families_;
};

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options, Families families) {
  try {
    check_dtype(options.dtype);
    DeviceChoice choice = load_device(options.device, options.ranks.rank);
    const c10::DeviceGuard guard(choice.device);  // libraries create their handles on the current device
    if (options.threads > 0) at::set_num_threads(options.threads);
    check_memory(options.memory, choice.device);
    const bool bf16 = options.dtype == "bf16" || (options.dtype == "auto" && !choice.device.is_cpu());
    region::CompileOptions compile = options.compile;
    if (region::runs_eagerly(compile, choice.device.is_cpu(), bf16)) compile.backend = "eager";
    auto regions = region::make_region_host(std::move(compile), choice.device, options.kernel_cache);
    if (options.ranks.size > 1) regions->ranks = join_ranks(options.ranks, choice.device);
    LoadContext base{
        .placement = {choice.device, bf16 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float},
        .regions = std::move(regions),
        .adapters = {options.max_lora_rank, options.lora_slots, options.lora_host_bytes},
        .adapter_columns = options.lora_slots > 0 ? std::max(options.lora_together_rank, options.max_lora_rank) : 0,
        .memory = std::make_shared<DeviceMemory>(choice.device, options.memory)};
    return std::unique_ptr<Engine>(
        std::make_unique<TorchEngine>(std::move(choice.name), std::move(base), std::move(families)));
  } catch (...) {
    const Error error = error_in_flight("engine");
    if (options.ranks.size > 1)  // the other ranks wait for this one
      if (auto group = parallel::join_group_memory(options.ranks.memory, options.ranks.rank)) (*group)->abort();
    return error;
  }
}

Result<UniqueFd> Engine::create_rank_memory(int size, std::chrono::milliseconds wait) {
  parallel::set_nccl_environment();  // the caller has no threads yet
  return parallel::create_group_memory(size, wait);
}

Result<region::AheadReport> Engine::compile_regions(const Families& families, const ModelSource& source,
                                                    const std::string& dtype,
                                                    const std::vector<std::string>& architectures,
                                                    kernel_cache::KernelCache& cache,
                                                    const region::CompileOptions& options) {
  return result_of("compile " + source.dir, [&] {
    check_dtype(dtype);
    const Family& family = family_of(families, source.dir);
    // Refuses an unknown architecture before the first one is compiled.
    unwrap(region::check_architectures(architectures));
    region::AheadReport report;
    for (const auto& arch : architectures) {
      const bool host = arch == "cpu";
      const bool wide = dtype == "fp32" || (dtype == "auto" && host);
      if (region::runs_eagerly(options, host, !wide)) {
        report.eager.push_back(arch);
        continue;
      }
      const auto type = wide ? region::ElementType::kF32 : region::ElementType::kBF16;
      auto one = unwrap(region::compile_ahead(ahead_programs(family, source, type, region::features_of(arch), options),
                                              type, arch, cache, options));
      report.compiled += one.compiled;
      report.hits += one.hits;
      for (auto& made : one.regions) report.regions.push_back(std::move(made));
    }
    return report;
  });
}

Result<std::unique_ptr<Tokenizers>> Engine::load_tokenizers(const Families& families, const std::string& dir) {
  return result_of("tokenize " + dir, [&] {
    const Family& family = family_of(families, dir);
    check_components(family, dir, "tokenizer");
    return family.load_tokenizers({.name = {}, .dir = dir});
  });
}

}  // namespace ditfleet::pipeline
