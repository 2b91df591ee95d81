#include "shared/loras/registry.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string_view>

#include "shared/core/excerpt.h"
#include "shared/core/sha256.h"
#include "shared/core/text.h"
#include "shared/core/wall_clock.h"
#include "shared/loras/keys.h"
#include "shared/loras/scripts.h"
#include "shared/redis/connection.h"

namespace ditfleet::loras {
namespace {

// How long a file is kept after its last name got another file, for jobs that were admitted before. A file whose last
// name was removed is deleted immediately.
constexpr std::int64_t kKeepReplacedMs = 600'000;
constexpr int kTries = 20;  // of a change that meets a concurrent one each time

Error not_registered(const std::string& name) {
  return Error{Code::kNotFound, "adapter '" + name + "' not found", "name"};
}

int chunk_count(std::int64_t bytes) {
  return static_cast<int>((bytes + static_cast<std::int64_t>(kChunkBytes) - 1) /
                          static_cast<std::int64_t>(kChunkBytes));
}

redis::Command eval(std::string_view script, std::size_t keys) {
  redis::Command command("EVAL");
  command << script << static_cast<std::int64_t>(keys);
  return command;
}

// The commit script's `pin`.
const char* pin_of(const Adapter& adapter) { return adapter.pinned ? "1" : ""; }

// The record of a field. If it is unreadable, logs a warning and returns nothing.
std::optional<Adapter> readable(const std::string& field, const std::string& text) {
  auto adapter = Adapter::parse(text);
  if (adapter && field_of(adapter->tenant, adapter->name) == field) return std::move(*adapter);
  spdlog::warn("loras: skipping the record '{}': {}", excerpt(field, 200),
               adapter ? "its tenant or name differs" : adapter.error().message);
  return std::nullopt;
}

}  // namespace

Registry::Registry(std::shared_ptr<redis::Connection> connection) : connection_(std::move(connection)) {}

asio::awaitable<Result<std::optional<std::string>>> Registry::record(const std::string& field, Deadline deadline) {
  auto reply = co_await connection_->execute(redis::Command("HGET") << kNamesKey << field, deadline);
  if (!reply) co_return reply.error();
  if (reply->is_nil()) co_return std::optional<std::string>();
  co_return std::optional<std::string>(std::move(reply->text));
}

asio::awaitable<Result<Registry::Registered>> Registry::registered(const std::string& field, const std::string& name,
                                                                   Deadline deadline) {
  auto text = co_await record(field, deadline);
  if (!text) co_return text.error();
  if (!*text) co_return not_registered(name);
  auto adapter = Adapter::parse(**text);
  if (!adapter) co_return adapter.error();
  co_return Registered{std::move(**text), std::move(*adapter)};
}

asio::awaitable<Result<std::optional<Adapter>>> Registry::find(const std::string& tenant, const std::string& name,
                                                               Deadline deadline) {
  auto text = co_await record(field_of(tenant, name), deadline);
  if (!text) co_return text.error();
  if (!*text) co_return std::optional<Adapter>();
  auto adapter = Adapter::parse(**text);
  if (!adapter) co_return adapter.error();
  co_return std::optional<Adapter>(std::move(*adapter));
}

// Reads pages, so that thousands of records do not block Redis. A concurrent change may be missed, but it changes the
// version.
asio::awaitable<Result<std::map<std::string, Adapter>>> Registry::all(Deadline deadline) {
  std::map<std::string, Adapter> out;
  std::string cursor = "0";
  do {
    auto reply =
        co_await connection_->execute(redis::Command("HSCAN") << kNamesKey << cursor << "COUNT" << 500, deadline);
    if (!reply) co_return reply.error();
    if (!reply->is_array() || reply->elements.size() != 2)
      co_return internal_error("[loras] unexpected reply to HSCAN");
    cursor = reply->elements[0].text;
    const auto& pairs = reply->elements[1].elements;
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (auto adapter = readable(pairs[i].text, pairs[i + 1].text))
        out.insert_or_assign(pairs[i].text, std::move(*adapter));
    }
  } while (cursor != "0");
  co_return out;
}

