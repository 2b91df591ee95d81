#include "pipeline/engine/family.h"

#include <algorithm>
#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/region/programs/channels_last_source.h"
#include "pipeline/region/programs/dequantize_source.h"
#include "pipeline/region/programs/f8_heads_source.h"
#include "pipeline/region/programs/matrix_copies_source.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

// The second item of a component's entry, its class; null if there is no such entry.
const json::value* class_of(const ConfigFile& index, std::string_view component) {
  const json::value* entry = index.fields().if_contains(component);
  const json::array* pair = entry ? entry->if_array() : nullptr;
  return pair && pair->size() == 2 ? &(*pair)[1] : nullptr;
}

std::string list_of(const std::vector<std::string>& all, const char* last = " and ") {
  std::string text;
  for (std::size_t i = 0; i < all.size(); ++i) text += (i == 0 ? "" : i + 1 == all.size() ? last : ", ") + all[i];
  return text;
}
std::string one_of(const std::vector<std::string>& all) { return list_of(all, " or "); }

// The format of transformer is also the one of transformer_2.
void check_quantize(const Family& family, const ModelSource& source) {
  std::vector<std::string> right;
  for (const Component& one : family.components)
    if (!one.formats.empty()) right.push_back(std::string(one.name) + " (" + one_of(one.formats) + ")");
  for (const auto& [component, format] : source.quantize) {
    const auto known = std::find_if(family.components.begin(), family.components.end(),
                                    [&, &name = component](const Component& one) { return one.name == name; });
    if (known == family.components.end() || known->formats.empty())
      fail(Code::kInvalidArgument, "quantize has the component \"" + component + "\"; it must be " + one_of(right),
           "quantize");
    if (std::find(known->formats.begin(), known->formats.end(), format) == known->formats.end())
      fail(Code::kInvalidArgument,
           "quantize." + component + " is \"" + format + "\"; it must be " + one_of(known->formats), "quantize");
  }
}

std::string format_of(const ModelSource& source, const std::string& component) {
  const auto format = source.quantize.find(component.starts_with("transformer") ? "transformer" : component);
  return format == source.quantize.end() ? std::string() : format->second;
}

ComponentFiles files_of(const ModelSource& source, const Component& one) {
  const std::string name(one.name);
  const auto file = source.files.find(name);
  return {source.dir + "/" + name, file == source.files.end() ? std::string() : file->second, one.prefixes};
}

void check_files(const Family& family, const ModelSource& source) {
  std::vector<std::string> right;
  for (const Component& one : family.components)
    if (one.library && (!one.optional || std::filesystem::exists(source.dir + "/" + std::string(one.name))))
      right.emplace_back(one.name);
  for (const auto& [component, file] : source.files)
    if (std::find(right.begin(), right.end(), component) == right.end())
      fail(Code::kInvalidArgument,
           "a file is given for " + component + ", which " + source.dir + " does not have; it has " + list_of(right),
           component);
}

}  // namespace

bool Folder::has(std::string_view component) const {
  const ConfigFile file = index();
  const json::value* name = class_of(file, component);
  return name && name->is_string();
}

std::string Folder::quantize(const std::string& component) const { return format_of(context.source, component); }

ComponentFiles Folder::files(const std::string& component) const {
  return files_of(context.source, *std::find_if(family.components.begin(), family.components.end(),
                                                [&](const Component& one) { return one.name == component; }));
}

TransformerSource Folder::transformer(const std::string& component) const {
  return {.files = files(component),
          .quantize = quantize(component),
          .name = component,
          .adapter_rank = context.adapter_columns,
          .f8_attention = context.source.attention == "fp8",
          .regions = context.regions};
}

void Folder::must_match(std::string_view what, std::int64_t a, std::string_view other, std::int64_t b) const {
  if (a != b)
    fail(Code::kDataCorrupt, context.source.dir + ": " + std::string(what) + " is " + std::to_string(a) + ", but " +
                                 std::string(other) + " is " + std::to_string(b) +
                                 "; they must be equal in the parts of one model");
}

bool Folder::loads_together() const {
  return context.placement.device.is_cuda() && !context.placement.on_host &&
         !(context.regions && context.regions->ranks);
}

void Folder::loaded(const char* part, std::chrono::steady_clock::time_point begun) {
  const auto took = std::chrono::steady_clock::now() - begun;
  const std::lock_guard lock(mutex_);
  times.emplace_back(part, std::chrono::duration_cast<std::chrono::microseconds>(took));
}

void Folder::refuse_vae_dtype() const {
  if (!context.source.vae_dtype.empty())
    fail(Code::kInvalidArgument, "this family's VAE has the precision of the other parts; leave vae_dtype out",
         "vae_dtype");
}

FileNames names_in_file(const TransformerSpec& spec,
                        const std::function<std::vector<LoraTarget>(const std::vector<BaseLinear>&)>& aliases) {
  FileNames names;
  std::vector<BaseLinear> linears;
  each_linear(spec, [&](const LinearSpec& linear, const std::vector<std::string>& each) {
    for (const std::string& name : each) linears.push_back({name, linears.size(), 0, linear.in, linear.out});
  });
  for (const LoraTarget& target : aliases(linears)) {
    if (target.name.find(".processor.") != std::string::npos) continue;  // of adapters alone
    std::int64_t row = 0;
    for (const LoraPiece& piece : target.pieces) {
      auto& rows = names[linears[piece.slot].name];
      rows.insert(piece.first_row == 0 ? rows.begin() : rows.end(), {target.name, row, piece.rows, target.out});
      row += piece.rows;
    }
  }
  return names;
}

