#include "tests/history/redis_model.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>

#include "tests/history/redis_script.h"

namespace ditfleet::history {
namespace {

Reply nil() { return {}; }
Reply text(std::string value) { return {.type = Reply::Type::kString, .text = std::move(value)}; }
Reply text(std::string_view value) { return text(std::string(value)); }
Reply text(const char* value) { return text(std::string(value)); }
Reply status(const char* value) { return {.type = Reply::Type::kStatus, .text = value}; }
Reply number(std::int64_t value) { return {.type = Reply::Type::kInteger, .integer = value}; }
Reply array() { return {.type = Reply::Type::kArray}; }
Reply error(std::string value) { return {.type = Reply::Type::kError, .text = std::move(value)}; }
Reply wrong_type() { return error("WRONGTYPE Operation against a key holding the wrong kind of value"); }
Reply syntax() { return error("ERR syntax error"); }
Reply not_integer() { return error("ERR value is not an integer or out of range"); }
Reply bad_id() { return error("ERR Invalid stream ID specified as stream command argument"); }

std::optional<std::int64_t> integer(std::string_view digits) {
  std::int64_t value = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool plain = !digits.empty() && digits != "-0" && !digits.starts_with("+") &&
                     (digits == "0" || digits[digits[0] == '-' ? 1 : 0] != '0');
  if (failed != std::errc() || end != digits.data() + digits.size() || !plain) return std::nullopt;
  return value;
}

std::optional<double> real(std::string_view digits) {
  const std::string copy(digits);
  if (copy.empty() || std::isspace(static_cast<unsigned char>(copy[0]))) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  if (end != copy.c_str() + copy.size() || std::isnan(value)) return std::nullopt;
  return value;
}

// As Redis writes scores.
std::string score_text(double value) {
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char out[64];
  const bool whole = value == std::floor(value) && std::fabs(value) < 1e17;
  std::snprintf(out, sizeof out, whole ? "%.0f" : "%.17g", value);
  return out;
}

bool same(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return std::toupper(static_cast<unsigned char>(x)) == std::toupper(static_cast<unsigned char>(y));
         });
}

constexpr StreamId kLastId{std::numeric_limits<std::uint64_t>::max(), std::numeric_limits<std::uint64_t>::max()};

// "ms-sequence", or "ms" with `sequence`.
std::optional<StreamId> stream_id(std::string_view id, std::uint64_t sequence) {
  const auto part = [](std::string_view digits, std::uint64_t& out) {
    const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), out);
    return failed == std::errc() && end == digits.data() + digits.size() && !digits.empty();
  };
  StreamId out{0, sequence};
  const auto dash = id.find('-');
  if (!part(id.substr(0, dash), out.ms)) return std::nullopt;
  if (dash != std::string_view::npos && !part(id.substr(dash + 1), out.sequence)) return std::nullopt;
  return out;
}

StreamId after(StreamId id) {
  if (id.sequence == kLastId.sequence) return {id.ms + 1, 0};
  return {id.ms, id.sequence + 1};
}

Reply entry_of(const StreamId& id, const std::vector<std::string>& fields) {
  Reply pair = array(), values = array();
  for (const auto& field : fields) values.elements.push_back(text(field));
  pair.elements.push_back(text(id.text()));
  pair.elements.push_back(std::move(values));
  return pair;
}

// Trims in front: the part of XADD and XTRIM from MAXLEN or MINID on. Sets `at` behind it. With `~`, Redis removes only
// whole nodes; this model nothing of less than 100 entries.
std::optional<Reply> trim(Stream& stream, const Arguments& command, std::size_t& at, std::int64_t& removed) {
  const bool by_length = same(command[at], "MAXLEN");
  if (++at >= command.size()) return syntax();
  const bool roughly = command[at] == "~";
  if (command[at] == "~" || command[at] == "=") ++at;
  if (at >= command.size()) return syntax();
  const auto limit = by_length ? integer(command[at]) : 0;
  const auto least = by_length ? StreamId() : stream_id(command[at], 0);
  if (!limit || !least) return by_length ? not_integer() : bad_id();
  if (*limit < 0) return error("ERR The MAXLEN argument must be >= 0.");
  ++at;
  if (roughly && stream.entries.size() < 100) return std::nullopt;
  while (!stream.entries.empty() && (by_length ? static_cast<std::int64_t>(stream.entries.size()) > *limit
                                               : stream.entries.begin()->first < *least)) {
    stream.entries.erase(stream.entries.begin());
    ++removed;
  }
  return std::nullopt;
}

