#include "coordinator/gateway/http/http.h"

#include <algorithm>
#include <limits>

#include "shared/core/bytes.h"
#include "shared/core/short_numbers.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

Result<std::string> percent_decode(std::string_view part, bool plus_is_space) {
  std::string text(part);
  if (plus_is_space) std::replace(text.begin(), text.end(), '+', ' ');
  const auto decoded = percent_decoded(text);
  if (!decoded)
    return invalid_argument("the URL has a '%' without two hexadecimal digits after it; write a literal % as %25");
  if (decoded->find('\0') != std::string::npos || !is_valid_utf8(*decoded)) {
    return invalid_argument("the URL does not decode to valid UTF-8");
  }
  return *decoded;
}

}  // namespace

std::string lower_case(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), lower);
  return out;
}

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) { return lower(x) == lower(y); });
}

std::string_view Request::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (same_name(key, name)) return value;
  }
  return {};
}

std::size_t Request::count_headers(std::string_view name) const {
  std::size_t count = 0;
  for (const auto& field : headers) count += same_name(field.first, name) ? 1 : 0;
  return count;
}

std::optional<std::string> Request::query_value(std::string_view name) const {
  for (const auto& [key, value] : query) {
    if (key == name) return value;
  }
  return std::nullopt;
}

std::string Request::path() const {
  std::string path;
  for (const auto& segment : segments) path += "/" + segment;
  if (path.empty() || trailing_slash) path += "/";
  return path;
}

Result<void> parse_target(std::string_view target, Request& request) {
  // A server must also accept the absolute form that clients send to proxies (RFC 9112 §3.2.2).
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!same_name(target.substr(0, scheme.size()), scheme)) continue;
    target.remove_prefix(scheme.size());
    const std::string_view authority = target.substr(0, target.find_first_of("/?"));
    const bool opened = authority.find('[') != std::string_view::npos,
               closed = authority.find(']') != std::string_view::npos;
    if (authority.empty() || opened != closed) {
      return invalid_argument("the request target has no valid host between '//' and the path");
    }
    target.remove_prefix(authority.size());
    if (target.empty() || target[0] == '?') return parse_target("/" + std::string(target), request);
    break;
  }
  if (target.empty() || target[0] != '/') {
    return invalid_argument("the request target must be an absolute path such as /v1/jobs");
  }
  request.segments.clear();
  request.query.clear();
  request.trailing_slash = false;
  target = target.substr(0, target.find('#'));
  const auto mark = target.find('?');
  std::string_view path = target.substr(1, mark == std::string_view::npos ? mark : mark - 1);
  std::string_view query = mark == std::string_view::npos ? std::string_view() : target.substr(mark + 1);

  while (!path.empty()) {
    const auto slash = path.find('/');
    auto segment = percent_decode(path.substr(0, slash), false);
    if (!segment) return segment.error();
    request.segments.push_back(std::move(*segment));
    if (slash == std::string_view::npos) break;
    path.remove_prefix(slash + 1);
    request.trailing_slash = path.empty();
  }
  while (!query.empty()) {
    const auto end = query.find('&');
    const std::string_view pair = query.substr(0, end);
    const auto equals = pair.find('=');
    auto key = percent_decode(pair.substr(0, equals), true);
    if (!key) return key.error();
    auto value = percent_decode(equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1), true);
    if (!value) return value.error();
    if (!key->empty()) request.query.emplace_back(std::move(*key), std::move(*value));
    if (end == std::string_view::npos) break;
    query.remove_prefix(end + 1);
  }
  return {};
}

Result<int> parse_limit(std::string_view text, int most, const std::string& note) {
  const auto number = number_of(text, 1, most);
  if (!number) return invalid_argument("'limit' must be an integer from 1 to " + std::to_string(most) + note, "limit");
  return *number;
}

bool names_etag(std::string_view field, std::string_view etag, bool strongly) {
  while (!field.empty()) {
    const auto comma = field.find(',');
    std::string_view one = field.substr(0, comma);
    field.remove_prefix(comma == std::string_view::npos ? field.size() : comma + 1);
    while (!one.empty() && (one.front() == ' ' || one.front() == '\t')) one.remove_prefix(1);
    while (!one.empty() && (one.back() == ' ' || one.back() == '\t')) one.remove_suffix(1);
    if (!strongly && one.starts_with("W/")) one.remove_prefix(2);
    if (one == etag || one == "*") return true;
  }
  return false;
}

Response bytes_response(const Request& request, std::string bytes, std::string media_type, const std::string& etag) {
  Response response;
  response.content_type = std::move(media_type);
  response.with("ETag", etag).with("Cache-Control", "private, max-age=3600, immutable");
  if (names_etag(request.header("If-None-Match"), etag))
    response.status = 304;
  else
    response.body = std::move(bytes);
  return response;
}

std::optional<ByteRange> parse_range(std::string_view field, std::int64_t size) {
  if (!same_name(field.substr(0, 6), "bytes=")) return std::nullopt;
  field.remove_prefix(6);
  const auto dash = field.find('-');
  if (dash == field.npos) return std::nullopt;
  const std::string_view from = field.substr(0, dash), to = field.substr(dash + 1);
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const auto first = number_of<std::int64_t>(from, 0, kMost), last = number_of<std::int64_t>(to, 0, kMost);
  if ((!first && !from.empty()) || (!last && !to.empty()) || (!first && !last)) return std::nullopt;
  if (!first) return ByteRange{size - std::min(*last, size), std::min(*last, size)};
  if (last && *last < *first) return std::nullopt;
  if (*first >= size) return ByteRange{*first, 0};
  return ByteRange{*first, std::min(last.value_or(kMost), size - 1) - *first + 1};
}

std::string media_type_of(std::string_view content_type) {
  const std::string_view type = content_type.substr(0, content_type.find(';'));
  return lower_case(type.substr(0, type.find_last_not_of(" \t") + 1));
}

Response json_response(int status, const json::object& body) {
  Response response;
  response.status = status;
  response.body = json_text(body) + "\n";
  return response;
}

json::value text_or_null(std::string_view text) { return text.empty() ? json::value(nullptr) : json::value(text); }

}  // namespace ditfleet::gateway
