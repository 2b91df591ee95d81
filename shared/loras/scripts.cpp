#include "shared/loras/scripts.h"

#include <string>

namespace ditfleet::loras {
namespace {

// Shared by the scripts. If Redis is over its memory limit it refuses a script with "#!lua" before the first command;
// flags=allow-oom exempts the scripts that free memory.
constexpr std::string_view kShared = R"LUA(
local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function referenced(blob)
  for _, field in ipairs(redis.call('HKEYS', blob)) do
    if string.sub(field, 1, 2) == 'r:' then return true end
  end
  return false
end

-- A new registry (another Redis, FLUSHALL) starts with the time in microseconds, which counting changes never
-- overtakes, so no version is used twice. The lowest version in `changes` is how far back it reaches; the entry '' is
-- the beginning.
local function note(version, changes, field)
  local number = redis.call('INCR', version)
  if number == 1 then
    local t = redis.call('TIME')
    number = t[1] * 1000000 + t[2]
    redis.call('SET', version, string.format('%d', number))
    redis.call('ZADD', changes, string.format('%d', number), '')
  end
  redis.call('ZADD', changes, string.format('%d', number), field)
  redis.call('ZREMRANGEBYRANK', changes, 0, -1001)
end

-- Removes one record's reference. Without references the bytes are deleted after keep milliseconds and can be found
-- until then.
local function release(garbage, blob, sha, field, keep)
  local path = redis.call('HGET', blob, 'r:' .. field) or ''
  redis.call('HDEL', blob, 'r:' .. field, 'p:' .. field)
  if referenced(blob) then return end
  local due = string.format('%d', clock() + keep)
  redis.call('HSET', blob, 'kept', path, 'until', keep > 0 and due or '0')
  redis.call('ZADD', garbage, due, sha)
end
)LUA";

constexpr std::string_view kCommit = R"LUA(
local names, version, changes, garbage, blob, old_blob = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local field, expected, record, sha, old_sha, path, bytes = unpack(ARGV, 1, 7)
local keep, pin, upload, chunks, before = tonumber(ARGV[8]), ARGV[9], ARGV[10], tonumber(ARGV[11]), ARGV[12]
if (redis.call('HGET', names, field) or '') ~= expected then return 'changed' end
if upload ~= '' and upload ~= before then
  -- KEYS has the upload's chunks, then the existing ones. The existing ones stay only if they are complete.
  if (redis.call('HGET', blob, 'upload') or '') ~= before then return 'changed' end
  local whole = before ~= '' and #KEYS == 6 + 2 * chunks
  for i = 7, 6 + chunks do
    local size = redis.call('STRLEN', KEYS[i])
    if size == 0 then return 'expired' end
    whole = whole and redis.call('STRLEN', KEYS[i + chunks]) == size
  end
  local first, last = 7 + chunks, #KEYS
  if whole then
    first, last = 7, 6 + chunks
  else
    for i = 7, 6 + chunks do redis.call('PERSIST', KEYS[i]) end
    redis.call('HSET', blob, 'upload', upload, 'chunks', string.format('%d', chunks))
  end
  for i = first, last do redis.call('UNLINK', KEYS[i]) end
end
redis.call('HSET', blob, 'bytes', bytes, 'r:' .. field, path)
redis.call('HDEL', blob, 'until', 'kept', 'p:' .. field)
if pin ~= '' then redis.call('HSET', blob, 'p:' .. field, pin) end
redis.call('ZREM', garbage, sha)
if old_sha ~= '' and old_sha ~= sha then release(garbage, old_blob, old_sha, field, keep) end
redis.call('HSET', names, field, record)
note(version, changes, field)
return 'done'
)LUA";

constexpr std::string_view kRemove = R"LUA(
local field, expected, sha = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', KEYS[1], field) ~= expected then return 'changed' end
release(KEYS[4], KEYS[5], sha, field, 0)
redis.call('HDEL', KEYS[1], field)
note(KEYS[2], KEYS[3], field)
return 'done'
)LUA";

constexpr std::string_view kCollect = R"LUA(
local garbage, blob, sha, upload = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local due = redis.call('ZSCORE', garbage, sha)
if not due or tonumber(due) > clock() or referenced(blob) then return 0 end
if (redis.call('HGET', blob, 'upload') or '') ~= upload then return 0 end
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('DEL', blob)
redis.call('ZREM', garbage, sha)
return 1
)LUA";

std::string script(std::string_view flags, std::string_view body) {
  return "#!lua" + std::string(flags) + "\n" + std::string(kShared) + std::string(body);
}

}  // namespace

std::string_view commit_script() {
  static const std::string text = script("", kCommit);
  return text;
}
std::string_view remove_script() {
  static const std::string text = script(" flags=allow-oom", kRemove);
  return text;
}
std::string_view collect_script() {
  static const std::string text = script(" flags=allow-oom", kCollect);
  return text;
}

}  // namespace ditfleet::loras
