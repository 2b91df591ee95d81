#include "tests/history/redis_model.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>

#include "tests/history/redis_script.h"

namespace ditfleet::history {
namespace {

using Type = Reply::Type;

Reply text(std::string_view value) { return {.type = Type::kString, .text = std::string(value)}; }
Reply number(auto value) { return {.type = Type::kInteger, .integer = static_cast<std::int64_t>(value)}; }
Reply ok() { return {.type = Type::kStatus, .text = "OK"}; }
Reply error(std::string value) { return {.type = Type::kError, .text = std::move(value)}; }
Reply array(std::vector<Reply> elements = {}) { return {.type = Type::kArray, .elements = std::move(elements)}; }

// Ends a command that has not changed anything yet.
[[noreturn]] void refuse(const char* why) { throw error(why); }
[[noreturn]] void refuse_syntax() { refuse("ERR syntax error"); }

std::int64_t integer(std::string_view digits) {
  std::int64_t value = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool plain = digits == std::to_string(value);
  if (failed != std::errc() || !plain) refuse("ERR value is not an integer or out of range");
  return value;
}

double real(std::string_view digits, const char* otherwise) {
  double value = 0;
  if (digits == "inf" || digits == "+inf") return std::numeric_limits<double>::infinity();
  if (digits == "-inf") return -std::numeric_limits<double>::infinity();
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (failed != std::errc() || end != digits.data() + digits.size()) refuse(otherwise);
  return value;
}

// As Redis writes scores.
Reply score(double value) {
  char out[64];
  if (std::isinf(value)) return text(value > 0 ? "inf" : "-inf");
  std::snprintf(out, sizeof out, value == std::floor(value) && std::fabs(value) < 1e17 ? "%.0f" : "%.17g", value);
  return text(out);
}

// From `first` to `last`, which count from the end if they are negative.
std::pair<std::int64_t, std::int64_t> range_of(std::string_view first, std::string_view last, std::size_t size) {
  const auto place = [&](std::string_view one) {
    const std::int64_t at = integer(one);
    return at < 0 ? static_cast<std::int64_t>(size) + at : at;
  };
  return {std::max<std::int64_t>(0, place(first)), std::min(static_cast<std::int64_t>(size) - 1, place(last))};
}

// ---- streams

constexpr StreamId kLastId{std::numeric_limits<std::uint64_t>::max(), std::numeric_limits<std::uint64_t>::max()};

// "ms-sequence", or "ms" with `sequence`.
StreamId stream_id(std::string_view id, std::uint64_t sequence = 0) {
  StreamId out{0, sequence};
  const auto part = [](std::string_view digits, std::uint64_t& to) {
    const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), to);
    if (failed != std::errc() || end != digits.data() + digits.size())
      refuse("ERR Invalid stream ID specified as stream command argument");
  };
  const auto dash = id.find('-');
  part(id.substr(0, dash), out.ms);
  if (dash != std::string_view::npos) part(id.substr(dash + 1), out.sequence);
  return out;
}

StreamId after(StreamId id) {
  return id.sequence == kLastId.sequence ? StreamId{id.ms + 1, 0} : StreamId{id.ms, id.sequence + 1};
}
StreamId before(StreamId id) {
  return id.sequence == 0 ? StreamId{id.ms - 1, kLastId.sequence} : StreamId{id.ms, id.sequence - 1};
}

// An end of the range of XRANGE.
StreamId edge(std::string_view id, bool low) {
  if (id == "-") return {};
  if (id == "+") return kLastId;
  const bool open = id.starts_with('(');
  const StreamId out = stream_id(id.substr(open ? 1 : 0), low ? 0 : kLastId.sequence);
  return !open ? out : low ? after(out) : before(out);
}

Reply entry(const std::pair<const StreamId, std::vector<std::string>>& one) {
  Reply fields = array();
  for (const auto& field : one.second) fields.elements.push_back(text(field));
  return array({text(one.first.text()), std::move(fields)});
}

