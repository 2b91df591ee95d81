#include "shared/kernel_cache/redis_tier.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/counters.h"
#include "shared/kernel_cache/secret.h"

namespace ditfleet::kernel_cache {
namespace {

namespace asio = boost::asio;
using redis::Command;
using redis::Reply;
using Replies = std::vector<Result<Reply>>;

constexpr std::string_view kPrefix = "df:{0}:kernel:1:";
constexpr std::string_view kIndex = "df:{0}:kernels";
// The head of a value in chunks: "DFCHUNKS <id> <bytes>".
constexpr std::string_view kChunked = "DFCHUNKS ";

// Both check the token: the lock may have expired and belong to another process by now.
constexpr std::string_view kRenew =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0";
constexpr std::string_view kRelease =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

struct Chunks {
  std::string id;
  std::uint64_t bytes = 0;
  std::size_t count() const {
    return static_cast<std::size_t>((bytes + RedisTier::kChunkBytes - 1) / RedisTier::kChunkBytes);
  }
};

std::optional<Chunks> parse_chunks(std::string_view head) {
  if (!head.starts_with(kChunked) || head.size() > 64) return std::nullopt;
  head.remove_prefix(kChunked.size());
  const auto id = take_part(head, ' ');
  const auto bytes = number_of<std::uint64_t>(head, 0, kMaxValueBytes);
  if (id.size() != 16 || !bytes) return std::nullopt;
  return Chunks{std::string(id), *bytes};
}

// Errors of the server or the connection, not of one key or command. An ACL that forbids EVAL, ZADD or PEXPIRE leaves
// enough to share programs.
bool is_failure(const Error& error) {
  if (error.code == Code::kPermissionDenied) return error.kind != "NOPERM";
  return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded;
}

bool is_wrong_type(const Error& error) { return error.kind == "WRONGTYPE"; }

Error left_out() {
  return unavailable("[kernel_cache] Redis failed repeatedly; it is not used until it responds again");
}

// At most a chunk and a byte: a longer text is not a value, and is not fetched whole.
Command head_of(const std::string& name) {
  return std::move(Command("GETRANGE") << name << 0 << static_cast<std::int64_t>(RedisTier::kChunkBytes));
}

std::string name_of(const Key& key) { return std::string(kPrefix) + key.hex(); }

std::string chunk_of(const Key& key, const Chunks& chunks, std::size_t i) {
  return name_of(key) + ":chunk:" + chunks.id + ":" + std::to_string(i);
}

}  // namespace

class RedisTier::Impl {
 public:
  explicit Impl(CacheOptions options)
      : options_(std::move(options)),
        work_(asio::make_work_guard(io_)),
        connection_(redis::Connection::create(io_.get_executor(), {.endpoint = *options_.redis,
                                                                   .connect_timeout = options_.redis_timeout,
                                                                   .max_pending_bytes = std::size_t{256} << 20})),
        first_connection_(Deadline::after(options_.redis_timeout)),
        breaker_({.slow = options_.redis_timeout / 2}) {
    asio::post(io_, [connection = connection_] { connection->start(); });
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "kernels-redis");
      io_.run();
    });
  }

  ~Impl() {
    asio::post(io_, [this] { connection_->stop(); });
    work_.reset();
    // Pending renewals are dropped: the locks expire.
    asio::post(io_, [this] { io_.stop(); });
    thread_.join();
  }

  // One round trip. The error is one of the server or the connection; errors of single commands are in the replies.
  Result<Replies> exchange(std::vector<Command> commands) {
    std::optional<Breaker::Ticket> ticket;
    {
      const std::lock_guard lock(mutex_);
      ticket = breaker_.enter(Breaker::Clock::now());
      if (ticket && breaker_.state() == Breaker::State::kHalfOpen) show_breaker(0.5);
    }
    if (!ticket) return left_out();
    Replies replies = perform(std::move(commands), Deadline::after(options_.redis_timeout));
    const auto failed = std::find_if(replies.begin(), replies.end(),
                                     [](const auto& reply) { return !reply && is_failure(reply.error()); });
    report(*ticket, failed == replies.end(), failed == replies.end() ? std::string() : failed->error().message);
    if (failed != replies.end()) return failed->error();
    return replies;
  }

  // One command; its own error, too.
  Result<Reply> exchange(Command command) {
    std::vector<Command> commands;
    commands.push_back(std::move(command));
    auto replies = exchange(std::move(commands));
    if (!replies) return replies.error();
    return std::move(replies->front());
  }

  // The value whose head is `head`. Stops at the first chunk of a wrong size: a forged head of 33 bytes must not cost
  // every reader a command for each MiB that it claims.
  Result<std::optional<Value>> whole(const Key& key, std::string head) {
    if (head.empty()) return std::optional<Value>();
    const auto chunks = parse_chunks(head);
    if (!chunks) return std::optional<Value>(Value{std::move(head), {}});
    std::string bytes;
    while (bytes.size() < chunks->bytes) {
      auto chunk = exchange(head_of(chunk_of(key, *chunks, bytes.size() / kChunkBytes)));
      if (!chunk && is_failure(chunk.error())) return chunk.error();
      const std::size_t wanted = std::min<std::uint64_t>(kChunkBytes, chunks->bytes - bytes.size());
      if (!chunk || chunk->text.size() != wanted) return std::optional<Value>(Value{{}, std::move(head)});
      bytes += chunk->text;
    }
    return std::optional<Value>(Value{std::move(bytes), std::move(head)});
  }

  // Of a reply to head_of().
  Result<std::optional<Value>> value_of(const Key& key, Result<Reply> reply) {
    if (!reply) {
      if (is_wrong_type(reply.error())) return std::optional<Value>(Value());
      return reply.error();
    }
    return whole(key, std::move(reply->text));
  }

  asio::awaitable<void> renew(std::shared_ptr<Lock> lock) {
    asio::steady_timer timer(io_);
    const auto pause = options_.lock / 4;
    std::weak_ptr<Lock> held = lock;
    lock.reset();  // the lock ends with its owner
    for (;;) {
      timer.expires_after(pause);
      co_await timer.async_wait(asio::use_awaitable);
      const auto still = held.lock();
      if (!still || still->over_) co_return;
      Command command("EVAL");
      command << kRenew << 1 << still->name_ << still->token_ << static_cast<std::int64_t>(options_.lock.count());
      (void)co_await connection_->execute(std::move(command), Deadline::after(pause * 2));
    }
  }

  const CacheOptions options_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  const std::shared_ptr<redis::Connection> connection_;
  const Deadline first_connection_;  // until then calls wait for the connection
  mutable std::mutex mutex_;
  Breaker breaker_;  // under mutex_
  std::thread thread_;

 private:
  Replies perform(std::vector<Command> commands, Deadline deadline) {
    const std::size_t count = commands.size();
    auto running = asio::co_spawn(
        io_,
        [this, commands = std::move(commands), deadline]() mutable -> asio::awaitable<Replies> {
          if (!connection_->connected() && connection_->generation() == 0 && first_connection_.passed()) {
            co_return Replies(commands.size(),
                              unavailable("[kernel_cache] no connection to " + options_.redis->display()));
          }
          co_return co_await connection_->execute_all(std::move(commands), deadline);
        },
        asio::use_future);
    try {
      return running.get();
    } catch (const std::exception& e) {
      return Replies(count, unavailable(std::string("[kernel_cache] Redis: ") + e.what()));
    }
  }

  void report(const Breaker::Ticket& ticket, bool good, const std::string& why) {
    const std::lock_guard lock(mutex_);
    const auto before = breaker_.state();
    breaker_.leave(ticket, good, Breaker::Clock::now());
    const auto after = breaker_.state();
    if (before == after) return;
    if (after == Breaker::State::kOpen) count_breaker_opened();
    show_breaker(after == Breaker::State::kOpen ? 1 : 0);
    if (after == Breaker::State::kOpen && before == Breaker::State::kClosed) {
      spdlog::warn("kernel cache: Redis is not used until it responds again; missing programs are compiled locally: {}",
                   why.empty() ? "it replies too slowly" : why);
    }
    if (after == Breaker::State::kClosed) spdlog::info("kernel cache: Redis is used again");
  }
};