struct Bound {
  double value = 0;
  bool open = false;
};
std::optional<Bound> bound(std::string_view limit) {
  Bound out;
  if (limit.starts_with('(')) {
    out.open = true;
    limit.remove_prefix(1);
  }
  const auto value = real(limit);
  if (!value) return std::nullopt;
  out.value = *value;
  return out;
}
bool within(double score, const Bound& low, const Bound& high) {
  return (low.open ? score > low.value : score >= low.value) && (high.open ? score < high.value : score <= high.value);
}

void add_scored(Reply& out, const std::pair<double, std::string>& one, bool with_scores) {
  out.elements.push_back(text(one.second));
  if (with_scores) out.elements.push_back(text(score_text(one.first)));
}

}  // namespace

Hash::const_iterator Hash::find(std::string_view field) const {
  return std::find_if(begin(), end(), [field](const auto& one) { return one.first == field; });
}

std::string StreamId::text() const { return std::to_string(ms) + "-" + std::to_string(sequence); }

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
const T* RedisModel::read(std::string_view key, bool& wrong) {
  const Value* value = peek(key);
  const T* typed = value ? std::get_if<T>(value) : nullptr;
  wrong = value && !typed;
  return typed;
}

// Precondition: the key has this type or none.
template <class T>
T& RedisModel::write(std::string_view key) {
  Entry* entry = find(key);
  if (!entry) entry = &entries_.emplace(std::string(key), Entry{std::make_shared<Value>(T())}).first->second;
  if (entry->value.use_count() > 1) entry->value = std::make_shared<Value>(*entry->value);
  return std::get<T>(*entry->value);
}

template <class T>
void RedisModel::drop_if_empty(std::string_view key) {
  const T* value = peek_as<T>(key);
  if (!value) return;
  bool empty = false;
  if constexpr (std::is_same_v<T, SortedSet>) {
    empty = value->scores.empty();
  } else {
    empty = value->empty();
  }
  if (empty) entries_.erase(entries_.find(key));
}

// ---- strings and keys

Reply RedisModel::get(const Arguments& a) {
  bool wrong = false;
  const auto* value = read<std::string>(a[1], wrong);
  return wrong ? wrong_type() : value ? text(*value) : nil();
}

Reply RedisModel::set(const Arguments& a) {
  bool absent = false, present = false, old = false, keep = false;
  std::int64_t expires_ms = 0;
  for (std::size_t i = 3; i < a.size(); ++i) {
    if (same(a[i], "NX")) {
      absent = true;
    } else if (same(a[i], "XX")) {
      present = true;
    } else if (same(a[i], "GET")) {
      old = true;
    } else if (same(a[i], "KEEPTTL")) {
      keep = true;
    } else if ((same(a[i], "PX") || same(a[i], "EX")) && i + 1 < a.size()) {
      const auto time = integer(a[i + 1]);
      if (!time) return not_integer();
      if (*time <= 0) return error("ERR invalid expire time in 'set' command");
      expires_ms = now_ms() + *time * (same(a[i], "EX") ? 1000 : 1);
      ++i;
    } else {
      return syntax();
    }
  }
  Entry* entry = find(a[1]);
  Reply before;
  if (old) {
    before = get({"GET", a[1]});
    if (before.type == Reply::Type::kError) return before;
  }
  if ((absent && entry) || (present && !entry)) return old ? before : nil();
  if (!entry) entry = &entries_[std::string(a[1])];
  entry->value = std::make_shared<Value>(std::string(a[2]));
  if (!keep) entry->expires_ms = expires_ms;
  return old ? before : status("OK");
}

Reply RedisModel::del(const Arguments& a) {
  std::int64_t count = 0;
  for (std::size_t i = 1; i < a.size(); ++i) {
    if (!find(a[i])) continue;
    entries_.erase(entries_.find(a[i]));
    ++count;
  }
  return number(count);
}

Reply RedisModel::exists(const Arguments& a) {
  std::int64_t count = 0;
  for (std::size_t i = 1; i < a.size(); ++i) count += find(a[i]) ? 1 : 0;
  return number(count);
}

Reply RedisModel::incr(const Arguments& a) {
  bool wrong = false;
  const auto* value = read<std::string>(a[1], wrong);
  if (wrong) return wrong_type();
  const auto before = value ? integer(*value) : 0;
  if (!before) return not_integer();
  write<std::string>(a[1]) = std::to_string(*before + 1);
  return number(*before + 1);
}

Reply RedisModel::strlen(const Arguments& a) {
  bool wrong = false;
  const auto* value = read<std::string>(a[1], wrong);
  return wrong ? wrong_type() : number(value ? static_cast<std::int64_t>(value->size()) : 0);
}

