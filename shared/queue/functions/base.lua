#!lua name=ditfleet_v3
-- The queue's transitions, one Function each. README.md and ../README.md document the public Functions.
--
-- Rules:
--  * Keys come in KEYS. `checked`, `claim_key`, `gone_key`, `deregister`, `workers`, `take`, `give_back`, inputs.lua
--    and the parts of pauses and checkpoints derive further keys of the same shard, which lie in the same slot.
--  * There is no rollback: a Function checks everything before it writes.
--  * TIME is read once per call. Numbers become strings by string.format('%d'), never by '..'.
--  * redis.call does not exist while the library loads; functions look it up when they run.
--  * The number of commands decides what a call costs.
--
-- Formats: the key `format` has the number of the format of the shard's keys and packed records. Without it, they have
-- format 1. A library reads the formats in `readable` and writes `format`; its first call that may write stores the
-- number. Under another number every call fails with FORMAT. From format 2 on, a packed record begins with its format
-- and a colon, so that a library can read records of two formats. Records leave the library in the form of the
-- interface (`shown_unit`, `shown_job`), so that processes of other builds can use it.
--
-- What is open:
--   units: <job>:<unit> → the unit's record (unpack_unit)
--   open: <job> → the job's record (unpack_job)
--   specs: <job> → its spec, from admission on
--   last: <job>:<unit>, of a queued job <job> → the id of its newest event's entry in `events`
-- What has ended is the hash of its job: `o` (the job's record), `spec`, `state`, `ended`, `error`; of each unit
-- u<i> (its record, |ended_ms|id of its last event), m<i> manifest, p<i> phases, e<i> error, w<i> warnings. `done`
-- counts the ended units of a job with several. `l` is the last event of a job that ended before it had units.

local function now()
  local time = redis.call('TIME')
  local ms = time[1] * 1000 + math.floor(time[2] / 1000)
  return ms, string.format('%d', ms)
end

local function int(value) return string.format('%d', value) end

-- The end of a lease, rounded up to a twentieth of its length and at most 250 ms: a renewal that does not change the
-- score costs a fifth of one that does.
local function lease_until(ms, lease_ms)
  local grain = math.max(1, math.min(250, math.floor(lease_ms / 20)))
  return int(math.ceil((ms + lease_ms) / grain) * grain)
end

local function prefix_of(key) return string.match(key, '^df:{[^}]*}:') or '' end

local function badarg(text) return redis.error_reply('BADARG ' .. text) end

local format, readable = '1', {['1'] = true}

-- What `error` takes for a record that this library cannot read. The caller must not have written anything yet.
local function unreadable(what, text)
  return redis.error_reply('UNREADABLE a ' .. what .. ' has no record of format ' .. format .. ' but ' ..
    cjson.encode(string.sub(text, 1, 60)))
end

-- For calls with several records, which leave those alone that cannot be read: nil if it cannot be read.
local function if_readable(unpack_record, text)
  local read, record = pcall(unpack_record, text)
  return read and record or nil, not read
end

local function valid_id(id)
  return #id <= 64 and string.find(id, '^[%w._-]+$') ~= nil
end

-- A unit's record. state: ready, delayed (ready once its back-off has passed), assigned, running, canceling (running,
-- asked to stop) or an end. nonce and owner are empty while no worker holds the unit. units and deadline are its job's.
-- lapses: how often it was lost with its worker; crashes: how many of those count against it, because it had started.
-- mark: the nonce of the latest lapse that counts as a crash; of a canceling unit, when it was asked to stop.
-- failed_on: the workers on which it failed, separated by commas. The record of an ended unit goes on behind it.
local unit_form = '^(%a+)|([^|]*)|(%d+)|(%d+)|(%d+)|([^|]*)|(%d+)|(%d+)|(%d+)|(%d+)|([^|]*)|([^|]*)'
local function unpack_unit(text)
  if not text then return nil end
  local state, nonce, started, errors, crashes, owner, assigned, units, deadline, lapses, mark, failed_on =
    string.match(text, unit_form)
  if not state then error(unreadable('unit', text)) end
  return {state = state, nonce = nonce, started = started, errors = errors, crashes = crashes, owner = owner,
    assigned = assigned, units = units, deadline = deadline, lapses = lapses, mark = mark, failed_on = failed_on}
