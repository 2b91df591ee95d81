// Model folders damaged at random, as a bad disk, a broken copy or a hostile upload leaves them: whatever is wrong,
// loading and drawing end in a picture or in an error of one line that names the folder's file or part; nothing
// crashes. Seeds are fixed: a failure repeats.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <vector>

#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// What happened to `bytes`, for the test's trace.
std::string damage(std::string& bytes, const std::string& other, std::mt19937_64& random) {
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % std::max<std::size_t>(n, 1)); };
  // Headers and configurations are where damage matters: half of it goes to the first 4 KiB.
  const std::size_t reach = random() % 2 ? bytes.size() : std::min<std::size_t>(bytes.size(), 4096);
  switch (random() % 7) {
    case 0: {
      const std::size_t length = below(reach);
      bytes.resize(length);
      return "cut to " + std::to_string(length);
    }
    case 1: {
      const std::size_t flips = 1 + below(8);
      for (std::size_t i = 0; i < flips; ++i) bytes[below(reach)] ^= static_cast<char>(1 << below(8));
      return std::to_string(flips) + " bits flipped";
    }
    case 2: bytes.insert(below(reach), std::string(1 + below(64), static_cast<char>(random()))); return "bytes put in";
    case 3: bytes.erase(below(reach), 1 + below(64)); return "bytes taken out";
    case 4: {
      // Another number, often the kind that breaks a size computation.
      static const char* const kNumbers[] = {"0",
                                             "-1",
                                             "1",
                                             "3",
                                             "7",
                                             "1e30",
                                             "9223372036854775807",
                                             "18446744073709551615",
                                             "2147483648",
                                             "0.5",
                                             "-7",
                                             "65536",
                                             "null",
                                             "true",
                                             "\"x\"",
                                             "[]"};
      std::vector<std::size_t> starts;
      for (std::size_t i = 1; i < reach; ++i)
        if (std::isdigit(static_cast<unsigned char>(bytes[i])) &&
            std::string(" [,:").find(bytes[i - 1]) != std::string::npos)
          starts.push_back(i);
      if (starts.empty()) return "nothing";
      const std::size_t at = starts[below(starts.size())];
      std::size_t end = at;
      while (end < bytes.size() && std::isdigit(static_cast<unsigned char>(bytes[end]))) ++end;
      const std::string number = kNumbers[below(std::size(kNumbers))];
      bytes.replace(at, end - at, number);
      return "number at " + std::to_string(at) + " is now " + number;
    }
    case 5: bytes = other; return "another file's bytes";
    default: {
      const std::size_t at = below(reach), length = std::min(bytes.size() - std::min(at, bytes.size()), 1 + below(256));
      for (std::size_t i = 0; i < length; ++i) bytes[at + i] = static_cast<char>(random());
      return "overwritten at " + std::to_string(at);
    }
  }
}

void damage_and_draw(const fs::path& whole, int cases) {
  const std::string name = whole.parent_path().filename();
  const fs::path dir = fs::temp_directory_path() / ("ditfleet_damage_" + name + std::to_string(::getpid()));
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(whole))
    if (entry.is_regular_file()) files.push_back(entry.path().lexically_relative(whole));
  std::sort(files.begin(), files.end());
  auto engine = Engine::create({"cpu", "fp32", 1}, {&flux_family()});
  ASSERT_TRUE(engine);
  fs::remove_all(dir);
  fs::copy(whole, dir, fs::copy_options::recursive);
  int refused = 0;
  for (int seed = 0; seed < cases; ++seed) {
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    const fs::path file = files[static_cast<std::size_t>(seed) % files.size()];
    const std::string before = read(whole / file);
    std::string bytes = before;
    const std::string what = damage(bytes, read(whole / files[random() % files.size()]), random);
    SCOPED_TRACE(file.string() + ", seed " + std::to_string(seed) + ": " + what);
    // Renamed into place: a file that is cut while it is mapped is another matter.
    std::ofstream(dir / "new", std::ios::binary) << bytes;
    fs::rename(dir / "new", dir / file);
    const auto check = [&](const Error& error) {
      ++refused;
      EXPECT_NE(error.code, Code::kInternal) << error.message;
      EXPECT_EQ(error.message.find('\n'), std::string::npos) << error.message;
      EXPECT_LT(error.message.size(), 1000u);
      EXPECT_GT(error.message.size(), 20u) << error.message;
    };
    auto model = (*engine)->load_model({"damaged", dir.string()});
    if (!model) {
      check(model.error());
    } else {
      GenerationRequest request;
      request.prompt = "a red circle above a white star";
      request.fields.set("width", (*model)->info().size_multiple);
      request.fields.set("height", (*model)->info().size_multiple);
      request.fields.set("num_inference_steps", 2);
      request.fields.set("max_sequence_length", 16);
      if (*request.fields.integer("width") <= 512) {
        auto prepared = (*model)->encode(request);
        if (!prepared) {
          check(prepared.error());
        } else if (auto denoised = (*model)->denoise(**prepared, nullptr); !denoised) {
          check(denoised.error());
        } else if (auto image = (*model)->decode(**prepared); !image) {
          check(image.error());
        }
      }
    }
    std::ofstream(dir / "new", std::ios::binary) << before;
    fs::rename(dir / "new", dir / file);
  }
  fs::remove_all(dir);
  std::printf("%s: %d of %d refused\n", name.c_str(), refused, cases);
  EXPECT_GT(refused, cases / 3);
}

TEST(FluxDamage, OfAFolderAsTransformers5WritesIt) { damage_and_draw(golden::fixtures() / "flux/dev/model", 200); }
TEST(FluxDamage, OfAFolderAsItIsPublished) { damage_and_draw(golden::fixtures() / "flux/schnell/model", 200); }
TEST(FluxDamage, OfAFolderInNf4) { damage_and_draw(golden::fixtures() / "quant/nf4_double/model", 200); }
TEST(FluxDamage, OfAFolderInFp8WithRowScales) { damage_and_draw(golden::fixtures() / "quant/fp8_rows/model", 200); }

}  // namespace
}  // namespace ditfleet::pipeline
