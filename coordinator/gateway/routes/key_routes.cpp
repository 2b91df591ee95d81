// For administrators: keys (add, list, rotate, revoke), and what tenants use of their quotas. For tenants: what they
// used.
#include <fmt/chrono.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/routes/api_context.h"
#include "coordinator/gateway/routes/errors.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/ids.h"
#include "shared/core/wall_clock.h"
#include "shared/job/object_reader.h"
#include "shared/loras/registry_mirror.h"
#include "shared/queue/keys.h"
#include "shared/queue/reply_fields.h"
#include "shared/redis/connection.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

using Answer = Result<json::object>;

json::object key_json(const Key& key) {
  return {{"id", key.id},
          {"object", "key"},
          {"tenant", key.tenant},
          {"admin", key.admin},
          {"source", key.configured() ? "configuration" : "added"},
          {"created_ms", key.configured() ? json::value(nullptr) : json::value(key.created_ms)}};
}

json::object use_json(std::int64_t use, std::int64_t quota) {
  return {{"used", use}, {"quota", quota > 0 ? json::value(quota) : json::value(nullptr)}};
}

Deadline soon() { return Deadline::after(std::chrono::seconds(5)); }
Error key_error(const Error& error) {
  return redis_error(error, "the Redis that stores the keys", "list the keys to see whether they were changed",
                     "raise its maxmemory");
}

asio::awaitable<Result<void>> refresh(const ApiContext& context) {
  if (!context.key_store) co_return unavailable("this gateway has no store for keys");
  auto fresh = co_await context.key_store->refresh(soon());
  if (!fresh) co_return key_error(fresh.error());
  co_return Result<void>();
}

// Whether a key other than `id` is an administrator's. Keys that Redis has lost do not count.
bool has_administrator(const ApiContext& context, const std::string& id) {
  return std::any_of(context.keys.keys().begin(), context.keys.keys().end(), [&](const Key& key) {
    return key.admin && key.id != id && (key.configured() || !context.key_store->empty());
  });
}

// The added key that the path names.
asio::awaitable<Result<Key>> find(const ApiContext& context, CallPtr call) {
  if (auto fresh = co_await refresh(context); !fresh) co_return fresh.error();
  const std::string& id = call->param(0);
  for (const Key& key : context.keys.keys()) {
    if (key.id != id) continue;
    if (!key.configured()) co_return key;
    co_return Error{
        Code::kConflict, "key '" + id + "' is set by the option `keys`; change the configuration and restart", {}};
  }
  co_return Error{Code::kNotFound, "key '" + excerpt(id, 100) + "' not found; see GET /v1/keys", {}};
}

json::object audited(const Call& call, const Key& key, const char* act) {
  spdlog::info("audit: {} of tenant '{}' {} key {} of tenant '{}', administrator: {}, request {}",
               call.caller.key.empty() ? "nobody's key" : "key " + call.caller.key, call.caller.tenant, act, key.id,
               key.tenant, key.admin, call.request_id);
  return key_json(key);
}

// Stores the key with a new secret, which only this answer contains.
asio::awaitable<Answer> issue(const ApiContext& context, CallPtr call, Key key, const char* act) {
  const std::string secret = "df-" + new_nonce();
  key.sha256 = sha256_hex(secret);
  if (auto done = co_await context.key_store->put(key, soon()); !done) co_return key_error(done.error());
  json::object body = audited(*call, key, act);
  body["key"] = secret;
  co_return body;
}

std::string month_at(std::int64_t ms) { return fmt::format("{:%Y-%m}", fmt::gmtime(ms / 1000)); }

// GPU-seconds of each tenant's results in a month.
asio::awaitable<Result<std::map<std::string, double>>> gpu_seconds(const ApiContext& context, std::string month) {
  if (!context.dependencies.redis || !context.dependencies.queue) co_return std::map<std::string, double>();
  const queue::Keys keys(context.dependencies.queue->options().shard);
  const auto stored =
      co_await context.dependencies.redis->execute(redis::Command("HGETALL") << keys.usage(month), soon());
  if (!stored) co_return key_error(stored.error());
  std::map<std::string, double> out;
  for (const auto& [tenant, us] : queue::fields_of(*stored))
    out.emplace(tenant, static_cast<double>(leading_integer(us)) / 1e6);
  co_return out;
}

// What the caller's tenant has used, the latest month first.
asio::awaitable<Answer> get_usage(const ApiContext& context, CallPtr call) {
  constexpr int kMonths = 12;
  json::array months;
  std::int64_t at_ms = unix_ms();
  for (int i = 0; i < kMonths; ++i) {
    const std::string month = month_at(at_ms);
    const auto used = co_await gpu_seconds(context, month);
    if (!used) co_return used.error();
    const auto own = used->find(call->caller.tenant);
    if (own != used->end() || i == 0)
      months.push_back(json::object{{"month", month}, {"gpu_seconds", own == used->end() ? 0.0 : own->second}});
    while (month_at(at_ms) == month) at_ms -= 86'400'000;
  }
  co_return json::object{{"object", "usage"}, {"tenant", call->caller.tenant}, {"months", std::move(months)}};
}

