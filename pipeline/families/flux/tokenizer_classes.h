// Whether a FLUX folder's tokenizers are those that are built here.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// model_index.json in `dir` must name CLIP's and T5's tokenizers: transformers reads the same files to other ids with
// another class. kNotFound: there is no such file; kDataCorrupt names the tokenizer, its class and the right one.
Result<void> check_tokenizer_classes(const std::string& dir);

}  // namespace ditfleet::pipeline