// What XADD and XTRIM say of trimming, from command[at] on. Sets `at` behind it.
struct Trim {
  Trim(const Arguments& command, std::size_t& at) : by_length(command[at] == "MAXLEN") {
    if (!by_length && command[at] != "MINID") refuse_syntax();
    if (++at < command.size() && (command[at] == "~" || command[at] == "=")) roughly = command[at++] == "~";
    if (at >= command.size()) refuse_syntax();
    if (by_length) {
      limit = integer(command[at++]);
    } else {
      least = stream_id(command[at++]);
    }
    if (limit < 0) refuse("ERR The MAXLEN argument must be >= 0.");
  }
  // With `~`, Redis removes only whole nodes; this model nothing of less than 100 entries.
  std::int64_t run(Stream& stream) const {
    std::int64_t removed = 0;
    auto& entries = stream.entries;
    if (roughly && entries.size() < 100) return 0;
    for (; !entries.empty() &&
           (by_length ? static_cast<std::int64_t>(entries.size()) > limit : entries.begin()->first < least);
         ++removed)
      entries.erase(entries.begin());
    return removed;
  }
  bool by_length, roughly = false;
  std::int64_t limit = 0;
  StreamId least;
};

// The streams of XREAD: where their keys begin, how many there are, and the limit of entries.
struct Read {
  explicit Read(const Arguments& a) {
    for (at = 1; at + 1 < a.size() && a[at] != "STREAMS"; at += 2) {
      if (a[at] == "COUNT") limit = integer(a[at + 1]);
    }
    if (++at >= a.size() || (a.size() - at) % 2 != 0) refuse_syntax();
    streams = (a.size() - at) / 2;
  }
  std::size_t at = 0, streams = 0;
  std::int64_t limit = -1;
};

// ---- sorted sets

// Scores from one bound to another; "(5" excludes 5.
struct Scores {
  Scores(std::string_view low, std::string_view high)
      : low(bound(low)), high(bound(high)), open_low(low.starts_with('(')), open_high(high.starts_with('(')) {}
  static double bound(std::string_view text) {
    return real(text.substr(text.starts_with('(') ? 1 : 0), "ERR min or max is not a float");
  }
  bool contain(double value) const {
    return (open_low ? value > low : value >= low) && (open_high ? value < high : value <= high);
  }
  double low, high;
  bool open_low, open_high;
};

void add_scored(Reply& out, const std::pair<double, std::string>& one, bool with_scores) {
  out.elements.push_back(text(one.second));
  if (with_scores) out.elements.push_back(score(one.first));
}

Reply texts_of(const auto& collection) {
  Reply out = array();
  for (const auto& one : collection) out.elements.push_back(text(one));
  return out;
}

}  // namespace

std::string StreamId::text() const { return std::to_string(ms) + "-" + std::to_string(sequence); }

Hash::const_iterator Hash::find(std::string_view field) const {
  return std::find_if(begin(), end(), [field](const auto& one) { return one.first == field; });
}

// ---- the keyspace

RedisModel::Entry* RedisModel::find(std::string_view key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return nullptr;
  if (it->second.expires_ms != 0 && now_ms() > it->second.expires_ms) {
    entries_.erase(it);
    return nullptr;
  }
  return &it->second;
}

const Value* RedisModel::peek(std::string_view key) {
  const Entry* entry = find(key);
  return entry ? entry->value.get() : nullptr;
}

std::vector<std::string> RedisModel::keys() {
  std::vector<std::string> out;
  for (const auto& [key, entry] : entries_) out.push_back(key);
  std::erase_if(out, [this](const std::string& key) { return !find(key); });
  std::sort(out.begin(), out.end());
  return out;
}

template <class T>
const T& RedisModel::read(std::string_view key) {
  static const T none;
  const Value* value = peek(key);
  if (value && !std::holds_alternative<T>(*value))
    refuse("WRONGTYPE Operation against a key holding the wrong kind of value");
  return value ? std::get<T>(*value) : none;
}

template <class T>
T& RedisModel::write(std::string_view key) {
  (void)read<T>(key);
  Entry* entry = find(key);
  if (!entry) entry = &entries_.emplace(std::string(key), Entry{std::make_shared<Value>(T())}).first->second;
  if (entry->value.use_count() > 1) entry->value = std::make_shared<Value>(*entry->value);
  return std::get<T>(*entry->value);
}

