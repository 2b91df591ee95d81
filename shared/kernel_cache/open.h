// Opens the configured cache.
#pragma once

#include <memory>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::kernel_cache {

// Whether a missing secret of the folder is created.
enum class FolderSecret { kMake, kLeave };

// The options for the section `cache`: folder, secret, Redis. A tier that cannot be used is left out and logged. The
// secret is cache.secret, else cache.secret_file, else the file `secret` in the folder. Other nodes do not know the
// last one, so it signs the disk tier only, and the Redis tier is off. With kMake a missing folder and secret file are
// created. With kLeave nothing is written; the options then have a folder and no secret.
//
// Errors: kInvalidArgument, kNotFound or kUnavailable (a configured secret cannot be read, or redis.url is invalid). A
// folder that cannot be created or written is not an error. Blocks on the disk.
Result<CacheOptions> cache_options(const config::Settings& settings, FolderSecret missing = FolderSecret::kMake);

// Creates the cache with these options.
Result<std::unique_ptr<KernelCache>> open_cache(const config::Settings& settings);

}  // namespace ditfleet::kernel_cache
