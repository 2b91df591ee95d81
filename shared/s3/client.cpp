#include "shared/s3/client.h"

#include <curl/curl.h>

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <sstream>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/environment.h"
#include "shared/core/excerpt.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::s3 {
namespace {

using namespace std::chrono_literals;

constexpr int kTries = 4;
constexpr auto kFirstPause = 100ms, kIdle = 10'000ms;
constexpr std::int64_t kBytesPerSecond = 64 << 10, kLongestLinkS = 604'800;

std::string region_of(const Options& options) {
  if (!options.region.empty()) return options.region;
  for (const char* name : {"AWS_REGION", "AWS_DEFAULT_REGION"})
    if (std::string value = environment_variable(name); !value.empty()) return value;
  return "us-east-1";
}

boost::property_tree::ptree xml_of(const std::string& text) {
  boost::property_tree::ptree tree;
  std::istringstream stream(text);
  try {
    boost::property_tree::read_xml(stream, tree);
  } catch (const boost::property_tree::xml_parser_error&) {
    tree.clear();
  }
  return tree;
}

}  // namespace

std::string endpoint_of(const Options& options) {
  std::string endpoint =
      options.endpoint.empty() ? "https://s3." + region_of(options) + ".amazonaws.com" : options.endpoint;
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return endpoint;
}

Client::Client(const Options& options)
    : endpoint_(endpoint_of(options)),
      region_(region_of(options)),
      addressing_(options.addressing),
      url_(http_url_parts(endpoint_)),
      http_({.thread = "s3", .ca_file = environment_variable("AWS_CA_BUNDLE")}),
      credentials_(http_) {}

std::pair<std::string, std::string> Client::place_of(const std::string& bucket, const std::string& key) const {
  // AWS wants names, but its certificate does not fit those with dots. Elsewhere few buckets have a name of their own.
  const bool by_name = addressing_ == "auto" ? url_.host.ends_with(".amazonaws.com") && bucket.find('.') == bucket.npos
                                             : addressing_ == "virtual";
  std::string path = std::string(url_.rest) + (by_name ? "" : "/" + bucket);
  path += "/" + uri_encoded(key, true);
  // The Host header has no default port, so the signature must not have it either.
  std::string_view authority = url_.authority;
  if (url_.port == (url_.scheme == "https" ? ":443" : ":80")) authority.remove_suffix(url_.port.size());
  return {(by_name ? bucket + "." : "") + std::string(authority), path};
}

std::int64_t Client::now_s() const { return unix_ms() / 1000 + ahead_s_; }

HttpClient::Request Client::request_of(const Call& call, const Credentials& credentials, Deadline deadline) const {
  const std::int64_t now = now_s();
  const auto [host, path] = place_of(call.bucket, call.key);
  SignedParts parts{call.method, host, path, call.query, call.headers, call.sha256};
  parts.headers["x-amz-date"] = amz_date(now);
  parts.headers["x-amz-content-sha256"] = parts.payload_sha256;
  if (!credentials.token.empty()) parts.headers["x-amz-security-token"] = credentials.token;
  const std::string query = canonical_query(call.query);
  const std::string place = std::string(url_.scheme) + "://" + host + path;
  HttpClient::Request request{.method = call.method,
                              .url = place + (query.empty() ? "" : "?" + query),
                              .body = call.body,
                              .most_bytes = call.most_bytes,
                              .idle = kIdle};
  request.headers.push_back("Authorization: " + authorization(parts, credentials, region_, now));
  for (const auto& [name, value] : parts.headers) request.headers.push_back(name + ": " + value);
  const std::int64_t bytes = call.body ? static_cast<std::int64_t>(call.body->size()) : 0;
  request.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()) +
                    std::chrono::milliseconds(bytes * 1000 / kBytesPerSecond);
  return request;
}

