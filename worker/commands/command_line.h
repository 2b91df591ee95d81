// The commands of ditfleet-worker, and what they share: configuration flags and exit codes.
#pragma once

#include <functional>
#include <string>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/job/flags.h"

namespace CLI {
class App;
}

namespace ditfleet::worker {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// Adds --config and --set to a command.
void add_configuration_flags(CLI::App& command, config::Sources& sources);

// Adds --model: a folder, or hf:ORG/NAME, which becomes the folder in the local cache of Hugging Face's hub.
void add_model_folder(CLI::App& command, std::string& dir);

// Where weights are and in which format.
struct WeightFlags {
  std::map<std::string, std::string> files = {};  // by component
  std::string quantize = {}, attention = {};
};
// Adds --transformer, --transformer-2, --text-encoder, --text-encoder-2, --vae, --quantize and --attention.
void add_weight_flags(CLI::App& command, WeightFlags& flags);

// --offload, --memory-limit and --reserve-vram, which set keys of the configuration. Empty: not given.
struct MemoryFlags {
  std::string offload, limit, reserve;
  config::Sources over(config::Sources sources) const;  // sources that these flags override
};
void add_memory_flags(CLI::App& command, MemoryFlags& flags);

// How a command loads a model without a queue. Empty: as configured.
struct ModelFlags {
  config::Sources sources;
  MemoryFlags memory;
  WeightFlags weights;
  std::string dir, device, dtype, vae_dtype;
};
void add_model_flags(CLI::App& command, ModelFlags& flags);

// Loads the configuration and sets up the log. kInvalidArgument: `param` is the key at fault.
Result<config::Settings> settings_of(const config::Sources& sources);

// The complete and valid spec of a request to the model in `dir`; `out`: the file to write. The flag of an image names
// its file; the spec has the file's SHA-256. Its adapters are the preset's, without digests. Without `needs_pictures`
// an image that the model needs may be missing. Errors: kInvalidArgument (the message contains the flag), those of
// families::read_model_entry() and sha256_of_file().
Result<job::JobSpec> spec_of(job::FieldFlags fields, const std::string& out, const std::string& dir,
                             bool needs_pictures = true);

// Returns kExitOk if the command is done. Otherwise prints "ditfleet-worker COMMAND: message" to stderr and returns
// kExitUsage for kInvalidArgument, else kExitFailure.
int report(const std::string& command, const Result<void>& done);

// The command to run after the command line has been parsed. Returns the exit code.
using Invocation = std::function<int()>;

// Each function adds its command to `app`. The command that the user typed sets `invoked`.
void add_run(CLI::App& app, Invocation& invoked);       // serves the queue
void add_generate(CLI::App& app, Invocation& invoked);  // runs one request through the pipeline
void add_compile(CLI::App& app, Invocation& invoked);   // compiles the regions of a model ahead of time, without a GPU
void add_plan(CLI::App& app, Invocation& invoked);      // shows how a model fits into the device's memory
void add_inspect(CLI::App& app, Invocation& invoked);   // says what files of weights are
void add_tokenize(CLI::App& app, Invocation& invoked);  // converts prompts, one JSON string per line, into token ids

}  // namespace ditfleet::worker
