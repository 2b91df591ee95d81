#include "shared/results/store.h"

#include "shared/config/settings.h"
#include "shared/results/file_store.h"
#include "shared/results/redis_store.h"
#include "shared/results/s3_store.h"

namespace ditfleet::results {

StoreOptions store_options(const config::Settings& settings) {
  // An open job keeps its image, so that it must outlive the oldest one. Without a limit of their age: a year.
  const auto oldest_ms = settings.queue.max_age_ms > 0 ? settings.queue.max_age_ms : 31'536'000'000;
  return {.backend = settings.results.backend,
          .dir = settings.results.dir,
          .retention_ms = settings.queue.retention_ms,
          .preview_ms = settings.results.preview_ms,
          .input_ms = settings.results.input_ms + oldest_ms,
          .redis_max_bytes = settings.results.redis_max_bytes,
          .s3 = {.endpoint = settings.results.s3.endpoint,
                 .region = settings.results.s3.region,
                 .addressing = settings.results.s3.addressing},
          .bucket = settings.results.s3.bucket,
          .prefix = settings.results.s3.prefix,
          .delete_expired = settings.results.s3.delete_expired};
}

Result<std::shared_ptr<Store>> open_store(const StoreOptions& options, std::shared_ptr<redis::Connection> connection) {
  if (options.backend == "file") return FileStore::open(options);
  if (options.backend == "s3") return S3Store::open(options, std::move(connection));
  if (options.backend != "redis") {
    return invalid_argument("results.backend is '" + options.backend + "'; it must be redis, file or s3",
                            "results.backend");
  }
  if (!connection) return invalid_argument("results.backend is 'redis', which needs a Redis connection; set redis.url");
  return std::shared_ptr<Store>(std::make_shared<RedisStore>(options, std::move(connection)));
}

}  // namespace ditfleet::results
