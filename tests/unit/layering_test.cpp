// Dependencies point one way: shared ← pipeline ← worker, shared ← coordinator. Reads the includes of every source and
// fails on any that kMayInclude does not allow, on cycles of folders, and on LibTorch or CUDA outside pipeline/.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "shared/job/fields.h"
#include "tests/paths.h"

namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kParts = {"coordinator", "worker", "pipeline", "shared"};

// What each folder may include besides its own files and shared/core: folders, or single headers.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"shared/core", {}},
    {"shared/telemetry", {}},
    {"shared/job", {}},
    {"shared/families", {"shared/job"}},
    {"shared/families/flux", {"shared/families", "shared/job"}},
    {"shared/families/flux2", {"shared/families", "shared/job", "shared/media/sizes.h"}},
    {"shared/families/qwen_image", {"shared/families", "shared/job", "shared/media/sizes.h"}},
    {"shared/families/wan", {"shared/families", "shared/job"}},
    {"shared/families/z_image", {"shared/families", "shared/job"}},
    {"shared/media", {"shared/job/output_format.h"}},
    {"shared/safetensors", {}},
    {"shared/redis", {"shared/telemetry"}},
    {"shared/config", {"shared/redis/endpoint.h"}},
    {"shared/queue", {"shared/config/settings.h", "shared/job", "shared/redis", "shared/telemetry"}},
    {"shared/loras", {"shared/redis", "shared/safetensors"}},
    {"shared/results", {"shared/config/settings.h", "shared/job/output_format.h", "shared/redis", "shared/s3"}},
    {"shared/s3", {}},
    {"shared/kernel_cache", {"shared/config", "shared/redis", "shared/telemetry"}},

    {"coordinator",
     {"coordinator/gateway", "coordinator/scheduling/service", "shared/config", "shared/families",
      "shared/families/flux/flux.h", "shared/families/flux2/flux2.h", "shared/families/qwen_image/qwen_image.h",
      "shared/families/wan/wan.h", "shared/families/z_image/z_image.h", "shared/job", "shared/loras", "shared/queue",
      "shared/redis", "shared/results", "shared/telemetry"}},
    {"coordinator/cli",
     {"coordinator", "coordinator/simulation", "shared/config", "shared/families", "shared/job", "shared/kernel_cache",
      "shared/queue", "shared/redis", "shared/safetensors", "shared/telemetry"}},
    {"coordinator/cli/up",
     {"coordinator/cli", "shared/config", "shared/families", "shared/job", "shared/kernel_cache", "shared/redis"}},
    {"coordinator/gateway",
     {"coordinator/gateway/backend", "coordinator/gateway/events", "coordinator/gateway/http",
      "coordinator/gateway/routes", "shared/config", "shared/job", "shared/queue", "shared/redis", "shared/results",
      "shared/telemetry"}},
    {"coordinator/gateway/backend",
     {"shared/config", "shared/job", "shared/queue", "shared/redis", "shared/results", "shared/s3"}},
    {"coordinator/gateway/http", {"shared/telemetry"}},
    {"coordinator/gateway/events", {"coordinator/gateway/backend/job_service.h", "shared/queue", "shared/telemetry"}},
    {"coordinator/gateway/webhooks",
     {"shared/config", "shared/job", "shared/queue", "shared/redis", "shared/telemetry"}},
    {"coordinator/gateway/routes",
     {"coordinator/gateway/backend", "coordinator/gateway/events", "coordinator/gateway/http",
      "coordinator/gateway/webhooks", "shared/config", "shared/job", "shared/loras", "shared/media", "shared/queue",
      "shared/redis", "shared/results", "shared/safetensors", "shared/telemetry"}},
    {"coordinator/scheduling",
     {"coordinator/scheduling/order", "coordinator/scheduling/placement", "shared/job", "shared/queue"}},
    {"coordinator/scheduling/order", {"coordinator/scheduling/placement"}},
    {"coordinator/scheduling/placement", {"shared/job", "shared/queue"}},
    {"coordinator/scheduling/service",
     {"coordinator/scheduling", "coordinator/scheduling/placement", "shared/job", "shared/loras", "shared/queue",
      "shared/redis", "shared/telemetry"}},
    {"coordinator/simulation", {"coordinator/scheduling", "coordinator/scheduling/placement", "shared/queue"}},

    {"pipeline", {"pipeline/api", "pipeline/memory", "pipeline/region", "pipeline/region/programs/ahead.h"}},
    {"pipeline/api", {"shared/job/fields.h", "shared/media/media.h"}},
    {"pipeline/device", {}},
    {"pipeline/parallel", {"pipeline/device"}},
    {"pipeline/memory", {"pipeline/api/model.h", "pipeline/device"}},
    {"pipeline/weights", {"shared/safetensors"}},
    {"pipeline/tokenizers", {}},
    {"pipeline/nn",
     {"pipeline/device", "pipeline/memory", "pipeline/parallel", "pipeline/region/libraries",
      "pipeline/region/programs", "pipeline/region/run/region_host.h", "pipeline/weights",
      "shared/safetensors/header.h"}},
    {"pipeline/nn/transformer",
     {"pipeline/device", "pipeline/nn", "pipeline/parallel", "pipeline/region", "pipeline/region/ir",
      "pipeline/region/programs", "pipeline/region/run", "shared/telemetry"}},
    {"pipeline/nn/text",
     {"pipeline/device", "pipeline/memory", "pipeline/nn", "shared/media/media.h", "shared/media/resize.h"}},
    {"pipeline/nn/video_vae", {"pipeline/device", "pipeline/nn", "pipeline/region/programs", "pipeline/region/run"}},
    {"pipeline/nn/vae",
     {"pipeline/device", "pipeline/nn", "pipeline/nn/text", "pipeline/region/programs", "pipeline/region/run"}},
    {"pipeline/lora", {"pipeline/api", "pipeline/device", "pipeline/nn", "pipeline/weights", "shared/safetensors"}},
    {"pipeline/sampling", {"pipeline/api", "pipeline/device", "pipeline/nn", "shared/media/resize.h"}},
    {"pipeline/region", {"pipeline/region/compile", "shared/kernel_cache", "shared/telemetry"}},
    {"pipeline/region/ir", {}},
    {"pipeline/region/fusion", {"pipeline/region/ir"}},
    {"pipeline/region/codegen", {"pipeline/region/fusion"}},
    {"pipeline/region/compile",
     {"pipeline/device/symbols.h", "pipeline/region/codegen", "pipeline/region/libraries", "shared/kernel_cache",
      "shared/telemetry"}},
    {"pipeline/region/libraries", {"pipeline/device", "pipeline/region/ir", "shared/kernel_cache"}},
    {"pipeline/region/programs",
     {"pipeline/device", "pipeline/region", "pipeline/region/compile", "pipeline/region/ir",
      "pipeline/region/libraries", "pipeline/region/run", "shared/kernel_cache", "pipeline/weights/nf4.h",
      "pipeline/weights/gguf.h"}},
    {"pipeline/region/run",
     {"pipeline/device", "pipeline/parallel", "pipeline/region", "pipeline/region/codegen", "pipeline/region/compile",
      "pipeline/region/fusion", "pipeline/region/ir", "pipeline/region/libraries"}},
    {"pipeline/families/flux",
     {"pipeline/device", "pipeline/engine", "pipeline/engine.h", "pipeline/lora", "pipeline/memory", "pipeline/nn",
      "pipeline/nn/text", "pipeline/nn/transformer", "pipeline/nn/vae", "pipeline/parallel", "pipeline/region",
      "pipeline/region/ir", "pipeline/region/run", "pipeline/sampling", "pipeline/tokenizers", "pipeline/weights",
      "shared/families/flux/flux.h", "shared/media/resize.h", "shared/media/sizes.h"}},
    {"pipeline/families/flux2",
     {"pipeline/device", "pipeline/engine", "pipeline/engine.h", "pipeline/lora", "pipeline/nn", "pipeline/nn/text",
      "pipeline/nn/transformer", "pipeline/nn/vae", "pipeline/region/run", "pipeline/sampling", "pipeline/tokenizers",
      "shared/families/flux2/flux2.h", "shared/media/resize.h", "shared/media/sizes.h"}},
    {"pipeline/families/qwen_image",
     {"pipeline/device", "pipeline/engine", "pipeline/engine.h", "pipeline/nn", "pipeline/nn/text",
      "pipeline/nn/transformer", "pipeline/nn/video_vae", "pipeline/region/run", "pipeline/sampling",
      "pipeline/tokenizers", "shared/families/qwen_image/qwen_image.h", "shared/media/resize.h",
      "shared/media/sizes.h"}},
    {"pipeline/families/wan",
     {"pipeline/device", "pipeline/engine", "pipeline/engine.h", "pipeline/lora", "pipeline/memory", "pipeline/nn",
      "pipeline/nn/text", "pipeline/nn/transformer", "pipeline/nn/video_vae", "pipeline/parallel", "pipeline/region/ir",
      "pipeline/sampling", "pipeline/tokenizers", "shared/families/wan/wan.h", "shared/media/resize.h"}},
    {"pipeline/families/z_image",
     {"pipeline/device", "pipeline/engine", "pipeline/engine.h", "pipeline/lora", "pipeline/nn", "pipeline/nn/text",
      "pipeline/nn/transformer", "pipeline/nn/vae", "pipeline/region/run", "pipeline/sampling", "pipeline/tokenizers",
      "shared/families/z_image/z_image.h"}},
    {"pipeline/engine",
     {"pipeline/api", "pipeline/device", "pipeline/engine.h", "pipeline/lora", "pipeline/memory", "pipeline/nn",
      "pipeline/nn/text", "pipeline/nn/transformer", "pipeline/parallel", "pipeline/region/libraries/fp8.h",
      "pipeline/region/programs", "pipeline/region/run", "pipeline/sampling", "pipeline/tokenizers", "pipeline/weights",
      "shared/families", "shared/job", "shared/safetensors"}},

    {"worker",
     {"pipeline/engine.h",
      "pipeline/families/flux/flux.h",
      "pipeline/families/flux2/flux2.h",
      "pipeline/families/qwen_image/qwen_image.h",
      "pipeline/families/wan/wan.h",
      "pipeline/families/z_image/z_image.h",
      "shared/families",
      "shared/families/flux/flux.h",
      "shared/families/flux2/flux2.h",
      "shared/families/qwen_image/qwen_image.h",
      "shared/families/wan/wan.h",
      "shared/families/z_image/z_image.h",
      "shared/job",
      "shared/queue",
      "shared/redis",
      "shared/results",
      "shared/telemetry",
      "worker/adapters",
      "worker/models",
      "worker/units"}},
    {"worker/ranks", {"pipeline/engine.h"}},
    {"worker/models", {"pipeline/engine.h", "shared/job", "shared/media", "shared/telemetry"}},
    {"worker/adapters",
     {"pipeline/engine.h", "shared/job", "shared/loras", "shared/queue", "shared/redis", "shared/safetensors",
      "shared/telemetry", "worker/models"}},
    {"worker/units",
     {"pipeline/engine.h", "shared/job", "shared/media/writer.h", "shared/queue", "shared/results", "shared/telemetry",
      "worker/adapters", "worker/models"}},
    {"worker/commands",
     {"pipeline/engine.h", "shared/config", "shared/families", "shared/job", "shared/kernel_cache", "shared/loras",
      "shared/media", "shared/telemetry", "worker", "worker/models", "worker/ranks", "worker/units/receipt.h"}},
};

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