Result<void> Condition::check(const std::string& name, const Adapter* record) const {
  if (kind == kAbsent && record) {
    return Error{Code::kConflict,
                 "adapter '" + name + "' already exists; remove it first, or omit If-None-Match to replace it", "name"};
  }
  if (kind == kPresent && !record)
    return Error{Code::kConflict, "adapter '" + name + "' not found, but If-Match requires it", "name"};
  if (kind == kPresent && is && *record != *is) {
    return Error{
        Code::kConflict,
        "adapter '" + name + "' does not match If-Match: it was changed and now has the SHA-256 " + record->sha256,
        "name"};
  }
  return {};
}

asio::awaitable<Result<Registry::Stored>> Registry::stored(const std::string& sha256, Deadline deadline) {
  redis::Command get("HMGET");
  get << blob_key(sha256) << "upload"
      << "chunks";
  auto blob = co_await connection_->execute(std::move(get), deadline);
  if (!blob) co_return blob.error();
  if (blob->elements.size() != 2) co_return internal_error("[loras] unexpected reply to HMGET");
  Stored out{blob->elements[0].text, 0};
  if (!out.upload.empty()) out.chunks = leading_integer<int>(blob->elements[1].text);
  co_return out;
}

asio::awaitable<Result<bool>> Registry::put(const Adapter& adapter, const std::string& upload, Condition condition,
                                            Deadline deadline) {
  if (auto good = check_name(adapter.name); !good) co_return good.error();
  if (!is_sha256_hex(adapter.sha256) || adapter.bytes <= 0)
    co_return internal_error("[loras] the record has no digest or size");
  const std::string field = field_of(adapter.tenant, adapter.name);
  const std::string text = adapter.to_json();
  const int chunks = upload.empty() ? 0 : chunk_count(adapter.bytes);
  bool replaces = false;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto current = co_await record(field, deadline);
    if (!current) co_return current.error();
    // Either an earlier attempt succeeded and its reply was lost, or someone else put the same record. The script must
    // run again for an upload, to delete chunks that the digest does not use.
    const bool made = attempt > 0 && *current == text;
    if (made && upload.empty()) co_return !replaces;
    if (!made) replaces = current->has_value();
    Adapter old;
    if (current->has_value()) {
      // An unreadable record is replaced; its file then remains, because its digest is unknown.
      if (auto parsed = Adapter::parse(**current)) old = std::move(*parsed);
    }
    if (auto holds = condition.check(adapter.name, replaces ? &old : nullptr); !made && !holds) co_return holds.error();
    Stored before;
    if (!upload.empty()) {
      auto found = co_await stored(adapter.sha256, deadline);
      if (!found) co_return found.error();
      before = std::move(*found);
    }
    redis::Command commit = eval(commit_script(), 6 + static_cast<std::size_t>(chunks + before.chunks));
    commit << kNamesKey << kVersionKey << kChangesKey << kGarbageKey << blob_key(adapter.sha256)
           << blob_key(old.sha256.empty() ? adapter.sha256 : old.sha256);
    for (int i = 0; i < chunks; ++i) commit << chunk_key(upload, static_cast<std::size_t>(i));
    for (int i = 0; i < before.chunks; ++i) commit << chunk_key(before.upload, static_cast<std::size_t>(i));
    commit << field << current->value_or("") << text << adapter.sha256 << old.sha256 << adapter.path << adapter.bytes
           << kKeepReplacedMs << pin_of(adapter) << upload << chunks << before.upload;
    auto done = co_await connection_->execute(std::move(commit), deadline);
    if (!done) co_return done.error();
    if (done->text == "expired") {
      co_return not_found("the upload of '" + adapter.name + "' took longer than " + std::to_string(kUploadMs / 1000) +
                          " s and has expired; upload it again");
    }
    if (done->text != "done") continue;
    (void)co_await sweep(deadline);  // if it fails, the next change sweeps
    co_return !replaces;
  }
  co_return Error{Code::kConflict, "adapter '" + adapter.name + "' is being changed by other clients; try again"};
}