end
local function pack_unit(unit)
  return table.concat({unit.state, unit.nonce, unit.started, unit.errors, unit.crashes, unit.owner, unit.assigned,
    unit.units, unit.deadline, unit.lapses, unit.mark, unit.failed_on}, '|')
end
-- The record of a unit as callers get it: in format 1, what is stored. An error if it cannot be read.
local function shown_unit(text)
  if text and not string.find(text, unit_form) then error(unreadable('unit', text)) end
  return text
end

-- The unit is no longer held by a worker.
local function set_waiting(unit, state)
  unit.state, unit.nonce, unit.started, unit.owner, unit.assigned = state, '', '0', '', '0'
  return unit
end

local function attempt_of(unit) return int(unit.errors + unit.lapses + 1) end

-- The unit failed on its worker, or was lost with it. Keeps the latest eight names.
local function failed_here(unit)
  local names = {string.match(unit.owner, '^[^:]*')}
  for name in string.gmatch(unit.failed_on, '[^,]+') do
    if name ~= names[1] and #names < 8 then names[#names + 1] = name end
  end
  unit.failed_on = table.concat(names, ',')
end

-- What the scheduler must know of a unit that waits again: members of a JSON object, each after a comma.
local function past_of(unit)
  return (unit.lapses == '0' and '' or ',"lapses":' .. unit.lapses) ..
    (unit.failed_on == '' and '' or ',"failed_on":"' .. unit.failed_on .. '"')
end

-- The state of a unit if this attempt holds it.
local function held_state(unit, nonce) return unit and unit.nonce == nonce and unit.state end

-- A job's record. units is 0 while it is queued. entry: of the intake. body: the first 16 digits of the SHA-256 of its
-- spec. use: what it takes of its tenant's quotas. class: class|steps[|adapters].
local job_form = '^(%d+)|(%d+)|(%d+)|(%-?%d+)|(%d+)|([^|]*)|([^|]*)|(%x*)|([^|]*)|(%d*)|(.*)$'
local function unpack_job(text)
  if not text then return nil end
  local units, ready, cost, priority, deadline, entry, tenant, body, trace, use, class = string.match(text, job_form)
  if not units then error(unreadable('job', text)) end
  return {units = units, ready = ready, cost = cost, priority = priority, deadline = deadline, entry = entry,
    tenant = tenant, body = body, trace = trace, use = use, class = class}
end
local function pack_job(job)
  return table.concat({job.units, job.ready, job.cost, job.priority, job.deadline, job.entry, job.tenant, job.body,
    job.trace, job.use, job.class}, '|')
end
local function shown_job(text)
  if text and not string.find(text, job_form) then error(unreadable('job', text)) end
  return text
end

local function queued_job(deadline, entry, tenant, sha256, trace, use)
  return {units = '0', ready = '0', cost = '0', priority = '0', deadline = deadline, entry = entry, tenant = tenant,
    body = string.sub(sha256, 1, 16), trace = trace, use = use, class = '|'}
end

local function same_body(job, tenant, sha256)
  return job.tenant == tenant and job.body == string.sub(sha256, 1, 16)
end