template <class T>
void RedisModel::drop_if_empty(std::string_view key) {
  const T& value = read<T>(key);
  bool empty = false;
  if constexpr (std::is_same_v<T, SortedSet>) {
    empty = value.scores.empty();
  } else {
    empty = value.empty();
  }
  if (empty && find(key)) entries_.erase(entries_.find(key));
}

// ---- the commands: `a` has the name first

using R = RedisModel;
using A = const Arguments&;

struct Commands {
  static Reply get(R& m, A a) { return m.find(a[1]) ? text(m.read<std::string>(a[1])) : Reply(); }

  static Reply set(R& m, A a) {
    bool absent = false, present = false, old = false;
    std::int64_t expires_ms = 0;
    for (std::size_t i = 3; i < a.size(); ++i) {
      absent = absent || a[i] == "NX";
      present = present || a[i] == "XX";
      old = old || a[i] == "GET";
      if (a[i] != "PX" && a[i] != "EX") continue;
      if (i + 1 == a.size()) refuse_syntax();
      const std::int64_t time = integer(a[i + 1]) * (a[i] == "EX" ? 1000 : 1);
      if (time <= 0) refuse("ERR invalid expire time in 'set' command");
      expires_ms = m.now_ms() + time;
      ++i;
    }
    const Reply before = old ? get(m, a) : Reply();
    if (m.find(a[1]) ? absent : present) return before;
    m.entries_[std::string(a[1])] = {std::make_shared<Value>(std::string(a[2])), expires_ms};
    return old ? before : ok();
  }

  static Reply del(R& m, A a) {
    std::int64_t count = 0;
    for (std::size_t i = 1; i < a.size(); ++i) {
      if (m.find(a[i])) count += static_cast<std::int64_t>(m.entries_.erase(std::string(a[i])));
    }
    return number(count);
  }

  static Reply exists(R& m, A a) {
    return number(std::count_if(a.begin() + 1, a.end(), [&](std::string_view key) { return m.find(key) != nullptr; }));
  }

  static Reply incr(R& m, A a) {
    const std::int64_t sum = (m.find(a[1]) ? integer(m.read<std::string>(a[1])) : 0) + 1;
    m.write<std::string>(a[1]) = std::to_string(sum);
    return number(sum);
  }

