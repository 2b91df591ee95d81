// What every model family does alike, beside its pictures: each row is a fixture's folder, and a new family adds one.
// DITFLEET_TEST_COMPILE=cpu_jit runs the same with compiled blocks, DITFLEET_TEST_DEVICE=cuda on a GPU.
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/families/z_image/z_image.h"
#include "pipeline/weights/safetensors.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Row {
  const Family& (*family)();
  golden::Case golden;         // a request of few steps
  int preview = 0;             // width of a preview of 512 × 256 pixels
  std::set<std::string> text;  // names in the dump: of what the text encoders get and make
  std::set<std::string> ends;  // and of what the VAE makes
  std::string adapter = {};    // for the folder's model, in tests/fixtures; empty: there is none
  int text_tokens = 512;       // at most
};

const std::set<std::string> kFluxText = {"clip_ids", "t5_ids", "pooled_prompt_embeds", "prompt_embeds"};
const std::set<std::string> kWanText = {"prompt_ids", "prompt_embeds"};
const std::set<std::string> kQwenText = {"qwen_ids", "prompt_embeds"};
const std::set<std::string> kZImageText = {"qwen3_ids", "prompt_embeds"};
const std::set<std::string> kFlux2Text = {"qwen3_ids", "qwen3_mask", "prompt_embeds"};

const Row kRows[] = {
    {flux_family, {"dev", "plain", "flux"}, 256, kFluxText, {"image"}, "lora/adapters/all.safetensors"},
    {wan_family, {"one", "plain", "wan"}, 64, kWanText, {}},
    {wan_family, {"two", "plain", "wan"}, 64, kWanText, {}, "wan/lora/adapters/peft.safetensors"},
    {wan_family, {"i2v", "one", "wan"}, 64, kWanText, {}},
    {wan_family, {"ti2v", "image", "wan"}, 512, kWanText, {}},
    {wan_family, {"clip", "five", "wan"}, 64, kWanText, {}, "wan/lora/adapters/image.safetensors"},
    {z_image_family,
     {"turbo", "plain", "z_image"},
     256,
     kZImageText,
     {"image"},
     "layouts/z_image/blocks/diffusers.safetensors",
     1024},
    {flux2_family,
     {"klein", "plain", "flux2"},
     256,
     kFlux2Text,
     {"image"},
     "layouts/flux2/blocks/diffusers.safetensors"},
    {flux2_family, {"base", "plain", "flux2"}, 128, kFlux2Text, {"image"}},
    {qwen_image_family, {"zero_image", "plain", "qwen_image"}, 32, kQwenText, {"image"}, "", 1024},
};

std::string name_of(const Row& row) { return row.golden.set + "_" + row.golden.folder; }
void PrintTo(const Row& row, std::ostream* out) { *out << name_of(row); }

struct Opened {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Model> model;
};

EngineOptions options_of() {
  EngineOptions options = golden::test_options("fp32", 1);
  options.max_lora_rank = 64;
  options.lora_slots = 2;
  return options;
}
ModelSource source_of(const Row& row) { return {"m", row.golden.model_dir()}; }
Opened open(const Row& row, const EngineOptions& options = options_of()) {
  Opened opened{.engine = unwrap(Engine::create(options, {&row.family()})), .model = nullptr};
  opened.model = unwrap(opened.engine->load_model(source_of(row)));
  return opened;
}

// One model a row for the whole run. They must go before the process ends its libraries.
class Shared : public ::testing::Environment {
 public:
  static Shared& get() {
    static auto* const shared = dynamic_cast<Shared*>(::testing::AddGlobalTestEnvironment(new Shared));
    return *shared;
  }
  Opened& of(const Row& row) {
    auto& opened = opened_[name_of(row)];
    if (!opened.model) opened = open(row);
    return opened;
  }
  void TearDown() override {
    for (const auto& [name, opened] : opened_) golden::expect_compiled(*opened.engine);
    opened_.clear();
  }

