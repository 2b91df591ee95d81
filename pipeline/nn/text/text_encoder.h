// What all text encoders have: weights that can leave the device, and linears that adapters change.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/memory/part_sequence.h"
#include "pipeline/nn/linear.h"

namespace ditfleet::pipeline {

class TextEncoder {
 public:
  virtual ~TextEncoder() = default;
  // Its name in a folder, if it is not text_encoder or a further one of them.
  virtual std::string component() const { return {}; }
  std::int64_t bytes() const { return bytes_; }
  PartSequence& parts() const { return *parts_; }                         // the weights that can leave the device
  const std::map<std::string, int>& linears() const { return linears_; }  // as Parameters::linears()

  // Every linear of the layers by its name in transformers. The result points into this encoder. A copy of an encoder
  // shares the weights; low-rank terms that are added to a copy do not affect the original.
  virtual std::vector<NamedLinear> named_linears() = 0;

 protected:
  Placement placement_;
  std::shared_ptr<PartSequence> parts_;
  std::int64_t bytes_ = 0;
  std::map<std::string, int> linears_;
};

}  // namespace ditfleet::pipeline
