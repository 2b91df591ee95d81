// A model of Redis 7 for the fleet under virtual time: the commands that DiTFleet uses, and Functions, which run in
// Lua 5.1 as in Redis. redis_model_test.cpp compares it with redis-server.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "shared/redis/connection.h"

namespace ditfleet::history {

using redis::Reply;
using Arguments = std::vector<std::string_view>;

struct StreamId {
  std::uint64_t ms = 0, sequence = 0;
  auto operator<=>(const StreamId&) const = default;
  std::string text() const;
};

// In the order in which the fields were added, as Redis keeps a small hash.
struct Hash : std::vector<std::pair<std::string, std::string>> {
  const_iterator find(std::string_view field) const;
  iterator find(std::string_view field) { return begin() + (std::as_const(*this).find(field) - cbegin()); }
  bool contains(std::string_view field) const { return find(field) != end(); }
};
using Set = std::set<std::string, std::less<>>;
struct SortedSet {
  std::map<std::string, double, std::less<>> scores;
  std::set<std::pair<double, std::string>> order;
};
struct Stream {
  std::map<StreamId, std::vector<std::string>> entries;
  StreamId last;
};
using Value = std::variant<std::string, Hash, SortedSet, Stream, Set>;

// One Function of a library, which all models of a process share.
struct Function {
  int callback = 0;  // in Lua's registry
  bool writes = true, allows_oom = false;
};

// A database. Copies share what neither has changed since, so that a copy is a cheap snapshot. Not thread-safe.
class RedisModel {
 public:
  // `now_us`: the server's clock, in microseconds since 1970.
  explicit RedisModel(std::function<std::int64_t()> now_us) : now_us_(std::move(now_us)) {}

  // Runs a command; an error reply has the type kError. Commands that concern a connection are not known here.
  Reply run(const Arguments& command);
  // XREAD without BLOCK: nil if no stream has an entry after its id. `$` is resolved by from_now().
  Reply read_streams(const Arguments& command);
  // The command with the last id of its streams in place of `$`.
  std::vector<std::string> from_now(const Arguments& command);
  // Called by PUBLISH; returns the number of receivers.
  std::function<std::int64_t(std::string_view channel, std::string_view message)> on_publish;

  // The value, or null. For judges, which must not change it.
  const Value* peek(std::string_view key);
  template <class T>
  const T* peek_as(std::string_view key) {
    const Value* value = peek(key);
    return value ? std::get_if<T>(value) : nullptr;
  }
  std::vector<std::string> keys();
  bool out_of_memory = false;  // refuses what may need more memory
  std::string run_id = "0123456789abcdef0123456789abcdef01234567";
  std::int64_t calls = 0;  // of Functions

 private:
  friend struct Commands;
  struct Entry {
    std::shared_ptr<Value> value;
    std::int64_t expires_ms = 0;  // 0: never
  };
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  std::int64_t now_ms() const { return now_us_() / 1000; }
  Entry* find(std::string_view key);
  // The value, or an empty one. Throws if the key has another type, as write() does.
  template <class T>
  const T& read(std::string_view key);
  template <class T>
  T& write(std::string_view key);
  // Removes an empty collection, as Redis does.
  template <class T>
  void drop_if_empty(std::string_view key);
  Reply load(const Arguments& command);
  Reply fcall(const Arguments& command);

  std::function<std::int64_t()> now_us_;
  std::unordered_map<std::string, Entry, TextHash, std::equal_to<>> entries_;
  std::unordered_map<std::string, const Function*, TextHash, std::equal_to<>> functions_;
  const Function* running_ = nullptr;
};

}  // namespace ditfleet::history