 private:
  std::map<std::string, Opened> opened_;
};
const Shared& kRegistered = Shared::get();

class ModelFamily : public ::testing::TestWithParam<Row> {
 protected:
  ModelFamily()
      : model_(*Shared::get().of(GetParam()).model), request_([] {
          GenerationRequest request = golden::load(GetParam().golden).request;
          request.fields.set("frames", 5);  // of videos
          return request;
        }()) {}

  Media draw(const GenerationRequest& request) { return unwrap(golden::draw(model_, request)); }
  int steps() const { return static_cast<int>(*request_.fields.integer("num_inference_steps")); }
  // This request with the pixels of 512 × 256 and one step.
  GenerationRequest large(int width = 512, int height = 256) const {
    GenerationRequest request = request_;
    request.fields.set("width", width);
    request.fields.set("height", height);
    request.fields.set("frames", 1);
    request.fields.set("num_inference_steps", 1);
    return request;
  }
  static std::string dump_of(const Generation& generation) {
    const std::string path = ::testing::TempDir() + "families_" + std::to_string(::getpid()) + ".safetensors";
    unwrap(generation.dump(path));
    return path;
  }

  Model& model_;
  const GenerationRequest request_;
};

TEST_P(ModelFamily, TheSameSeedDrawsTheSame) {
  const Media first = draw(request_);
  GenerationRequest other = request_;
  ++other.seed;
  EXPECT_FALSE(draw(other).rgb == first.rgb);
  EXPECT_TRUE(draw(request_).rgb == first.rgb);
  EXPECT_TRUE(unwrap(golden::draw(*open(GetParam()).model, request_)).rgb == first.rgb) << "of a model loaded again";
}

TEST_P(ModelFamily, TellsEveryStepAndShowsPreviews) {
  auto generation = unwrap(model_.encode(request_));
  std::vector<int> told;
  std::set<std::vector<std::uint8_t>> previews;
  unwrap(model_.denoise(*generation, [&](const StepProgress& progress) {
    told.push_back(progress.step);
    EXPECT_EQ(progress.total, steps());
    const Media preview = unwrap(progress.preview());
    EXPECT_EQ(preview.frames, 1);
    EXPECT_EQ(preview.rgb.size(), std::size_t{3} * preview.width * preview.height);
    EXPECT_EQ(preview.width * *request_.fields.integer("height"), preview.height * *request_.fields.integer("width"));
    previews.insert(preview.rgb);
    return true;
  }));
  std::vector<int> expected;
  for (int step = 1; step <= steps(); ++step) expected.push_back(step);
  EXPECT_EQ(told, expected);
  EXPECT_EQ(previews.size(), told.size()) << "each step changes the estimate";
  unwrap(model_.decode(*generation));
  std::vector<std::string> phases;
  for (const auto& [name, us] : generation->phases_us()) {
    phases.push_back(name);
    EXPECT_GT(us, 0);
  }
  EXPECT_THAT(phases, ElementsAre("text", "denoise", "vae"));
}

TEST_P(ModelFamily, PreviewsOfLargePicturesAreSmall) {
  auto generation = unwrap(model_.encode(large()));
  int shown = 0;
  unwrap(model_.denoise(*generation, [&](const StepProgress& progress) {
    const Media preview = unwrap(progress.preview());
    EXPECT_EQ(preview.width, GetParam().preview);
    EXPECT_EQ(preview.height, GetParam().preview / 2);
    ++shown;
    return true;
  }));
  EXPECT_EQ(shown, 1);
}

