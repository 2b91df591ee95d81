// Weights that leave the device and come back: results are those of weights that stay, bit for bit, in every format and
// with adapters.
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/families/z_image/z_image.h"
#include "pipeline/memory/part_sequence.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

std::unique_ptr<WeightPart> part_of(const at::Tensor& tensor) {
  auto part = std::make_unique<WeightPart>(tensor.device());
  part->add(tensor);
  return part;
}

TEST(WeightPart, ComesBackAsItWas) {
  memory_use(kCpu);  // counts from now on
  const at::Tensor a = at::rand({3, 5}), view = a.narrow(0, 1, 2), b = at::rand({7}), a_was = a.clone(),
                   b_was = b.clone();
  WeightPart part(kCpu);
  part.add(a);
  part.add(view);  // shares a's storage
  part.add(b);
  EXPECT_EQ(part.bytes(), 2 * 512);
  const std::int64_t before = memory_use(kCpu).now;
  part.leave();
  EXPECT_LT(memory_use(kCpu).now, before);
  EXPECT_FALSE(is_on_device(a));
  for (int i = 0; i < 2; ++i) {
    part.enter();
    EXPECT_TRUE(at::equal(a, a_was));
    EXPECT_TRUE(at::equal(view, a_was.narrow(0, 1, 2)));
    EXPECT_TRUE(at::equal(b, b_was));
    a.zero_();  // the host's copy does not follow
    part.leave();
  }
}

TEST(WeightPart, SharesItsHostCopy) {
  const auto copies = [] {
    std::size_t count = 0;
    for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
      count += file.path().filename().string().starts_with("ditfleet-");
    return count;
  };
  const std::size_t before = copies();
  {
    const at::Tensor a = at::rand({1 << 20}), other = at::zeros({1 << 20}), a_was = a.clone();
    WeightPart first(kCpu), second(kCpu), third(kCpu);
    const std::string key = "offload_test/" + std::to_string(::getpid());
    first.add(a);
    first.share(key);
    first.leave();
    EXPECT_EQ(copies(), before + 1);
    second.add(other);
    second.share(key);
    second.leave();
    EXPECT_EQ(copies(), before + 1);
    second.enter();
    EXPECT_TRUE(at::equal(other, a_was)) << "the second part finds the bytes of the first";
    third.add(at::zeros({5}));
    third.share(key);  // of another size: not the same bytes
    third.leave();
    EXPECT_EQ(copies(), before + 2);
  }
  EXPECT_EQ(copies(), before) << "the last user removes the copy";
}

TEST(PartSequence, KeepsWhatFitsSpreadEvenly) {
  PartSequence sequence(Placement{kCpu, c10::ScalarType::Float, /*on_host=*/true}, "test", /*repeats=*/true);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(at::rand({256}));  // 1 KiB
    sequence.add(part_of(tensors.back()));
  }
  const auto kept = [&] {
    std::string text;
    for (const at::Tensor& tensor : tensors) text += is_on_device(tensor) ? 'x' : '.';
    return text;
  };
  const auto keep = [&](std::int64_t parts) {
    sequence.keep(parts * 1024 + 100);
    return kept();
  };
  EXPECT_EQ(keep(0), "............");
  EXPECT_EQ(keep(12), "xxxxxxxxxxxx");
  EXPECT_EQ(keep(6), ".x.x.x.x.x.x");
  EXPECT_EQ(keep(4), "..x..x..x..x");
  EXPECT_EQ(keep(9), ".xxx.xxx.xxx");
  EXPECT_EQ(keep(1), "..........x.");
  PartSequence::Pass pass(&sequence);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    pass.begin(i);
    EXPECT_TRUE(is_on_device(tensors[i]));
    pass.end(i);
    EXPECT_EQ(is_on_device(tensors[i]), i == 10);
  }
}

