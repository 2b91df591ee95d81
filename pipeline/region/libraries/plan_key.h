// Builds the parts that all keys of library plans and of timed choices share.
#pragma once

#include "pipeline/region/libraries/cudnn.h"
#include "pipeline/region/libraries/driver.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::region {

// The key of a plan of this kind on GPUs like this one. Raise `schema` when the format of such plans changes.
inline kernel_cache::KeyBuilder plan_key_of(const char* kind, int schema, const GpuIdentity& gpu) {
  kernel_cache::KeyBuilder key;
  key.add("plan", kind)
      .add("schema", schema)
      .add("gpu", gpu.name)
      .add("multiprocessors", gpu.multiprocessors)
      .add("driver", gpu.driver);
  return key;
}

inline void add_shape(kernel_cache::KeyBuilder& key, const AttentionShape& s) {
  key.add("batch", s.batch).add("tokens", s.tokens).add("key_tokens", s.key_tokens);
  key.add("heads", s.heads).add("head_dim", s.head_dim);
  for (const auto* strides : {&s.q, &s.k, &s.v, &s.out})
    key.add("batch_stride", strides->batch).add("token_stride", strides->token).add("head_stride", strides->head);
}

}  // namespace ditfleet::region
