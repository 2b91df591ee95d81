#include "pipeline/region/compile/known_compiler.h"

#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/compile/processor.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

// Identity and target, a line each.
std::string text_of(const Compiler& compiler) { return compiler.identity() + "\n" + compiler.target(kHostArch); }

}  // namespace

std::optional<kernel_cache::Key> compiler_key() {
  const std::string features = processor_features();
  if (features.empty()) return std::nullopt;
  return kernel_cache::KeyBuilder()
      .add("known", "cpu_jit's compiler")
      .add("schema", 1)
      .add("processor", features)
      .finish();
}

void remember_compiler(kernel_cache::KernelCache& cache, const Compiler& compiler) {
  const auto key = compiler_key();
  if (!key) return;
  const std::string text = text_of(compiler);
  const auto make = [&]() -> Result<Entry> {
    return Entry{.region = "compiler", .arch = kHostArch, .kind = kernel_cache::Kind::kPlan, .code = text};
  };
  const auto same = [&](const Entry& known) -> Result<void> {
    if (known.code == text) return {};
    return Error{Code::kDataCorrupt, "programs are made by another compiler now: " + compiler.identity(), {}};
  };
  (void)cache.get_or_compile(*key, "compiler", kHostArch, make,
                             same);  // for lack of it only those without a compiler compile nothing
}

Result<std::shared_ptr<const Compiler>> remembered_compiler(kernel_cache::KernelCache& cache,
                                                            const std::string& missing) {
  const auto key = compiler_key();
  const Error unknown{Code::kNotFound, "[cpu_jit] the kernel cache knows of no compiler for this processor", {}};
  if (!key) return unknown;
  const auto known = cache.find(*key, kHostArch);
  if (!known) return unknown;
  const std::string& text = (*known)->code;
  const auto end = text.find('\n');
  if ((*known)->kind != kernel_cache::Kind::kPlan || end == std::string::npos) return unknown;
  return absent_cpu_jit(text.substr(0, end), text.substr(end + 1), missing);
}

}  // namespace ditfleet::region
