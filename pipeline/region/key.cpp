#include "pipeline/region/key.h"

namespace ditfleet::region {

ProgramIdentity identify(const Source& source, const Compiler& compiler, const std::string& arch) {
  ProgramIdentity id;
  id.generator = kGeneratorId;
  id.source = source.text;
  for (const KernelLaunch& launch : source.kernels)
    id.kernels.push_back(launch.name + " " + std::to_string(launch.argument_words));
  id.compiler = std::string(compiler.name()) + " " + compiler.identity();
  id.options = compiler.options(arch);
  id.target = compiler.target(arch);
  id.output_kind = kernel_cache::kind_name(compiler.output_kind());
  return id;
}

kernel_cache::Key key_of(const ProgramIdentity& id) {
  kernel_cache::KeyBuilder key;
  key.add("schema", id.schema).add("generator", id.generator).add("source", id.source).add("compiler", id.compiler);
  key.add("kernels", static_cast<std::int64_t>(id.kernels.size()));
  for (const auto& kernel : id.kernels) key.add("kernel", kernel);
  key.add("options", static_cast<std::int64_t>(id.options.size()));
  for (const auto& option : id.options) key.add("option", option);
  key.add("target", id.target).add("output_kind", id.output_kind);
  return key.finish();
}

}  // namespace ditfleet::region