asio::awaitable<Result<Adapter>> Registry::set_pinned(const std::string& tenant, const std::string& name, bool pinned,
                                                      Deadline deadline, Condition condition) {
  const std::string field = field_of(tenant, name);
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto current = co_await registered(field, name, deadline);
    if (!current) co_return current.error();
    auto& [text, adapter] = *current;
    if (auto holds = condition.check(name, &adapter); !holds) co_return holds.error();
    if (adapter.pinned == pinned) co_return std::move(adapter);
    adapter.pinned = pinned;
    const std::string blob = blob_key(adapter.sha256);
    redis::Command commit = eval(commit_script(), 6);
    commit << kNamesKey << kVersionKey << kChangesKey << kGarbageKey << blob << blob << field << text
           << adapter.to_json() << adapter.sha256 << adapter.sha256 << adapter.path << adapter.bytes << 0
           << pin_of(adapter) << "" << 0 << "";
    auto done = co_await connection_->execute(std::move(commit), deadline);
    if (!done) co_return done.error();
    if (done->text == "done") co_return std::move(adapter);
  }
  co_return Error{Code::kConflict, "adapter '" + name + "' is being changed by other clients; try again"};
}

asio::awaitable<Result<Adapter>> Registry::remove(const std::string& tenant, const std::string& name, Deadline deadline,
                                                  Condition condition) {
  const std::string field = field_of(tenant, name);
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto current = co_await registered(field, name, deadline);
    if (!current) co_return current.error();
    auto& [text, adapter] = *current;
    if (auto holds = condition.check(name, &adapter); !holds) co_return holds.error();
    redis::Command remove = eval(remove_script(), 5);
    remove << kNamesKey << kVersionKey << kChangesKey << kGarbageKey << blob_key(adapter.sha256) << field << text
           << adapter.sha256;
    auto done = co_await connection_->execute(std::move(remove), deadline);
    if (!done) co_return done.error();
    if (done->text != "done") continue;
    (void)co_await sweep(deadline);
    co_return std::move(adapter);
  }
  co_return Error{Code::kConflict, "adapter '" + name + "' is being changed by other clients; try again"};
}

asio::awaitable<Result<std::int64_t>> Registry::version(Deadline deadline) {
  auto reply = co_await connection_->execute(redis::Command("GET") << kVersionKey, deadline);
  if (!reply) co_return reply.error();
  co_return leading_integer(reply->text);
}

asio::awaitable<Result<std::optional<Changes>>> Registry::changes_since(std::int64_t version, Deadline deadline) {
  std::vector<redis::Command> ask(3);
  ask[0] << "GET" << kVersionKey;  // first, so that a later call with this version returns concurrent changes
  ask[1] << "ZRANGE" << kChangesKey << 0 << 0 << "WITHSCORES";
  ask[2] << "ZRANGEBYSCORE" << kChangesKey << "(" + std::to_string(version) << "+inf";
  auto replies = co_await connection_->execute_all(std::move(ask), deadline);
  for (const auto& reply : replies) {
    if (!reply) co_return reply.error();
  }
  const auto& oldest = replies[1]->elements;
  if (oldest.size() != 2 || leading_integer(oldest[1].text) > version) co_return std::optional<Changes>();
  Changes out;
  out.version = leading_integer(replies[0]->text);
  const auto& fields = replies[2]->elements;
  if (fields.empty()) co_return std::optional<Changes>(std::move(out));
  redis::Command get("HMGET");
  get << kNamesKey;
  for (const auto& field : fields) get << field.text;
  auto records = co_await connection_->execute(std::move(get), deadline);
  if (!records) co_return records.error();
  for (std::size_t i = 0; i < fields.size() && i < records->elements.size(); ++i) {
    const auto& text = records->elements[i];
    out.records[fields[i].text] = text.is_nil() ? std::nullopt : readable(fields[i].text, text.text);
  }
  co_return std::optional<Changes>(std::move(out));
}