Reply RedisModel::getrange(const Arguments& a) {
  bool wrong = false;
  const auto* value = read<std::string>(a[1], wrong);
  const auto from = integer(a[2]), to = integer(a[3]);
  if (!from || !to) return not_integer();
  if (wrong) return wrong_type();
  const auto size = static_cast<std::int64_t>(value ? value->size() : 0);
  const std::int64_t first = std::max<std::int64_t>(0, *from < 0 ? size + *from : *from);
  // As Redis: -6 of two bytes is the first one.
  const std::int64_t last = std::min(size - 1, std::max<std::int64_t>(0, *to < 0 ? size + *to : *to));
  if (first > last || (*from < 0 && *to < 0 && *from > *to)) return text("");
  return text(value->substr(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first + 1)));
}

Reply RedisModel::getex(const Arguments& a) {
  Reply value = get(a);
  if (a.size() != 4 || !same(a[2], "EX")) return syntax();
  const auto time = integer(a[3]);
  if (!time) return not_integer();
  if (value.type == Reply::Type::kString) find(a[1])->expires_ms = now_ms() + *time * 1000;
  return value;
}

Reply RedisModel::pttl(const Arguments& a) {
  const Entry* entry = find(a[1]);
  return number(!entry ? -2 : entry->expires_ms == 0 ? -1 : entry->expires_ms - now_ms());
}

Reply RedisModel::pexpire(const Arguments& a) {
  const auto time = integer(a[2]);
  if (!time) return not_integer();
  Entry* entry = find(a[1]);
  if (!entry) return number(0);
  entry->expires_ms = now_ms() + *time;
  if (*time <= 0) entries_.erase(entries_.find(a[1]));
  return number(1);
}

Reply RedisModel::persist(const Arguments& a) {
  Entry* entry = find(a[1]);
  return number(entry && std::exchange(entry->expires_ms, 0) != 0 ? 1 : 0);
}

// ---- hashes

Reply RedisModel::hget(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  if (!hash) return nil();
  const auto it = hash->find(a[2]);
  return it == hash->end() ? nil() : text(it->second);
}

Reply RedisModel::hset(const Arguments& a) {
  if (a.size() % 2 != 0) return error("ERR wrong number of arguments for 'hset' command");
  bool wrong = false;
  (void)read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  auto& hash = write<Hash>(a[1]);
  std::int64_t added = 0;
  for (std::size_t i = 2; i < a.size(); i += 2) {
    const auto it = hash.find(a[i]);
    if (it == hash.end()) {
      hash.emplace_back(a[i], a[i + 1]);
      ++added;
    } else {
      it->second = a[i + 1];
    }
  }
  return number(added);
}

Reply RedisModel::hsetnx(const Arguments& a) {
  const Reply before = hexists(a);
  if (before.type == Reply::Type::kError || before.integer == 1)
    return before.type == Reply::Type::kError ? before : number(0);
  write<Hash>(a[1]).emplace_back(a[2], a[3]);
  return number(1);
}

Reply RedisModel::hdel(const Arguments& a) {
  bool wrong = false;
  const auto* found = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  if (!found) return number(0);
  auto& hash = write<Hash>(a[1]);
  std::int64_t removed = 0;
  for (std::size_t i = 2; i < a.size(); ++i) {
    const auto it = hash.find(a[i]);
    if (it == hash.end()) continue;
    hash.erase(it);
    ++removed;
  }
  drop_if_empty<Hash>(a[1]);
  return number(removed);
}

Reply RedisModel::hexists(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  return wrong ? wrong_type() : number(hash && hash->contains(a[2]) ? 1 : 0);
}

Reply RedisModel::hgetall(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (hash)
    for (const auto& [field, value] : *hash) {
      out.elements.push_back(text(field));
      out.elements.push_back(text(value));
    }
  return out;
}

Reply RedisModel::hincrby(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  const auto by = integer(a[3]);
  if (!by) return not_integer();
  const auto it = hash ? hash->find(a[2]) : Hash::const_iterator();
  const auto before = hash && it != hash->end() ? integer(it->second) : 0;
  if (!before) return error("ERR hash value is not an integer");
  std::int64_t sum = 0;
  if (__builtin_add_overflow(*before, *by, &sum)) return error("ERR increment or decrement would overflow");
  auto& changed = write<Hash>(a[1]);
  if (const auto at = changed.find(a[2]); at != changed.end()) {
    at->second = std::to_string(sum);
  } else {
    changed.emplace_back(a[2], std::to_string(sum));
  }
  return number(sum);
}

Reply RedisModel::hkeys(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (hash)
    for (const auto& [field, value] : *hash) out.elements.push_back(text(field));
  return out;
}