const Family& family_of(const Families& families, const std::string& dir) {
  const ConfigFile index(dir + "/model_index.json");
  const std::string name = index.text("_class_name", "");
  std::string known;
  int count = 0;
  for (const Family* family : families)
    for (const std::string_view one : family->description->class_names) {
      if (one == name) return *family;
      known += (count++ ? ", " : "") + std::string(one);
    }
  index.refuse("_class_name is \"" + name + "\"; it must be " + (count > 1 ? "one of " : "") + known);
}

void check_components(const Family& family, const std::string& dir, std::string_view prefix) {
  const ConfigFile index(dir + "/model_index.json");
  for (const Component& one : family.components) {
    if (!one.name.starts_with(prefix)) continue;
    const json::value* found = class_of(index, one.name);
    const json::string* name = found ? found->if_string() : nullptr;
    const json::value* entry = index.fields().if_contains(one.name);
    const bool missing = !entry || entry->is_null() || (found && found->is_null());
    if ((one.optional && missing) ||
        (name && (*name == one.class_name || *name == std::string(one.class_name) + "Fast" ||  // of tokenizers
                  (!one.other_class.empty() && *name == one.other_class))))
      continue;
    index.refuse(std::string(one.name) + " is " + (entry ? excerpt(json::serialize(*entry), 100) : "missing") +
                 "; it must be [LIBRARY, \"" + std::string(one.class_name) + "\"]");
  }
}

std::unique_ptr<Network> load_network(Folder& folder) {
  const Family& family = folder.family;
  const std::string& attention = folder.context.source.attention;
  if (!attention.empty() && attention != "fp8")
    fail(Code::kInvalidArgument, "attention is \"" + attention + "\"; it must be fp8, or be left out", "attention");
  const ModelSource& source = folder.context.source;
  check_quantize(family, source);
  check_components(family, source.dir);
  check_files(family, source);
  auto network = family.load(folder);
  network->placement = folder.context.placement;
  network->entry = unwrap(families::read_model_entry(source.name, source.dir, std::span(&family.description, 1)));
  return network;
}

StoredFormats stored_formats(const Family& family, const ModelSource& source) {
  check_quantize(family, source);
  check_files(family, source);
  StoredFormats found{.other = !source.quantize.empty()};
  for (const Component& one : family.components) {
    const ComponentFiles files = files_of(source, one);
    if (one.formats.empty()) continue;
    try {
      const Parameters parameters = Parameters::open(files, *one.library, {c10::kCPU, c10::ScalarType::Float});
      found.gguf = found.gguf || parameters.has_gguf();
      found.other = found.other || (parameters.has_quantized() && !parameters.has_gguf());
      if (!format_of(source, std::string(one.name)).empty()) parameters.check_quantize_on_load();
    } catch (const Failure& failure) {
      if (failure.error().code != Code::kNotFound || !files.file.empty()) throw;
    }
  }
  return found;
}

std::string not_finite_weight(const Family& family, const ModelSource& source) {
  for (const Component& one : family.components) {
    const ComponentFiles files = files_of(source, one);
    if (!one.library || (one.optional && !std::filesystem::exists(files.dir))) continue;
    const std::string name = unwrap(open_checkpoint(files, *one.library).not_finite());
    if (!name.empty())
      return "weight " + name + " of " + (files.file.empty() ? std::string(one.name) : files.file) + " is not finite";
  }
  return "all stored weights are finite";
}

region::AheadPrograms ahead_programs(const Family& family, const ModelSource& source, region::ElementType type,
                                     region::ArchFeatures arch, const region::CompileOptions& options) {
  region::AheadPrograms made;
  const StoredFormats formats = stored_formats(family, source);
  const bool f8_attention = source.attention == "fp8" && arch.f8_attention;
  const Placement host{c10::kCPU,
                       type == region::ElementType::kF32 ? c10::ScalarType::Float : c10::ScalarType::BFloat16};
  for (const Component& one : family.components) {
    const ComponentFiles files = files_of(source, one);
    if (!options.transformer || !family.spec || !one.name.starts_with("transformer") ||
        (one.optional && !std::filesystem::exists(files.dir + "/config.json")))
      continue;
    for (region::Program& program : Transformer::programs(
             family.spec(ConfigFile(files.dir + "/config.json"), ConfigFile(source.dir + "/model_index.json")),
             {.files = files, .quantize = format_of(source, std::string(one.name)), .f8_attention = f8_attention}, host,
             arch.fp8_products))
      made.blocks.push_back(std::move(program));
  }
  if (!arch.gpu) return made;
  if (!made.blocks.empty()) made.fixed.push_back(region::matrix_copies_program());  // brings adapters to the blocks
  if (f8_attention) made.fixed.push_back(region::f8_heads_program());
  if (options.vae.value_or(true)) made.fixed.push_back(region::channels_last_program());
  if (formats.other) made.fixed.push_back(region::dequantize_program());
  if (formats.gguf) made.fixed.push_back(region::gguf_program());
  return made;
}

}  // namespace ditfleet::pipeline