TEST_P(ModelFamily, CancelsAtEachStepAndCanStartAgain) {
  const Media expected = draw(request_);
  for (int last = 1; last <= steps(); ++last) {
    SCOPED_TRACE(last);
    auto generation = unwrap(model_.encode(request_));
    int told = 0;
    const auto canceled = model_.denoise(*generation, [&](const StepProgress& progress) {
      told = progress.step;
      return progress.step < last;
    });
    ASSERT_FALSE(canceled);
    EXPECT_EQ(canceled.error().code, Code::kCanceled);
    EXPECT_EQ(canceled.error().message,
              "canceled after step " + std::to_string(last) + " of " + std::to_string(steps()));
    EXPECT_EQ(told, last) << "steps that ran after it was canceled";
    EXPECT_FALSE(model_.decode(*generation));
    EXPECT_TRUE(draw(request_).rgb == expected.rgb) << "the next request";
    unwrap(model_.denoise(*generation, nullptr));
    EXPECT_TRUE(unwrap(model_.decode(*generation)).rgb == expected.rgb) << "the canceled one, again";
  }
}

TEST_P(ModelFamily, StagesOfDifferentUnitsRunAtOnce) {
  const Media expected = draw(request_);
  std::atomic<bool> stop = false;
  std::thread texts([&] {
    for (int i = 0; !stop; ++i) {
      GenerationRequest other = request_;
      other.prompt = "another prompt " + std::to_string(i);
      EXPECT_TRUE(model_.encode(other));
    }
  });
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(draw(request_).rgb == expected.rgb);
  stop = true;
  texts.join();
}

TEST_P(ModelFamily, DumpsWhatEachStageMade) {
  auto generation = unwrap(model_.encode(request_));
  const auto names = [&] {
    std::set<std::string> names;
    const auto file = unwrap(SafetensorsFile::open(dump_of(*generation)));
    for (const auto& entry : file.entries()) names.insert(entry.name);
    return names;
  };
  std::set<std::string> expected = GetParam().text;
  expected.insert({"noise", "sigmas", "timesteps"});
  if (!request_.images.empty()) expected.insert("condition");
  if (GetParam().golden.folder == "clip") expected.insert("image_embeds");
  if (unwrap(model_.size_of(request_)).forwards == 2)
    for (const std::string& name : GetParam().text) expected.insert("negative_" + name);
  EXPECT_EQ(names(), expected);
  unwrap(model_.denoise(*generation, nullptr));
  expected.insert("latents");
  EXPECT_EQ(names(), expected);
  unwrap(model_.decode(*generation));
  expected.insert(GetParam().ends.begin(), GetParam().ends.end());
  EXPECT_EQ(names(), expected);
}

#ifndef __SANITIZE_ADDRESS__  // whose allocator ends the process instead
// Leaves next to no memory on the device the test runs on, until it is destroyed.
class MemoryShortage {
 public:
  MemoryShortage() {
    if (golden::test_device() == "cpu") {
      getrlimit(RLIMIT_AS, &before_);
      long pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      rlimit tight = before_;
      tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{16} << 20);
      setrlimit(RLIMIT_AS, &tight);
      return;
    }
    for (std::int64_t size = std::int64_t{1} << 34; size >= std::int64_t{1} << 25;) {
      try {
        ballast_.push_back(
            at::empty({size}, at::TensorOptions().dtype(c10::ScalarType::Byte).device(c10::DeviceType::CUDA)));
      } catch (const std::exception&) {
        size /= 2;
      }
    }
  }
  ~MemoryShortage() {
    if (golden::test_device() == "cpu") setrlimit(RLIMIT_AS, &before_);
  }

 private:
  rlimit before_{};
  std::vector<at::Tensor> ballast_;
};

TEST_P(ModelFamily, SurvivesMemoryThatRunsOut) {
  if (golden::test_device() == "cpu" && GetParam().family == wan_family)
    GTEST_SKIP() << "oneDNN keeps convolutions that it could not create";
  const Media expected = draw(request_);
  auto generation = unwrap(model_.encode(request_));
  unwrap(model_.denoise(*generation, nullptr));  // so that every thread and workspace is there
  {
    const MemoryShortage shortage;
    const auto drawn = golden::draw(model_, large(1024, 1024));
    ASSERT_FALSE(drawn);
    EXPECT_EQ(drawn.error().code, Code::kOutOfMemory) << drawn.error().message;
    EXPECT_THAT(drawn.error().message, HasSubstr("out of memory"));
  }
  EXPECT_TRUE(unwrap(model_.decode(*generation)).rgb == expected.rgb) << "the request before it";
  EXPECT_TRUE(draw(request_).rgb == expected.rgb) << "the next one";
}
#endif

