// `ditfleet models add` with the programs of the build and the demo's models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/paths.h"
#include "tests/system/program.h"
#include "tests/system/temporary_folder.h"
#include "tests/unit/pipeline/weights/gguf_file.h"

namespace ditfleet::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

const std::string kImages = source_path("deploy/demo-model/model"),
                  kVideos = source_path("deploy/demo-model/video/model");

std::string weights(const std::string& model, const std::string& component) {
  return model + "/" + component + "/diffusion_pytorch_model.safetensors";
}

// The tensors of a safetensors file in BF16 as a GGUF file.
std::string as_gguf(const std::string& path) {
  constexpr std::uint32_t kBf16 = 30;
  const std::string bytes = *read_file(path);
  std::size_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  const auto header = parse_json(bytes.substr(8, length));
  std::vector<pipeline::GgufTensor> tensors;
  for (const auto& [name, entry] : header->as_object()) {
    if (name == "__metadata__") continue;
    const auto at = [&](std::size_t i) { return entry.at("data_offsets").at(i).to_number<std::size_t>(); };
    tensors.push_back({name, json::value_to<std::vector<std::int64_t>>(entry.at("shape")), kBf16,
                       bytes.substr(8 + length + at(0), at(1) - at(0))});
  }
  return pipeline::gguf_file(tensors);
}

class ModelsAdd : public FolderTest {
 protected:
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  std::string configuration() const {
    const auto text = read_file(config_);
    return text ? *text : "none";
  }
  // Runs the command, and returns what it printed.
  std::string add(Words words, const std::vector<std::string>& environment = {}) const {
    words.insert(words.begin(), {"models", "add"});
    words.insert(words.end(), {"--config", config_, "--set", "worker.device=cpu"});
    Program program("ditfleet", words, {.environment = environment, .input = {}, .stdout_path = {}});
    EXPECT_EQ(program.wait(), 0) << program.err();
    EXPECT_EQ(program.err(), "");
    Program check("ditfleet", {"config", "check", "--config", config_},
                  {.environment = environment, .input = {}, .stdout_path = {}});
    EXPECT_EQ(check.wait(), 0) << check.err() << configuration();
    return program.out();
  }
  // The error has these words, and the configuration stays as it was.
  void expect_refused(Words words, int status, const std::vector<std::string>& said,
                      const std::vector<std::string>& environment = {}) const {
    const std::string before = configuration();
    words.insert(words.begin(), {"models", "add"});
    words.insert(words.end(), {"--config", config_, "--set", "worker.device=cpu"});
    Program program("ditfleet", words, {.environment = environment, .input = {}, .stdout_path = {}});
    EXPECT_EQ(program.wait(), status) << program.err();
    EXPECT_EQ(program.out(), "");
    for (const auto& word : said) EXPECT_THAT(program.err(), HasSubstr(word));
    EXPECT_EQ(configuration(), before);
  }

  const std::string config_ = dir_ + "/fleet.yaml";
};

TEST_F(ModelsAdd, AFolderIsWrittenWithItsPlan) {
  const std::string out = add({"demo", kImages});
  EXPECT_EQ(configuration(), "models:\n  demo:\n    path: \"" + kImages + "\"\n");
  EXPECT_THAT(out, AllOf(HasSubstr("wrote model 'demo' to " + config_), HasSubstr("path: \"" + kImages + "\""),
                         HasSubstr("plan                  resident"), HasSubstr("ditfleet up --config " + config_),
                         HasSubstr("ditfleet generate --model demo")));
  fs::create_directory_symlink(kVideos, path("videos"));
  const auto json = parse_json(add({"video", path("./videos/"), "--json", "--quantize", "auto"}));
  ASSERT_TRUE(json);
  EXPECT_EQ(json->at("entry").at("path").as_string(), path("videos") + "/");
  EXPECT_EQ(json->at("plan").at("plan").at("name").as_string(), "resident");
  EXPECT_GT(json->at("plan").at("by_frames").as_array().size(), 3u);
}

TEST_F(ModelsAdd, FilesBecomeTheKeysOfTheirComponents) {
  const std::string gguf = write("some.gguf", as_gguf(weights(kImages, "transformer"))), vae = path("any.safetensors");
  fs::copy_file(weights(kImages, "vae"), vae);
  add({"images", kImages, vae, gguf});
  EXPECT_EQ(configuration(), "models:\n  images:\n    path: \"" + kImages + "\"\n    transformer: \"" + gguf +
                                 "\"\n    vae: \"" + vae + "\"\n");
  const std::string low = path("Wan-LowNoise.safetensors"), high = path("wan_high_noise.gguf");
  fs::copy_file(weights(kVideos, "transformer_2"), low);
  write("wan_high_noise.gguf", as_gguf(weights(kVideos, "transformer")));
  add({"videos", low, kVideos, high});
  EXPECT_THAT(configuration(), HasSubstr("    transformer: \"" + high + "\"\n    transformer_2: \"" + low + "\"\n"));
  add({"named", kVideos, "transformer_2=" + high, "transformer=" + low, "--quantize", "text_encoder=nf4"});
  EXPECT_THAT(configuration(), HasSubstr("    transformer: \"" + low + "\"\n    transformer_2: \"" + high +
                                         "\"\n    quantize:\n      text_encoder: nf4\n"));
}

