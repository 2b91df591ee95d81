// Changes a model's entry in the text of a configuration file. Thread-safe.
#pragma once

#include <string>

#include "shared/config/settings.h"

namespace YAML {
class Emitter;
}

namespace ditfleet::config {

// Writes the entry as a map.
void emit_model(YAML::Emitter& out, const ModelSetting& model);

// The entry as a block of YAML, "NAME:" and below it its keys.
std::string model_yaml(const std::string& name, const ModelSetting& model);

// Returns the text of `file` with the entry. All other lines stay as they are, comments included. `replace`: an entry
// with this name is replaced. Errors: kInvalidArgument (not YAML, or a layout into which an entry cannot be inserted;
// the message has the entry), kConflict (the name is taken, without `replace`).
Result<std::string> with_model(const std::string& text, const std::string& file, const std::string& name,
                               const ModelSetting& model, bool replace);

}  // namespace ditfleet::config
