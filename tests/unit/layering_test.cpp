// Dependencies point one way: shared ← pipeline ← worker, shared ← coordinator. Reads every source's includes
// and fails on any other, and on LibTorch or CUDA outside pipeline/.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kParts = {"coordinator", "worker", "pipeline", "shared"};

// What each module of shared/ may include of the others; itself and core always.
const std::map<std::string, std::set<std::string>> kShared = {
    {"core", {}},
    {"telemetry", {}},
    {"config", {}},
    {"job", {}},
    {"redis", {"telemetry"}},
    {"queue", {"job", "redis", "telemetry"}},
    {"safetensors", {}},
    {"loras", {"redis", "safetensors"}},
    {"results", {"job", "queue", "redis", "telemetry"}},
    {"kernel_cache", {"config", "redis", "telemetry"}},
};
// Modules of coordinator/ that others of it may be included from; the routes and the scheduling stay apart.
const std::map<std::string, std::set<std::string>> kCoordinator = {
    {"scheduling", {}},
    {"gateway", {}},
    {"simulation", {"scheduling"}},
    {"cli", {"scheduling", "gateway", "simulation", ""}},
    {"", {"scheduling", "gateway"}},  // files of coordinator/ itself
};

// "shared/core/x.h" → {"shared", "core"}; "worker/x.h" → {"worker", ""}.
std::pair<std::string, std::string> part_and_module(const std::string& path) {
  const auto first = path.find('/');
  const auto second = path.find('/', first + 1);
  return {path.substr(0, first), second == std::string::npos ? "" : path.substr(first + 1, second - first - 1)};
}

bool allows(const std::map<std::string, std::set<std::string>>& rules, const std::string& from, const std::string& to) {
  const auto row = rules.find(from);
  return from == to || (row != rules.end() && row->second.contains(to));
}

// Why `file` must not include `included` ("a/b.h" of our own, or "<torch/…>"); nothing if it may.
std::optional<std::string> objection(const std::string& file, const std::string& included) {
  const auto [part, module] = part_and_module(file);
  static const std::regex kAccelerator("<(torch|ATen|c10|cuda|nvrtc|cudnn|nccl|cublas)[a-zA-Z_0-9]*[/.].*");
  if (included.starts_with("<")) {
    if (part != "pipeline" && std::regex_match(included, kAccelerator))
      return "LibTorch and CUDA belong in pipeline/ alone";
    return std::nullopt;
  }
  const auto [to_part, to_module] = part_and_module(included);
  if (std::find(kParts.begin(), kParts.end(), to_part) == kParts.end()) return "includes start at the tree's root";
  if (to_part == "shared") {
    if (part == "shared" && module == "config" && included == "shared/redis/endpoint.h")
      return std::nullopt;  // what a URL is
    if (part != "shared" || to_module == "core" || allows(kShared, module, to_module)) return std::nullopt;
    return "shared/" + module + " may not use shared/" + to_module;
  }
  if (part != to_part) {
    if (part == "worker" && included == "pipeline/engine.h") return std::nullopt;
    if (part == "worker" && to_part == "pipeline")
      return "worker/ sees pipeline/engine.h and nothing else of pipeline/";
    return part + "/ may not use " + to_part + "/";
  }
  if (part == "coordinator" && !allows(kCoordinator, module, to_module)) {
    return "coordinator/" + module + " may not use coordinator/" + to_module;
  }
  return std::nullopt;
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
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(DITFLEET_SOURCE_DIR) / part)) {
    if (entry.is_regular_file() && extensions.contains(entry.path().extension().string()))
      files.push_back(entry.path());
  }
  return files;
}

std::string shown(const fs::path& path) { return path.lexically_relative(DITFLEET_SOURCE_DIR).generic_string(); }

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
  EXPECT_GT(seen, 100u) << "the sources were not found under " << DITFLEET_SOURCE_DIR;
}

TEST(Layering, OnlyPipelineAndWorkerLinkThePipeline) {
  for (const std::string part : {"coordinator", "shared"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(DITFLEET_SOURCE_DIR) / part)) {
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

TEST(Layering, TheTopLevelHoldsWhatItShould) {
  const std::set<std::string> allowed = {"CMakeLists.txt", "README.md", "config", "coordinator", "deploy",
                                         "pipeline",       "shared",    "tests",  "worker"};
  for (const auto& entry : fs::directory_iterator(DITFLEET_SOURCE_DIR)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".") || name.starts_with("build")) continue;
    EXPECT_TRUE(allowed.contains(name)) << name << " does not belong at the top of the tree";
  }
}

// The rules themselves: that what is wrong is seen as wrong.
TEST(LayeringRules, RefuseWhatTheyShould) {
  EXPECT_FALSE(objection("worker/run.cpp", "pipeline/engine.h"));
  EXPECT_FALSE(objection("pipeline/models/flux.cpp", "<ATen/Tensor.h>"));
  EXPECT_FALSE(objection("shared/queue/client.cpp", "shared/redis/connection.h"));
  EXPECT_FALSE(objection("coordinator/cli/main.cpp", "coordinator/gateway/gateway.h"));
  EXPECT_FALSE(objection("coordinator/service.cpp", "coordinator/gateway/gateway.h"));
  EXPECT_FALSE(objection("shared/core/bytes.cpp", "<string>"));
  EXPECT_FALSE(objection("shared/config/options.cpp", "shared/redis/endpoint.h"));

  EXPECT_TRUE(objection("worker/run.cpp", "pipeline/models/flux/model.h"));
  EXPECT_TRUE(objection("shared/core/bytes.cpp", "shared/job/spec.h"));
  EXPECT_TRUE(objection("shared/config/options.cpp", "shared/redis/connection.h"));
  EXPECT_TRUE(objection("shared/job/spec.h", "pipeline/engine.h"));
  EXPECT_TRUE(objection("pipeline/engine.cpp", "worker/unit.h"));
  EXPECT_TRUE(objection("coordinator/gateway/api.cpp", "worker/unit.h"));
  EXPECT_TRUE(objection("coordinator/gateway/api.cpp", "pipeline/engine.h"));
  EXPECT_TRUE(objection("coordinator/gateway/api.cpp", "coordinator/scheduling/router.h"));
  EXPECT_TRUE(objection("worker/run.cpp", "coordinator/gateway/api.h"));
  EXPECT_TRUE(objection("worker/run.cpp", "<ATen/ATen.h>"));
  EXPECT_TRUE(objection("worker/run.cpp", "<torch/torch.h>"));
  EXPECT_TRUE(objection("coordinator/cli/up.cpp", "<cuda_runtime.h>"));
  EXPECT_TRUE(objection("shared/core/bytes.cpp", "bytes.h"));
}

}  // namespace