TEST_F(ModelsAdd, APartOfSeveralFamiliesServesTheFoldersOwn) {
  for (const std::string folder : {"z_image/base", "flux2/klein"}) {
    const std::string model = source_path("tests/fixtures/" + folder + "/model"), text = path("qwen3.safetensors");
    fs::copy_file(model + "/text_encoder/model.safetensors", text, fs::copy_options::overwrite_existing);
    add({folder.substr(0, 5), model, text});
    EXPECT_THAT(configuration(), HasSubstr("path: \"" + model + "\"\n    text_encoder: \"" + text + "\"\n"));
  }
}

TEST_F(ModelsAdd, TheHubsCacheIsSearched) {
  const std::string folder = dir_ + "/hub/models--me--tiny/snapshots";
  fs::create_directories(folder);
  fs::create_directory_symlink(kImages, folder + "/main");
  const std::vector<std::string> cache{"HF_HUB_CACHE=" + dir_ + "/hub"};
  add({"demo", "hf:me/tiny"}, cache);
  EXPECT_THAT(configuration(), HasSubstr("path: \"" + folder + "/main\""));
  expect_refused({"other", "hf:me/other"}, 1, {"`hf download me/other` fetches it"}, cache);
  expect_refused({"other", "hf:other"}, 2, {"must be hf:ORG/NAME"}, cache);
}

TEST_F(ModelsAdd, TheRestOfTheFileStays) {
  const std::string before =
                        "# Fleet\nworker:\n  count: 1   # one\n\nmodels:\n  # ours\n  old: {path: " + kImages + "}\n",
                    after = "\n# to the end\nlog: {level: warning}\n";
  write("fleet.yaml", before + after);
  fs::permissions(config_, fs::perms(0640));
  fs::create_symlink(config_, path("link.yaml"));
  Program program("ditfleet", {"--config", path("link.yaml"), "models", "add", "new", kImages});
  EXPECT_EQ(program.wait(), 0) << program.err();
  EXPECT_EQ(configuration(), before + "  new:\n    path: \"" + kImages + "\"\n" + after);
  EXPECT_TRUE(fs::is_symlink(path("link.yaml")));
  EXPECT_EQ(fs::status(config_).permissions(), fs::perms(0640));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), fs::directory_iterator()), 2);  // no temporary file
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(config_.c_str(), 12, 34), 0);
    add({"third", kImages});
    struct stat info = {};
    ASSERT_EQ(::stat(config_.c_str(), &info), 0);
    EXPECT_EQ(info.st_uid, 12u);
    EXPECT_EQ(info.st_gid, 34u);
  }

  expect_refused({"old", kVideos}, 1, {"has a model 'old'", "--replace"});
  add({"old", kVideos, "--replace"});
  EXPECT_THAT(configuration(), HasSubstr("models:\n  # ours\n  old:\n    path: \"" + kVideos + "\"\n  new:\n"));
  EXPECT_THAT(configuration(), HasSubstr(after));
}

TEST_F(ModelsAdd, PartsThatDoNotFitAreNamed) {
  const std::string flux = weights(kImages, "transformer"), wan = weights(kVideos, "transformer"),
                    vae = weights(kImages, "vae");
  expect_refused({"a", kImages, wan}, 2, {wan, "part of a wan model", kImages + " has a flux model"});
  expect_refused({"a", kImages, flux, write("again.gguf", as_gguf(flux))}, 2,
                 {"transformer is given twice", flux, "again.gguf"});
  expect_refused({"a", kVideos, wan}, 2, {"may be either transformer", "transformer_2=FILE"});
  expect_refused({"a", kImages, "vae=" + flux}, 2, {"has no vae; it is: FLUX.1 transformer"});
  expect_refused({"a", kImages, "transformer_2=" + wan}, 2, {"part of a wan model"});
  expect_refused({"a", kImages, "vae=" + kVideos}, 2, {"is a folder", "vae must be a safetensors or GGUF file"});
  expect_refused({"a", flux, vae}, 2, {"a model folder is missing", "hf:ORG/NAME"});
  expect_refused({"a", kImages, kVideos}, 2, {kImages, kVideos, "both folders"});
  expect_refused({"a", kImages, path("none.gguf")}, 1, {"none.gguf' does not exist"});
  expect_refused({"a", kImages, write("text.gguf", "hello")}, 2, {"text.gguf' cannot be used"});
  expect_refused({"a", kImages, source_path("deploy/demo-model/loras/night.safetensors")}, 2, {"ditfleet loras add"});
  expect_refused({"a", dir_}, 1, {"model_index.json", "diffusers' layout"});
  expect_refused({"a", source_path("tests/fixtures/flux/dev/model"), flux}, 1,
                 {"x_embedder.weight has shape [192, 32]"});

  const std::string folder = path("no-vae");
  fs::copy(kImages, folder, fs::copy_options::recursive);
  fs::remove(weights(folder, "vae"));
  expect_refused({"a", folder}, 1, {folder + "/vae has no weights", "diffusion_pytorch_model.safetensors"});
  add({"a", folder, vae});
  fs::remove_all(folder + "/vae");
  expect_refused({"b", folder, vae}, 1, {folder + "/vae/config.json"});
}

