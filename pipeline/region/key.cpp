#include "pipeline/region/key.h"

namespace ditfleet::region {

ProgramIdentity identify(const Plan& plan, const Source& source, const Compiler& compiler, const std::string& arch) {
  ProgramIdentity id;
  id.ir = canonical_bytes(plan.program);
  id.generator = kGeneratorId;
  id.source = source.text;
  id.compiler = std::string(compiler.name()) + " " + compiler.identity();
  id.options = compiler.options(arch);
  id.target = compiler.target(arch);
  id.output_kind = kernel_cache::kind_name(compiler.output_kind());
  for (const RowKernel& kernel : plan.kernels) id.widths.push_back(kernel.width);
  for (const KernelLaunch& launch : source.kernels) id.vectors.push_back(launch.vector);
  for (int input : plan.program.inputs()) id.element_types += std::string(name_of(plan.program.values[static_cast<std::size_t>(input)].type)) + " ";
  id.layouts = "rows contiguous, outer axes strided";
  id.numerics = "f32 inside, rounded where stored or cast";
  return id;
}

kernel_cache::Key key_of(const ProgramIdentity& id) {
  kernel_cache::KeyBuilder key;
  key.add("schema", id.schema).add("ir", id.ir).add("generator", id.generator).add("source", id.source).add("compiler", id.compiler);
  key.add("options", static_cast<std::int64_t>(id.options.size()));
  for (const auto& option : id.options) key.add("option", option);
  key.add("target", id.target).add("output_kind", id.output_kind);
  key.add("widths", static_cast<std::int64_t>(id.widths.size()));
  for (std::int64_t width : id.widths) key.add("width", width);
  key.add("vectors", static_cast<std::int64_t>(id.vectors.size()));
  for (std::int64_t vector : id.vectors) key.add("vector", vector);
  key.add("element_types", id.element_types).add("layouts", id.layouts).add("numerics", id.numerics);
  return key.finish();
}

}  // namespace ditfleet::region