// Every tenant that has a key, options, open jobs, images or streams.
asio::awaitable<Answer> list_tenants(const ApiContext& context, CallPtr) {
  const auto& settings = context.dependencies.settings;
  auto uses = co_await context.service.use();
  if (!uses) co_return uses.error();
  auto names = context.keys.tenants();
  for (const auto& [name, unused] : settings.tenants) names.insert(name);
  for (const auto& [name, unused] : *uses) names.insert(name);
  auto seconds = co_await gpu_seconds(context, month_at(unix_ms()));
  if (!seconds) co_return seconds.error();
  for (const auto& [name, unused] : *seconds) names.insert(name);
  auto streams = context.streams->by_tenant;
  for (const auto& [name, unused] : streams) names.insert(name);
  json::array list;
  for (const auto& name : names) {
    const auto quota = config::quotas_of(settings, name);
    const auto stored = context.dependencies.adapters->use(name);
    list.push_back(json::object{{"tenant", name},
                                {"gpu_seconds_this_month", (*seconds)[name]},
                                {"queued_units", use_json((*uses)[name].units, quota.queued_units)},
                                {"queued_bytes", use_json((*uses)[name].bytes, quota.queued_bytes)},
                                {"adapters", use_json(stored.adapters, quota.adapters)},
                                {"adapter_bytes", use_json(stored.bytes, quota.adapter_bytes)},
                                {"streams", use_json(streams[name], quota.streams)},
                                {"inputs", use_json((*uses)[name].inputs, quota.inputs)},
                                {"input_bytes", use_json((*uses)[name].input_bytes, quota.input_bytes)}});
  }
  co_return json::object{{"object", "list"}, {"tenants", std::move(list)}};
}

asio::awaitable<Answer> list_keys(const ApiContext& context, CallPtr) {
  if (auto fresh = co_await refresh(context); !fresh) co_return fresh.error();
  json::array keys;
  for (const Key& key : context.keys.keys()) keys.push_back(key_json(key));
  co_return json::object{{"object", "list"}, {"keys", std::move(keys)}};
}

asio::awaitable<Answer> add_key(const ApiContext& context, CallPtr call) {
  std::function<Result<json::value>()> work = [body = call->request.body] { return parse_json(body); };
  auto body = co_await context.off_loop<json::value>(call, call->request.body.size(), std::move(work));
  if (!body || !body->is_object())
    co_return invalid_argument("the body must be a JSON object such as {\"tenant\": \"acme\"}");
  job::ObjectReader reader(body->get_object(), "");
  reader.refuse_unknown({"tenant", "admin"});
  Key key{.id = new_id(), .tenant = reader.text("tenant", 64).value_or(""), .created_ms = unix_ms()};
  if (!is_valid_id(key.tenant)) reader.fail("tenant", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -");
  const auto* admin = reader.find("admin");
  if (admin && !admin->is_bool()) reader.fail("admin", "must be true or false");
  if (!reader.ok()) co_return *reader.error();
  key.admin = admin && admin->get_bool();
  if (auto fresh = co_await refresh(context); !fresh) co_return fresh.error();
  if (!key.admin && !has_administrator(context, "")) {
    co_return invalid_argument(
        "the first key must be an administrator's, because only administrators add keys; send \"admin\": true",
        "admin");
  }
  if (context.keys.keys().size() >= KeyStore::kMost)
    co_return Error{
        Code::kConflict, "there are " + std::to_string(KeyStore::kMost) + " keys, the maximum; revoke one first", {}};
  co_return co_await issue(context, call, std::move(key), "added");
}

asio::awaitable<Answer> rotate(const ApiContext& context, CallPtr call) {
  const auto key = co_await find(context, call);
  if (!key) co_return key.error();
  co_return co_await issue(context, call, *key, "rotated");
}

asio::awaitable<Answer> revoke(const ApiContext& context, CallPtr call) {
  const auto key = co_await find(context, call);
  if (!key) co_return key.error();
  if (key->admin && !has_administrator(context, key->id))
    co_return Error{
        Code::kConflict, "key '" + key->id + "' is the last administrator's key; add another one first", {}};
  if (auto done = co_await context.key_store->remove(*key, soon()); !done) co_return key_error(done.error());
  co_return audited(*call, *key, "revoked");
}

}  // namespace

asio::awaitable<void> export_usage(const ApiContext& context) {
  static const telemetry::Gauges used("ditfleet_tenant_gpu_seconds");
  const auto seconds = co_await gpu_seconds(context, month_at(unix_ms()));
  if (!seconds) co_return;
  for (const auto& [tenant, value] : *seconds) used({tenant}).Set(value);
}

void add_key_routes(Router& router) {
  const auto add = [&](std::string_view method, std::string_view pattern, auto handler) {
    const auto answer = [handler](const ApiContext& context, CallPtr call) -> asio::awaitable<Result<Response>> {
      if (auto refused = call->request.body.empty() ? std::nullopt : refuse_body_unless_json(call->request))
        co_return std::move(*refused);
      const auto body = co_await handler(context, call);
      if (!body) co_return body.error();
      co_return json_response(200, *body).with("Cache-Control", "no-store");
    };
    router.add({method, pattern, answer, Access::kAdministrator});
  };
  router.add({"GET", "/v1/usage", [](const ApiContext& context, CallPtr call) -> asio::awaitable<Result<Response>> {
                const auto body = co_await get_usage(context, call);
                if (!body) co_return body.error();
                co_return json_response(200, *body).with("Cache-Control", "no-store");
              }});
  add("GET", "/v1/tenants", list_tenants);
  add("GET", "/v1/keys", list_keys);
  add("POST", "/v1/keys", add_key);
  add("POST", "/v1/keys/{id}/rotate", rotate);
  add("DELETE", "/v1/keys/{id}", revoke);
}

}  // namespace ditfleet::gateway
