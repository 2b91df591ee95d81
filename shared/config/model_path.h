// Finds models by name: in the local cache of Hugging Face's hub, and among the folders that DiTFleet ships. Downloads
// nothing.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::config {

// "known:NAME" is a folder that DiTFleet ships (deploy/known-models): configurations and tokenizers, without weights.
// "hf:ORG/NAME", "hf:ORG/NAME@REVISION" or "hf:ORG/NAME/FILE" is a path in the cache: $HF_HUB_CACHE, $HF_HOME/hub,
// $XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub, in this order. Any other text is returned as it is. The
// revision is a branch, a tag or a commit, main by default. Source of the layout: huggingface_hub 0.36, "Understand
// caching". kInvalidArgument: another form. kNotFound: it is not in the cache, and the message has the command that
// fetches it; or no known model has this name, and the message has the names.
Result<std::string> model_path(const std::string& text);

}  // namespace ditfleet::config