TEST_P(ModelFamily, RefusesBadRequests) {
  const auto refusal = [&](auto&& spoil) {
    GenerationRequest request = request_;
    spoil(request);
    const auto result = model_.encode(request);
    EXPECT_FALSE(result);
    if (result) return std::string();
    EXPECT_EQ(result.error().code, Code::kInvalidArgument);
    return result.error().param + ": " + result.error().message;
  };
  const auto with = [&](job::Field field, auto value) {
    return refusal([&](GenerationRequest& request) { request.fields.set(field, value); });
  };
  const int multiple = model_.info().size_multiple;
  ASSERT_GT(multiple, 1);
  const auto text = [&](int pixels) { return std::to_string(pixels); };
  for (const job::Field side : {job::Field("width"), job::Field("height")}) {
    const std::string name(side.name());
    EXPECT_EQ(with(side, 6 * multiple + 4),
              name + ": " + name + " is " + text(6 * multiple + 4) + ", which is not a multiple of " + text(multiple) +
                  " as model 'm' needs; use " + text(6 * multiple) + " or " + text(7 * multiple));
  }
  EXPECT_THAT(with(job::Field("height"), 0),
              AllOf(StartsWith("height: "), HasSubstr("accepts " + text(multiple) + " to 2048")));
  EXPECT_THAT(with(job::Field("num_inference_steps"), 0),
              AllOf(StartsWith("num_inference_steps: "), HasSubstr("accepts 1 to")));
  const int least = GetParam().golden.folder == "clip" ? 512 : 1;
  EXPECT_THAT(with(job::Field("max_sequence_length"), GetParam().text_tokens + 1),
              HasSubstr("accepts " + text(least) + " to " + text(GetParam().text_tokens)));
  EXPECT_THAT(with(job::Field("guidance_scale"), NAN), StartsWith("guidance_scale: "));
  EXPECT_THAT(refusal([](auto& request) { request.prompt = "\xff"; }), HasSubstr("UTF-8"));
  EXPECT_THAT(refusal([](auto& request) { request.loras.push_back({"x", NAN}); }), HasSubstr("finite"));
}

// A plan reads headers only: it says what a load takes and how the request then runs.
TEST_P(ModelFamily, RunsAsPlanned) {
  const c10::Device cpu(c10::DeviceType::CPU);
  const Media expected = draw(request_);
  for (const auto& [offload, plan] : {std::pair("auto", "resident"), {"model", "model"}, {"block", "block"}}) {
    SCOPED_TRACE(offload);
    EngineOptions options = golden::test_options("fp32", 1);
    options.memory = {.offload = offload, .limit = std::int64_t{8} << 30};
    const auto engine = unwrap(Engine::create(options, {&GetParam().family()}));
    const PlanReport planned = unwrap(engine->plan(source_of(GetParam()), request_));
    ASSERT_TRUE(planned.choice.plan);
    EXPECT_EQ(name_of(planned.choice.plan->kind), plan);
    const std::int64_t before = memory_use(cpu).now;
    const auto model = unwrap(engine->load_model(source_of(GetParam())));
    const std::int64_t all = planned.needs.weight_bytes(), loaded = memory_use(cpu).now - before;
    EXPECT_TRUE(planned.choice.plan->kind == PlanKind::kResident ? loaded == all : loaded < all)
        << loaded << " bytes were loaded of " << all;
    EXPECT_TRUE(unwrap(golden::draw(*model, request_)).rgb == expected.rgb);
    const MemoryReport report = model->memory();
    EXPECT_EQ(report.plan, plan);
    const std::int64_t ahead = planned.choice.plan->kind == PlanKind::kBlock ? planned.needs.blocks.ahead : 0;
    EXPECT_EQ(report.predicted_bytes, std::max(planned.needs.denoise + ahead, planned.needs.decode));
  }
  limit_memory(cpu, 0);
}