// Why `file` must not include `included` ("a/b.h" of our own, or "<torch/…>"). Empty if it may.
std::optional<std::string> objection(const std::string& file, const std::string& included) {
  static const std::regex kAccelerator("<(torch|ATen|c10|cuda|nvrtc|cudnn|nccl|cublas)[a-zA-Z_0-9]*[/.].*");
  if (included.starts_with("<")) {
    if (!file.starts_with("pipeline/") && std::regex_match(included, kAccelerator))
      return "only pipeline/ may use LibTorch and CUDA";
    return std::nullopt;
  }
  const std::string part = included.substr(0, included.find('/'));
  if (std::find(kParts.begin(), kParts.end(), part) == kParts.end()) return "includes start at the top of the tree";
  const std::string from = folder_of(file), to = folder_of(included);
  if (from == to || to == "shared/core") return std::nullopt;
  const auto row = kMayInclude.find(from);
  if (row == kMayInclude.end()) return "kMayInclude has no row for " + from;
  if (row->second.contains(to) || row->second.contains(included)) return std::nullopt;
  return from + " may not include " + to;
}

std::vector<std::string> includes_of(const fs::path& file) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*(?:"([^"]+)\"|(<[^>]+>)).*)");
  std::vector<std::string> found;
  std::ifstream in(file);
  std::smatch match;
  for (std::string line; std::getline(in, line);) {
    if (std::regex_match(line, match, kInclude)) found.push_back(match[1].matched ? match[1].str() : match[2].str());
  }
  return found;
}