asio::awaitable<Result<Location>> Registry::lookup(const std::string& sha256, Deadline deadline) {
  if (!is_sha256_hex(sha256))
    co_return invalid_argument("[loras] '" + excerpt(sha256, 80) +
                               "' is not a SHA-256; it must be 64 lower-case hexadecimal digits");
  auto reply = co_await connection_->execute(redis::Command("HGETALL") << blob_key(sha256), deadline);
  if (!reply) co_return reply.error();
  Location out;
  out.sha256 = sha256;
  bool named = false, several = false;
  std::string until, kept, place;
  const auto& fields = reply->elements;
  for (std::size_t i = 0; i + 1 < fields.size(); i += 2) {
    const std::string &key = fields[i].text, &value = fields[i + 1].text;
    if (key == "bytes") out.bytes = leading_integer(value);
    if (key == "upload") out.upload = value;
    if (key == "chunks") out.chunks = leading_integer<int>(value);
    if (key == "until") until = value;
    if (key == "kept") kept = value;
    if (key.starts_with("p:")) out.pinned = true;
    if (!key.starts_with("r:")) continue;
    several |= named && value != place;
    place = value;
    named = true;
    if (!value.empty() && std::find(out.paths.begin(), out.paths.end(), value) == out.paths.end())
      out.paths.push_back(value);
  }
  if (!named && (until.empty() || until == "0")) {
    co_return not_found("[loras] no adapter with the digest " + sha256.substr(0, 12) + "… is registered");
  }
  if (!named && !kept.empty()) out.paths.push_back(kept);
  out.one_place = named && !several;
  if (!out.upload.empty() && out.chunks != chunk_count(out.bytes)) {
    co_return data_corrupt("[loras] the record of " + sha256 + " is inconsistent: " + std::to_string(out.bytes) +
                           " bytes in " + std::to_string(out.chunks) + " chunks");
  }
  co_return out;
}

asio::awaitable<Result<std::string>> Registry::read_chunk(const Location& location, int index, Deadline deadline) {
  if (location.upload.empty() || index < 0 || index >= location.chunks) {
    co_return invalid_argument("[loras] no chunk " + std::to_string(index) + "; the upload has " +
                               std::to_string(location.chunks));
  }
  redis::Command get("GET");
  get << chunk_key(location.upload, static_cast<std::size_t>(index));
  const std::int64_t begin = static_cast<std::int64_t>(index) * static_cast<std::int64_t>(kChunkBytes);
  const auto size =
      static_cast<std::size_t>(std::min<std::int64_t>(static_cast<std::int64_t>(kChunkBytes), location.bytes - begin));
  const std::string sha256 = location.sha256;
  auto reply = co_await connection_->execute(std::move(get), deadline);
  if (!reply) co_return reply.error();
  if (reply->is_nil()) {
    co_return not_found("[loras] the file with the digest " + sha256.substr(0, 12) + "… was deleted while it was read");
  }
  if (reply->text.size() != size) {
    co_return data_corrupt("[loras] chunk " + std::to_string(index) + " of " + sha256 + " has " +
                           std::to_string(reply->text.size()) + " bytes; it must have " + std::to_string(size));
  }
  co_return std::move(reply->text);
}

asio::awaitable<Result<int>> Registry::sweep(Deadline deadline) {
  redis::Command due("ZRANGEBYSCORE");
  due << kGarbageKey << "-inf" << unix_ms() + 1000 << "LIMIT" << 0 << 100;  // the script checks Redis' own clock
  auto found = co_await connection_->execute(std::move(due), deadline);
  if (!found) co_return found.error();
  int gone = 0;
  for (const auto& element : found->elements) {
    const std::string sha256 = element.text;
    auto bytes = co_await stored(sha256, deadline);
    if (!bytes) co_return bytes.error();
    redis::Command collect = eval(collect_script(), 2 + static_cast<std::size_t>(bytes->chunks));
    collect << kGarbageKey << blob_key(sha256);
    for (int i = 0; i < bytes->chunks; ++i) collect << chunk_key(bytes->upload, static_cast<std::size_t>(i));
    collect << sha256 << bytes->upload;
    auto done = co_await connection_->execute(std::move(collect), deadline);
    if (!done) co_return done.error();
    gone += static_cast<int>(done->integer);
  }
  co_return gone;
}

}  // namespace ditfleet::loras
