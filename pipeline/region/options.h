// How regions are compiled: the configuration's compile.* as the pipeline takes it.
#pragma once

#include <string>

namespace ditfleet::region {

struct CompileOptions {
  // auto: cpu_jit on a CPU with a C++ compiler, else eager. A backend named here must be there.
  std::string backend = "eager";  // auto | nvrtc | cpu_jit | eager
  // default | reduce-overhead | max-autotune-no-cudagraphs | max-autotune
  std::string mode = "default";
  bool fullgraph = false;           // a block that would fall back to eager is an error
  bool dynamic = true;              // one program for all sizes; false: one for each
  bool error_on_recompile = false;  // a second program for a region is an error
  int recompile_limit = 8;          // programs a region may have; beyond it eager (an error with fullgraph)
  // Which components are compiled. Only the transformer has regions so far.
  bool transformer = true, text_encoders = false, vae = false;
};

}  // namespace ditfleet::region