std::vector<fs::path> files_with(const std::string& part, const std::set<std::string>& extensions) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(ditfleet::source_path(part))) {
    if (entry.is_regular_file() && extensions.contains(entry.path().extension().string()))
      files.push_back(entry.path());
  }
  return files;
}

std::string shown(const fs::path& path) { return path.lexically_relative(ditfleet::source_path()).generic_string(); }

TEST(Layering, EveryIncludePointsTheRightWay) {
  std::size_t seen = 0;
  for (const std::string& part : kParts) {
    for (const fs::path& file : files_with(part, {".h", ".cpp"})) {
      for (const std::string& included : includes_of(file)) {
        ++seen;
        const auto why = objection(shown(file), included);
        EXPECT_FALSE(why) << shown(file) << " includes " << included << ": " << *why;
      }
    }
  }
  EXPECT_GT(seen, 100u) << "the sources were not found under " << ditfleet::source_path();
}

// Takes folders away that include none of those left, or that none of those left includes. Cycles are left.
TEST(Layering, NoFolderIncludesItselfByWayOfOthers) {
  std::map<std::string, std::set<std::string>> includes;
  for (const std::string& part : kParts) {
    for (const fs::path& file : files_with(part, {".h", ".cpp"})) {
      const std::string from = folder_of(shown(file));
      for (const std::string& included : includes_of(file))
        if (!included.starts_with("<") && folder_of(included) != from) includes[from].insert(folder_of(included));
    }
  }
  EXPECT_GT(includes.size(), 30u);
  const auto at_an_end = [&](const auto& one) {
    const auto& [folder, others] = one;
    return std::none_of(others.begin(), others.end(), [&](const auto& other) { return includes.contains(other); }) ||
           std::none_of(includes.begin(), includes.end(),
                        [&](const auto& other) { return other.second.contains(folder); });
  };
  while (std::erase_if(includes, at_an_end) > 0) continue;
  for (const auto& [folder, others] : includes)
    for (const std::string& other : others)
      EXPECT_FALSE(includes.contains(other)) << "in a cycle: " << folder << " includes " << other;
}