TEST(PartSequence, KeepsNothingWhenMemoryRunsOut) {
  PartSequence sequence(Placement{kCpu, c10::ScalarType::Float, /*on_host=*/true}, "test", /*repeats=*/true);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(at::zeros({1 << 20}));
    sequence.add(part_of(tensors.back()));
  }
  limit_memory(kCpu, memory_use(kCpu).now + (10 << 20));
  EXPECT_THROW(sequence.keep(sequence.bytes()), c10::OutOfMemoryError);
  for (const at::Tensor& tensor : tensors) EXPECT_FALSE(is_on_device(tensor));
  sequence.keep(8 << 20);
  EXPECT_EQ(sequence.kept_bytes(), 8 << 20);
  limit_memory(kCpu, 0);
}

struct Case {
  std::string name, folder;  // a fixture of `flux`, `quant` or `wan`
  bool bf16;
  std::string adapter = {};  // for the folder's model
  std::string image = {};    // the case that has one
};

// What a model drew, or why it did not.
struct Drawn {
  std::vector<Media> pictures;
  std::vector<std::string> plans;  // in force after each picture
  std::optional<Error> error;
  std::int64_t peak = 0;  // device memory beyond what was in use before
};

class Offload : public ::testing::TestWithParam<Case> {
 protected:
  // Draws with a model of its own: without and with adapters, at two sizes. `limit` is beyond what is in use.
  static Drawn draw(const std::string& offload, std::int64_t limit = 0) {
    const Case& which = GetParam();
    EngineOptions options = golden::test_options(which.bf16 ? "bf16" : "fp32", 1);
    options.lora_slots = 1;
    options.max_lora_rank = 16;
    const std::int64_t before = memory_use(kCpu).now;
    options.memory = {.offload = offload, .limit = limit > 0 ? before + limit : 0};
    reset_memory_peak(kCpu);
    Drawn drawn;
    drawn.error = draw_all(options, drawn);
    drawn.peak = memory_use(kCpu).peak - before;
    limit_memory(kCpu, 0);
    return drawn;
  }
  // With weights that stay on the device.
  static const Drawn& resident() {
    static std::map<std::string, Drawn> known;
    const auto [at, added] = known.try_emplace(GetParam().name);
    if (added) at->second = draw("none");
    return at->second;
  }

 private:
  static std::optional<Error> draw_all(const EngineOptions& options, Drawn& drawn) {
    auto engine = Engine::create(
        options, {&flux_family(), &wan_family(), &z_image_family(), &flux2_family(), &qwen_image_family()});
    if (!engine) return engine.error();
    const auto folder = golden::fixtures() / GetParam().folder, file = folder / "transformer.safetensors";
    ModelSource source{"m", (folder / "model").string()};
    if (std::filesystem::exists(file)) source.files["transformer"] = file.string();
    auto model = (*engine)->load_model(source);
    if (!model) return model.error();
    for (const std::int64_t side : {4, 6, 4}) {
      GenerationRequest request;
      request.prompt = "a red circle above a white star";
      request.seed = side;
      request.fields.set("width", side * (*model)->info().size_multiple);
      request.fields.set("height", 4 * (*model)->info().size_multiple);
      request.fields.set("num_inference_steps", 4);
      request.fields.set("max_sequence_length", 16);
      request.fields.set("true_cfg_scale", 2.0);
      request.fields.set("negative_prompt", "blue");
      if (GetParam().folder.starts_with("wan")) request.fields.set("frames", 9);
      if (const std::string& name = GetParam().image; !name.empty())
        request.images = golden::load({folder.filename(), name, folder.parent_path().filename()}).request.images;
      if (GetParam().folder == "wan/clip") request.fields.set("max_sequence_length", 512);
      if (!GetParam().folder.starts_with("flux/") && !GetParam().folder.starts_with("quant"))
        request.fields.set("guidance_scale", 3.0);
      for (const bool adapted : {false, true}) {
        if (adapted && GetParam().adapter.empty()) continue;
        if (adapted) request.loras = {{(golden::fixtures() / GetParam().adapter).string(), 0.7}};
        auto picture = golden::draw(**model, request);
        if (!picture) return picture.error();
        drawn.pictures.push_back(std::move(*picture));
        drawn.plans.push_back((*model)->memory().plan);
      }
    }
    return {};
  }
};

