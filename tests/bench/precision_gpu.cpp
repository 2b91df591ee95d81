// Measures quantized weights on a GPU at FLUX.1-dev's size with random weights, 1024×1024, 512 text tokens. gpu.sh runs
// it.
//
//   precision_gpu_bench SCENARIO [--cache DIR] [--layers DOUBLE,SINGLE] [--model DIR] [--quantize FORMAT]
//                       [--attention fp8] [--prompts FILE] [--revision TEXT] [--machine TEXT]
//
// SCENARIO: fp8 | bf16  first forward, step and 28 steps; with --attention fp8, rows of fp8_attention8
//           nf4         one step relative to bf16's, in turns
//           gguf        the same with the linears in blocks of Q8_0, then of Q4_K
//           lora_fp8    one step with a rank 64 adapter on q, k, v and o relative to none, in turns
//           mixed       fp8: 200 jobs of four steps at eight sizes in random order
//           whole       from a prompt to a PNG with the folder --model and its --quantize FORMAT (transformer):
//                       alone, and back to back with the stages of images on three threads, as a worker runs them
//           trajectory  latents of the trained model --model in fp8 relative to bf16, after each of 20 steps; the first
//                       16 lines of --prompts
//           profile     a few fp8 steps for a profiler
#include <ATen/TensorOperators.h>
#include <ATen/ops/cosine_similarity.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/engine/needs.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/region/programs/dequantize.h"
#include "pipeline/region/run/region.h"
#include "pipeline/sampling/sampler.h"
#include "pipeline/weights/gguf.h"
#include "shared/core/background_threads.h"
#include "shared/core/json.h"
#include "shared/kernel_cache/cache.h"
#include "shared/media/writer.h"
#include "tests/bench/flux_size.h"

namespace ditfleet::bench {
namespace {

using Clock = std::chrono::steady_clock;
using c10::ScalarType;
using pipeline::FluxTransformer;
using pipeline::LinearSlot;

constexpr int kTrajectoryText = 32;  // text tokens of the demo model

enum class Format { kBf16, kFp8, kNf4, kQ8_0, kQ4K };

// Random blocks. Their scales make values of a weight's size.
pipeline::QuantizedRows gguf_rows(Format format, std::int64_t rows, std::int64_t in) {
  std::uint8_t number = 1;
  while (pipeline::gguf_blocks(number).name != (format == Format::kQ8_0 ? "Q8_0" : "Q4_K")) ++number;
  const auto& [name, id, values, bytes] = pipeline::gguf_blocks(number);
  const at::Tensor codes =
      at::randint(256, {rows * in / values, bytes}, at::TensorOptions(ScalarType::Byte).device(gpu));
  const auto scale = [&](int at, double value) {
    const at::Tensor half = at::full({codes.size(0)}, value, at::TensorOptions(ScalarType::Half).device(gpu));
    codes.narrow(1, at, 2).copy_(half.unsqueeze(1).view(ScalarType::Byte));
  };
  scale(0, format == Format::kQ8_0 ? 2.7e-4 : 1e-4);
  if (format == Format::kQ4K) scale(2, 7.5e-4);
  return {codes.flatten(), {}, rows, number};
}

bool in_blocks(const std::string& name) {
  return name.find("transformer_blocks.") != std::string::npos && name.find(".norm") == std::string::npos;
}

// The linears that the loader quantizes.
void quantize(pipeline::TransformerWeights& weights, Format format,
              const std::shared_ptr<const region::Dequantizer>& program) {
  for (const auto& [name, slot, first_row, rows] : pipeline::named_linears(pipeline::flux_spec(config()), weights)) {
    if (slot->quantized || format == Format::kBf16 || (format == Format::kFp8 && !in_blocks(name))) continue;
    auto made = std::make_shared<pipeline::QuantizedWeight>();
    made->out = slot->out();
    made->in = slot->in();
    made->compute = ScalarType::BFloat16;
    made->dynamic = format == Format::kFp8;
    made->program = program;
    made->parts.push_back(format == Format::kFp8   ? pipeline::quantize_fp8(slot->weight)
                          : format == Format::kNf4 ? pipeline::quantize_nf4(slot->weight)
                                                   : gguf_rows(format, made->out, made->in));
    const std::int64_t columns = slot->lora_columns.count;
    slot->wide = columns > 0 ? at::zeros({slot->out(), columns}, slot->weight.options()) : at::Tensor();
    slot->weight = at::Tensor();
    slot->quantized = std::move(made);
  }
}

// A transformer and the inputs of one request.
struct Run {
  Run(Format format, std::shared_ptr<region::RegionHost> with, std::int64_t adapter_rank = 0)
      : host(std::move(with)), flux(load(format, host, adapter_rank)), in(flux, 1024, 1024) {
    table.emplace(flux.modulation(in.timesteps, 3.5, in.pooled));
  }
  static FluxTransformer load(Format format, const std::shared_ptr<region::RegionHost>& host, std::int64_t rank) {
    const auto c = config();
    auto weights = random_weights(c, rank);
    quantize(weights, format, region::make_dequantizer(*host, format == Format::kQ8_0 || format == Format::kQ4K));
    return FluxTransformer(c, std::move(weights), {gpu, ScalarType::BFloat16}, host);
  }
  void step() const { flux.velocity(in.latents, in.text, table->step(0), in.rope); }