RedisTier::RedisTier(CacheOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
RedisTier::~RedisTier() = default;

Result<std::optional<RedisTier::Value>> RedisTier::fetch(const Key& key) {
  return impl_->value_of(key, impl_->exchange(head_of(name_of(key))));
}

Result<RedisTier::Attempt> RedisTier::try_lock(const Key& key, std::string_view refused_head) {
  auto lock = std::make_shared<Lock>();
  // Nodes with different secrets do not wait for each other.
  lock->name_ = name_of(key) + ":" + impl_->options_.secret->id_text() + ":lock";
  lock->token_ = new_nonce();
  std::vector<Command> commands;
  commands.push_back(std::move(Command("SET") << lock->name_ << lock->token_ << "NX"
                                              << "PX" << static_cast<std::int64_t>(impl_->options_.lock.count())));
  commands.push_back(head_of(name_of(key)));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->at(0)) return replies->at(0).error();
  Attempt attempt;
  if (!replies->at(0)->is_nil()) {
    attempt.lock = lock;
    asio::co_spawn(impl_->io_, impl_->renew(lock), asio::detached);
  }
  if (!attempt.lock && !refused_head.empty() && replies->at(1) && replies->at(1)->text == refused_head) return attempt;
  auto value = impl_->value_of(key, std::move(replies->at(1)));
  if (!value) return value.error();
  attempt.value = std::move(*value);
  return attempt;
}