INSTANTIATE_TEST_SUITE_P(Rows, ModelFamily, ::testing::ValuesIn(kRows),
                         [](const auto& info) { return name_of(info.param); });

std::vector<Row> adapted_rows() {
  std::vector<Row> rows;
  for (const Row& row : kRows)
    if (!row.adapter.empty()) rows.push_back(row);
  return rows;
}

class AdaptedFamily : public ModelFamily {
 protected:
  ~AdaptedFamily() override {
    model_.pin_adapters({});
    for (const char* id : {"x", "y", "z"}) model_.forget_adapter(id);
  }
  static LoraRequest adapter(const std::string& id) {
    return {(golden::fixtures() / GetParam().adapter).string(), 0.7, id};
  }
  GenerationRequest with(const std::string& id) const {
    GenerationRequest request = request_;
    request.loras = {adapter(id)};
    return request;
  }
};

TEST_P(AdaptedFamily, PrefetchesAndPins) {
  EXPECT_EQ(model_.adapters().slots, 2);
  EXPECT_THAT(model_.adapters().in_host, IsEmpty());
  unwrap(model_.prefetch({adapter("x"), adapter("y")}));
  EXPECT_THAT(model_.adapters().in_slots, ElementsAre("y", "x"));
  EXPECT_THAT(model_.adapters().in_host, ElementsAre("y", "x"));
  model_.pin_adapters({"x"});
  unwrap(model_.prefetch({adapter("z")}, {.from_host = {"x"}, .from_slots = {"x"}}));
  EXPECT_THAT(model_.adapters().in_slots, ElementsAre("z", "x")) << "a pinned one goes last";
  EXPECT_THAT(model_.adapters().in_host, ElementsAre("z", "y", "x"));
  model_.pin_adapters({"x", "z"});
  unwrap(model_.prefetch({adapter("y")}));
  EXPECT_THAT(model_.adapters().in_slots, ElementsAre("y", "z")) << "where no other slot is to be had";
}

TEST_P(AdaptedFamily, ForgottenAdaptersLeaveNoTrace) {
  const Media plain = draw(request_), adapted = draw(with("x"));
  EXPECT_FALSE(adapted.rgb == plain.rgb);
  unwrap(model_.prefetch({adapter("y")}));
  EXPECT_TRUE(draw(with("y")).rgb == adapted.rgb) << "prefetched";
  {
    auto generation = unwrap(model_.encode(with("x")));
    model_.forget_adapter("x");  // in use: it goes when that ends
    model_.forget_adapter("y");
    EXPECT_THAT(model_.adapters().in_host, IsEmpty());
    EXPECT_TRUE(draw(request_).rgb == plain.rgb);
    unwrap(model_.denoise(*generation, nullptr));  // was encoded before, so it still has it
    EXPECT_TRUE(unwrap(model_.decode(*generation)).rgb == adapted.rgb);
  }
  EXPECT_THAT(model_.adapters().in_slots, IsEmpty());
  EXPECT_TRUE(draw(request_).rgb == plain.rgb);
  EXPECT_TRUE(draw(with("x")).rgb == adapted.rgb);
}

TEST_P(AdaptedFamily, ACanceledRequestKeepsNoAdapter) {
  const Media plain = draw(request_), adapted = draw(with("x"));
  {
    auto generation = unwrap(model_.encode(with("x")));
    EXPECT_FALSE(model_.denoise(*generation, [](const StepProgress&) { return false; }));
  }
  EXPECT_TRUE(draw(request_).rgb == plain.rgb);
  EXPECT_TRUE(draw(with("x")).rgb == adapted.rgb);
}

INSTANTIATE_TEST_SUITE_P(Rows, AdaptedFamily, ::testing::ValuesIn(adapted_rows()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace ditfleet::pipeline
