#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "shared/core/sha256.h"

namespace ditfleet::region {
namespace {

// A build of the kernels whose operator was tried. deploy/libtorch/fa3.txt pins the wheel that contains it.
constexpr const char* kVersion = "0.0.3";
constexpr const char* kSha256 = "f74cff6d35de49a3df1fe5aed3c82f9bb7695bbf89b51dbba0ac663ae3812ef8";
constexpr const char* kOperator = "fa3_fwd::fwd";

class Flash3Attention : public DirectAttention {
 public:
  explicit Flash3Attention(c10::OperatorHandle op) : op_(std::move(op)) {
    const auto& arguments = op_.schema().arguments();
    for (const auto& argument : arguments) defaults_.push_back(argument.default_value().value_or(c10::IValue()));
    const auto place = [&](const char* name) {
      return static_cast<std::size_t>(op_.schema().argumentIndexWithName(name).value());
    };
    q_ = place("q"), k_ = place("k"), v_ = place("v"), out_ = place("out"), scale_ = place("softmax_scale");
    v_scale_ = place("v_descale");
    defaults_[place("num_splits")] = 1;  // more would allocate partial results
  }

  std::string name() const override { return std::string("fa3 ") + kVersion; }
  bool has_f8() const override { return true; }

  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           const at::Tensor& v_scales) const override {
    const bool f8 = q.scalar_type() == c10::ScalarType::Float8_e4m3fn;
    for (const at::Tensor* t : {&q, &k, &v})
      if (!is_operand(*t, q.scalar_type())) return false;
    if (!is_operand(out)) return false;
    if (q.scalar_type() != c10::ScalarType::BFloat16 && !f8) return false;
    if (q.size(3) % 8 != 0 || q.size(3) > 256) return false;
    auto stack = defaults_;
    stack[q_] = q;
    stack[k_] = k;
    stack[v_] = v;
    if (f8) stack[v_scale_] = v_scales;
    stack[out_] = out;
    stack[scale_] = 1 / std::sqrt(static_cast<double>(q.size(3)));
    op_.callBoxed(stack);
    return true;
  }

 private:
  const c10::OperatorHandle op_;
  std::vector<c10::IValue> defaults_;
  std::size_t q_, k_, v_, out_, scale_, v_scale_;  // arguments
};

}  // namespace

Result<std::shared_ptr<const DirectAttention>> open_flash3() {
  const char* named = std::getenv("DITFLEET_FA3");
  const std::string path =
      named && *named ? named
                      : (pipeline::libtorch_folder().parent_path().parent_path() / "fa3_fwd/_C.abi3.so").string();
  const std::string advice = "; `ditfleet-worker-setup --fa3` installs the one that is known";
  const auto digest = sha256_of_file(path);
  if (!digest) return unavailable("[fa3] " + digest.error().message + advice);
  if (digest->sha256 != kSha256)
    return unavailable("[fa3] " + path + " has SHA-256 " + digest->sha256 + ", but the known build of fa3-fwd " +
                       kVersion + " has " + kSha256 + advice);
  // It needs libtorch.so, which only collects LibTorch's parts. It names Python's module functions, which are never
  // called, so they may stay unresolved.
  const std::string whole = (pipeline::libtorch_folder() / "libtorch.so").string();
  if (!dlopen(whole.c_str(), RTLD_LAZY | RTLD_LOCAL) || !dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL))
    return unavailable("[fa3] " + path + " does not load: " + pipeline::last_dl_error() +
                       "; it needs LibTorch 2.10 or newer for CUDA 13");
  const auto op = c10::Dispatcher::singleton().findSchema({kOperator, ""});
  if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA))
    return unavailable("[fa3] " + path + " does not register the operator " + kOperator);
  for (const char* name : {"q", "k", "v", "out", "v_descale", "softmax_scale", "num_splits"})
    if (!op->schema().argumentIndexWithName(name))
      return unavailable("[fa3] the operator " + std::string(kOperator) + " has no argument " + name);
  return std::shared_ptr<const DirectAttention>(std::make_shared<const Flash3Attention>(*op));
}

}  // namespace ditfleet::region