Error Client::error_of(const Call& call, const HttpClient::Answer& answer, const std::string& code,
                       const std::string& message) const {
  const auto later = [](Code kind, std::string what) {
    return Error{.code = kind, .message = std::move(what), .source = Source::kObjectStore};
  };
  if (answer.status == 0)
    return later(Code::kUnavailable, "the S3 store '" + endpoint_ + "' gave no answer: " + answer.error);
  const std::string said = "the S3 store '" + endpoint_ + "' answered " + std::to_string(answer.status) +
                           (code.empty() ? "" : " " + code) + (message.empty() ? "" : ": " + message);
  if (answer.status == 412) return Error{Code::kConflict, said};
  if (code == "NoSuchBucket")
    return unavailable("the bucket '" + call.bucket + "' does not exist at '" + endpoint_ +
                       "'; create it, or set results.s3.bucket");
  if (answer.status == 404) return not_found("'s3://" + call.bucket + "/" + call.key + "' does not exist");
  if (answer.status == 416) return data_corrupt("'s3://" + call.bucket + "/" + call.key + "' is too short");
  if (code == "EntityTooLarge") return Error{Code::kPayloadTooLarge, said};
  if (answer.status == 507) return later(Code::kResourceExhausted, said);
  const bool busy = answer.status >= 500 || answer.status == 429 || answer.status == 408 || answer.status == 409 ||
                    code == "RequestTimeout";
  if (busy && answer.status != 501) return later(Code::kUnavailable, said);
  std::string right;
  if (const std::string region = answer.header("x-amz-bucket-region"); !region.empty() && region != region_)
    right = "; set results.s3.region to " + excerpt(region, 32);
  else if (code == "SignatureDoesNotMatch" || code == "InvalidAccessKeyId")
    right = "; the credentials with the id '" + excerpt(credentials_.known().id, 128) +
            "' are wrong: correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or where they come from";
  else if (code == "RequestTimeTooSkewed")
    right = "; set this host's clock";
  else if (answer.status == 403)
    right = "; permit s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket";
  return unavailable(said + right);
}

asio::awaitable<Result<HttpClient::Answer>> Client::perform(Call call, Deadline deadline) {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  bool renewed = false, clock_set = false;
  for (int tries = 1;; ++tries) {
    const auto credentials = co_await credentials_.get();
    if (!credentials) co_return credentials.error();
    auto request = request_of(call, *credentials, deadline);
    auto answer = co_await http_.send(std::move(request));
    if (answer.status >= 200 && answer.status < 300 && answer.error.empty()) co_return answer;
    const auto xml = xml_of(answer.body);
    const std::string code = excerpt(xml.get("Error.Code", ""), 64);
    const auto theirs = curl_getdate(answer.header("date").c_str(), nullptr);
    if (code == "RequestTimeTooSkewed" && theirs > 0 && !std::exchange(clock_set, true)) {
      ahead_s_ = std::int64_t{theirs} - unix_ms() / 1000;
      continue;
    }
    if ((code == "ExpiredToken" || code == "InvalidToken") && !std::exchange(renewed, true)) {
      credentials_.renew();
      continue;
    }
    Error error = error_of(call, answer, code, excerpt(xml.get("Error.Message", ""), 300));
    const auto pause = kFirstPause * (1 << tries);
    if (error.source != Source::kObjectStore || tries >= kTries || deadline.left() < pause) co_return error;
    timer.expires_after(pause);
    co_await timer.async_wait(asio::use_awaitable);
  }
}

asio::awaitable<Result<void>> Client::put(std::string bucket, std::string key, std::shared_ptr<const std::string> bytes,
                                          std::string sha256, std::string media_type, bool replace, Deadline deadline) {
  Call call{.method = "PUT", .bucket = std::move(bucket), .key = std::move(key), .body = std::move(bytes)};
  call.headers["content-type"] = std::move(media_type);
  if (!replace) call.headers["if-none-match"] = "*";
  call.sha256 = std::move(sha256);
  const auto stored = co_await perform(std::move(call), deadline);
  if (!stored && stored.error().code != Code::kConflict) co_return stored.error();
  co_return Result<void>();
}