  std::shared_ptr<region::RegionHost> host;
  FluxTransformer flux;
  Inputs in;
  std::optional<pipeline::ModulationTable> table;
};

std::shared_ptr<region::RegionHost> open_host() { return region::make_region_host(options(), gpu, open_cache()); }

// Everything from resident weights to the end of the first step, then steady steps.
void steps_of(Format format) {
  const auto c = config();
  auto weights = random_weights(c);
  quantize(weights, format, nullptr);
  const auto bf16 = at::TensorOptions(ScalarType::BFloat16).device(gpu);
  const at::Tensor latents = at::randn({1, 4096, 64}, bf16), prompt = at::randn({1, kText, 4096}, bf16),
                   pooled = at::randn({1, 768}, bf16);
  const at::Tensor timesteps = at::linspace(1000, 36, kSteps, at::TensorOptions(ScalarType::Float).device(gpu));
  finish();
  const auto start = Clock::now();
  auto host = open_host();
  const FluxTransformer flux(c, std::move(weights), {gpu, ScalarType::BFloat16}, host, !flags["--attention"].empty());
  const at::Tensor text = flux.embed_text(prompt),
                   rope = pipeline::rope_table(c, kText, {{64, 64}}, {gpu, ScalarType::BFloat16});
  const auto table = flux.modulation(timesteps, 3.5, pooled);
  flux.velocity(latents, text, table.step(0), rope);
  finish();
  if (!flags["--attention"].empty()) scenario += "_attention8";
  row("first_forward_s", since(start), "s");
  const auto step = [&] { flux.velocity(latents, text, table.step(0), rope); };
  for (int i = 0; i < 4; ++i) step();
  row("step_ms", steady_s(step, 21) * 1e3, "ms");
  const auto begun = Clock::now();
  step();
  row("host_ms", since(begun) * 1e3, "ms");  // until the last kernel is enqueued
  finish();
  row("image_28_s",
      steady_s(
          [&] {
            const auto rows = flux.modulation(timesteps, 3.5, pooled);
            at::Tensor x = latents;
            for (int i = 0; i < kSteps; ++i) x = x + 0.01 * flux.velocity(x, text, rows.step(i), rope);
          },
          3),
      "s");
}

// The median ratio of two steps that run in turns, and their medians.
void in_turns(const std::function<void()>& a, const std::function<void()>& b) {
  for (int i = 0; i < 4; ++i) a(), b();
  std::vector<double> of_a, of_b, ratios;
  for (int i = 0; i < 21; ++i) {
    of_a.push_back(first_s(a));
    of_b.push_back(first_s(b));
    ratios.push_back(of_a.back() / of_b.back());
  }
  row("step_ms", median(of_a) * 1e3, "ms");
  row("step_without_ms", median(of_b) * 1e3, "ms");
  row("step_ratio", median(ratios), "x");
}

void to_bf16(Format format) {
  const auto host = open_host();
  const Run bf16(Format::kBf16, host), quantized(format, host);
  in_turns([&] { quantized.step(); }, [&] { bf16.step(); });
}

void gguf() {
  for (const auto& [name, format] : {std::pair("gguf_q8_0", Format::kQ8_0), {"gguf_q4_k", Format::kQ4K}}) {
    scenario = name;
    to_bf16(format);
  }
}

void lora_fp8() {
  constexpr std::int64_t kRank = 64;
  Run run(Format::kFp8, open_host(), kRank);
  auto weights = run.flux.weights();
  for (const auto& [name, slot, first_row, rows] : run.flux.named_linears(weights)) {
    const auto is = [&name = name](const char* end) { return name.ends_with(end); };
    if (!is(".to_q") && !is(".to_k") && !is(".to_v") && !is(".to_out.0")) continue;
    const auto random = [&](std::int64_t m, std::int64_t n) {
      return at::randn({m, n}, at::TensorOptions(ScalarType::BFloat16).device(gpu)) * 0.02;
    };
    slot->low_rank.push_back({random(kRank, slot->in()), random(rows, kRank), first_row, 1.0});
  }
  FluxTransformer adapted = run.flux;
  adapted.adapt(std::move(weights));
  adapted.load_adapters();
  in_turns([&] { adapted.velocity(run.in.latents, run.in.text, run.table->step(0), run.in.rope); },
           [&] { run.step(); });
}

void mixed() {
  constexpr int kJobs = 200, kJobSteps = 4;
  const Run run(Format::kFp8, open_host());
  const std::vector<std::pair<int, int>> sizes = {{1024, 1024}, {768, 1360}, {1360, 768}, {512, 512},
                                                  {832, 1216},  {1216, 832}, {640, 1536}, {896, 1152}};
  std::vector<Inputs> inputs;
  for (const auto& [height, width] : sizes) inputs.emplace_back(run.flux, height, width, kJobSteps);
  const auto job = [&](std::size_t size) {
    const Inputs& in = inputs[size];
    for (int i = 0; i < kJobSteps; ++i) run.flux.velocity(in.latents, in.text, run.table->step(i), in.rope);
    finish();
  };
  std::vector<double> alone;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    job(i);
    alone.push_back(steady_s([&] { job(i); }, 5));
  }
  const auto compiles = run.host->counters->counts().compiles;
  std::mt19937 random(20261124);
  std::vector<std::size_t> order(kJobs);
  for (std::size_t& one : order) one = random() % sizes.size();
  double expected = 0;
  for (const std::size_t one : order) expected += alone[one];
  const double took = first_s([&] {
    for (const std::size_t one : order) job(one);
  });
  row("throughput_ratio", expected / took, "x");
  row("jobs_per_s", kJobs / took, "1/s");
  row("compiles", static_cast<double>(run.host->counters->counts().compiles - compiles), "programs");
}

// A loaded folder.
class Pictures {
 public:
  Pictures() {
    pipeline::EngineOptions o;
    o.device = "cuda";
    o.compile = options();
    o.kernel_cache = open_cache();
    engine_ = pipeline::unwrap(pipeline::Engine::create(o, {&pipeline::flux_family()}));
    pipeline::ModelSource source{"flux", flags["--model"]};
    if (!flags["--quantize"].empty()) source.quantize["transformer"] = flags["--quantize"];
    source.attention = flags["--attention"];
    model_ = pipeline::unwrap(engine_->load_model(source));
  }

