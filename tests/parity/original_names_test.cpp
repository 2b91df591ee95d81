// A transformer in a file with the names of the original code draws what the folder draws, and in GGUF what diffusers
// draws: tests/fixtures/original.
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/z_image/z_image.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/weights/checkpoint.h"
#include "pipeline/weights/safetensors_writer.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

struct Row {
  const Family& (*family)();
  golden::Case golden;
  friend void PrintTo(const Row& row, std::ostream* to) { *to << row.golden.set; }
};

class OriginalNames : public ::testing::TestWithParam<Row> {
 protected:
  // The folder's transformer in such a file.
  std::string file(const std::string& prefix) const {
    const auto checkpoint =
        unwrap(Checkpoint::open(GetParam().golden.model_dir() + "/transformer", Library::kDiffusers));
    const auto read = [&](const std::string& name) {
      const auto [from, entry] = unwrap(checkpoint.tensor(name));
      return copy_to({at::kCPU, at::kFloat}, unwrap(from.view(*entry)));
    };
    const std::filesystem::path names = golden::fixtures() / "original" / (GetParam().golden.set + ".json");
    std::vector<at::Tensor> values;
    std::vector<TensorToWrite> tensors;
    const json::value rows = unwrap(parse_json(unwrap(read_file(names.string()))));
    for (const json::value& row : rows.as_array()) {
      std::vector<at::Tensor> parts;
      for (const json::value& part : row.at("parts").as_array()) parts.push_back(read(std::string(part.as_string())));
      at::Tensor& value = values.emplace_back(parts.size() == 1 ? parts[0] : at::cat(parts));
      if (row.as_object().contains("swapped")) {
        const auto halves = value.chunk(2);
        value = at::cat({halves[1], halves[0]});
      }
      tensors.push_back({prefix + std::string(row.at("name").as_string()),
                         DType::kF32,
                         value.sizes().vec(),
                         {static_cast<const std::byte*>(value.const_data_ptr()), value.nbytes()}});
    }
    const std::string path = path_of("original");
    unwrap(write_safetensors(path, tensors));
    return path;
  }

  at::Tensor draw(const std::map<std::string, std::string>& files, const std::string& quantize = {}) const {
    const auto engine = unwrap(Engine::create(golden::test_options("fp32", 1), {&GetParam().family()}));
    ModelSource source{.name = "m", .dir = GetParam().golden.model_dir(), .files = files};
    if (!quantize.empty()) source.quantize["transformer"] = quantize;
    const auto model = unwrap(engine->load_model(source));
    const auto generation = unwrap(model->encode(golden::load(GetParam().golden).request));
    unwrap(model->denoise(*generation, nullptr));
    const std::string dump = path_of("dump");
    unwrap(generation->dump(dump));
    return golden::read_tensor(dump, "latents");
  }

 private:
  static std::string path_of(const std::string& name) {
    return ::testing::TempDir() + name + "_" + std::to_string(::getpid()) + ".safetensors";
  }
};

TEST_P(OriginalNames, DrawWhatTheFolderDraws) {
  const at::Tensor expected = draw({});
  for (const std::string prefix : {"", "model.diffusion_model.", "diffusion_model."})
    EXPECT_TRUE(at::equal(draw({{"transformer", file(prefix)}}), expected)) << prefix;
}

TEST_P(OriginalNames, AreQuantizedOnLoad) {
  const at::Tensor expected = draw({}, "nf4");
  EXPECT_GT(golden::distance(expected, draw({})), 1e-3);
  EXPECT_TRUE(at::equal(draw({{"transformer", file("")}}, "nf4"), expected));
}

TEST_P(OriginalNames, DrawWhatDiffusersDrawsOfAGgufFile) {
  const golden::Golden golden = golden::load({".", GetParam().golden.set, "original"});
  const auto engine = unwrap(Engine::create(golden::test_options("fp32", 1), {&GetParam().family()}));
  const auto model = unwrap(engine->load_model(
      {.name = "m",
       .dir = GetParam().golden.model_dir(),
       .files = {{"transformer", (golden::fixtures() / "original" / (GetParam().golden.set + ".gguf")).string()}}}));
  golden::expect_picture(unwrap(golden::draw(*model, golden.request)), golden.tensor("pixels"), golden,
                         GetParam().golden.set + ".gguf");
}

INSTANTIATE_TEST_SUITE_P(Families, OriginalNames,
                         ::testing::Values(Row{z_image_family, {"turbo", "plain", "z_image"}},
                                           Row{flux2_family, {"klein", "plain", "flux2"}}),
                         [](const auto& info) { return info.param.golden.set; });

}  // namespace
}  // namespace ditfleet::pipeline
