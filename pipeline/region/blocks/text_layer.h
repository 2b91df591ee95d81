// What the text encoders' layers share.
#pragma once

#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {

inline Builder::Ref activated(Builder& b, const std::string& name, OpCode activation, Builder::Ref x) {
  switch (activation) {
    case OpCode::kQuickGelu: return b.quick_gelu(name, x);
    case OpCode::kGeluErf: return b.gelu_erf(name, x);
    case OpCode::kSilu: return b.silu(name, x);
    default: return b.gelu_tanh(name, x);
  }
}

}  // namespace ditfleet::region