void RedisTier::release(const std::shared_ptr<Lock>& lock) {
  if (!lock || lock->over_.exchange(true)) return;
  (void)impl_->exchange(std::move(Command("EVAL") << kRelease << 1 << lock->name_ << lock->token_));  // or it expires
}

Result<RedisTier::Stored> RedisTier::store(const Key& key, std::string_view bytes, bool replace) {
  const std::string name = name_of(key);
  const auto ttl = static_cast<std::int64_t>(impl_->options_.redis_ttl.count());
  std::string head(bytes);
  if (bytes.size() > kChunkBytes) {
    if (!replace) {
      auto exists = impl_->exchange(std::move(Command("EXISTS") << name));
      if (!exists) return exists.error();
      if (exists->integer != 0) return Stored::kAlready;
    }
    const Chunks chunks{sha256_hex(bytes).substr(0, 16), bytes.size()};
    for (std::size_t i = 0; i < chunks.count(); ++i) {
      auto set = impl_->exchange(std::move(
          Command("SET") << chunk_of(key, chunks, i) << bytes.substr(i * kChunkBytes, kChunkBytes) << "PX" << ttl));
      if (!set) return set.error();
    }
    head = std::string(kChunked) + chunks.id + " " + std::to_string(bytes.size());
  }
  Command set("SET");
  set << name << head << "PX" << ttl;
  if (!replace) set << "NX";
  std::vector<Command> commands;
  commands.push_back(std::move(set));
  commands.push_back(std::move(Command("ZADD") << kIndex << unix_ms() << key.hex()));
  // Values that were not used for their TTL have expired.
  commands.push_back(std::move(Command("ZREMRANGEBYSCORE") << kIndex << "-inf" << unix_ms() - ttl));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->front()) return replies->front().error();  // errors of the index only affect `ditfleet cache`
  return replies->front()->is_nil() ? Stored::kAlready : Stored::kNow;
}

void RedisTier::refresh(const Key& key, std::string_view head) {
  const auto ttl = static_cast<std::int64_t>(impl_->options_.redis_ttl.count());
  std::vector<Command> commands;
  commands.push_back(std::move(Command("PEXPIRE") << name_of(key) << ttl));
  commands.push_back(std::move(Command("ZADD") << kIndex << "XX" << unix_ms() << key.hex()));
  if (const auto chunks = parse_chunks(head))
    for (std::size_t i = 0; i < chunks->count(); ++i)
      commands.push_back(std::move(Command("PEXPIRE") << chunk_of(key, *chunks, i) << ttl));
  (void)impl_->exchange(std::move(commands));  // if this fails, the value expires sooner
}

Result<std::vector<RedisTier::Listed>> RedisTier::list() {
  auto indexed = impl_->exchange(std::move(Command("ZRANGE") << kIndex << 0 << -1 << "WITHSCORES"));
  if (!indexed) return indexed.error();
  const auto& members = indexed->elements;
  std::vector<Listed> found;
  for (std::size_t i = 0; i + 1 < members.size(); i += 2) {
    const auto key = Key::from_hex(members[i].text);
    if (!key) continue;
    auto exists = impl_->exchange(std::move(Command("EXISTS") << name_of(*key)));
    if (!exists) return exists.error();
    if (exists->integer != 0)
      found.push_back({*key, leading_integer(members[i + 1].text)});
    else
      (void)impl_->exchange(std::move(Command("ZREM") << kIndex << members[i].text));
  }
  return found;
}

Result<bool> RedisTier::remove(const Key& key) {
  auto head = impl_->exchange(std::move(Command("GETRANGE") << name_of(key) << 0 << 63));
  if (!head && is_failure(head.error())) return head.error();
  Command unlink("UNLINK");
  unlink << name_of(key);
  if (head) {
    if (const auto chunks = parse_chunks(head->text)) {
      for (std::size_t i = 0; i < chunks->count(); ++i) unlink << chunk_of(key, *chunks, i);
    }
  }
  std::vector<Command> commands;
  commands.push_back(std::move(unlink));
  commands.push_back(std::move(Command("ZREM") << kIndex << key.hex()));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->front()) return replies->front().error();
  return replies->front()->integer > 0;
}

Breaker::State RedisTier::breaker_state() const {
  const std::lock_guard lock(impl_->mutex_);
  return impl_->breaker_.state();
}

}  // namespace ditfleet::kernel_cache
