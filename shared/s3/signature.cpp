#include "shared/s3/signature.h"

#include <fmt/chrono.h>
#include <sodium.h>

#include <cctype>

#include "shared/core/bytes.h"

namespace ditfleet::s3 {
namespace {

constexpr const char* kAlgorithm = "AWS4-HMAC-SHA256";

std::string hmac(std::string_view key, std::string_view text) {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(key.data()), key.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  std::string out(crypto_auth_hmacsha256_BYTES, '\0');
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(out.data()));
  return out;
}

std::string scope_of(const std::string& region, const std::string& date) {
  return date.substr(0, 8) + "/" + region + "/s3/aws4_request";
}

std::string signed_headers(const SignedParts& parts) {
  std::string names;
  auto headers = parts.headers;
  headers["host"];
  for (const auto& [name, value] : headers) names += (names.empty() ? "" : ";") + name;
  return names;
}

std::string signature(const SignedParts& parts, const Credentials& credentials, const std::string& region,
                      const std::string& date) {
  auto headers = parts.headers;
  headers["host"] = parts.host;
  std::string request = parts.method + "\n" + parts.path + "\n" + canonical_query(parts.query) + "\n";
  for (const auto& [name, value] : headers) request.append(name).append(":").append(value).append("\n");
  request += "\n" + signed_headers(parts) + "\n" + parts.payload_sha256;
  const std::string text =
      std::string(kAlgorithm) + "\n" + date + "\n" + scope_of(region, date) + "\n" + sha256_hex(request);
  const std::string day = hmac("AWS4" + credentials.secret, date.substr(0, 8));
  const std::string digest = hmac(hmac(hmac(hmac(day, region), "s3"), "aws4_request"), text);
  return to_hex({reinterpret_cast<const unsigned char*>(digest.data()), digest.size()});
}

}  // namespace

std::string uri_encoded(std::string_view text, bool path) {
  constexpr std::string_view kPlain = "-._~";
  std::string out;
  for (const unsigned char c : text) {
    const bool plain = (c < 0x80 && std::isalnum(c)) || kPlain.find(static_cast<char>(c)) != kPlain.npos;
    if (plain || (path && c == '/')) {
      out += static_cast<char>(c);
    } else {
      out += fmt::format("%{:02X}", c);
    }
  }
  return out;
}

std::string canonical_query(const std::map<std::string, std::string>& query) {
  std::string out;
  for (const auto& [name, value] : query)
    out += (out.empty() ? "" : "&") + uri_encoded(name) + "=" + uri_encoded(value);
  return out;
}

std::string amz_date(std::int64_t unix_s) {
  return fmt::format("{:%Y%m%dT%H%M%SZ}", fmt::gmtime(static_cast<std::time_t>(unix_s)));
}

std::string authorization(const SignedParts& parts, const Credentials& credentials, const std::string& region,
                          std::int64_t at_s) {
  const std::string date = amz_date(at_s);
  return std::string(kAlgorithm) + " Credential=" + credentials.id + "/" + scope_of(region, date) +
         ",SignedHeaders=" + signed_headers(parts) + ",Signature=" + signature(parts, credentials, region, date);
}

std::string presigned_query(SignedParts parts, const Credentials& credentials, const std::string& region,
                            std::int64_t at_s, std::int64_t life_s) {
  const std::string date = amz_date(at_s);
  parts.query["X-Amz-Algorithm"] = kAlgorithm;
  parts.query["X-Amz-Credential"] = credentials.id + "/" + scope_of(region, date);
  parts.query["X-Amz-Date"] = date;
  parts.query["X-Amz-Expires"] = std::to_string(life_s);
  parts.query["X-Amz-SignedHeaders"] = signed_headers(parts);
  if (!credentials.token.empty()) parts.query["X-Amz-Security-Token"] = credentials.token;
  return canonical_query(parts.query) + "&X-Amz-Signature=" + signature(parts, credentials, region, date);
}

}  // namespace ditfleet::s3