TEST_F(ModelsAdd, NothingElseInvalidIsWritten) {
  expect_refused({"a b", kImages}, 2, {"model name 'a b' must have 1 to 64 characters"});
  expect_refused({"\xff", kImages}, 2, {"model name", "must have"});
  expect_refused({"a", kImages, "--quantize", "transformer=int3"}, 2, {"int3", "fp8 or nf4"});
  expect_refused({"a", kImages, "--quantize", "nf4"}, 2, {"COMPONENT=FORMAT"});
  expect_refused({"a", kImages, "--set", "worker.devise=cpu"}, 2, {"worker.devise", "worker.device"});
  write("fleet.yaml", "worker:\n  count: several\n");
  expect_refused({"a", kImages}, 2, {"nothing is written", config_ + ":2", "worker.count"});
  write("fleet.yaml", "models:\n  gone: {path: /none}\n");
  expect_refused({"a", kImages}, 1, {"nothing is written", "/none"});
  write("fleet.yaml", "models: [\n");
  expect_refused({"a", kImages}, 2, {config_ + ":", "not valid YAML"});
}

TEST_F(ModelsAdd, AFileThatCannotBeWrittenIsNamed) {
  for (const std::string& file : {path("none/fleet.yaml"), std::string("/proc/fleet.yaml"), dir_}) {
    Program program("ditfleet", {"models", "add", "a", kImages, "--config", file});
    EXPECT_EQ(program.wait(), 1) << program.err();
    EXPECT_EQ(program.out(), "");
    EXPECT_THAT(program.err(), HasSubstr("'" + file + "'"));
  }
  Program none("ditfleet", {"models", "add", "a", kImages});
  EXPECT_EQ(none.wait(), 2);
  EXPECT_THAT(none.err(), AllOf(HasSubstr("--config FILE"), HasSubstr("DITFLEET_CONFIG")));
  Program from_environment("ditfleet", {"models", "add", "a", kImages},
                           {.environment = {"DITFLEET_CONFIG=" + config_}, .input = {}, .stdout_path = {}});
  EXPECT_EQ(from_environment.wait(), 0) << from_environment.err();
  EXPECT_THAT(configuration(), HasSubstr("  a:\n    path: "));
}

TEST_F(ModelsAdd, AServiceDrawsWithWhatWasWritten) {
  const std::string gguf = write("some.gguf", as_gguf(weights(kImages, "transformer")));
  add({"folder", kImages});
  add({"file", kImages, gguf});
  Program service("ditfleet", {"up", "--config", config_, "--listen", "127.0.0.1:0", "--data", path("data"), "--device",
                               "cpu", "--ready-file", path("ready.json"), "--set", "worker.warmup=false"});
  const auto until = std::chrono::steady_clock::now() + 120s;
  while (!fs::exists(path("ready.json")) && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(50ms);
  const auto ready = read_file(path("ready.json"));
  ASSERT_TRUE(ready) << service.err();
  const std::string url(parse_json(*ready)->at("gateway").as_string());
  for (const char* model : {"folder", "file"}) {
    Program drawn("ditfleet", {"generate", "a red circle", "--model", model, "--url", url, "--seed", "1", "--steps",
                               "2", "--size", "64x64", "-o", path(std::string(model) + ".png")});
    EXPECT_EQ(drawn.wait(120s), 0) << drawn.err();
  }
  EXPECT_EQ(*read_file(path("folder.png")), *read_file(path("file.png")));
  service.send(SIGTERM);
  EXPECT_EQ(service.wait(), 0) << service.err();
}

}  // namespace
}  // namespace ditfleet::testing
