// A model family inside the pipeline: how one kind of diffusers pipeline is loaded and compiled ahead of time.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/engine.h"
#include "pipeline/engine/network.h"
#include "pipeline/lora/adapter.h"
#include "pipeline/memory/model_memory.h"
#include "pipeline/nn/config_file.h"
#include "pipeline/region/run/region.h"
#include "shared/families/family.h"

namespace ditfleet::pipeline {

struct LoadContext {
  ModelSource source;
  Placement placement;
  std::shared_ptr<region::RegionHost> regions;
  AdapterStore::Limits adapters;
  std::int64_t adapter_columns = 0;  // reserved beside each linear of the blocks; 0: none
  std::shared_ptr<DeviceMemory> memory;
};

// A part of a folder.
struct Component {
  std::string_view name, class_name;      // in model_index.json
  std::optional<Library> library;         // whose names its weights have; empty: no weights
  std::vector<std::string> formats = {};  // that it can be quantized to while it is loaded
  bool optional = false;
  std::vector<std::string_view> prefixes = {};  // of its tensors in a checkpoint of several components
  std::vector<std::string_view> known_by = {};  // a file with one of these tensors may have the component
  std::string_view other_class = {};            // that model_index.json may have instead
};

// What Engine::inspect() says about a component in a file.
struct FileAbout {
  std::string text;     // the model and variant; empty: the file has another component
  std::string problem;  // why the variant is not supported; empty: it is
  // The models of deploy/known-models that it fits: with one such file, and with two if that is another one.
  std::vector<std::string> known = {};
};

struct Family;

// A folder while it is loaded.
class Folder {
 public:
  // `tokenizers`: null if nobody is going to tokenize.
  Folder(const Family& family, const LoadContext& context, const Tokenizers* tokenizers)
      : family(family), context(context), tokenizers(tokenizers) {}

  std::string dir(const std::string& component) const { return context.source.dir + "/" + component; }
  ConfigFile config(const std::string& component) const { return ConfigFile(dir(component) + "/config.json"); }
  ConfigFile index() const { return ConfigFile(context.source.dir + "/model_index.json"); }
  bool has(std::string_view component) const;                // false also for [null, null]
  std::string quantize(const std::string& component) const;  // its format; empty: as it is stored
  ComponentFiles files(const std::string& component) const;
  TransformerSource transformer(const std::string& component) const;
  // Throws Failure (kDataCorrupt) unless the two numbers of different parts are equal.
  void must_match(std::string_view what, std::int64_t a, std::string_view other, std::int64_t b) const;
  // Throws Failure (kInvalidArgument) if the source has a vae_dtype: for families whose VAE has the other parts' type.
  void refuse_vae_dtype() const;
  // Loads a part with `load`, on a thread of its own if this process alone loads it to a GPU; otherwise at once,
  // because ranks load their parts together and in order, and a CPU has no faster way. Adds the time to `times`. The
  // future rethrows what `load` throws; destroying it waits.
  template <class Load>
  std::future<std::invoke_result_t<Load>> load(const char* part, Load load) {
    auto task = [this, part, load = std::move(load)] {
      const c10::InferenceMode inference(true);
      const c10::DeviceGuard guard(context.placement.device);
      const auto begun = std::chrono::steady_clock::now();
      auto made = load();
      loaded(part, begun);
      return made;
    };
    if (loads_together()) return std::async(std::launch::async, std::move(task));
    std::packaged_task<std::invoke_result_t<Load>()> now(std::move(task));
    now();
    return now.get_future();
  }

  const Family& family;
  const LoadContext& context;
  const Tokenizers* const tokenizers;
  PartTimes times;  // parts that were loaded at the same time overlap

 private:
  bool loads_together() const;
  void loaded(const char* part, std::chrono::steady_clock::time_point begun);
  std::mutex mutex_;  // of times, while parts are loaded
};

// The functions throw Failure and what LibTorch throws. kNotFound and kDataCorrupt: the message contains the file and
// the problem.
struct Family {
  const families::Family* description;  // class names, fields, limits and defaults
  std::vector<Component> components;    // text encoders in the order of Network::text_encoders(), and others
  // Checks every configuration of the folder before it reads weights. Compiles no blocks.
  std::unique_ptr<Network> (*load)(Folder& folder);
  std::unique_ptr<Tokenizers> (*load_tokenizers)(const ModelSource& source);
  FileAbout (*about)(std::string_view component, const Checkpoint& weights);
  // Of a transformer's config.json and the model_index.json; null: it has no blocks.
  TransformerSpec (*spec)(const ConfigFile& config, const ConfigFile& index);
  // A small and a typical request. Between and beyond them, memory grows in proportion to width × height × frames.
  struct Extent {
    int width, height, frames;
  } small, typical;
};

// Where the linears of a transformer are in a file with other names, which `aliases` lists.
FileNames names_in_file(const TransformerSpec& spec,
                        const std::function<std::vector<LoraTarget>(const std::vector<BaseLinear>&)>& aliases);

// The family of the folder, according to its model_index.json. Throws Failure: kNotFound (no such file), kDataCorrupt
// (no family has its _class_name; the message lists the supported names).
const Family& family_of(const Families& families, const std::string& dir);

// Throws Failure (kDataCorrupt) unless model_index.json has the family's components whose names begin with `prefix`.
void check_components(const Family& family, const std::string& dir, std::string_view prefix = {});

// Loads the folder's networks without compiling them. Throws what Family::load throws, and Failure (kInvalidArgument)
// for `quantize` of another component or format.
std::unique_ptr<Network> load_network(Folder& folder);

// Whether any linear is stored as GGUF, and whether any is stored in another quantized format or will be quantized on
// load. Opens the weight files of all components and reads their headers. Skips components without weights. Throws
// Failure: kDataCorrupt, kInvalidArgument (`quantize` for a component that is stored quantized), kNotFound
// (a file of `source.files`).
struct StoredFormats {
  bool gguf = false, other = false;
};
StoredFormats stored_formats(const Family& family, const ModelSource& source);

// The first stored weight with a NaN or an infinity, such as "weight proj_out.weight of transformer is not finite", or
// a remark that there is none. Reads all weights. Throws the errors of Checkpoint as Failure.
std::string not_finite_weight(const Family& family, const ModelSource& source);

// The programs that workers on one architecture look up. Reads only configuration files and headers.
region::AheadPrograms ahead_programs(const Family& family, const ModelSource& source, region::ElementType type,
                                     region::ArchFeatures arch, const region::CompileOptions& options);

}  // namespace ditfleet::pipeline