Reply RedisModel::hlen(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  return wrong ? wrong_type() : number(hash ? static_cast<std::int64_t>(hash->size()) : 0);
}

Reply RedisModel::hmget(const Arguments& a) {
  bool wrong = false;
  const auto* hash = read<Hash>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  for (std::size_t i = 2; i < a.size(); ++i) {
    const auto it = hash ? hash->find(a[i]) : Hash::const_iterator();
    out.elements.push_back(hash && it != hash->end() ? text(it->second) : nil());
  }
  return out;
}

// All of it is one page, as of a hash that Redis keeps compact.
Reply RedisModel::hscan(const Arguments& a) {
  Reply page = hgetall(a);
  if (page.type == Reply::Type::kError) return page;
  Reply out = array();
  out.elements = {text("0"), std::move(page)};
  return out;
}

// ---- sets

Reply RedisModel::sadd(const Arguments& a) {
  bool wrong = false;
  (void)read<Set>(a[1], wrong);
  if (wrong) return wrong_type();
  auto& set = write<Set>(a[1]);
  std::int64_t added = 0;
  for (std::size_t i = 2; i < a.size(); ++i) added += set.emplace(a[i]).second ? 1 : 0;
  return number(added);
}

Reply RedisModel::srem(const Arguments& a) {
  bool wrong = false;
  if (!read<Set>(a[1], wrong)) return wrong ? wrong_type() : number(0);
  auto& set = write<Set>(a[1]);
  std::int64_t removed = 0;
  for (std::size_t i = 2; i < a.size(); ++i) removed += static_cast<std::int64_t>(set.erase(std::string(a[i])));
  drop_if_empty<Set>(a[1]);
  return number(removed);
}

Reply RedisModel::smembers(const Arguments& a) {
  bool wrong = false;
  const auto* set = read<Set>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (set)
    for (const auto& member : *set) out.elements.push_back(text(member));
  return out;
}

// ---- sorted sets

Reply RedisModel::zadd(const Arguments& a) {
  std::size_t at = 2;
  bool greater = false, less = false, known_only = false;
  for (; at < a.size(); ++at) {
    if (same(a[at], "GT")) {
      greater = true;
    } else if (same(a[at], "LT")) {
      less = true;
    } else if (same(a[at], "XX")) {
      known_only = true;
    } else {
      break;
    }
  }
  if (at >= a.size() || (a.size() - at) % 2 != 0) return syntax();
  bool wrong = false;
  (void)read<SortedSet>(a[1], wrong);
  std::vector<double> scores;
  for (std::size_t i = at; i < a.size(); i += 2) {
    const auto score = real(a[i]);
    if (!score) return error("ERR value is not a valid float");
    scores.push_back(*score);
  }
  if (wrong) return wrong_type();
  if (known_only && !find(a[1])) return number(0);
  auto& set = write<SortedSet>(a[1]);
  std::int64_t added = 0;
  for (std::size_t i = at; i < a.size(); i += 2) {
    const double score = scores[(i - at) / 2];
    const auto it = set.scores.find(a[i + 1]);
    if (it == set.scores.end()) {
      if (known_only) continue;
      set.scores.emplace(a[i + 1], score);
      set.order.emplace(score, a[i + 1]);
      ++added;
    } else if (it->second != score && !(greater && score < it->second) && !(less && score > it->second)) {
      set.order.erase({it->second, it->first});
      it->second = score;
      set.order.emplace(score, a[i + 1]);
    }
  }
  return number(added);
}

Reply RedisModel::zrem(const Arguments& a) {
  bool wrong = false;
  if (!read<SortedSet>(a[1], wrong)) return wrong ? wrong_type() : number(0);
  auto& set = write<SortedSet>(a[1]);
  std::int64_t removed = 0;
  for (std::size_t i = 2; i < a.size(); ++i) {
    const auto it = set.scores.find(a[i]);
    if (it == set.scores.end()) continue;
    set.order.erase({it->second, it->first});
    set.scores.erase(it);
    ++removed;
  }
  drop_if_empty<SortedSet>(a[1]);
  return number(removed);
}

Reply RedisModel::zcard(const Arguments& a) {
  bool wrong = false;
  const auto* set = read<SortedSet>(a[1], wrong);
  return wrong ? wrong_type() : number(set ? static_cast<std::int64_t>(set->scores.size()) : 0);
}

Reply RedisModel::zscore(const Arguments& a) {
  Reply all = zmscore(a);
  return all.type == Reply::Type::kError ? all : std::move(all.elements[0]);
}

