// Finds models in the local cache of Hugging Face's hub, by the id of their repository. Downloads nothing.
#pragma once

#include <string>

#include "shared/core/result.h"

namespace ditfleet::config {

// "hf:ORG/NAME", "hf:ORG/NAME@REVISION" or "hf:ORG/NAME/FILE" as a path in the cache: $HF_HUB_CACHE, $HF_HOME/hub,
// $XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub, in this order. Any other text is returned as it is. The
// revision is a branch, a tag or a commit, main by default. Source of the layout: huggingface_hub 0.36, "Understand
// caching". kInvalidArgument: another form. kNotFound: it is not in the cache; the message has the command that fetches
// it.
Result<std::string> hub_path(const std::string& text);

}  // namespace ditfleet::config