void expect_equal(const Drawn& made, const Drawn& expected) {
  ASSERT_FALSE(made.error) << made.error->message;
  ASSERT_EQ(made.pictures.size(), expected.pictures.size());
  for (std::size_t i = 0; i < made.pictures.size(); ++i)
    EXPECT_TRUE(made.pictures[i].rgb == expected.pictures[i].rgb) << "picture " << i;
}

TEST_P(Offload, DrawsWhatResidentWeightsDraw) {
  const Drawn& expected = resident();
  ASSERT_FALSE(expected.error) << expected.error->message;
  if (!GetParam().adapter.empty()) {
    EXPECT_FALSE(expected.pictures[0].rgb == expected.pictures[1].rgb) << "the adapter changes nothing";
  }
  for (const char* offload : {"auto", "model", "block"}) {
    SCOPED_TRACE(offload);
    const Drawn drawn = draw(offload);
    expect_equal(drawn, expected);
    // A CPU's memory has no limit here, so nothing is planned.
    const std::string all = golden::test_device() == "cpu" ? "" : "resident";
    for (const std::string& plan : drawn.plans) EXPECT_EQ(plan, std::string(offload) == "auto" ? all : offload);
  }
}

// Whatever the limit, the pictures are right or the error has the numbers.
TEST_P(Offload, StepsDownUntilItFits) {
  const Drawn& expected = resident();
  const std::int64_t peak = expected.peak;
  int drawn = 0;
  std::set<std::string> plans;
  for (const double share : {1.5, 1.2, 1.0, 0.85, 0.7, 0.5, 0.2}) {
    SCOPED_TRACE(share);
    const Drawn made = draw("auto", static_cast<std::int64_t>(share * static_cast<double>(peak)));
    if (made.error) {
      EXPECT_EQ(made.error->code, Code::kOutOfMemory) << made.error->message;
      EXPECT_THAT(made.error->message, ::testing::HasSubstr("MiB"));
      continue;
    }
    ++drawn;
    EXPECT_LE(made.peak, static_cast<std::int64_t>(share * static_cast<double>(peak)));
    expect_equal(made, expected);
    plans.insert(made.plans.begin(), made.plans.end());
  }
  EXPECT_GE(drawn, 1);
  // The other models are so small that what is left over for weights decides nothing.
  if (GetParam().folder == "flux/dev") {
    EXPECT_GE(plans.size(), 2u) << "less memory changed nothing";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, Offload,
    ::testing::Values(Case{"fp32", "flux/dev", false, "lora/adapters/all.safetensors"},
                      Case{"bf16", "flux/dev", true, "lora/adapters/all.safetensors"},
                      Case{"comfy_old", "quant/comfy_old", true}, Case{"comfy_plain", "quant/comfy_plain", true},
                      Case{"nf4", "quant/nf4", true, "quant/adapters/nf4.safetensors"},
                      Case{"nf4_fp32", "quant/nf4_fp32", false}, Case{"nf4_fp32_in_bf16", "quant/nf4_fp32", true},
                      Case{"fp8_rows", "quant/fp8_rows", true, "quant/adapters/fp8.safetensors"},
                      Case{"wan_one", "wan/one", false},
                      Case{"wan_two", "wan/two", false, "wan/lora/adapters/peft.safetensors"},
                      Case{"wan_two_bf16", "wan/two", true, "wan/lora/adapters/peft.safetensors"},
                      Case{"wan_ti2v", "wan/ti2v", false, "", "image"},
                      Case{"wan_clip", "wan/clip", false, "wan/lora/adapters/image.safetensors", "five"},
                      Case{"z_image", "z_image/turbo", false, "layouts/z_image/blocks/kohya.safetensors"},
                      Case{"z_image_bf16", "z_image/base", true}, Case{"z_image_fp8", "z_image/fp8", false},
                      Case{"flux2", "flux2/klein", false, "layouts/flux2/blocks/kohya.safetensors"},
                      Case{"flux2_bf16", "flux2/base", true}, Case{"flux2_nf4", "flux2/nf4", false},
                      Case{"qwen_image", "qwen_image/image", false, "layouts/qwen_image/blocks/kohya.safetensors"},
                      Case{"qwen_image_bf16", "qwen_image/zero_image", true},
                      Case{"qwen_edit", "qwen_image/zero", true, "", "two"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ditfleet::pipeline
