#include "shared/kernel_cache/open.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <utility>

#include "shared/kernel_cache/secret.h"

namespace ditfleet::kernel_cache {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

std::string folder_of(const config::Settings& settings) {
  if (!settings.cache.dir.empty()) return settings.cache.dir;
  const std::string data = config::data_folder(settings);
  return data.empty() ? data : data + "/kernels";
}

// The folder's own secret. Without one nothing is stored, because nobody could verify it.
std::shared_ptr<const Secret> secret_of_folder(const std::string& dir, FolderSecret missing) {
  std::error_code ec;
  if (missing == FolderSecret::kMake) fs::create_directories(dir, ec);
  auto secret =
      missing == FolderSecret::kMake ? Secret::from_file_or_new(dir + "/secret") : Secret::from_file(dir + "/secret");
  if (secret) return *secret;
  if (missing == FolderSecret::kLeave && secret.error().code == Code::kNotFound) return nullptr;
  spdlog::warn("kernel cache: compiled programs are kept in memory only: {}", secret.error().message);
  return nullptr;
}

}  // namespace

Result<CacheOptions> cache_options(const config::Settings& settings, FolderSecret missing) {
  const auto& cache = settings.cache;
  CacheOptions options;
  options.memory_bytes = static_cast<std::uint64_t>(cache.memory_bytes);
  options.disk_bytes = static_cast<std::uint64_t>(cache.disk_bytes);
  options.redis_timeout = milliseconds(cache.redis_timeout_ms);
  options.redis_ttl = milliseconds(cache.redis_ttl_ms);
  options.lock = milliseconds(cache.lock_ms);
  options.wait = milliseconds(cache.wait_ms);
  if (cache.disk_bytes > 0) options.dir = folder_of(settings);

  const bool named = !cache.secret.empty() || !cache.secret_file.empty();
  if (named) {
    auto secret = cache.secret.empty() ? Secret::from_file(cache.secret_file) : Secret::from_text(cache.secret);
    if (!secret) return secret.error();
    options.secret = std::move(*secret);
  } else if (!options.dir.empty()) {
    options.secret = secret_of_folder(options.dir, missing);
    if (!options.secret && missing == FolderSecret::kMake) options.dir.clear();
  }
  if (!cache.redis || settings.redis.url.empty()) return options;
  if (!named) {
    spdlog::warn(
        "kernel cache: compiled programs are not shared through Redis: set cache.secret or cache.secret_file to the "
        "same secret on all nodes, or set cache.redis=false");
    return options;
  }
  auto endpoint = config::redis_endpoint(settings);
  if (!endpoint) return endpoint.error();
  options.redis = std::move(*endpoint);
  return options;
}

Result<std::unique_ptr<KernelCache>> open_cache(const config::Settings& settings) {
  auto options = cache_options(settings);
  if (!options) return options.error();
  return KernelCache::create(std::move(*options));
}

}  // namespace ditfleet::kernel_cache
