#include "coordinator/gateway/webhooks/delivery_store.h"

#include <algorithm>
#include <sstream>

#include "coordinator/gateway/webhooks/signature.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::gateway {
namespace {

constexpr std::int64_t kOldSecretMs = 86'400'000;
constexpr int kPage = 200;

Deadline soon() { return Deadline::after(std::chrono::seconds(5)); }

Result<Delivery> parse_delivery(const std::string& id, const std::string& text) {
  const auto parsed = parse_json(text);
  if (!parsed || !parsed->is_object()) return Error{Code::kDataCorrupt, "delivery '" + id + "' is not JSON", {}};
  const json::object& o = parsed->get_object();
  const auto string = [&](const char* name) {
    const json::value* v = o.if_contains(name);
    return v && v->is_string() ? std::string(v->get_string()) : std::string();
  };
  const auto number = [&](const char* name) {
    const json::value* v = o.if_contains(name);
    return v && v->is_int64() ? v->get_int64() : 0;
  };
  Delivery d{.id = id, .tenant = string("tenant"), .url = string("url"), .type = string("type"), .job = string("job")};
  d.attempts = static_cast<int>(number("attempts"));
  d.first_ms = number("first_ms");
  d.due_ms = number("due_ms");
  d.error = string("error");
  d.dead = string("state") == "dead";
  d.body = string("body");
  return d;
}

}  // namespace

json::object delivery_json(const Delivery& d) {
  return {{"id", d.id},
          {"object", "webhook.delivery"},
          {"state", d.dead ? "dead" : "waiting"},
          {"type", d.type},
          {"job", d.job},
          {"tenant", d.tenant},
          {"url", d.url},
          {"attempts", d.attempts},
          {"first_ms", d.first_ms},
          {"due_ms", d.due_ms},
          {"error", d.error}};
}

asio::awaitable<Result<std::vector<std::string>>> DeliveryStore::secrets(std::string tenant) {
  auto stored = co_await redis_->execute(redis::Command("HGET") << keys_.hook_secrets() << tenant, soon());
  if (!stored) co_return stored.error();
  if (stored->is_nil()) {
    auto made = co_await redis_->execute(
        redis::Command("HSETNX") << keys_.hook_secrets() << tenant << new_webhook_secret(), soon());
    if (!made) co_return made.error();
    stored = co_await redis_->execute(redis::Command("HGET") << keys_.hook_secrets() << tenant, soon());
    if (!stored) co_return stored.error();
  }
  std::istringstream text(stored->text);  // "<secret>", or "<secret> <the one before> <until, in ms>"
  std::string secret, before;
  std::int64_t until = 0;
  text >> secret;
  std::vector<std::string> out{secret};
  if (text >> before >> until && unix_ms() < until) out.push_back(before);
  co_return out;
}

asio::awaitable<Result<std::string>> DeliveryStore::rotate(std::string tenant) {
  auto old = co_await secrets(tenant);
  if (!old) co_return old.error();
  std::string secret = new_webhook_secret();
  const std::string record = secret + " " + old->front() + " " + std::to_string(unix_ms() + kOldSecretMs);
  auto done = co_await redis_->execute(redis::Command("HSET") << keys_.hook_secrets() << tenant << record, soon());
  if (!done) co_return done.error();
  co_return secret;
}

asio::awaitable<Result<void>> DeliveryStore::put(const Delivery& d) {
  json::object record = delivery_json(d);
  record["body"] = d.body;
  auto done =
      co_await redis_->execute(redis::Command("HSET") << keys_.deliveries() << d.id << json::serialize(record), soon());
  co_return without_value(done);
}

asio::awaitable<Result<Delivery>> DeliveryStore::get(std::string id) {
  auto stored = co_await redis_->execute(redis::Command("HGET") << keys_.deliveries() << id, soon());
  if (!stored) co_return stored.error();
  if (stored->is_nil())
    co_return Error{Code::kNotFound, "delivery '" + id + "' does not exist; see GET /v1/webhooks/deliveries", {}};
  co_return parse_delivery(id, stored->text);
}

asio::awaitable<Result<void>> DeliveryStore::remove(std::string id) {
  co_return without_value(co_await redis_->execute(redis::Command("HDEL") << keys_.deliveries() << id, soon()));
}

asio::awaitable<Result<std::vector<Delivery>>> DeliveryStore::list(std::string tenant) {
  std::vector<Delivery> out;
  std::string cursor = "0";
  do {
    auto page =
        co_await redis_->execute(redis::Command("HSCAN") << keys_.deliveries() << cursor << "COUNT" << kPage, soon());
    if (!page) co_return page.error();
    cursor = page->elements.at(0).text;
    const auto& fields = page->elements.at(1).elements;
    for (std::size_t i = 0; i + 1 < fields.size(); i += 2) {
      auto delivery = parse_delivery(fields[i].text, fields[i + 1].text);
      if (!delivery || (!tenant.empty() && delivery->tenant != tenant)) continue;
      delivery->body.clear();
      out.push_back(std::move(*delivery));
    }
  } while (cursor != "0");
  std::ranges::sort(out, [](const Delivery& a, const Delivery& b) {
    return std::tie(a.first_ms, a.id) < std::tie(b.first_ms, b.id);
  });
  const auto same = std::ranges::unique(out, {}, &Delivery::id);  // HSCAN may repeat fields
  out.erase(same.begin(), same.end());
  co_return out;
}

asio::awaitable<Result<Delivery>> DeliveryStore::replay(std::string id, std::string tenant) {
  auto delivery = co_await get(id);
  if (!delivery) co_return delivery.error();
  if (!tenant.empty() && delivery->tenant != tenant)
    co_return Error{Code::kNotFound, "delivery '" + id + "' does not exist; see GET /v1/webhooks/deliveries", {}};
  delivery->dead = false;
  delivery->attempts = 0;
  delivery->first_ms = delivery->due_ms = unix_ms();
  if (auto done = co_await put(*delivery); !done) co_return done.error();
  auto told = co_await redis_->execute(redis::Command("XADD") << keys_.outbox() << "*"
                                                              << "e" << id + " replay",
                                       soon());
  if (!told) co_return told.error();
  co_return delivery;
}

asio::awaitable<Result<std::vector<DeliveryStore::Change>>> DeliveryStore::changes(std::string after, int limit) {
  auto entries = co_await redis_->execute(redis::Command("XRANGE") << keys_.outbox() << "(" + after << "+"
                                                                   << "COUNT" << limit,
                                          soon());
  if (!entries) co_return entries.error();
  std::vector<Change> out;
  for (const redis::Reply& entry : entries->elements) {
    Change change{.entry = entry.elements.at(0).text, .job = {}, .change = {}};
    if (entry.elements.at(1).elements.size() == 2) {
      const std::string& text = entry.elements[1].elements[1].text;
      const auto space = std::min(text.size(), text.rfind(' '));
      change.job = text.substr(0, space);
      change.change = text.substr(std::min(text.size(), space + 1));
    }
    out.push_back(std::move(change));
  }
  co_return out;
}

asio::awaitable<Result<void>> DeliveryStore::forget(std::string entry) {
  co_return without_value(co_await redis_->execute(redis::Command("XDEL") << keys_.outbox() << entry, soon()));
}

asio::awaitable<Result<std::vector<std::string>>> DeliveryStore::watched() {
  auto members = co_await redis_->execute(redis::Command("SMEMBERS") << keys_.watched(), soon());
  if (!members) co_return members.error();
  std::vector<std::string> out;
  for (const redis::Reply& member : members->elements) out.push_back(member.text);
  co_return out;
}

}  // namespace ditfleet::gateway
