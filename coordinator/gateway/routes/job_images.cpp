#include "coordinator/gateway/routes/job_images.h"

#include <sodium.h>

#include <optional>

#include "coordinator/gateway/http/http.h"
#include "shared/core/bytes.h"
#include "shared/core/sha256.h"

namespace ditfleet::gateway {
namespace {

// Accepts line breaks. Nothing for other text.
std::optional<std::string> base64_decoded(std::string_view text) {
  std::string bytes(text.size() / 4 * 3 + 3, '\0');
  std::size_t size = 0;
  if (sodium_base642bin(reinterpret_cast<unsigned char*>(bytes.data()), bytes.size(), text.data(), text.size(), "\r\n",
                        &size, nullptr, sodium_base64_VARIANT_ORIGINAL) != 0)
    return std::nullopt;
  bytes.resize(size);
  return bytes;
}

Result<media::Info> check_image(std::string_view file, std::int64_t most, const std::string& param) {
  if (static_cast<std::int64_t>(file.size()) > most) {
    return Error{
        Code::kPayloadTooLarge,
        "the image has " + std::to_string(file.size()) + " bytes; results.input_max_bytes is " + std::to_string(most),
        param};
  }
  auto info = media::inspect(file);
  if (info) return info;
  Error error = info.error();
  error.param = param;
  return error;
}

}  // namespace

SentImages take_images(json::object& job) {
  SentImages images;
  const auto take = [&](job::Field field, std::size_t index, std::string param, json::value& value) {
    if (!value.is_string()) return;
    const bool stored = is_sha256_hex(value.get_string());
    images.push_back({field, index, std::move(param), stored ? std::string() : std::string(value.get_string()),
                      stored ? SentImage::Form::kStored : SentImage::Form::kText});
    if (!stored) value = kUnknownSha256;
  };
  for (const job::Field field : job::kFields) {
    json::value* value = job.if_contains(field.name());
    const std::string name(field.name());
    if (value && field.row().type == job::FieldType::kImage) take(field, 0, name, *value);
    if (!value || field.row().type != job::FieldType::kImages || !value->is_array()) continue;
    json::array& list = value->get_array();
    for (std::size_t i = 0; i < list.size() && i < job::kMaxImages; ++i)
      take("image", i, name + "[" + std::to_string(i) + "]", list[i]);
  }
  return images;
}

Result<ImageFile> read_image(SentImage image, std::int64_t most) {
  const std::string& param = image.param;
  if (image.form == SentImage::Form::kText) {
    std::string_view text = image.contents;
    if (text.starts_with("http:") || text.starts_with("https:"))
      return invalid_argument(param + " is a URL, but no URL is fetched; send the image itself", param);
    if (text.starts_with("data:")) {
      const auto comma = text.find(',');
      if (comma == text.npos || !text.substr(0, comma).ends_with(";base64"))
        return invalid_argument(param + " is a data URL without base64; it must begin as data:image/png;base64,",
                                param);
      text.remove_prefix(comma + 1);
    }
    auto file = base64_decoded(text);
    if (!file) {
      return invalid_argument(
          param + " must be an image in base64, a data URL, an s3:// URL, or the id that POST /v1/uploads returned",
          param);
    }
    image.contents = std::move(*file);
  }
  const auto info = check_image(image.contents, most, param);
  if (!info) return info.error();
  std::string sha256 = sha256_hex(image.contents);
  return ImageFile{std::move(sha256), std::move(image.contents), *info};
}

}  // namespace ditfleet::gateway
