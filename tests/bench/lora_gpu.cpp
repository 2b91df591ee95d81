// Measures adapters on a GPU at FLUX.1-dev's size with random weights, bf16, 1024×1024, 512 text tokens: the cost of a
// step with an adapter, of a swap, of a swap hidden behind the previous job, and of 50 random adapters. gpu.sh runs it.
//
//   lora_gpu_bench SCENARIO [--mode MODE] [--cache DIR] [--layers DOUBLE,SINGLE] [--revision TEXT] [--machine TEXT]
//
// SCENARIO: step | swap | cycle
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include <unistd.h>

#include <filesystem>
#include <future>
#include <optional>
#include <random>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/families/flux/transformer.h"
#include "pipeline/lora/adapter.h"
#include "pipeline/region/run/region.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using c10::ScalarType;
using pipeline::FluxTransformer;

constexpr std::int64_t kRoom = 64;  // the largest rank
constexpr int kSlots = 4, kJobSteps = 4;

class Bench {
 public:
  Bench() : folder_(fs::temp_directory_path() / ("lora_gpu_bench_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
    const auto c = config();
    host = region::make_region_host(options(), gpu, open_cache());
    flux.emplace(c, random_weights(c, kRoom), pipeline::Placement{gpu, ScalarType::BFloat16}, host);
    auto weights = flux->weights();
    const auto base = pipeline::flux_lora_base(pipeline::base_linears(flux->named_linears(weights)), {}, {});
    store.emplace(base, pipeline::Placement{gpu, ScalarType::BFloat16},
                  pipeline::AdapterStore::Limits{kRoom, kSlots, std::int64_t{64} << 30});
    in.emplace(*flux, 1024, 1024, kJobSteps);
  }
  ~Bench() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  // Writes an adapter file with PEFT's names and shapes for the linears that `wanted` accepts.
  std::string write(const std::string& name, std::int64_t rank, const std::function<bool(const std::string&)>& wanted) {
    auto weights = flux->weights();
    std::vector<at::Tensor> values;
    std::vector<pipeline::TensorToWrite> tensors;
    const auto add = [&](const std::string& tensor, std::int64_t rows, std::int64_t columns) {
      values.push_back((at::randn({rows, columns}, at::TensorOptions(ScalarType::BFloat16).device(gpu)) * 0.02).cpu());
      tensors.push_back({tensor,
                         pipeline::DType::kBF16,
                         {rows, columns},
                         {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
    };
    for (const auto& linear : flux->named_linears(weights)) {
      if (!wanted(linear.name)) continue;
      add("transformer." + linear.name + ".lora_A.weight", rank, linear.slot->weight.size(1));
      add("transformer." + linear.name + ".lora_B.weight", linear.rows, rank);
    }
    const std::string path = folder_ / (name + ".safetensors");
    pipeline::unwrap(pipeline::write_safetensors(path, std::move(tensors), {}));
    return path;
  }

  FluxTransformer adapted(const pipeline::LoraRequest& request) {
    auto weights = flux->weights();
    auto linears = flux->named_linears(weights);
    const auto adapter = store->get(request);
    for (const auto& term : adapter->terms) linears[term.slot].slot->low_rank.push_back(term.low_rank);
    FluxTransformer with = *flux;
    with.adapt(std::move(weights));
    return with;
  }

  // A job after encoding, as the engine's encode() returns it.
  struct Job {
    FluxTransformer flux;
    pipeline::ModulationTable modulation;
  };

  // Prepares a job while the previous one runs, on its own thread and stream: copies its adapter, if any, to a slot,
  // plans its columns and computes its modulation.
  std::future<Job> encode(const std::optional<pipeline::LoraRequest>& request) {
    return std::async(std::launch::async, [this, request] {
      pipeline::StageScope scope(gpu);
      if (request) store->prefetch(*request, {});
      FluxTransformer with = request ? adapted(*request) : *flux;
      auto table = with.modulation(in->timesteps, 3.5, in->pooled);
      scope.finish();
      return Job{std::move(with), std::move(table)};
    });
  }
  Job job(const std::optional<pipeline::LoraRequest>& request) { return encode(request).get(); }

  // Seconds from the moment the GPU is free for the job to the end of its last step.
  double job_s(const Job& job) {
    return first_s([&] {
      job.flux.load_adapters();
      for (int i = 0; i < kJobSteps; ++i) job.flux.velocity(in->latents, in->text, job.modulation.step(i), in->rope);
    });
  }

  // Seconds to copy an adapter to a slot.
  std::future<void> prefetch(const pipeline::LoraRequest& request) {
    return std::async(std::launch::async, [this, request] {
      pipeline::StageScope scope(gpu);
      store->prefetch(request, {});
      scope.finish();
    });
  }

  std::shared_ptr<region::RegionHost> host;
  std::optional<FluxTransformer> flux;
  std::optional<pipeline::AdapterStore> store;
  std::optional<Inputs> in;

 private:
  fs::path folder_;
};

bool any(const std::string&) { return true; }
bool attention(const std::string& name) {
  for (const char* part : {".to_q", ".to_k", ".to_v", ".to_out.0"})
    if (name.ends_with(part)) return true;
  return false;
}

void step() {
  Bench b;
  const auto table = b.flux->modulation(b.in->timesteps, 3.5, b.in->pooled);
  const FluxTransformer qkvo = b.adapted({b.write("qkvo64", 64, attention)}),
                        all = b.adapted({b.write("all64", 64, any)}), all16 = b.adapted({b.write("all16", 16, any)});
  std::vector<double> base_times, qkvo_times, all_times, all16_times;
  const auto once = [&](const FluxTransformer& with, std::vector<double>& times) {
    with.load_adapters();
    std::vector<double> runs;
    for (int i = 0; i < 4; ++i)
      runs.push_back(first_s([&] { with.velocity(b.in->latents, b.in->text, table.step(0), b.in->rope); }));
    runs.erase(runs.begin());
    times.push_back(median(runs));
  };
  for (int round = 0; round < 22; ++round) {  // alternating, so that a warming chip slows all variants alike
    once(*b.flux, base_times);
    once(qkvo, qkvo_times);
    once(all, all_times);
    once(all16, all16_times);
    if (round == 1)  // round 0 was the warm-up
      for (auto* times : {&base_times, &qkvo_times, &all_times, &all16_times}) times->clear();
  }
  // Relative to the step without an adapter in the same round. The clock drifts between rounds by more than adapters
  // cost.
  const auto ratio = [&](const std::vector<double>& times) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < times.size(); ++i) ratios.push_back(times[i] / base_times[i]);
    return median(ratios);
  };
  const double base = median(base_times);
  row("none_ms", base * 1e3, "ms");
  row("qkvo_rank64_ms", median(qkvo_times) * 1e3, "ms");
  row("all_rank64_ms", median(all_times) * 1e3, "ms");
  row("qkvo_rank64_ratio", ratio(qkvo_times), "x");
  row("all_rank64_ratio", ratio(all_times), "x");
  row("all_rank16_ratio", ratio(all16_times), "x");
}

void swap() {
  Bench b;
  const std::string path = b.write("all16", 16, any);
  row("adapter_bytes", static_cast<double>(fs::file_size(path)), "B");
  const auto named = [&](int i) { return pipeline::LoraRequest{path, 1, "adapter-" + std::to_string(i)}; };
  constexpr int kAdapters = kSlots + 2;  // more than the slots, so that each is copied from host memory again
  for (int i = 0; i < kAdapters; ++i) b.prefetch(named(i)).get();
  std::vector<double> idle, busy, same, swapped, resident;
  for (int i = 0; i < 12; ++i) {
    const auto start = Clock::now();
    b.prefetch(named(i % kAdapters)).get();
    idle.push_back(since(start));
  }
  for (int i = 0; i < 3; ++i) b.job_s(b.job(named(0)));
  for (int i = 0; i < 10; ++i) {
    const Bench::Job first = b.job(named(i % kAdapters));
    b.job_s(first);
    same.push_back(b.job_s(first));  // resident already
    auto next = std::async(std::launch::async, [&] {
      const auto start = Clock::now();
      b.prefetch(named((i + 1) % kAdapters)).get();
      busy.push_back(since(start));
      return b.job(named((i + 1) % kAdapters));
    });
    b.job_s(first);
    swapped.push_back(b.job_s(next.get()));
    const FluxTransformer other = b.adapted(named(i % kAdapters));
    resident.push_back(first_s([&] { other.load_adapters(); }));
  }
  row("host_rank16_ms", median(idle) * 1e3, "ms");
  row("host_rank16_busy_ms", median(busy) * 1e3, "ms");
  row("added_latency_ms", (median(swapped) - median(same)) * 1e3, "ms");
  row("resident_copies_ms", median(resident) * 1e3, "ms");
  // Extra time of the first step after a switch between resident adapters, alternating with steps without a switch.
  const Bench::Job jobs[] = {b.job(named(0)), b.job(named(1))};
  std::vector<double> more;
  for (int i = 0; i < 64; ++i) {
    const Bench::Job& job = jobs[i % 2];
    const auto step = [&] {
      return first_s([&] {
        job.flux.load_adapters();
        job.flux.velocity(b.in->latents, b.in->text, job.modulation.step(0), b.in->rope);
      });
    };
    const double changed = step();
    more.push_back(changed - step());
  }
  row("resident_ms", median(more) * 1e3, "ms");
}

void cycle() {
  Bench b;
  const std::string path = b.write("all16", 16, any);
  const auto named = [&](int i) { return pipeline::LoraRequest{path, 1, "adapter-" + std::to_string(i)}; };
  const auto loading = Clock::now();
  for (int i = 0; i < 50; ++i) b.prefetch(named(i)).get();  // to host memory
  row("load_50_adapters_s", since(loading), "s");
  for (int i = 0; i < 3; ++i) {
    b.job_s(b.job({}));
    b.job_s(b.job(named(0)));
  }
  std::mt19937_64 random(1);
  std::uniform_int_distribution<int> draw(0, 49);
  const auto compiles = b.host->counters->counts().compiles;
  double plain = 0, with = 0;
  constexpr int kRounds = 5, kPlain = 12, kWith = 40;
  // Runs jobs in sequence, each prepared while the previous one runs. Returns the total seconds.
  const auto stream = [&](int jobs, const std::function<std::optional<pipeline::LoraRequest>()>& draw_request) {
    Bench::Job now = b.job(draw_request());
    const auto begun = Clock::now();
    for (int i = 0; i < jobs; ++i) {
      auto next = b.encode(draw_request());
      b.job_s(now);
      now = next.get();
    }
    return since(begun);
  };
  for (int round = 0; round < kRounds; ++round) {
    plain += stream(kPlain, [] { return std::nullopt; });
    with += stream(kWith, [&] { return named(draw(random)); });
  }
  row("jobs", kRounds * kWith, "jobs");
  row("compiles", static_cast<double>(b.host->counters->counts().compiles - compiles), "programs");
  row("slowdown_ratio", (with / (kRounds * kWith)) / (plain / (kRounds * kPlain)), "x");
  row("throughput_ratio", (plain / (kRounds * kPlain)) / (with / (kRounds * kWith)), "x");
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  run(argc, argv, {{"step", step}, {"swap", ditfleet::bench::swap}, {"cycle", cycle}});
}
