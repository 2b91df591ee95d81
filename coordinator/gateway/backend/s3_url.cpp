#include "coordinator/gateway/backend/s3_url.h"

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

// "s3://photos" and "s3://photos/2026/" are places of all that is below them, not of "s3://photos-of-others/".
bool is_below(std::string_view url, std::string_view place) {
  while (place.starts_with(' ')) place.remove_prefix(1);
  while (place.ends_with(' ') || place.ends_with('/')) place.remove_suffix(1);
  return place.starts_with("s3://") && url.starts_with(place) && url.substr(place.size()).starts_with('/');
}

}  // namespace

Result<std::pair<std::string, std::string>> s3_object(std::string_view url, std::string_view allowed) {
  const auto wrong = [&](const std::string& why) { return invalid_argument("'" + excerpt(url, 200) + "' " + why); };
  std::string_view key = url.substr(std::string_view("s3://").size());
  const std::string_view bucket = take_part(key, '/');
  if (bucket.empty() || key.empty()) return wrong("is not an object's URL, such as s3://bucket/folder/image.png");
  // A store, or a proxy before it, may resolve them.
  const auto parts = split(key, '/');
  if (std::ranges::any_of(parts, [](std::string_view part) { return part.empty() || part == "." || part == ".."; }))
    return wrong("has an empty part, '.' or '..' in its path; name the object itself");
  const auto places = split(allowed, ',');
  if (std::ranges::none_of(places, [&](std::string_view place) { return is_below(url, place); })) {
    return wrong(allowed.empty() ? "is an s3:// URL, and you may use none (tenants.NAME.s3_inputs); send the image"
                                 : "is in no place that you may use; these are " + std::string(allowed));
  }
  return std::pair{std::string(bucket), std::string(key)};
}

}  // namespace ditfleet::gateway