-- What a tenant's open jobs take is one number in the hash `use`, so that one command changes and reads it:
-- units * 2^26 + KiB of specs.
local one_unit = 67108864
local function use_of(units, spec) return int(units * one_unit + math.ceil(#spec / 1024)) end

local function give_back(intake, tenant, use)
  local key = prefix_of(intake) .. 'use'
  if redis.call('HINCRBY', key, tenant, '-' .. use) <= 0 then redis.call('HDEL', key, tenant) end
end

-- Adds to a tenant's use. quota: "<units> <bytes> <share> <max_queued>", each 0 for none, or "". If that exceeds the
-- quota, adds nothing and returns "quota units <used>", "quota bytes <used>" or "quota queue <used units>". queue:
-- above `share` units, the shard must have fewer than `max_queued` queued units, so that a tenant below its share is
-- never refused because of others.
local function take(intake, tenant, use, quota)
  local rc, prefix = redis.call, prefix_of(intake)
  local most_units, most_bytes, share, max_queued = string.match(quota, '^(%d+) (%d+) (%d+) (%d+)$')
  local sum = rc('HINCRBY', prefix .. 'use', tenant, use)
  if not most_units then return nil end
  local units, kib = math.floor(sum / one_unit), sum % one_unit
  local function beyond(value, most) return most ~= '0' and value > tonumber(most) end
  local over = beyond(units, most_units) and 'units' or beyond(kib * 1024, most_bytes) and 'bytes'
  if not over and beyond(units, share) then
    local queued = rc('XLEN', intake) + rc('ZCARD', prefix .. 'ready')
    over = queued >= tonumber(max_queued) and 'queue'
  end
  if not over then return nil end
  give_back(intake, tenant, use)
  sum = sum - use
  return 'quota ' .. over .. ' ' .. int(over == 'bytes' and sum % one_unit * 1024 or math.floor(sum / one_unit))
end

-- Exists for a while after a run of a worker has left.
local function gone_key(key, boot) return prefix_of(key) .. 'gone:' .. boot end

-- The job that an idempotency key names and whether it was made from the same body. Nothing if the key is free or its
-- job was forgotten: from now on it names `id`.
local function claim_key(key, id, sha256, keep_ms, open)
  local rc, claim = redis.call, id .. ' ' .. string.sub(sha256, 1, 32)
  local old = rc('SET', key, claim, 'NX', 'GET', 'PX', keep_ms)
  if not old then return nil end
  local first = string.match(old, '^%S*')
  if rc('HEXISTS', open, first) == 0 and rc('EXISTS', prefix_of(open) .. 'job:' .. first) == 0 then
    rc('SET', key, claim, 'PX', keep_ms)
    return nil
  end
  return first, string.sub(old, -32) == string.sub(sha256, 1, 32)
end

-- The spec of a queued job; '' if its entry is gone.
local function queued_spec(intake, entry)
  local found = redis.call('XRANGE', intake, entry, entry)[1]
  local fields = found and found[2] or {}
  for i = 1, #fields, 2 do
    if fields[i] == 'spec' then return fields[i + 1] end
  end
  return ''
end

-- Removes entries from the intake. Once the last possible id is gone, the stream's ids follow the clock again.
local last_id = '18446744073709551615-18446744073709551615'
local function forget_entries(intake, entries)
  if #entries == 0 then return end
  local rc = redis.call
  rc('XDEL', intake, unpack(entries))
  for _, entry in ipairs(entries) do
    if entry == last_id then
      local _, at = now()
      local top = rc('XREVRANGE', intake, '+', '-', 'COUNT', '1')[1]
      local later = top and tonumber(string.match(top[1], '^%d+')) >= tonumber(at)
      rc('XSETID', intake, later and top[1] or at .. '-0')
    end
  end
end

-- When an entry was added. A producer may have chosen an id in the future, whose job would never be swept.
local function added_at(entry, ms) return int(math.min(tonumber(string.match(entry, '^%d+')), ms)) end

-- Every `stride` arguments from `first` on belong to one job, or to one unit (id, unit).
local function ids_of(args, first, stride)
  local ids = {}
  for at = first, #args, stride do ids[#ids + 1] = args[at] end
  return ids
end
local function members_of(args, first, stride)
  local members = {}
  for at = first, #args, stride do members[#members + 1] = args[at] .. ':' .. args[at + 1] end
  return members
end
local function read_all(key, fields)
  if #fields == 0 then return {} end
  return redis.call('HMGET', key, unpack(fields))
end

local function append(list, more)
  for _, value in ipairs(more) do list[#list + 1] = value end
end