  std::unique_ptr<pipeline::Generation> encode() {
    pipeline::GenerationRequest request;
    request.prompt = "picture number " + std::to_string(++prompts_);  // a new prompt, so that no embedding is reused
    request.seed = prompts_;
    request.fields.set("width", 1024);
    request.fields.set("height", 1024);
    request.fields.set("num_inference_steps", kSteps);
    return pipeline::unwrap(model_->encode(request));
  }
  pipeline::Media draw(pipeline::Generation& generation) {
    pipeline::unwrap(model_->denoise(generation, nullptr));
    return pipeline::unwrap(model_->decode(generation));
  }
  static std::size_t png(const pipeline::Media& image) {
    return pipeline::unwrap(media::encode(image, job::OutputFormat::kPng, 100)).size();
  }

 private:
  std::unique_ptr<pipeline::Engine> engine_;
  std::unique_ptr<pipeline::Model> model_;
  int prompts_ = 0;
};

void whole() {
  constexpr int kImages = 8;
  Pictures pictures;
  const std::string in = (flags["--quantize"].empty() ? "bf16" : flags["--quantize"]) +
                         (flags["--attention"].empty() ? "" : "_attention8");
  BackgroundThreads text("text", 1), device("device", 1), encoder("png", 1);
  const auto encode = [&] { return text.run([&] { return pictures.encode(); }); };
  const auto draw = [&](std::unique_ptr<pipeline::Generation> generation) {
    return device.run([&, g = std::shared_ptr(std::move(generation))] { return pictures.draw(*g); });
  };
  const auto png = [&](pipeline::Media image) {
    return encoder.run([i = std::move(image)] { return Pictures::png(i); });
  };
  const auto raw_alone = [&] { return draw(encode().get()).get(); };
  for (int i = 0; i < 2; ++i) png(raw_alone()).get();
  row("prompt_to_png_s", steady_s([&] { png(raw_alone()).get(); }, 3), "s", in);
  row("prompt_to_pixels_s", steady_s([&] { raw_alone(); }, 3), "s", in);
  const auto back_to_back = [&] {
    std::vector<std::future<std::size_t>> files;
    auto next = encode();
    for (int i = 0; i < kImages; ++i) {
      auto ready = next.get();
      if (i + 1 < kImages) next = encode();
      files.push_back(png(draw(std::move(ready)).get()));
    }
    for (auto& file : files) file.get();
  };
  row("back_to_back_s", first_s(back_to_back) / kImages, "s", in);
}

// The latents after each step for each prompt, in the order of prompts.
std::vector<std::vector<at::Tensor>> trajectories(const std::string& quantize, const std::string& attention,
                                                  const std::vector<std::string>& prompts) {
  pipeline::ModelSource source{"demo", flags["--model"]};
  if (!quantize.empty()) source.quantize["transformer"] = quantize;
  source.attention = attention;
  const pipeline::LoadContext context{
      .source = source, .placement = {gpu, ScalarType::BFloat16}, .regions = open_host(), .adapters = {}, .memory = {}};
  const auto tokenizers = pipeline::flux_family().load_tokenizers(source);
  pipeline::Folder folder(pipeline::flux_family(), context, tokenizers.get());
  const auto network = pipeline::load_network(folder);
  pipeline::Transformer::compile(network->transformers(), context.regions);
  std::vector<std::vector<at::Tensor>> made;
  for (const std::string& prompt : prompts) {
    pipeline::GenerationRequest request;
    request.prompt = prompt;
    request.seed = static_cast<std::int64_t>(made.size());
    for (const auto& [field, value] : {std::pair(job::Field("width"), 256),
                                       {job::Field("height"), 256},
                                       {job::Field("num_inference_steps"), 20},
                                       {job::Field("max_sequence_length"), kTrajectoryText}})
      request.fields.set(field, value);
    request.fields.set("guidance_scale", 3.5);
    const auto settings = pipeline::settings_of(*network, request);
    const auto schedule = network->schedule(settings);
    const auto conditions = pipeline::encode_conditions(*network, settings, [&](const std::string& text) {
      return network->encode(tokenizers->ids(text, settings.text_tokens()), settings);
    });
    const auto denoiser = network->denoiser(settings, schedule, conditions);
    const auto sampler = network->sampler(settings, schedule);
    at::Tensor latents = network->first_latents(conditions, schedule).to(gpu);
    auto& steps = made.emplace_back();
    for (std::int64_t i = 0; i < settings.steps(); ++i) {
      latents = sampler->step(latents, denoiser->velocity(i, latents, /*negative=*/false, {}, nullptr), i);
      steps.push_back(latents.to(ScalarType::Float).flatten().clone());
    }
  }
  return made;
}

void trajectory() {
  constexpr std::size_t kPrompts = 16;
  std::ifstream file(flags["--prompts"]);
  std::vector<std::string> prompts;
  for (std::string line; prompts.size() < kPrompts && std::getline(file, line);) {
    const auto parsed = pipeline::unwrap(parse_json(line));
    prompts.emplace_back(parsed.at("prompt").as_string());
  }
  const auto bf16 = trajectories("", "", prompts);
  for (const auto& [in, quantize, attention] :
       {std::tuple("fp8", "fp8", ""), {"attention8", "", "fp8"}, {"fp8_attention8", "fp8", "fp8"}}) {
    const auto rounded = trajectories(quantize, attention, prompts);
    double worst = 1;  // of the steps, each averaged over the prompts
    for (std::size_t i = 0; i < bf16.front().size(); ++i) {
      double sum = 0;
      for (std::size_t p = 0; p < prompts.size(); ++p)
        sum += at::cosine_similarity(bf16[p][i], rounded[p][i], 0).item<double>();
      worst = std::min(worst, sum / static_cast<double>(prompts.size()));
    }
    row("trajectory_cosine", worst, "1", in);
  }
}

void profile() {
  const Run run(Format::kFp8, open_host());
  for (int i = 0; i < 3; ++i) run.step();
  finish();
}

}  // namespace
}  // namespace ditfleet::bench

int main(int argc, char** argv) {
  using namespace ditfleet::bench;
  run(argc, argv,
      {{"fp8", [] { steps_of(Format::kFp8); }},
       {"bf16", [] { steps_of(Format::kBf16); }},
       {"nf4", [] { to_bf16(Format::kNf4); }},
       {"gguf", gguf},
       {"lora_fp8", lora_fp8},
       {"mixed", mixed},
       {"whole", whole},
       {"trajectory", trajectory},
       {"profile", profile}});
}
