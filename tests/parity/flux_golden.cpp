#include "tests/parity/flux_golden.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "pipeline/device/failure.h"
#include "pipeline/weights/safetensors.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/media/image_file.h"
#include "tests/paths.h"
#include "tests/programs.h"

namespace ditfleet::pipeline::golden {
namespace {

c10::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return c10::ScalarType::Float;
    case DType::kBF16: return c10::ScalarType::BFloat16;
    case DType::kI64: return c10::ScalarType::Long;
    case DType::kU8: return c10::ScalarType::Byte;
    default: fail(Code::kInternal, "a golden tensor of an unexpected type");
  }
}

}  // namespace

std::filesystem::path fixtures() {
  const char* flux = std::getenv("DITFLEET_FIXTURES");
  return flux ? std::filesystem::path(flux).parent_path() : std::filesystem::path(source_path("tests/fixtures"));
}

std::string test_device() {
  const char* device = std::getenv("DITFLEET_TEST_DEVICE");
  return device ? device : "cpu";
}

region::CompileOptions test_compile() {
  const char* backend = std::getenv("DITFLEET_TEST_COMPILE");
  const char* mode = std::getenv("DITFLEET_TEST_MODE");
  return {.backend = backend ? backend : "eager", .mode = mode ? mode : "default", .fullgraph = backend != nullptr};
}

EngineOptions test_options(const std::string& dtype, int threads) {
  return {test_device(), dtype, threads, test_compile(), testing::shared_programs()};
}

void expect_compiled(const Engine& engine) {
  const auto counts = engine.region_counts();
  EXPECT_EQ(counts.recompiles, 0u);
  EXPECT_EQ(counts.fallbacks, 0u);
  const std::string backend = test_compile().backend;
  EXPECT_EQ(engine.compile_backend(), backend);
  if (backend == "eager") return;
  EXPECT_GT(counts.compiles, 0u) << "no block was compiled";
  EXPECT_GT(counts.hits, 0u) << "no compiled block ran";
}

std::string Case::model_dir() const { return (fixtures() / set / folder / "model").string(); }
std::string Case::file() const { return (fixtures() / set / folder / (name + ".safetensors")).string(); }

std::vector<Case> all_cases(const std::string& set) {
  std::vector<Case> cases;
  for (const auto& folder : std::filesystem::directory_iterator(fixtures() / set)) {
    if (!std::filesystem::exists(folder.path() / "model")) continue;
    for (const auto& file : std::filesystem::directory_iterator(folder.path()))
      if (file.path().extension() == ".safetensors")
        cases.push_back({folder.path().filename().string(), file.path().stem().string(), set});
  }
  std::sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.file() < b.file(); });
  return cases;
}

void expect_picture(const Media& picture, const at::Tensor& pixels, const Golden& golden, const std::string& shown) {
  ASSERT_EQ(pixels.size(0), picture.height);
  ASSERT_EQ(pixels.size(1), picture.width);
  ASSERT_EQ(picture.rgb.size(), static_cast<std::size_t>(pixels.numel()));
  double mean = 0;
  int largest = 0;
  for (std::size_t i = 0; i < picture.rgb.size(); ++i) {
    const int apart = std::abs(int{picture.rgb[i]} - int{pixels.const_data_ptr<std::uint8_t>()[i]});
    mean += apart / static_cast<double>(picture.rgb.size());
    largest = std::max(largest, apart);
  }
  std::printf("%s: largest %d, mean %.5f of 255\n", shown.c_str(), largest, mean);
  const double times = test_device() == "cpu" ? 1.5 : 2;
  EXPECT_LE(largest, golden.bf16 ? times * golden.largest_apart : 1);
  EXPECT_LE(mean, golden.bf16 ? times * golden.mean_apart : 0.006);
}

void expect_layout(Model& model, const Layout& layout) {
  const Golden golden = load(layout.picture);
  GenerationRequest request = golden.request;
  request.loras = {{.path = layout.path}};
  auto generation = unwrap(model.encode(request));
  expect_left_out(generation->warnings(), layout);
  unwrap(model.denoise(*generation, nullptr));
  const Media picture = unwrap(model.decode(*generation));
  expect_picture(picture, golden.tensor("pixels"), golden, layout.picture.name + " " + layout.name);
  const std::string dump = ::testing::TempDir() + "layout_" + std::to_string(::getpid()) + ".safetensors";
  unwrap(generation->dump(dump));
  EXPECT_LE(distance(read_tensor(dump, "latents"), golden.tensor("latents")), 2e-4);
  std::filesystem::remove(dump);
}