  static Reply getrange(R& m, A a) {
    const std::int64_t from = integer(a[2]), to = integer(a[3]);
    const std::string& value = m.read<std::string>(a[1]);
    auto [first, last] = range_of(a[2], a[3], value.size());
    if (from < 0 && to < 0 && from > to) return text("");
    if (to < 0) last = std::max<std::int64_t>(0, last);  // as Redis: -6 of two bytes is the first one
    last = std::min(last, static_cast<std::int64_t>(value.size()) - 1);
    return text(
        first > last ? "" : value.substr(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first + 1)));
  }

  static Reply getex(R& m, A a) {
    if (a.size() != 4 || a[2] != "EX") refuse_syntax();
    const std::int64_t ms = integer(a[3]) * 1000;
    Reply value = get(m, a);
    if (auto* entry = m.find(a[1])) entry->expires_ms = m.now_ms() + ms;
    return value;
  }

  static Reply pttl(R& m, A a) {
    const auto* entry = m.find(a[1]);
    return number(!entry ? -2 : entry->expires_ms == 0 ? -1 : entry->expires_ms - m.now_ms());
  }

  static Reply pexpire(R& m, A a) {
    const std::int64_t ms = integer(a[2]);
    auto* entry = m.find(a[1]);
    if (!entry) return number(0);
    entry->expires_ms = m.now_ms() + ms;
    if (ms <= 0) m.entries_.erase(std::string(a[1]));
    return number(1);
  }

  static Reply persist(R& m, A a) {
    auto* entry = m.find(a[1]);
    return number(entry && std::exchange(entry->expires_ms, 0) != 0 ? 1 : 0);
  }

  // ---- hashes

  static Reply field(const Hash& hash, std::string_view name) {
    const auto at = hash.find(name);
    return at == hash.end() ? Reply() : text(at->second);
  }
  static bool put(Hash& hash, std::string_view name, std::string_view value) {
    const auto at = hash.find(name);
    const bool fresh = at == hash.end();
    if (fresh) {
      hash.emplace_back(name, value);
    } else {
      at->second = value;
    }
    return fresh;
  }

  static Reply hget(R& m, A a) { return field(m.read<Hash>(a[1]), a[2]); }

  static Reply hset(R& m, A a) {
    if (a.size() % 2 != 0) refuse("ERR wrong number of arguments for 'hset' command");
    auto& hash = m.write<Hash>(a[1]);
    std::int64_t added = 0;
    for (std::size_t i = 2; i < a.size(); i += 2) added += put(hash, a[i], a[i + 1]) ? 1 : 0;
    return number(added);
  }

  static Reply hsetnx(R& m, A a) {
    if (m.read<Hash>(a[1]).contains(a[2])) return number(0);
    return number(put(m.write<Hash>(a[1]), a[2], a[3]) ? 1 : 0);
  }

  static Reply hdel(R& m, A a) {
    if (m.read<Hash>(a[1]).empty()) return number(0);
    auto& hash = m.write<Hash>(a[1]);
    std::int64_t removed = 0;
    for (std::size_t i = 2; i < a.size(); ++i) {
      const auto at = hash.find(a[i]);
      if (at == hash.end()) continue;
      hash.erase(at);
      ++removed;
    }
    m.drop_if_empty<Hash>(a[1]);
    return number(removed);
  }

  static Reply hgetall(R& m, A a) {
    Reply out = array();
    for (const auto& [name, value] : m.read<Hash>(a[1])) {
      out.elements.push_back(text(name));
      out.elements.push_back(text(value));
    }
    return out;
  }

  static Reply hincrby(R& m, A a) {
    const Hash& hash = m.read<Hash>(a[1]);
    const std::int64_t by = integer(a[3]);
    const auto at = hash.find(a[2]);
    std::int64_t sum = 0;
    if (__builtin_add_overflow(at == hash.end() ? 0 : integer(at->second), by, &sum))
      refuse("ERR increment or decrement would overflow");
    put(m.write<Hash>(a[1]), a[2], std::to_string(sum));
    return number(sum);
  }

  static Reply hkeys(R& m, A a) {
    Reply out = array();
    for (const auto& [name, value] : m.read<Hash>(a[1])) out.elements.push_back(text(name));
    return out;
  }

  static Reply hmget(R& m, A a) {
    Reply out = array();
    for (std::size_t i = 2; i < a.size(); ++i) out.elements.push_back(field(m.read<Hash>(a[1]), a[i]));
    return out;
  }

  // All of it is one page, as of a hash that Redis keeps compact.
  static Reply hscan(R& m, A a) { return array({text("0"), hgetall(m, a)}); }

  // ---- sets

  static Reply sadd(R& m, A a) {
    auto& set = m.write<Set>(a[1]);
    return number(std::count_if(a.begin() + 2, a.end(), [&](std::string_view one) { return set.emplace(one).second; }));
  }

  static Reply srem(R& m, A a) {
    if (m.read<Set>(a[1]).empty()) return number(0);
    auto& set = m.write<Set>(a[1]);
    const auto removed =
        std::count_if(a.begin() + 2, a.end(), [&](std::string_view one) { return set.erase(std::string(one)) > 0; });
    m.drop_if_empty<Set>(a[1]);
    return number(removed);
  }

  static Reply smismember(R& m, A a) {
    Reply out = array();
    for (std::size_t i = 2; i < a.size(); ++i) out.elements.push_back(number(m.read<Set>(a[1]).contains(a[i]) ? 1 : 0));
    return out;
  }

  // ---- sorted sets

  static Reply zadd(R& m, A a) {
    std::size_t at = 2;
    bool greater = false, less = false, known_only = false;
    for (; at < a.size() && (a[at] == "GT" || a[at] == "LT" || a[at] == "XX"); ++at) {
      greater = greater || a[at] == "GT";
      less = less || a[at] == "LT";
      known_only = known_only || a[at] == "XX";
    }
    if (at >= a.size() || (a.size() - at) % 2 != 0) refuse_syntax();
    std::vector<double> scores;
    for (std::size_t i = at; i < a.size(); i += 2) scores.push_back(real(a[i], "ERR value is not a valid float"));
    (void)m.read<SortedSet>(a[1]);
    if (known_only && !m.find(a[1])) return number(0);
    auto& set = m.write<SortedSet>(a[1]);
    std::int64_t added = 0;
    for (std::size_t i = at; i < a.size(); i += 2) {
      const double value = scores[(i - at) / 2];
      const auto known = set.scores.find(a[i + 1]);
      if (known == set.scores.end() ? known_only
                                    : (greater && value < known->second) || (less && value > known->second))
        continue;
      if (known == set.scores.end()) {
        ++added;
      } else {
        set.order.erase({known->second, known->first});
      }
      set.scores.insert_or_assign(std::string(a[i + 1]), value);
      set.order.emplace(value, a[i + 1]);
    }
    return number(added);
  }

  static Reply remove(R& m, std::string_view key, const std::vector<std::string>& members) {
    if (m.read<SortedSet>(key).scores.empty()) return number(0);
    auto& set = m.write<SortedSet>(key);
    std::int64_t removed = 0;
    for (const auto& member : members) {
      const auto known = set.scores.find(member);
      if (known == set.scores.end()) continue;
      set.order.erase({known->second, known->first});
      set.scores.erase(known);
      ++removed;
    }
    m.drop_if_empty<SortedSet>(key);
    return number(removed);
  }
  static Reply zrem(R& m, A a) { return remove(m, a[1], {a.begin() + 2, a.end()}); }

  static Reply zmscore(R& m, A a) {
    const auto& scores = m.read<SortedSet>(a[1]).scores;
    Reply out = array();
    for (std::size_t i = 2; i < a.size(); ++i) {
      const auto known = scores.find(a[i]);
      out.elements.push_back(known == scores.end() ? Reply() : score(known->second));
    }
    return out;
  }

  // By rank.
  static Reply zrange(R& m, A a) {
    if (a.size() > 5 || (a.size() == 5 && a[4] != "WITHSCORES")) refuse_syntax();
    const auto& order = m.read<SortedSet>(a[1]).order;
    const auto [first, last] = range_of(a[2], a[3], order.size());
    Reply out = array();
    std::int64_t rank = 0;
    for (const auto& one : order) {
      if (rank >= first && rank <= last) add_scored(out, one, a.size() == 5);
      ++rank;
    }
    return out;
  }

  static Reply zrangebyscore(R& m, A a) {
    const bool backwards = a[0] == "ZREVRANGEBYSCORE";
    const Scores scores(a[backwards ? 3 : 2], a[backwards ? 2 : 3]);
    bool with_scores = false;
    std::int64_t skip = 0, limit = -1;
    for (std::size_t i = 4; i < a.size(); ++i) {
      if (a[i] == "WITHSCORES") {
        with_scores = true;
      } else if (a[i] == "LIMIT" && i + 2 < a.size()) {
        skip = integer(a[i + 1]);
        limit = integer(a[i + 2]);
        i += 2;
      } else {
        refuse_syntax();
      }
    }
    std::vector<std::pair<double, std::string>> found;
    for (const auto& one : m.read<SortedSet>(a[1]).order)
      if (scores.contain(one.first)) found.push_back(one);
    if (backwards) std::reverse(found.begin(), found.end());
    Reply out = array();
    if (skip < 0) return out;
    for (std::size_t i = static_cast<std::size_t>(skip); i < found.size() && limit != 0; ++i, --limit)
      add_scored(out, found[i], with_scores);
    return out;
  }

  static Reply zremrangebyscore(R& m, A a) {
    const Scores scores(a[2], a[3]);
    std::vector<std::string> gone;
    for (const auto& [value, member] : m.read<SortedSet>(a[1]).order)
      if (scores.contain(value)) gone.push_back(member);
    return remove(m, a[1], gone);
  }

  static Reply zremrangebyrank(R& m, A a) {
    std::vector<std::string> gone;
    for (const auto& member : zrange(m, a).elements) gone.push_back(member.text);
    return remove(m, a[1], gone);
  }

  // ---- streams

  static Reply xadd(R& m, A a) {
    std::size_t at = 2;
    std::optional<Trim> trim;
    const bool known_only = a[at] == "NOMKSTREAM";
    if (known_only) ++at;
    if (a[at] == "MAXLEN" || a[at] == "MINID") trim.emplace(a, at);
    if (at + 2 >= a.size() || (a.size() - at) % 2 == 0) refuse("ERR wrong number of arguments for 'xadd' command");
    const StreamId last = m.read<Stream>(a[1]).last;
    StreamId id{static_cast<std::uint64_t>(m.now_ms()), 0};
    if (a[at] == "*") {
      if (last == kLastId) refuse("ERR The stream has exhausted the last possible ID, unable to add more items");
      if (id.ms <= last.ms) id = after(last);
    } else {
      id = stream_id(a[at]);
      if (id == StreamId()) refuse("ERR The ID specified in XADD must be greater than 0-0");
      if (id <= last) refuse("ERR The ID specified in XADD is equal or smaller than the target stream top item");
    }
    if (known_only && !m.find(a[1])) return {};
    auto& stream = m.write<Stream>(a[1]);
    stream.last = id;
    stream.entries.emplace(id, std::vector<std::string>(a.begin() + static_cast<std::ptrdiff_t>(at) + 1, a.end()));
    if (trim) trim->run(stream);
    return text(id.text());
  }

  static Reply xdel(R& m, A a) {
    (void)m.read<Stream>(a[1]);
    if (!m.find(a[1])) return number(0);
    std::vector<StreamId> ids;
    for (std::size_t i = 2; i < a.size(); ++i) ids.push_back(stream_id(a[i]));
    auto& entries = m.write<Stream>(a[1]).entries;
    return number(std::count_if(ids.begin(), ids.end(), [&](const StreamId& id) { return entries.erase(id) > 0; }));
  }

  static Reply xrange(R& m, A a) {
    const bool backwards = a[0] == "XREVRANGE";
    const StreamId low = edge(a[backwards ? 3 : 2], true), high = edge(a[backwards ? 2 : 3], false);
    if (a.size() > 4 && (a.size() != 6 || a[4] != "COUNT")) refuse_syntax();
    std::int64_t limit = a.size() > 4 ? integer(a[5]) : -1;
    const auto& entries = m.read<Stream>(a[1]).entries;
    if (!m.find(a[1]) || high < low) return array();
    if (a.size() > 4 && limit <= 0) return {};
    Reply out = array();
    auto first = entries.lower_bound(low), last = entries.upper_bound(high);
    for (; first != last && limit != 0; --limit) out.elements.push_back(entry(backwards ? *--last : *first++));
    return out;
  }

  static Reply xtrim(R& m, A a) {
    std::size_t at = 2;
    const Trim trim(a, at);
    (void)m.read<Stream>(a[1]);
    return number(m.find(a[1]) ? trim.run(m.write<Stream>(a[1])) : 0);
  }

  static Reply xsetid(R& m, A a) {
    const StreamId id = stream_id(a[2]);
    const auto& entries = m.read<Stream>(a[1]).entries;
    if (!m.find(a[1])) refuse("ERR no such key");
    if (!entries.empty() && id < entries.rbegin()->first)
      refuse("ERR The ID specified in XSETID is smaller than the target stream top item");
    m.write<Stream>(a[1]).last = id;
    return ok();
  }

  // Without BLOCK.
  static Reply xread(R& m, A a) {
    const Read read(a);
    Reply out = array();
    for (std::size_t i = 0; i < read.streams; ++i) {
      const StreamId since = stream_id(a[read.at + read.streams + i]);
      const auto& known = m.read<Stream>(a[read.at + i]).entries;
      Reply entries = array();
      for (auto at = known.upper_bound(since); at != known.end(); ++at) {
        if (read.limit > 0 && std::ssize(entries.elements) == read.limit) break;
        entries.elements.push_back(entry(*at));
      }
      if (!entries.elements.empty()) out.elements.push_back(array({text(a[read.at + i]), std::move(entries)}));
    }
    return out.elements.empty() ? Reply() : out;
  }

  // ---- the server

  static Reply time(R& m, A) {
    const std::int64_t us = m.now_us_();
    return array({text(std::to_string(us / 1'000'000)), text(std::to_string(us % 1'000'000))});
  }

  static Reply info(R& m, A) {
    return text("# Server\r\nredis_version:7.0.15\r\nrun_id:" + m.run_id +
                "\r\n# Memory\r\nused_memory:1000000\r\nmaxmemory:1000000000\r\nmaxmemory_policy:noeviction\r\n"
                "# Persistence\r\nloading:0\r\naof_enabled:1\r\naof_last_write_status:ok\r\n");
  }

  static Reply keys(R& m, A a) {  // "prefix*"
    auto all = m.keys();
    std::erase_if(all, [&](const std::string& key) { return !key.starts_with(a[1].substr(0, a[1].size() - 1)); });
    return texts_of(all);
  }
};