Reply RedisModel::zmscore(const Arguments& a) {
  bool wrong = false;
  const auto* set = read<SortedSet>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  for (std::size_t i = 2; i < a.size(); ++i) {
    const auto it = set ? set->scores.find(a[i]) : std::map<std::string, double, std::less<>>::const_iterator();
    out.elements.push_back(set && it != set->scores.end() ? text(score_text(it->second)) : nil());
  }
  return out;
}

// By rank.
Reply RedisModel::zrange(const Arguments& a) {
  bool with_scores = false;
  for (std::size_t i = 4; i < a.size(); ++i) {
    if (!same(a[i], "WITHSCORES")) return syntax();
    with_scores = true;
  }
  const auto from = integer(a[2]), to = integer(a[3]);
  if (!from || !to) return not_integer();
  bool wrong = false;
  const auto* set = read<SortedSet>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (!set) return out;
  const auto size = static_cast<std::int64_t>(set->order.size());
  const std::int64_t first = std::max<std::int64_t>(0, *from < 0 ? size + *from : *from);
  const std::int64_t last = std::min(size - 1, *to < 0 ? size + *to : *to);
  std::int64_t rank = 0;
  for (const auto& one : set->order) {
    if (rank >= first && rank <= last) add_scored(out, one, with_scores);
    ++rank;
  }
  return out;
}

Reply RedisModel::zrangebyscore(const Arguments& a) {
  const bool backwards = same(a[0], "ZREVRANGEBYSCORE");
  const auto low = bound(a[backwards ? 3 : 2]), high = bound(a[backwards ? 2 : 3]);
  if (!low || !high) return error("ERR min or max is not a float");
  bool with_scores = false;
  std::int64_t skip = 0, limit = -1;
  for (std::size_t i = 4; i < a.size(); ++i) {
    if (same(a[i], "WITHSCORES")) {
      with_scores = true;
    } else if (same(a[i], "LIMIT") && i + 2 < a.size()) {
      const auto first = integer(a[i + 1]), count = integer(a[i + 2]);
      if (!first || !count) return not_integer();
      skip = *first;
      limit = *count;
      i += 2;
    } else {
      return syntax();
    }
  }
  bool wrong = false;
  const auto* set = read<SortedSet>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (!set) return out;
  std::vector<const std::pair<double, std::string>*> found;
  for (const auto& one : set->order)
    if (within(one.first, *low, *high)) found.push_back(&one);
  if (backwards) std::reverse(found.begin(), found.end());
  if (skip < 0) return out;
  for (std::size_t i = static_cast<std::size_t>(skip); i < found.size() && limit != 0; ++i) {
    add_scored(out, *found[i], with_scores);
    if (limit > 0) --limit;
  }
  return out;
}

Reply RedisModel::zremrangebyscore(const Arguments& a) {
  const auto low = bound(a[2]), high = bound(a[3]);
  if (!low || !high) return error("ERR min or max is not a float");
  bool wrong = false;
  const auto* set = read<SortedSet>(a[1], wrong);
  if (wrong) return wrong_type();
  if (!set) return number(0);
  std::vector<std::string> gone;
  for (const auto& [score, member] : set->order)
    if (within(score, *low, *high)) gone.push_back(member);
  Arguments remove{"ZREM", a[1]};
  remove.insert(remove.end(), gone.begin(), gone.end());
  return gone.empty() ? number(0) : zrem(remove);
}

Reply RedisModel::zremrangebyrank(const Arguments& a) {
  Reply gone = zrange({"ZRANGE", a[1], a[2], a[3]});
  if (gone.type == Reply::Type::kError) return gone;
  Arguments remove{"ZREM", a[1]};
  for (const auto& member : gone.elements) remove.push_back(member.text);
  return gone.elements.empty() ? number(0) : zrem(remove);
}

// ---- streams

Reply RedisModel::xadd(const Arguments& a) {
  bool wrong = false;
  const auto* known = read<Stream>(a[1], wrong);
  if (wrong) return wrong_type();
  std::size_t at = 2;
  Stream none;
  std::int64_t removed = 0;
  const std::size_t options = at;
  if (same(a[at], "MAXLEN") || same(a[at], "MINID")) {
    if (auto failed = trim(none, a, at, removed)) return *failed;
  }
  if (at + 2 >= a.size() || (a.size() - at) % 2 == 0) return error("ERR wrong number of arguments for 'xadd' command");
  const StreamId last = known ? known->last : StreamId();
  StreamId id;
  if (a[at] == "*") {
    if (last == kLastId) return error("ERR The stream has exhausted the last possible ID, unable to add more items");
    const auto ms = static_cast<std::uint64_t>(now_ms());
    id = ms > last.ms ? StreamId{ms, 0} : after(last);
  } else {
    const auto given = stream_id(a[at], 0);
    if (!given) return bad_id();
    if (*given == StreamId()) return error("ERR The ID specified in XADD must be greater than 0-0");
    if (*given <= last)
      return error("ERR The ID specified in XADD is equal or smaller than the target stream top item");
    id = *given;
  }
  auto& stream = write<Stream>(a[1]);
  stream.last = id;
  stream.entries.emplace(id, std::vector<std::string>(a.begin() + static_cast<std::ptrdiff_t>(at) + 1, a.end()));
  if (at != options) {
    std::size_t again = options;
    (void)trim(stream, a, again, removed);
  }
  return text(id.text());
}