asio::awaitable<Result<std::string>> Client::get(std::string bucket, std::string key, std::int64_t offset,
                                                 std::int64_t size, Deadline deadline) {
  if (size <= 0) co_return std::string();
  Call call{.method = "GET", .bucket = std::move(bucket), .key = std::move(key)};
  call.headers["range"] = "bytes=" + std::to_string(offset) + "-" + std::to_string(offset + size - 1);
  call.most_bytes = static_cast<std::size_t>(size);
  auto answer = co_await perform(std::move(call), deadline);
  if (!answer) co_return answer.error();
  if (offset > 0 && answer->status != 206) co_return unavailable("the S3 store '" + endpoint_ + "' sends no ranges");
  co_return std::move(answer->body);
}

asio::awaitable<Result<void>> Client::remove(std::string bucket, std::string key, Deadline deadline) {
  Call call{.method = "DELETE", .bucket = std::move(bucket), .key = std::move(key)};
  const auto removed = co_await perform(std::move(call), deadline);
  if (!removed && removed.error().code != Code::kNotFound) co_return removed.error();
  co_return Result<void>();
}

asio::awaitable<Result<void>> Client::touch(std::string bucket, std::string key, Deadline deadline) {
  Call call{.method = "PUT", .bucket = std::move(bucket), .key = std::move(key)};
  call.body = std::make_shared<const std::string>();
  call.headers["content-type"] = "application/octet-stream";
  call.headers["x-amz-copy-source"] = "/" + call.bucket + "/" + uri_encoded(call.key, true);
  call.headers["x-amz-metadata-directive"] = "REPLACE";
  const auto touched = co_await perform(std::move(call), deadline);
  if (!touched) co_return touched.error();
  co_return Result<void>();
}

asio::awaitable<Result<Listing>> Client::list(std::string bucket, std::string prefix, std::string next, int most,
                                              Deadline deadline) {
  Call call{.method = "GET", .bucket = std::move(bucket)};
  call.query["list-type"] = "2";
  call.query["max-keys"] = std::to_string(most);
  call.query["prefix"] = std::move(prefix);
  if (!next.empty()) call.query["continuation-token"] = std::move(next);
  call.most_bytes = 4 << 20;
  const auto answer = co_await perform(std::move(call), deadline);
  if (!answer) co_return answer.error();
  const auto xml = xml_of(answer->body);
  const auto result = xml.get_child_optional("ListBucketResult");
  if (!result) co_return unavailable("the S3 store '" + endpoint_ + "' answered no list of objects");
  Listing listing;
  for (const auto& [name, child] : *result)
    if (name == "Contents") listing.objects.push_back({child.get("Key", ""), child.get("LastModified", "")});
  listing.next = result->get("NextContinuationToken", "");
  const auto theirs = curl_getdate(answer->header("date").c_str(), nullptr);
  listing.now_s = theirs > 0 ? std::int64_t{theirs} : now_s();
  co_return listing;
}

asio::awaitable<void> Client::keep_credentials() {
  const auto ignored = co_await credentials_.get();
  (void)ignored;
}

std::string Client::origin(const std::string& bucket) const {
  return std::string(url_.scheme) + "://" + place_of(bucket, "").first;
}

std::string Client::link(const std::string& bucket, const std::string& key, std::int64_t life_s) const {
  const Credentials& credentials = credentials_.known();
  if (credentials.id.empty()) return {};
  const auto [host, path] = place_of(bucket, key);
  return std::string(url_.scheme) + "://" + host + path + "?" +
         presigned_query({"GET", host, path, {}}, credentials, region_, now_s(), std::min(life_s, kLongestLinkS));
}

}  // namespace ditfleet::s3
