// An adapter's upload as multipart/form-data: its safetensors file, perhaps after PEFT's adapter_config.json.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/multipart.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

// Turns the body into one safetensors file as it arrives (shared/safetensors/peft_folder.h). Not thread-safe.
class LoraForm {
 public:
  explicit LoraForm(FormReader reader) : reader_(std::move(reader)) {}

  // Returns what follows of the one file. kInvalidArgument: the form is not valid, or the configuration is not, or
  // comes after the file.
  Result<std::string> feed(std::string_view bytes);
  // Call it after the last byte. kInvalidArgument: the form is incomplete, or has no file.
  Result<void> finish() const;

 private:
  enum class In { kNothing, kConfig, kFile };
  Result<void> begin(const FormReader::Part& part);
  Result<void> take(std::string_view contents, std::string& out);

  FormReader reader_;
  In in_ = In::kNothing;
  std::optional<std::string> config_;  // its text; then what is kept of it
  std::string head_;                   // of the file, until it is whole
  bool begun_ = false, head_done_ = false;
};

}  // namespace ditfleet::gateway
