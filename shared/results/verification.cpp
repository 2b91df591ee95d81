#include "shared/results/verification.h"

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/job/output_format.h"

namespace ditfleet::results {

Result<void> verify(const Manifest& manifest, std::string_view bytes) {
  if (static_cast<std::int64_t>(bytes.size()) != manifest.bytes) {
    return data_corrupt("the result '" + manifest.key + "' has " + std::to_string(bytes.size()) +
                        " bytes, but its manifest says " + std::to_string(manifest.bytes));
  }
  if (sha256_hex(bytes) != manifest.sha256) {
    return data_corrupt("the result '" + manifest.key + "' is damaged: its SHA-256 differs from the manifest's");
  }
  return {};
}

Result<void> verify_input(const std::string& sha256, std::string_view bytes) {
  if (sha256_hex(bytes) == sha256) return {};
  return data_corrupt("the stored image '" + sha256 + "' is damaged: its SHA-256 differs; upload it again");
}

Error input_gone(const std::string& sha256) {
  return not_found("the image '" + excerpt(sha256, 64) + "' is not stored, or has expired; upload it again");
}

Manifest describe(const ResultKey& result, std::string_view bytes, std::string media_type) {
  Manifest manifest;
  manifest.media_type = std::move(media_type);
  manifest.bytes = static_cast<std::int64_t>(bytes.size());
  manifest.sha256 = sha256_hex(bytes);
  manifest.nonce = result.nonce;
  return manifest;
}

std::string extension_of(const std::string& media_type) {
  const auto format = job::format_from_media_type(media_type);
  return format ? std::string(job::row_of(*format).extension.substr(1)) : "bin";
}

Result<void> check_names(const ResultKey& result) {
  if (!is_valid_id(result.job) || !is_valid_id(result.nonce) || result.unit < 0) {
    return invalid_argument(
        "a result needs a job id and a nonce, each of 1 to 64 letters, digits, '.', '_' or '-', and a unit number of 0 "
        "or more");
  }
  return {};
}

}  // namespace ditfleet::results
