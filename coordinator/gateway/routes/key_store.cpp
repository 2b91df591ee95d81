#include "coordinator/gateway/routes/key_store.h"

#include <spdlog/spdlog.h>

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <filesystem>
#include <sstream>

#include "shared/core/bytes.h"
#include "shared/redis/connection.h"

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;

// Hash: id → "<sha256> <tenant> <admin> <created_ms>". The field "" is the version: it changes with every key.
constexpr std::string_view kStored = "df:{keys}";

// ARGV: the expected version, id, record ("" removes the key). The time never repeats, not even after a FLUSHALL.
constexpr std::string_view kChange = R"LUA(#!lua
if (redis.call('HGET', KEYS[1], '') or '') ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('HSET', KEYS[1], '', table.concat(redis.call('TIME'), '.'))
return 1
)LUA";

}  // namespace

KeyStore::KeyStore(std::shared_ptr<redis::Connection> connection, KeyRing& ring, const std::string& folder)
    : connection_(std::move(connection)),
      ring_(ring),
      marker_(folder.empty() ? "" : folder + "/keys-required"),
      must_remember_(ring.would_open()) {
  ring_.await_added();
  // A file that cannot be examined counts as present.
  std::error_code ec;
  remembered_ = !marker_.empty() && (std::filesystem::exists(marker_, ec) || ec);
  if (remembered_) require_keys();
}

void KeyStore::require_keys() {
  ring_.require_keys(
      "an API key is required, but Redis has lost the keys of this service; restore Redis' backup, or configure an "
      "administrator's key (option `keys`) and restart. To serve everybody without keys again, delete '" +
      marker_ + "' and restart");
}

Result<void> KeyStore::remember() {
  if (remembered_) return {};
  std::error_code ec;
  if (!marker_.empty()) std::filesystem::create_directories(std::filesystem::path(marker_).parent_path(), ec);
  const auto written = marker_.empty()
                           ? unavailable("there is no data folder")
                           : write_file_atomically(marker_,
                                                   "Keys were added. Without this file, a coordinator whose Redis "
                                                   "has lost them would serve everybody.\n");
  remembered_ = written.ok();
  if (written || !must_remember_) return {};
  return unavailable("cannot remember outside Redis that keys are required: " + written.error().message +
                     "; set data.dir to a folder that this service can write, or gateway.require_keys to true");
}

asio::awaitable<Result<void>> KeyStore::refresh(Deadline deadline) {
  auto stored = co_await connection_->execute(redis::Command("HGETALL") << kStored, deadline);
  if (!stored) co_return stored.error();
  std::vector<Key> keys;
  std::string version;
  for (std::size_t i = 0; i + 1 < stored->elements.size(); i += 2) {
    std::istringstream record(stored->elements[i + 1].text);
    Key key{.id = stored->elements[i].text};
    if (key.id.empty())
      version = record.str();
    else if (record >> key.sha256 >> key.tenant >> key.admin >> key.created_ms)
      keys.push_back(std::move(key));
  }
  if (version.empty() && !version_.empty())
    spdlog::error("gateway: the keys in Redis are gone; the last known ones stay valid until a key is added");
  if (!version.empty()) {
    require_keys();
    if (const auto done = remember(); !done && !std::exchange(warned_, true))
      spdlog::error("gateway: {}", done.error().message);
  }
  if ((version != version_ && !version.empty()) || ring_.awaits_added()) ring_.set_added(keys);
  version_ = version;
  co_return Result<void>();
}

asio::awaitable<void> KeyStore::follow() {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  for (;;) {
    (void)co_await refresh(Deadline::after(5s));
    timer.expires_after(ring_.awaits_added() ? 50ms : 1000ms);
    co_await timer.async_wait(asio::use_awaitable);
  }
}

asio::awaitable<Result<void>> KeyStore::change(Key key, bool keep, Deadline deadline) {
  if (auto done = remember(); keep && !done) co_return done.error();
  std::ostringstream record;
  if (keep) record << key.sha256 << ' ' << key.tenant << ' ' << key.admin << ' ' << key.created_ms;
  redis::Command command("EVAL");
  command << kChange << 1 << kStored << version_ << key.id << record.str();
  auto done = co_await connection_->execute(std::move(command), deadline);
  if (!done) co_return done.error();
  if (done->integer == 0)
    co_return Error{Code::kConflict, "the keys were changed by another administrator; try again", {}};
  co_return co_await refresh(deadline);
}

}  // namespace ditfleet::gateway
