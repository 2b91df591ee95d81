// Single quantized matrices and linears against bitsandbytes and torchao (tests/fixtures/quant).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/nn/linear.h"
#include "pipeline/weights/safetensors.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

std::string file(const char* name) { return (golden::fixtures() / "quant" / name).string(); }

// The names before the last dot of a file's tensors.
std::set<std::string> entries(const std::string& path) {
  std::set<std::string> names;
  const auto opened = unwrap(SafetensorsFile::open(path));
  for (const auto& entry : opened.entries()) names.emplace(entry.name.substr(0, entry.name.rfind('.')));
  return names;
}

at::Tensor wide(const at::Tensor& t) { return t.to(at::kDouble); }
double rms(const at::Tensor& t) { return std::sqrt(at::mean(wide(t) * wide(t)).item<double>()); }

at::Tensor on_device(const at::Tensor& t) { return t.to(load_device(golden::test_device()).device); }

TEST(QuantizedLinear, Nf4BytesAreThoseOfBitsandbytes) {
  const std::string path = file("matrices.safetensors");
  const auto names = entries(path);
  EXPECT_GE(names.size(), 30u);
  for (const std::string& name : names) {
    const QuantizedRows rows = quantize_nf4(on_device(golden::read_tensor(path, name + ".weight")));
    EXPECT_TRUE(at::equal(rows.codes.cpu(), golden::read_tensor(path, name + ".codes"))) << name;
    EXPECT_TRUE(at::equal(rows.scales.cpu(), golden::read_tensor(path, name + ".absmax"))) << name;
  }
}

// The error to the product of the unquantized matrices.
TEST(QuantizedLinear, Fp8ErrorIsAtMostThatOfTorchao) {
  const std::string path = file("fp8_linears.safetensors");
  for (const std::string& name : entries(path)) {
    const auto tensor = [&](const char* part) { return golden::read_tensor(path, name + "." + part); };
    const at::Tensor x = tensor("x"), weight = tensor("weight"), bias = tensor("bias");
    const at::Tensor exact = at::linear(wide(x), wide(weight), wide(bias));
    for (const bool dynamic : {true, false}) {
      QuantizedWeight quantized{.parts = {quantize_fp8(on_device(weight))},
                                .out = weight.size(0),
                                .in = weight.size(1),
                                .compute = at::kBFloat16,
                                .dynamic = dynamic};
      const at::Tensor made = quantized_linear(quantized, on_device(bias), on_device(x)).cpu();
      const double ours = rms(wide(made) - exact), theirs = rms(wide(tensor(dynamic ? "dynamic" : "weights")) - exact);
      std::printf("%s %s: error %.4f, torchao's %.4f\n", name.c_str(), dynamic ? "dynamic" : "weight only", ours,
                  theirs);
      EXPECT_LE(ours, 1.05 * theirs) << name;
      EXPECT_GT(ours, 0.3 * theirs) << name << ": not quantized";
    }
  }
}

// cuBLASLt refuses some of these.
TEST(QuantizedLinear, Fp8TakesAnyNumberOfRows) {
  at::Generator generator = at::detail::createCPUGenerator(8);
  const auto random = [&](std::int64_t rows, std::int64_t in) {
    return at::randn({rows, in}, generator).to(at::kBFloat16);
  };
  // cuBLASLt has no algorithm for sums of 12288 with few columns and any number of rows. No model has such weights.
  for (const auto& [in, out] : {std::pair<std::int64_t, std::int64_t>{64, 48}, {3072, 64}, {12288, 3072}}) {
    const at::Tensor weight = random(out, in) / std::sqrt(static_cast<double>(in)), bias = random(1, out)[0];
    const QuantizedWeight quantized{
        .parts = {quantize_fp8(on_device(weight))}, .out = out, .in = in, .compute = at::kBFloat16, .dynamic = true};
    for (const std::int64_t rows : {1, 17, 33, 256, 257, 515}) {
      const at::Tensor x = random(rows, in), exact = at::linear(wide(x), wide(weight), wide(bias));
      const at::Tensor made = quantized_linear(quantized, on_device(bias), on_device(x.unsqueeze(0))).cpu();
      ASSERT_EQ(made.sizes(), (std::vector<std::int64_t>{1, rows, out}));
      EXPECT_LE(rms(wide(made[0]) - exact), 0.06 * rms(exact)) << rows << " x " << in;
    }
  }
}

// What an adapter adds is as exact beside a quantized weight as beside a bf16 weight.
TEST(QuantizedLinear, AdaptersAreAsExactAsBesideBf16) {
  at::Generator generator = at::detail::createCPUGenerator(7);
  const auto random = [&](std::vector<std::int64_t> shape) { return at::randn(shape, generator).to(at::kBFloat16); };
  constexpr std::int64_t kIn = 96, kOut = 160;
  const at::Tensor weight = random({kOut, kIn}) / std::sqrt(static_cast<double>(kIn)), bias = random({kOut});
  const at::Tensor x = random({40, kIn});
  const auto quantized = [&](const QuantizedRows& rows, at::ScalarType compute, bool dynamic) {
    return std::make_shared<const QuantizedWeight>(QuantizedWeight{{rows}, kOut, kIn, compute, dynamic});
  };
  const QuantizedRows nf4 = quantize_nf4(weight), fp8 = quantize_fp8(weight);
  for (const std::int64_t rank : {4, 16, 64}) {
    const at::Tensor down = random({rank, kIn}) / std::sqrt(static_cast<double>(kIn));
    const at::Tensor up = random({kOut, rank}) / std::sqrt(static_cast<double>(rank));
    const at::Tensor term = at::linear(at::linear(wide(x), wide(down)), wide(up)) * 0.7;
    const auto error = [&](LinearSlot slot) {
      const at::Tensor without = apply_linear(slot, x);
      slot.low_rank = {{down, up, 0, 0.7}};
      return rms(wide(apply_linear(slot, x)) - wide(without) - term);
    };
    const double plain = error({.weight = weight, .bias = bias});
    for (const auto& format : {quantized(nf4, at::kBFloat16, false), quantized(nf4, at::kFloat, false),
                               quantized(fp8, at::kBFloat16, false), quantized(fp8, at::kBFloat16, true)})
      EXPECT_LE(error({.bias = bias, .quantized = format}), 1.1 * plain) << format->format() << ", rank " << rank;
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