Reply RedisModel::load(const Arguments& a) {
  if (a[1] == "FLUSH") {
    functions_.clear();
    return ok();
  }
  if (a[1] != "LOAD") refuse("ERR unknown subcommand");
  const auto& loaded = Script::load(std::string(a.back()));
  if (!loaded.error.empty()) return error(loaded.error);
  // Functions' names begin with their library's.
  const auto of_library = [&](const auto& one) { return one.first.starts_with(loaded.library + "_"); };
  if (a[2] != "REPLACE" && std::any_of(functions_.begin(), functions_.end(), of_library))
    return error("ERR Library '" + loaded.library + "' already exists");
  std::erase_if(functions_, of_library);
  for (const auto& [name, function] : loaded.functions) functions_[name] = &function;
  return text(loaded.library);
}

Reply RedisModel::fcall(const Arguments& a) {
  ++calls;
  const auto it = functions_.find(a[1]);
  if (it == functions_.end()) refuse("ERR Function not found");
  const Function& function = *it->second;
  const auto keys = static_cast<std::size_t>(integer(a[2]));
  if (keys > a.size() - 3) refuse("ERR Number of keys can't be greater than number of args");
  if (a[0] == "FCALL_RO" && function.writes) refuse("ERR Can not execute a script with write flag using *_ro command.");
  if (out_of_memory && function.writes && !function.allows_oom)
    refuse("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'");
  running_ = &function;
  Reply out = Script::call(*this, function, a, keys);
  running_ = nullptr;
  return out;
}

