// Opens the cache with the options of section `cache`.
#pragma once

#include <memory>

#include "shared/config/settings.h"
#include "shared/core/result.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::kernel_cache {

// Whether to create the folder's secret file if it is missing.
enum class FolderSecret { kMake, kLeave };

// Converts the section `cache` of the settings. A tier that cannot be used is logged and omitted.
// The secret is cache.secret, else that of cache.secret_file, else that of the file `secret` in the folder. With
// the folder's secret the Redis tier is off, because other nodes do not have that secret. With kMake, a missing folder
// and secret file are created. With kLeave, nothing is created; the options then have a folder but no secret.
//
// Errors: kInvalidArgument, kNotFound or kUnavailable if a configured secret cannot be read or redis.url is invalid. A
// folder that cannot be created or written is not an error. Blocks on the disk.
Result<CacheOptions> cache_options(const config::Settings& settings, FolderSecret missing = FolderSecret::kMake);

// Creates the cache with cache_options(settings).
Result<std::unique_ptr<KernelCache>> open_cache(const config::Settings& settings);

}  // namespace ditfleet::kernel_cache