void expect_case(Model& model, const Case& which) {
  const Golden golden = load(which);
  const auto file = unwrap(SafetensorsFile::open(golden.path));
  std::set<std::string> names;
  for (const auto& entry : file.entries()) names.insert(entry.name);
  const json::value spec = unwrap(parse_json(file.metadata().at("request")));
  if (const json::value* quantized = spec.as_object().if_contains("quantized"))
    for (const auto& [part, count] : quantized->as_object()) {
      int found = 0;
      for (const auto& [format, linears] : model.info().linears.at(std::string(part)))
        if (format.starts_with("nf4") || format.starts_with("fp8")) found += linears;
      EXPECT_EQ(found, count.to_number<int>()) << part;
    }
  GenerationRequest request = golden.request;
  for (int image = 0;; ++image, ++request.seed, ++request.number) {
    const std::string pixels = image == 0 ? "pixels" : "pixels_" + std::to_string(image);
    if (!names.contains(pixels)) break;
    auto generation = unwrap(model.encode(request));
    unwrap(model.denoise(*generation, nullptr));
    const Media picture = unwrap(model.decode(*generation));
    expect_picture(picture, golden.tensor(pixels), golden, which.folder + "/" + which.name + " " + pixels);
    const std::string dump = ::testing::TempDir() + "case_" + std::to_string(::getpid()) + ".safetensors";
    unwrap(generation->dump(dump));
    for (const std::string& name : names) {
      if (name.starts_with("pixels") || (golden.bf16 && name == "latents")) continue;
      if (name == "posterior" || name == "mask" || name == "image_ids") continue;  // others follow from them
      const bool numbered = name.size() > 2 && name[name.size() - 2] == '_' && std::isdigit(name.back());
      if (image != (numbered ? name.back() - '0' : 0)) continue;
      const bool drawn = name == "noise" || name == "sigmas" || name == "timesteps",
                 ids = name.ends_with("_ids") || name.ends_with("_mask");
      const std::string dumped = name == "image_latents" ? "condition"
                                 : numbered              ? name.substr(0, name.size() - 2)
                                                         : name;
      EXPECT_LE(distance(read_tensor(dump, dumped), golden.tensor(name)), ids           ? 0
                                                                          : drawn       ? 1e-5
                                                                          : golden.bf16 ? 4e-2
                                                                                        : 2e-4)
          << name;
    }
    std::filesystem::remove(dump);
  }
}

std::string refusal(const Family& family, const Case& which,
                    const std::function<void(const std::filesystem::path& copy)>& change) {
  const std::filesystem::path copy = ::testing::TempDir() + "folder_" + std::to_string(::getpid());
  std::filesystem::remove_all(copy);
  std::filesystem::copy(which.model_dir(), copy, std::filesystem::copy_options::recursive);
  change(copy);
  const auto engine = unwrap(Engine::create({"cpu", "fp32", 1}, {&family}));
  const auto model = engine->load_model({"m", copy.string()});
  return model ? std::string() : model.error().message;
}

void replace_in(const std::filesystem::path& file, const std::string& from, const std::string& to) {
  std::string text = unwrap(read_file(file.string()));
  const auto at = text.find(from);
  ASSERT_NE(at, std::string::npos) << "no " << from << " in " << file;
  text.replace(at, from.size(), to);
  std::ofstream(file, std::ios::binary) << text;
}

Result<Media> draw(Model& model, const GenerationRequest& request) {
  auto generation = model.encode(request);
  if (!generation) return generation.error();
  if (auto denoised = model.denoise(**generation, nullptr); !denoised) return denoised.error();
  return model.decode(**generation);
}

std::vector<Layout> all_layouts(const std::string& family) {
  std::vector<Layout> layouts;
  for (const auto& picture : std::filesystem::directory_iterator(fixtures() / "layouts" / family)) {
    if (!picture.is_directory()) continue;
    const Case of{family, picture.path().filename().string(), "layouts"};
    const auto file = unwrap(SafetensorsFile::open(of.file()));
    const json::value request = unwrap(parse_json(file.metadata().at("request")));
    const json::object& left_out = request.at("left_out").as_object();
    for (const auto& adapter : std::filesystem::directory_iterator(picture)) {
      Layout& layout = layouts.emplace_back(of, adapter.path().stem().string(), adapter.path().string());
      if (const auto* names = left_out.if_contains(layout.name))
        for (const auto& name : names->as_array()) layout.left_out.emplace_back(name.as_string());
    }
  }
  std::sort(layouts.begin(), layouts.end(), [](const Layout& a, const Layout& b) { return a.path < b.path; });
  return layouts;
}

void expect_left_out(const std::vector<std::string>& warnings, const Layout& layout) {
  ASSERT_EQ(warnings.size(), layout.left_out.empty() ? 0u : 1u) << (warnings.empty() ? "no warning" : warnings[0]);
  if (warnings.empty()) return;
  EXPECT_NE(warnings[0].find("left out " + std::to_string(layout.left_out.size()) + " tensors: "), std::string::npos)
      << warnings[0];
  if (layout.left_out.size() > 6) return;  // the first are listed
  for (const std::string& name : layout.left_out)
    EXPECT_NE(warnings[0].find(name), std::string::npos) << name << " is not in: " << warnings[0];
}

