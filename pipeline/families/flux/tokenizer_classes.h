// Checks that a model folder uses the supported tokenizer classes.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// model_index.json in `dir` must contain the tokenizer classes of CLIP and T5, because transformers produces different
// ids from the same files with a different class. kNotFound: no such file. kDataCorrupt: the message contains the
// tokenizer, its class and the right class.
Result<void> check_tokenizer_classes(const std::string& dir);

}  // namespace ditfleet::pipeline