Reply RedisModel::read_streams(const Arguments& command) {
  try {
    return Commands::xread(*this, command);
  } catch (const Reply& refused) {
    return refused;
  }
}

std::vector<std::string> RedisModel::from_now(const Arguments& command) {
  std::vector<std::string> out(command.begin(), command.end());
  const Read read(command);
  for (std::size_t i = 0; i < read.streams; ++i) {
    auto& id = out[read.at + read.streams + i];
    if (id == "$") id = this->read<Stream>(command[read.at + i]).last.text();
  }
  return out;
}

Reply RedisModel::run(const Arguments& command) {
  enum Needs { kNothing, kWrites, kGrows };
  struct Known {
    Reply (*run)(R&, A);
    std::size_t least;  // arguments with the name
    Needs needs = kNothing;
  };
  using C = Commands;
  static const std::unordered_map<std::string_view, Known> all{
      {"GET", {C::get, 2}},
      {"SET", {C::set, 3, kGrows}},
      {"DEL", {C::del, 2, kWrites}},
      {"UNLINK", {C::del, 2, kWrites}},
      {"EXISTS", {C::exists, 2}},
      {"INCR", {C::incr, 2, kGrows}},
      {"STRLEN", {[](R& m, A a) { return number(m.read<std::string>(a[1]).size()); }, 2}},
      {"GETRANGE", {C::getrange, 4}},
      {"GETEX", {C::getex, 2, kWrites}},
      {"PTTL", {C::pttl, 2}},
      {"PEXPIRE", {C::pexpire, 3, kWrites}},
      {"PERSIST", {C::persist, 2, kWrites}},
      {"HGET", {C::hget, 3}},
      {"HSET", {C::hset, 4, kGrows}},
      {"HSETNX", {C::hsetnx, 4, kGrows}},
      {"HDEL", {C::hdel, 3, kWrites}},
      {"HEXISTS", {[](R& m, A a) { return number(m.read<Hash>(a[1]).contains(a[2]) ? 1 : 0); }, 3}},
      {"HGETALL", {C::hgetall, 2}},
      {"HINCRBY", {C::hincrby, 4, kGrows}},
      {"HKEYS", {C::hkeys, 2}},
      {"HLEN", {[](R& m, A a) { return number(m.read<Hash>(a[1]).size()); }, 2}},
      {"HMGET", {C::hmget, 3}},
      {"HSCAN", {C::hscan, 3}},
      {"SADD", {C::sadd, 3, kGrows}},
      {"SREM", {C::srem, 3, kWrites}},
      {"SISMEMBER", {[](R& m, A a) { return C::smismember(m, a).elements[0]; }, 3}},
      {"SMISMEMBER", {C::smismember, 3}},
      {"SMEMBERS", {[](R& m, A a) { return texts_of(m.read<Set>(a[1])); }, 2}},
      {"ZADD", {C::zadd, 4, kGrows}},
      {"ZREM", {C::zrem, 3, kWrites}},
      {"ZCARD", {[](R& m, A a) { return number(m.read<SortedSet>(a[1]).scores.size()); }, 2}},
      {"ZSCORE", {[](R& m, A a) { return C::zmscore(m, a).elements[0]; }, 3}},
      {"ZMSCORE", {C::zmscore, 3}},
      {"ZRANGE", {C::zrange, 4}},
      {"ZRANGEBYSCORE", {C::zrangebyscore, 4}},
      {"ZREVRANGEBYSCORE", {C::zrangebyscore, 4}},
      {"ZREMRANGEBYSCORE", {C::zremrangebyscore, 4, kWrites}},
      {"ZREMRANGEBYRANK", {C::zremrangebyrank, 4, kWrites}},
      {"XADD", {C::xadd, 5, kGrows}},
      {"XDEL", {C::xdel, 3, kWrites}},
      {"XLEN", {[](R& m, A a) { return number(m.read<Stream>(a[1]).entries.size()); }, 2}},
      {"XRANGE", {C::xrange, 4}},
      {"XREVRANGE", {C::xrange, 4}},
      {"XTRIM", {C::xtrim, 4, kWrites}},
      {"XSETID", {C::xsetid, 3, kGrows}},
      {"TIME", {C::time, 1}},
      {"PUBLISH", {[](R& m, A a) { return number(m.on_publish ? m.on_publish(a[1], a[2]) : 0); }, 3}},
      {"INFO", {C::info, 1}},
      {"KEYS", {C::keys, 2}},
      {"FUNCTION", {[](R& m, A a) { return m.load(a); }, 2, kGrows}},
      {"FCALL", {[](R& m, A a) { return m.fcall(a); }, 3}},
      {"FCALL_RO", {[](R& m, A a) { return m.fcall(a); }, 3}},
  };
  const auto it = all.find(command[0]);
  if (it == all.end()) return error("ERR unknown command '" + std::string(command[0]) + "'");
  const Known& known = it->second;
  if (command.size() < known.least) return error("ERR wrong number of arguments");
  if (known.needs != kNothing && running_ && !running_->writes)
    return error("ERR Write commands are not allowed from read-only scripts.");
  if (known.needs == kGrows && out_of_memory && !(running_ && running_->allows_oom))
    return error("OOM command not allowed when used memory > 'maxmemory'.");
  try {
    return known.run(*this, command);
  } catch (const Reply& refused) {
    return refused;
  }
}

}  // namespace ditfleet::history
