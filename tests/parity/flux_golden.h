// A golden case of tests/fixtures/flux, quant, wan, z_image, flux2 or qwen_image: what diffusers computed for one
// request (see make.py there).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "pipeline/engine.h"

namespace ditfleet::pipeline::golden {

// tests/fixtures, or the parent of DITFLEET_FIXTURES on a machine that has only the test binary.
std::filesystem::path fixtures();
// Where the tests compute: DITFLEET_TEST_DEVICE, or "cpu".
std::string test_device();
// DITFLEET_TEST_COMPILE, or "eager": the compile backend; DITFLEET_TEST_MODE, or "default": its mode. Under another
// than eager, a block that falls back is an error.
region::CompileOptions test_compile();
// With both of these and shared programs (tests/programs.h).
// No block fell back or was compiled twice. With DITFLEET_TEST_COMPILE also: the engine has this backend, and compiled
// blocks ran.
void expect_compiled(const Engine& engine);
EngineOptions test_options(const std::string& dtype, int threads);

struct Case {
  std::string folder, name;  // "dev", "plain"
  std::string set = "flux";  // the folder in tests/fixtures
  std::string model_dir() const;
  std::string file() const;
};

// Every case beside the fixtures' folders, sorted.
std::vector<Case> all_cases(const std::string& set = "flux");

struct Golden {
  GenerationRequest request;
  bool bf16 = false;
  std::string vae_dtype;                             // empty: as the pipeline
  double mean_apart = 0, largest_apart = 0;          // of diffusers' bf16 pixels from its fp32 pixels; 0: not known
  at::Tensor tensor(const std::string& name) const;  // a copy; throws for a name that is not there
  std::string path;
};
Golden load(const Case& which);

// A file or folder below tests/fixtures/layouts, and the case that has its picture.
struct Layout {
  Case picture;
  std::string name;                   // "kohya"
  std::string path;                   // of the adapter
  std::vector<std::string> left_out;  // the tensors that diffusers drops
  friend void PrintTo(const Layout& layout, std::ostream* to) { *to << layout.path; }
};
std::vector<Layout> all_layouts(const std::string& family);  // sorted
// The warnings of a generation name what diffusers drops of its only adapter, and nothing else.
void expect_left_out(const std::vector<std::string>& warnings, const Layout& layout);
// The picture of the layout, with it, and its warnings.
void expect_layout(Model& model, const Layout& layout);

// The number of quantized linears, each tensor of the case that has a name in the dump, and its pictures: images 1, 2,
// … have the seeds after the first. In bf16 the latents are left out. The limits are README.md's; in bf16, pixels may
// be 1.5 times as far from the case as diffusers' bf16 is from its fp32 (twice on a GPU).
void expect_case(Model& model, const Case& which);
void expect_picture(const Media& picture, const at::Tensor& pixels, const Golden& golden, const std::string& shown);

// What loading a copy of the case's folder says after `change`; empty: it loads.
std::string refusal(const Family& family, const Case& which,
                    const std::function<void(const std::filesystem::path& copy)>& change);
// Replaces the first `from` in a file; fails the running test if there is none.
void replace_in(const std::filesystem::path& file, const std::string& from, const std::string& to);

// Runs the three stages.
Result<Media> draw(Model& model, const GenerationRequest& request);

// One tensor of a safetensors file, copied; throws for a name that is not there.
at::Tensor read_tensor(const std::string& path, const std::string& name);

// How far `got` is from `reference`: max |a − b| / max(1, max |reference|). Fails the running test on another shape.
double distance(const at::Tensor& got, const at::Tensor& reference);

}  // namespace ditfleet::pipeline::golden
