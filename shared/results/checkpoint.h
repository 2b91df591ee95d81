// The record of a unit's checkpoint, which queue::Client::store_checkpoint stores as JSON. The state itself is a
// result.
#pragma once

#include <string>
#include <string_view>

#include "shared/results/store.h"

namespace ditfleet::results {

struct Checkpoint {
  int step = 0;       // the last one that it contains
  Manifest manifest;  // of the state
  std::string of;     // what made it (worker/units/receipt.h), as JSON

  std::string to_json() const;
  // kDataCorrupt: it is no such record.
  static Result<Checkpoint> parse(std::string_view json_text);
};

}  // namespace ditfleet::results
