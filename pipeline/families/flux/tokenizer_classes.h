// Checks that a model folder uses the supported tokenizer classes.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::pipeline {

// model_index.json in `dir` must name the tokenizer classes of CLIP and T5: with another class transformers produces
// other ids from the same files. kNotFound: no such file. kDataCorrupt: the message names the tokenizer, its class and
// the right one.
Result<void> check_tokenizer_classes(const std::string& dir);

}  // namespace ditfleet::pipeline