TEST(Layering, OnlyPipelineAndWorkerLinkThePipeline) {
  for (const std::string part : {"coordinator", "shared"}) {
    for (const auto& entry : fs::recursive_directory_iterator(ditfleet::source_path(part))) {
      if (entry.path().filename() != "CMakeLists.txt") continue;
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) {
        EXPECT_EQ(line.find("ditfleet_torch"), std::string::npos) << shown(entry.path()) << ": " << line;
        EXPECT_EQ(line.find("ditfleet_pipeline"), std::string::npos) << shown(entry.path()) << ": " << line;
      }
    }
  }
}

// A source that no target lists would look like a part, or a test, and be neither.
TEST(Layering, EverySourceIsBuilt) {
  std::vector<std::string> parts = kParts;
  parts.push_back("tests");
  for (const std::string& part : parts) {
    std::string lists;
    for (const fs::path& file : files_with(part, {".txt"})) {
      std::ifstream in(file);
      lists.append(std::istreambuf_iterator<char>(in), {});
    }
    for (const fs::path& file : files_with(part, {".cpp"})) {
      const bool by_name = file.parent_path().filename() == "fuzz";  // ditfleet_fuzzer(NAME …)
      const std::string wanted = by_name ? "(" + file.stem().string() + " " : file.filename().string();
      EXPECT_NE(lists.find(wanted), std::string::npos) << "no target lists " << shown(file);
    }
  }
}

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

const std::set<std::string> kNaming = {".cpp", ".h", ".lua", ".json", ".html"};

// A family is its folders and a line in each program's list of families.
TEST(Layering, NothingElseNamesAFamily) {
  for (const auto& family : fs::directory_iterator(ditfleet::source_path("shared/families"))) {
    if (!family.is_directory()) continue;
    const std::string folder = family.path().filename().string();
    std::string pattern;  // z_image or ZImage
    bool begins = true;
    for (const char c : folder) {
      const auto capital = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      pattern += c == '_' ? std::string("_?") : begins ? std::string{'[', c, capital, ']'} : std::string(1, c);
      begins = c == '_';
    }
    const std::regex name("\\b" + pattern + "(?![a-z0-9])");
    for (const std::string& part : kParts) {
      for (const fs::path& file : files_with(part, kNaming)) {
        if (file.filename() == "families.cpp" || shown(file).find("/families/" + folder + "/") != std::string::npos)
          continue;
        EXPECT_FALSE(std::regex_search(text_of(file), name)) << shown(file) << " names " << folder;
      }
    }
  }
}

