// Reads the byte pairs of a tokenizer folder: the model of tokenizer.json, or vocab.json and merges.txt.
#pragma once

#include <string>

#include "pipeline/tokenizers/byte_pair.h"
#include "pipeline/tokenizers/tokenizer_folder.h"

namespace ditfleet::pipeline {

// The other arguments: see BytePairEncoder::create. kNotFound: the message lists the missing files. kDataCorrupt: it
// contains the file and the problem.
Result<BytePairEncoder> read_byte_pairs(const TokenizerFolder& folder, const std::string& unknown_token,
                                        const std::string& end_of_word);

}  // namespace ditfleet::pipeline