Reply RedisModel::xdel(const Arguments& a) {
  bool wrong = false;
  if (!read<Stream>(a[1], wrong)) return wrong ? wrong_type() : number(0);
  std::vector<StreamId> ids;
  for (std::size_t i = 2; i < a.size(); ++i) {
    const auto id = stream_id(a[i], 0);
    if (!id) return bad_id();
    ids.push_back(*id);
  }
  auto& stream = write<Stream>(a[1]);
  std::int64_t removed = 0;
  for (const auto& id : ids) removed += static_cast<std::int64_t>(stream.entries.erase(id));
  return number(removed);
}

Reply RedisModel::xlen(const Arguments& a) {
  bool wrong = false;
  const auto* stream = read<Stream>(a[1], wrong);
  return wrong ? wrong_type() : number(stream ? static_cast<std::int64_t>(stream->entries.size()) : 0);
}

Reply RedisModel::xrange(const Arguments& a) {
  const bool backwards = same(a[0], "XREVRANGE");
  const auto edge = [](std::string_view id, bool low) -> std::optional<StreamId> {
    if (id == "-") return StreamId();
    if (id == "+") return kLastId;
    const bool open = id.starts_with('(');
    auto out = stream_id(id.substr(open ? 1 : 0), low ? 0 : kLastId.sequence);
    if (out && open) {
      if (low) return after(*out);
      return out->sequence > 0 ? StreamId{out->ms, out->sequence - 1} : StreamId{out->ms - 1, kLastId.sequence};
    }
    return out;
  };
  const auto low = edge(a[backwards ? 3 : 2], true), high = edge(a[backwards ? 2 : 3], false);
  if (!low || !high) return bad_id();
  std::int64_t limit = -1;
  if (a.size() > 4) {
    const auto count = a.size() == 6 && same(a[4], "COUNT") ? integer(a[5]) : std::nullopt;
    if (!count) return syntax();
    limit = *count;
  }
  bool wrong = false;
  const auto* stream = read<Stream>(a[1], wrong);
  if (wrong) return wrong_type();
  Reply out = array();
  if (!stream || *high < *low) return out;
  if (a.size() > 4 && limit <= 0) return nil();
  auto first = stream->entries.lower_bound(*low);
  auto last = stream->entries.upper_bound(*high);
  while (first != last && limit != 0) {
    if (backwards) --last;
    const auto& one = backwards ? *last : *first;
    out.elements.push_back(entry_of(one.first, one.second));
    if (!backwards) ++first;
    if (limit > 0) --limit;
  }
  return out;
}

Reply RedisModel::xtrim(const Arguments& a) {
  bool wrong = false;
  Stream none;
  std::size_t at = 2;
  std::int64_t removed = 0;
  if (!same(a[2], "MAXLEN") && !same(a[2], "MINID")) return syntax();
  const bool known = read<Stream>(a[1], wrong) != nullptr;
  if (wrong) return wrong_type();
  if (auto failed = trim(known ? write<Stream>(a[1]) : none, a, at, removed)) return *failed;
  return number(removed);
}

Reply RedisModel::xsetid(const Arguments& a) {
  bool wrong = false;
  const auto* stream = read<Stream>(a[1], wrong);
  if (wrong) return wrong_type();
  if (!stream) return error("ERR no such key");
  const auto id = stream_id(a[2], 0);
  if (!id) return bad_id();
  if (!stream->entries.empty() && *id < stream->entries.rbegin()->first)
    return error("ERR The ID specified in XSETID is smaller than the target stream top item");
  write<Stream>(a[1]).last = *id;
  return status("OK");
}