// A field that families read is its row in the table, and its use in the families. The service itself reads only what
// decides the cost, the shape class and the length of a video, and images; "image" and "cache" are also other words.
TEST(Layering, OnlyTheTableAndFamiliesNameAField) {
  using ditfleet::job::Field;
  const std::set<Field> of_the_service = {
      "width", "height", "frames", "fps", "num_inference_steps", "max_sequence_length", "image", "mask", "cache"};
  // The console labels the common fields by hand; worker.warmup_classes has a class with true CFG; a scheduler's
  // configuration and a tensor of the dump have the name of a field; some fields need an image, whatever the family.
  const std::set<std::string> allowed = {"shared/job/fields.h",
                                         "coordinator/gateway/pages/console.html",
                                         "worker/models/model_set.cpp",
                                         "pipeline/sampling/flow_scheduler.cpp",
                                         "pipeline/engine/generation.cpp",
                                         "shared/job/catalogue.cpp",
                                         "shared/job/validate.cpp"};
  for (const std::string& part : kParts) {
    for (const fs::path& file : files_with(part, kNaming)) {
      const std::string path = shown(file), text = text_of(file);
      if (allowed.contains(path) || path.find("/families/") != std::string::npos) continue;
      for (const Field field : ditfleet::job::kFields) {
        if (field.row().use != ditfleet::job::FieldUse::kGeneration || of_the_service.contains(field)) continue;
        const std::string quoted = '"' + std::string(field.name()) + '"';
        EXPECT_EQ(text.find(quoted), std::string::npos) << path << " names " << quoted;
      }
    }
  }
}

TEST(Layering, TheTopLevelHoldsWhatItShould) {
  const std::set<std::string> allowed = {"CMakeLists.txt", "README.md", "config", "coordinator", "deploy",
                                         "pipeline",       "shared",    "tests",  "worker"};
  for (const auto& entry : fs::directory_iterator(ditfleet::source_path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") || name.starts_with("build")) continue;
    EXPECT_TRUE(allowed.contains(name)) << name << " does not belong at the top of the tree";
  }
}

// The rules themselves: that what is wrong is seen as wrong.
TEST(LayeringRules, RefuseWhatTheyShould) {
  EXPECT_FALSE(objection("worker/units/unit_runner.cpp", "pipeline/engine.h"));
  EXPECT_FALSE(objection("pipeline/families/flux/flux.cpp", "<ATen/Tensor.h>"));
  EXPECT_FALSE(objection("shared/queue/client.cpp", "shared/redis/connection.h"));
  EXPECT_FALSE(objection("coordinator/cli/main.cpp", "coordinator/service.h"));
  EXPECT_FALSE(objection("coordinator/service.cpp", "coordinator/gateway/gateway.h"));
  EXPECT_FALSE(objection("shared/core/bytes.cpp", "<string>"));
  EXPECT_FALSE(objection("shared/config/options.cpp", "shared/redis/endpoint.h"));

  EXPECT_TRUE(objection("worker/units/unit_runner.cpp", "pipeline/families/flux/transformer.h"));
  EXPECT_TRUE(objection("shared/core/bytes.cpp", "shared/job/spec.h"));
  EXPECT_TRUE(objection("shared/config/options.cpp", "shared/redis/connection.h"));
  EXPECT_TRUE(objection("shared/job/spec.h", "pipeline/engine.h"));
  EXPECT_TRUE(objection("pipeline/engine/engine.cpp", "worker/units/unit.h"));
  EXPECT_TRUE(objection("coordinator/gateway/routes/api.cpp", "worker/units/unit.h"));
  EXPECT_TRUE(objection("coordinator/gateway/routes/api.cpp", "pipeline/engine.h"));
  EXPECT_TRUE(objection("coordinator/gateway/routes/api.cpp", "coordinator/scheduling/placement/fleet.h"));
  EXPECT_TRUE(objection("worker/commands/run.cpp", "coordinator/gateway/routes/api.h"));
  EXPECT_TRUE(objection("worker/commands/run.cpp", "<ATen/ATen.h>"));
  EXPECT_TRUE(objection("worker/commands/run.cpp", "<torch/torch.h>"));
  EXPECT_TRUE(objection("coordinator/cli/up/up.cpp", "<cuda_runtime.h>"));
  EXPECT_TRUE(objection("shared/core/bytes.cpp", "bytes.h"));
  EXPECT_TRUE(objection("pipeline/region/run/region.cpp", "pipeline/families/flux/transformer.h"));
  EXPECT_TRUE(objection("pipeline/nn/linear.cpp", "pipeline/region/ir/program.h"));
  EXPECT_TRUE(objection("pipeline/new_folder/file.cpp", "pipeline/device/device.h"));
}

}  // namespace
