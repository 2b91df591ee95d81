// The two names of a key in a tier that nodes with different secrets may share.
#pragma once

namespace ditfleet::kernel_cache {

enum class Name {
  kShared,  // where everybody looks first
  kOwn,     // of this node's secret alone: for as long as the first holds a value that another secret has signed
};

}  // namespace ditfleet::kernel_cache