namespace {
// Where the keys of XREAD begin, and how many there are.
std::optional<std::pair<std::size_t, std::size_t>> streams_of(const Arguments& a, std::int64_t& count) {
  for (std::size_t i = 1; i + 1 < a.size(); ++i) {
    if (same(a[i], "COUNT")) {
      count = integer(a[++i]).value_or(-1);
    } else if (same(a[i], "BLOCK")) {
      ++i;
    } else if (same(a[i], "STREAMS")) {
      const std::size_t rest = a.size() - i - 1;
      if (rest % 2 != 0) return std::nullopt;
      return std::pair(i + 1, rest / 2);
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;
}
}  // namespace

std::vector<std::string> RedisModel::from_now(const Arguments& command) {
  std::vector<std::string> out(command.begin(), command.end());
  std::int64_t count = -1;
  if (const auto at = streams_of(command, count)) {
    for (std::size_t i = 0; i < at->second; ++i) {
      auto& id = out[at->first + at->second + i];
      const auto* stream = peek_as<Stream>(command[at->first + i]);
      if (id == "$") id = stream ? stream->last.text() : "0-0";
    }
  }
  return out;
}

Reply RedisModel::read_streams(const Arguments& a) {
  std::int64_t count = -1;
  const auto at = streams_of(a, count);
  if (!at) return syntax();
  Reply out = array();
  for (std::size_t i = 0; i < at->second; ++i) {
    const auto key = a[at->first + i];
    const auto since = stream_id(a[at->first + at->second + i], 0);
    bool wrong = false;
    const auto* stream = read<Stream>(key, wrong);
    if (wrong) return wrong_type();
    if (!since) return bad_id();
    if (!stream) continue;
    Reply entries = array();
    for (auto it = stream->entries.upper_bound(*since); it != stream->entries.end(); ++it) {
      if (count > 0 && static_cast<std::int64_t>(entries.elements.size()) == count) break;
      entries.elements.push_back(entry_of(it->first, it->second));
    }
    if (entries.elements.empty()) continue;
    Reply pair = array();
    pair.elements.push_back(text(key));
    pair.elements.push_back(std::move(entries));
    out.elements.push_back(std::move(pair));
  }
  return out.elements.empty() ? nil() : out;
}

// ---- the server

Reply RedisModel::time(const Arguments&) {
  const std::int64_t us = now_us_();
  Reply out = array();
  out.elements = {text(std::to_string(us / 1'000'000)), text(std::to_string(us % 1'000'000))};
  return out;
}

Reply RedisModel::publish(const Arguments& a) { return number(on_publish ? on_publish(a[1], a[2]) : 0); }

Reply RedisModel::info(const Arguments&) {
  return text("# Server\r\nredis_version:7.0.15\r\nrun_id:" + run_id +
              "\r\n# Memory\r\nused_memory:1000000\r\nmaxmemory:1000000000\r\nmaxmemory_policy:noeviction\r\n"
              "# Persistence\r\nloading:0\r\naof_enabled:1\r\naof_last_write_status:ok\r\n");
}

Reply RedisModel::keys_like(const Arguments& a) {
  Reply out = array();
  const auto star = a[1].find('*');
  const auto front = a[1].substr(0, star);
  const auto back = star == std::string_view::npos ? std::string_view() : a[1].substr(star + 1);
  for (const auto& key : keys()) {
    const bool fits = star == std::string_view::npos
                          ? key == a[1]
                          : key.size() >= front.size() + back.size() && key.starts_with(front) && key.ends_with(back);
    if (fits) out.elements.push_back(text(key));
  }
  return out;
}

Reply RedisModel::flushall(const Arguments&) {
  entries_.clear();
  return status("OK");
}

Reply RedisModel::function(const Arguments& a) {
  if (same(a[1], "FLUSH")) {
    functions_.clear();
    return status("OK");
  }
  if (!same(a[1], "LOAD")) return error("ERR unknown subcommand '" + std::string(a[1]) + "'. Try FUNCTION HELP.");
  const auto& loaded = Script::load(std::string(a.back()));
  if (!loaded.error.empty()) return error(loaded.error);
  if (!same(a[2], "REPLACE"))
    for (const auto& [name, function] : loaded.functions)
      if (functions_.contains(name)) return error("ERR Library '" + loaded.library + "' already exists");
  // Libraries have names of their own, so that another one with this name is what it replaces.
  std::erase_if(functions_, [&](const auto& one) { return one.first.starts_with(loaded.library + "_"); });
  for (const auto& [name, function] : loaded.functions) functions_[name] = &function;
  return text(loaded.library);
}

Reply RedisModel::fcall(const Arguments& a) {
  ++calls;
  const auto it = functions_.find(a[1]);
  if (it == functions_.end()) return error("ERR Function not found");
  const auto count = integer(a[2]);
  if (!count || *count < 0) return error("ERR Bad number of keys provided");
  if (static_cast<std::size_t>(*count) > a.size() - 3)
    return error("ERR Number of keys can't be greater than number of args");
  if (same(a[0], "FCALL_RO") && it->second->writes)
    return error("ERR Can not execute a script with write flag using *_ro command.");
  if (out_of_memory && it->second->writes && !it->second->allows_oom)
    return error("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'");
  scripted_ = true;
  may_write_ = it->second->writes;
  may_grow_ = !out_of_memory || it->second->allows_oom;
  Reply out = Script::call(*this, *it->second, a, static_cast<std::size_t>(*count));
  scripted_ = false;
  may_write_ = may_grow_ = true;
  return out;
}

const std::unordered_map<std::string_view, RedisModel::CommandInfo>& RedisModel::commands() {
  using R = RedisModel;
  static const std::unordered_map<std::string_view, CommandInfo> all{
      {"GET", {&R::get, 2}},
      {"SET", {&R::set, 3, true, true}},
      {"DEL", {&R::del, 2, true}},
      {"UNLINK", {&R::del, 2, true}},
      {"EXISTS", {&R::exists, 2}},
      {"INCR", {&R::incr, 2, true, true}},
      {"STRLEN", {&R::strlen, 2}},
      {"GETRANGE", {&R::getrange, 4}},
      {"GETEX", {&R::getex, 2, true}},
      {"PTTL", {&R::pttl, 2}},
      {"PEXPIRE", {&R::pexpire, 3, true}},
      {"PERSIST", {&R::persist, 2, true}},
      {"HGET", {&R::hget, 3}},
      {"HSET", {&R::hset, 4, true, true}},
      {"HSETNX", {&R::hsetnx, 4, true, true}},
      {"HDEL", {&R::hdel, 3, true}},
      {"HEXISTS", {&R::hexists, 3}},
      {"HGETALL", {&R::hgetall, 2}},
      {"HINCRBY", {&R::hincrby, 4, true, true}},
      {"HKEYS", {&R::hkeys, 2}},
      {"HLEN", {&R::hlen, 2}},
      {"HMGET", {&R::hmget, 3}},
      {"HSCAN", {&R::hscan, 3}},
      {"SADD", {&R::sadd, 3, true, true}},
      {"SREM", {&R::srem, 3, true}},
      {"SMEMBERS", {&R::smembers, 2}},
      {"ZADD", {&R::zadd, 4, true, true}},
      {"ZREM", {&R::zrem, 3, true}},
      {"ZCARD", {&R::zcard, 2}},
      {"ZSCORE", {&R::zscore, 3}},
      {"ZMSCORE", {&R::zmscore, 3}},
      {"ZRANGE", {&R::zrange, 4}},
      {"ZRANGEBYSCORE", {&R::zrangebyscore, 4}},
      {"ZREVRANGEBYSCORE", {&R::zrangebyscore, 4}},
      {"ZREMRANGEBYSCORE", {&R::zremrangebyscore, 4, true}},
      {"ZREMRANGEBYRANK", {&R::zremrangebyrank, 4, true}},
      {"XADD", {&R::xadd, 5, true, true}},
      {"XDEL", {&R::xdel, 3, true}},
      {"XLEN", {&R::xlen, 2}},
      {"XRANGE", {&R::xrange, 4}},
      {"XREVRANGE", {&R::xrange, 4}},
      {"XTRIM", {&R::xtrim, 4, true}},
      {"XSETID", {&R::xsetid, 3, true, true}},
      {"TIME", {&R::time, 1}},
      {"PUBLISH", {&R::publish, 3}},
      {"INFO", {&R::info, 1}},
      {"KEYS", {&R::keys_like, 2}},
      {"FLUSHALL", {&R::flushall, 1, true}},
      {"FUNCTION", {&R::function, 2, true, true}},
      {"FCALL", {&R::fcall, 3}},
      {"FCALL_RO", {&R::fcall, 3}},
  };
  return all;
}

Reply RedisModel::run(const Arguments& command) {
  const auto it = commands().find(command[0]);
  if (it == commands().end()) {
    const std::string name(command[0]);
    return error(scripted_ ? "ERR Unknown Redis command called from script" : "ERR unknown command '" + name + "'");
  }
  const CommandInfo& info = it->second;
  if (command.size() < static_cast<std::size_t>(info.least)) {
    std::string name(command[0]);
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return error(scripted_ ? "ERR Wrong number of args calling Redis command from script"
                           : "ERR wrong number of arguments for '" + name + "' command");
  }
  if (info.writes && !may_write_) return error("ERR Write commands are not allowed from read-only scripts.");
  if (info.needs_memory && (scripted_ ? !may_grow_ : out_of_memory))
    return error("OOM command not allowed when used memory > 'maxmemory'.");
  return (this->*info.run)(command);
}

}  // namespace ditfleet::history