at::Tensor read_tensor(const std::string& path, const std::string& name) {
  const auto file = unwrap(SafetensorsFile::open(path));
  const TensorView view = unwrap(file.tensor(name));
  at::Tensor tensor = at::empty(std::vector<std::int64_t>(view.shape.begin(), view.shape.end()),
                                at::TensorOptions().dtype(scalar_type(view.dtype)));
  std::memcpy(tensor.mutable_data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

at::Tensor Golden::tensor(const std::string& name) const { return read_tensor(path, name); }

Golden load(const Case& which) {
  Golden golden;
  golden.path = which.file();
  const auto file = unwrap(SafetensorsFile::open(golden.path));
  const json::object spec = unwrap(parse_json(file.metadata().at("request"))).as_object();
  const auto number = [&](const char* key, double fallback) {
    return spec.contains(key) ? spec.at(key).to_number<double>() : fallback;
  };
  GenerationRequest& r = golden.request;
  r.prompt = std::string(spec.at("prompt").as_string());
  if (spec.contains("negative")) r.fields.set("negative_prompt", std::string(spec.at("negative").as_string()));
  const bool asks_no_size = spec.contains("asked") && spec.at("asked").as_array().at(0).is_null();
  for (const char* side : {"width", "height"})
    if (!asks_no_size) r.fields.set(*job::find_field(side), static_cast<int>(number(side, 0)));
  r.fields.set("num_inference_steps", static_cast<int>(number("steps", 0)));
  r.fields.set("guidance_scale", number("guidance", 3.5));
  r.fields.set("true_cfg_scale", number("true_cfg", 1.0));
  r.fields.set("max_sequence_length", static_cast<int>(number("max_sequence_length", 512)));
  for (const char* name : {"cfg_normalization", "cfg_truncation", "flow_shift"})
    if (spec.contains(name)) r.fields.set(job::find_field(name).value(), number(name, 0));
  if (spec.contains("cache")) r.fields.set("cache", number("cache", 0));
  if (spec.contains("num_frames")) r.fields.set("frames", static_cast<int>(number("num_frames", 0)));
  if (spec.contains("guidance_2")) r.fields.set("guidance_scale_2", number("guidance_2", 0));
  r.seed = spec.at("seed").to_number<std::int64_t>();
  if (spec.contains("loras"))
    for (const auto& lora : spec.at("loras").as_array()) {
      const auto file = fixtures() / which.set / (std::string(lora.at(0).as_string()) + ".safetensors");
      const auto& parts = lora.as_array();
      const std::string expert(parts.size() > 2 ? parts[2].as_string() : json::string("both"));
      r.loras.push_back(
          {.path = file.string(), .scale = lora.at(1).to_number<double>(), .expert = job::find_expert(expert).value()});
    }
  golden.bf16 = spec.contains("bf16");
  if (spec.contains("vae_dtype")) golden.vae_dtype = std::string(spec.at("vae_dtype").as_string());
  const auto picture_of = [&](const json::value& name) {
    return unwrap(read_file((fixtures() / "pictures" / std::string(name.as_string())).string()));
  };
  if (spec.contains("pictures"))
    for (const auto& name : spec.at("pictures").as_array())
      r.images.push_back(std::make_shared<const Media>(unwrap(media::decode(picture_of(name)))));
  if (spec.contains("mask"))
    r.mask = std::make_shared<const Media>(unwrap(media::decode_mask(picture_of(spec.at("mask")))));
  if (spec.contains("strength")) r.fields.set("strength", number("strength", 0));
  if (spec.contains("auto_resize") && !r.images.empty())
    r.fields.set("auto_resize", std::int64_t{spec.at("auto_resize").as_bool()});
  for (const char* name : {"picture", "last_picture"}) {
    if (!spec.contains(name)) continue;
    const at::Tensor picture = golden.tensor(name);
    const auto* bytes = picture.const_data_ptr<std::uint8_t>();
    r.images.push_back(std::make_shared<const Media>(Media{
        static_cast<int>(picture.size(1)), static_cast<int>(picture.size(0)), 1, 0, {bytes, bytes + picture.numel()}}));
  }
  golden.mean_apart = number("mean", 0);
  golden.largest_apart = number("largest", 0);
  return golden;
}

double distance(const at::Tensor& got, const at::Tensor& reference) {
  EXPECT_EQ(got.sizes(), reference.sizes());
  if (got.sizes() != reference.sizes()) return 1e30;
  const auto on_host = [](const at::Tensor& t) { return t.to(c10::DeviceType::CPU).to(c10::ScalarType::Double); };
  const at::Tensor a = on_host(got), b = on_host(reference);
  return at::abs(a - b).max().item<double>() / std::max(1.0, at::abs(b).max().item<double>());
}

}  // namespace ditfleet::pipeline::golden
