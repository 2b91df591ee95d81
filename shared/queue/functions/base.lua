#!lua name=ditfleet_v1
-- Every state transition of the queue, one Function each. README.md beside this folder documents KEYS, ARGV
-- and replies; it is the interface for clients in other languages.
--
-- Rules of these files:
--  * Keys come in KEYS only; a channel is the shard's prefix plus its name.
--  * No rollback exists: a transition checks everything it needs, then writes.
--  * TIME is read once a call. Numbers are made strings by string.format('%d'), never by '..'.
--  * redis.call, math, string are hidden while a library loads: functions look them up when they run.
--  * What a call costs is its number of commands. Whatever the jobs of a batch can share is read and written once
--    a call: what is open lies in hashes of the shard, and a call's events are one stream entry. Only what is a
--    job's own for good (its idempotency key, its record when it has ended) is a command for each.
--
-- What is open:
--   units: <job>:<unit> → state|nonce|started_ms|errors|crashes|owner|assigned_ms|n|deadline
--     with state ready, delayed (ready, but not before its back-off), assigned, running or canceling (running, asked
--     to stop). What a worker's calls check stands in front: the usual transitions compare and cut, and never parse.
--   open: <job> → n|ready_ms|cost|priority|deadline|intake entry|tenant|hash|traceparent|class|steps[|adapters]
--     with n units, 0 and no class while it is queued; the scheduler passes "steps[|adapters]" as one argument.
--   specs: <job> → its spec, from admission on.
--   last: <job>:<unit>, while it is queued <job> → the entry of `events` with its newest event. Every event names the
--     one before it: so an event is written once, in company, and a job's history is found without a search.
--
-- What has ended: the hash of its job, with `o` (its form in `open`), `spec`, and of each unit i u<i> (its form in
-- `units` with |ended_ms|last event behind), m<i> manifest, p<i> phases, e<i> error, w<i> warnings; state, ended,
-- error; `l` (last event) if it ended before it had units. Of a job with several units those that have ended stand
-- there before the others do; `done` counts them.

local function clock()
  local t = redis.call('TIME')
  local ms = t[1] * 1000 + math.floor(t[2] / 1000)
  return ms, string.format('%d', ms)
end

local function int(v) return string.format('%d', v) end

-- When a lease of that many milliseconds from now lapses, rounded up to a twentieth of it (a quarter of a second at most):
-- to set a place in a sorted set anew to what it was costs a fifth of moving it.
local function lease_until(ms, lease)
  local grain = math.max(1, math.min(250, math.floor(lease / 20)))
  return string.format('%d', math.ceil((ms + lease) / grain) * grain)
end

-- A number as it stands in the arguments; nil: it is none.
local function number(v)
  if v == '0' then return 0 elseif v == '1' then return 1 end
  return tonumber(v)
end

local function prefix_of(key) return string.match(key, '^df:{[^}]*}:') or '' end

local function badarg(text) return redis.error_reply('BADARG ' .. text) end

local function valid_id(id)
  return #id <= 64 and (string.find(id, '^%w+$') or string.find(id, '^[%w._-]+$')) ~= nil
end

-- state, nonce, started, errors, crashes, owner, assigned, n, deadline of an open unit
local function parts(u)
  return string.match(u, '^(%a+)|([^|]*)|(%d+)|(%d+)|(%d+)|([^|]*)|(%d+)|(%d+)|(%d+)$')
end

local function packed(s, nonce, st, e, c, owner, as, n, dl)
  return s .. '|' .. nonce .. '|' .. st .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. n .. '|' .. dl
end

-- A unit that waits for a worker.
local function waiting(s, e, c, n, dl) return s .. '||0|' .. e .. '|' .. c .. '||0|' .. n .. '|' .. dl end
local fresh = waiting('ready', '0', '0', '1', '0')

