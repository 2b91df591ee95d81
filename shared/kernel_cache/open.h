// The cache that a configuration asks for.
#pragma once

#include <memory>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::kernel_cache {

// What becomes of a folder that has no secret yet.
enum class FolderSecret { kMake, kLeave };

// What the section `cache` means here: the folder, the secret and the Redis, each left out where it cannot be,
// which is logged. The secret is, first that is there: cache.secret; cache.secret_file; the file `secret` in the
// folder, which signs what is on disk while the Redis tier is off: other nodes don't know it. It is made if missing,
// and so is the folder; with kLeave nothing is written, and the options then name a folder and no secret.
//
// kInvalidArgument, kNotFound or kUnavailable: a secret was named and is not to be had, or redis.url is wrong. A
// folder that cannot be made or written is no error. Blocks on the disk.
Result<CacheOptions> cache_options(const config::Settings& settings, FolderSecret missing = FolderSecret::kMake);

// The cache with these options.
Result<std::unique_ptr<KernelCache>> open_cache(const config::Settings& settings);

}  // namespace ditfleet::kernel_cache
