#include "shared/s3/credentials.h"

#include <ctime>
#include <string_view>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/environment.h"
#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::s3 {
namespace {

using namespace std::chrono_literals;

constexpr std::int64_t kRenewBeforeMs = 300'000, kReadAgainMs = 60'000, kAskAgainMs = 10'000;
constexpr auto kMetadataTimeout = 2s;
constexpr std::string_view kBlank = " \t\r";  // at the ends of lines

HttpClient::Request request_of(std::string url, std::string header) {
  HttpClient::Request request{.url = std::move(url), .timeout = kMetadataTimeout, .proxy = false};
  if (!header.empty()) request.headers.push_back(std::move(header));
  return request;
}

}  // namespace

Result<Credentials> credentials_in(std::string_view file, const std::string& profile) {
  Credentials found;
  bool here = false, any = false;
  for (std::string_view line : split(file, '\n')) {
    line = trimmed(line, kBlank);
    if (line.empty() || line.starts_with('#') || line.starts_with(';')) continue;
    if (line.starts_with('[')) {
      here = trimmed(line.substr(1, line.find(']') - 1), kBlank) == profile;
      any = any || here;
      continue;
    }
    const std::string_view name = trimmed(take_part(line, '='), kBlank);
    const std::string value(trimmed(line, kBlank));
    if (!here) continue;
    if (name == "aws_access_key_id") found.id = value;
    if (name == "aws_secret_access_key") found.secret = value;
    if (name == "aws_session_token") found.token = value;
  }
  if (!any) return not_found("has no profile '" + excerpt(profile, 64) + "'");
  if (found.id.empty() || found.secret.empty())
    return invalid_argument("has no aws_access_key_id or no aws_secret_access_key in profile '" + excerpt(profile, 64) +
                            "'; write both");
  return found;
}

Result<Credentials> credentials_of_answer(const std::string& text) {
  const auto parsed = parse_json(text);
  Credentials out;
  std::string expires;
  if (parsed && parsed->is_object()) {
    for (auto [name, into] : {std::pair<const char*, std::string*>{"AccessKeyId", &out.id},
                              {"SecretAccessKey", &out.secret},
                              {"Token", &out.token},
                              {"Expiration", &expires}}) {
      const json::value* value = parsed->get_object().if_contains(name);
      if (value && value->is_string()) *into = value->get_string();
    }
  }
  if (out.id.empty() || out.secret.empty()) return unavailable("answered '" + excerpt(text, 100) + "'");
  std::tm time{};
  if (strptime(expires.c_str(), "%Y-%m-%dT%H:%M:%S", &time) != nullptr)
    out.expires_ms = std::int64_t{timegm(&time)} * 1000;
  return out;
}

asio::awaitable<Result<Credentials>> CredentialChain::of_container() {
  std::string url = environment_variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (const std::string path = environment_variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"); !path.empty())
    url = "http://169.254.170.2" + path;
  std::string token = environment_variable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
  if (const std::string path = environment_variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); !path.empty()) {
    const auto file = read_file(path);
    if (!file) co_return file.error();
    token = trimmed(std::string_view(*file).substr(0, file->find('\n')), kBlank);
  }
  auto request = request_of(url, token.empty() ? "" : "Authorization: " + token);
  const auto answer = co_await client_.send(std::move(request));
  auto found = credentials_of_answer(answer.body);
  if (!found) co_return unavailable("'" + url + "' " + (answer.error.empty() ? found.error().message : answer.error));
  co_return found;
}

asio::awaitable<Result<Credentials>> CredentialChain::of_instance() {
  std::string base = environment_variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  if (base.empty()) base = "http://169.254.169.254";
  while (base.ends_with('/')) base.pop_back();
  HttpClient::Request ask = request_of(base + "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds: 300");
  ask.method = "PUT";
  ask.body = std::make_shared<std::string>();
  auto answer = co_await client_.send(std::move(ask));
  const std::string token = "X-aws-ec2-metadata-token: " + answer.body;
  std::string url = base + "/latest/meta-data/iam/security-credentials/";
  for (int i = 0; answer.status == 200 && i < 2; ++i) {  // the role's name, then its credentials
    auto next = request_of(url, token);
    answer = co_await client_.send(std::move(next));
    if (answer.status == 200 && i == 0) url += answer.body.substr(0, answer.body.find('\n'));
  }
  auto found = credentials_of_answer(answer.body);
  if (!found || answer.status != 200)
    co_return unavailable("'" + base + "' " +
                          (answer.error.empty() ? "answered " + std::to_string(answer.status) : answer.error));
  co_return found;
}

asio::awaitable<Result<Credentials>> CredentialChain::find() {
  Credentials out{environment_variable("AWS_ACCESS_KEY_ID"), environment_variable("AWS_SECRET_ACCESS_KEY"),
                  environment_variable("AWS_SESSION_TOKEN")};
  if (out.id.empty() != out.secret.empty())
    co_return unavailable("only one of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is set; set both");
  if (!out.id.empty()) co_return out;
  std::string path = environment_variable("AWS_SHARED_CREDENTIALS_FILE"), profile = environment_variable("AWS_PROFILE");
  if (path.empty()) path = environment_variable("HOME") + "/.aws/credentials";
  const auto file = read_file(path);
  if (file) {
    auto found = credentials_in(*file, profile.empty() ? "default" : profile);
    if (found) co_return found;
    if (!profile.empty() || found.error().code != Code::kNotFound)
      co_return unavailable("'" + path + "' " + found.error().message);
  } else if (!profile.empty()) {
    co_return unavailable("AWS_PROFILE is set, but " + file.error().message);
  }
  const bool container = !environment_variable("AWS_CONTAINER_CREDENTIALS_FULL_URI").empty() ||
                         !environment_variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").empty();
  std::string why = "AWS_EC2_METADATA_DISABLED is set";
  if (container || environment_variable("AWS_EC2_METADATA_DISABLED") != "true") {
    // Outside the co_await, because GCC 12 evaluates both branches of a conditional inside one.
    auto asking = container ? of_container() : of_instance();
    auto found = co_await std::move(asking);
    if (found) co_return found;
    why = found.error().message;
  }
  co_return unavailable(
      "there are no credentials for S3; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, write them to '" + path +
      "', or give the container or the instance a role (" + why + ")");
}

asio::awaitable<Result<Credentials>> CredentialChain::get() {
  if (!known_.id.empty() && unix_ms() < renew_ms_) co_return known_;
  auto found = co_await find();
  const std::int64_t now = unix_ms();
  if (found) {
    known_ = *found;
    // Half of their time, if that is less.
    renew_ms_ = known_.expires_ms > 0
                    ? std::max(known_.expires_ms - kRenewBeforeMs, now + (known_.expires_ms - now) / 2)
                    : now + kReadAgainMs;
    co_return known_;
  }
  if (known_.id.empty() || (known_.expires_ms > 0 && known_.expires_ms <= now)) co_return found;
  renew_ms_ = now + kAskAgainMs;
  co_return known_;
}

}  // namespace ditfleet::s3