-- The usual question, without making a string of what is looked for: no other state has its bar there.
local function runs(u, nonce)
  return u and string.byte(u, 8) == 124 and string.byte(u, 1) == 114 and string.find(u, nonce, 9, true) == 9 and string.byte(u, 9 + #nonce) == 124
end

local function holds(u, state, nonce) return u and string.find(u, state .. '|' .. nonce .. '|', 1, true) == 1 end

-- n, deadline, intake entry, tenant, hash of an open job
local function of_job(o) return string.match(o, '^(%d+)|%d+|%d+|%-?%d+|(%d+)|([^|]*)|([^|]*)|(%x*)|') end

-- A job that is queued.
local function queued(dl, entry, tenant, sha, trace)
  return '0|0|0|0|' .. dl .. '|' .. entry .. '|' .. tenant .. '|' .. string.sub(sha, 1, 16) .. '|' .. trace .. '||'
end
local function is_queued(o) return o and string.sub(o, 1, 2) == '0|' end

-- Whether the body is the one that the job was made of.
local function same_body(o, tenant, sha)
  local _, _, _, whose, hash = of_job(o)
  return whose == tenant and hash == string.sub(sha, 1, 16)
end

-- Which job an idempotency key stands for, and whether that was made of the same body; nothing: it stands for none yet,
-- or for a job that has been forgotten, and from now on for `id`. made: the jobs of this call, which stand nowhere yet.
-- The key of the job it stood for is derived, not declared; it bears the shard's hash tag like all the others.
local function claim_key(key, id, sha, keep_ms, made, open)
  local rc, mine = redis.call, id .. ' ' .. string.sub(sha, 1, 32)
  local old = rc('SET', key, mine, 'NX', 'GET', 'PX', keep_ms)
  if not old then return nil end
  local first = string.match(old, '^%S*')
  if not made[first] and rc('HEXISTS', open, first) == 0 and rc('EXISTS', prefix_of(open) .. 'job:' .. first) == 0 then
    rc('SET', key, mine, 'PX', keep_ms)
    return nil
  end
  return first, string.sub(old, -32) == string.sub(sha, 1, 32)
end

-- What waits in the intake is an entry, and of several jobs that were submitted in one call "<entry>/<which of them>".
-- The spec of a job that is queued; '' if its entry is gone.
local function queued_spec(intake, entry)
  local at, which = string.match(entry, '^([^/]*)/?(%d*)$')
  local found = redis.call('XRANGE', intake, at, at)
  local fields, skip = found[1] and found[1][2] or {}, tonumber(which) or 1
  for i = 1, #fields, 2 do
    if fields[i] == 'spec' then
      skip = skip - 1
      if skip == 0 then return fields[i + 1] end
    end
  end
  return ''
end

-- After the last id that a stream can have nothing could be added any more: what follows is numbered by the clock again.
local last_id = '18446744073709551615-18446744073709551615'
local function renumber(intake)
  local _, t = clock()
  local top = redis.call('XREVRANGE', intake, '+', '-', 'COUNT', '1')[1]
  local at = top and tonumber(string.match(top[1], '^%d+')) >= tonumber(t) and top[1] or t .. '-0'
  redis.call('XSETID', intake, at)
end

-- Entries that nobody needs any more. One of several jobs goes when the scheduler has seen to the last of them.
local function forget_entries(intake, entries, count)
  local own, n, last = {}, 0, false
  for i = 1, count do
    local entry = entries[i]
    if not string.find(entry, '/', 1, true) then n = n + 1; own[n] = entry end
    if entry == last_id then last = true end
  end
  if n > 0 then redis.call('XDEL', intake, unpack(own)) end
  if last then renumber(intake) end
end

-- When a plain entry was added: its id says it, but may have been chosen, and a job of the future would never be swept.
local function added_at(entry, ms) return int(math.min(tonumber(string.match(entry, '^%d+')), ms)) end

-- Whether an entry is the one that this job was submitted in; o: its open form. Else the job has ended, or the entry was
-- made to look like one of `submit`: `reject`, which sees ended jobs too, tells which.
local function is_entry_of(o, entry)
  local from = o and select(2, string.find(o, '^%d+|%d+|%d+|%-?%d+|%d+|'))
  return from and string.find(o, entry .. '|', from + 1, true) == from + 1
end

-- The fields of a batch: every `stride` arguments from `first` on name a job, or one by (id, unit).
local function ids_of(a, first, stride)
  local out, n = {}, 0
  for p = first, #a, stride do n = n + 1; out[n] = a[p] end
  return out
end
local function members_of(a, first, stride)
  local out, n = {}, 0
  for p = first, #a, stride do n = n + 1; out[n] = a[p] .. ':' .. a[p + 1] end
  return out
end
local function read_all(key, fields)
  if #fields == 0 then return {} end
  return redis.call('HMGET', key, unpack(fields))
end
