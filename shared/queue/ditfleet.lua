#!lua name=ditfleet_v1
-- Every state transition of the queue, one Function each. README.md beside this file documents KEYS, ARGV
-- and replies; it is the interface for clients in other languages.
--
-- Rules of this file:
--  * Keys come in KEYS only; a channel is the shard's prefix plus its name.
--  * No rollback exists: a transition checks everything it needs, then writes.
--  * TIME is read once a call. Numbers are made strings by string.format('%d'), never by '..'.
--  * redis.call, math, string are hidden while a library loads: functions look them up when they run.
--  * What a call costs is its number of commands: what all units of a batch share (the units hash, the ready
--    and lease sets) is read and written once a call.
--
-- The hash `units` holds every unit that has not ended, <job>:<unit> →
--   queued|entry                                                       (the whole job, as unit 0)
--   state|nonce|started_ms|errors|crashes|owner|assigned_ms|n|deadline
-- with state ready, delayed (ready, but not before its back-off), assigned, running or canceling (running,
-- asked to stop). What a worker's calls check stands in front, what only the end needs stands at the end: the
-- usual transitions compare and cut, and never parse. When a unit ends it leaves the hash, and its job's field
-- u<unit> gets the same with |ended_ms behind it.

local function clock()
  local t = redis.call('TIME')
  local ms = t[1] * 1000 + math.floor(t[2] / 1000)
  return ms, string.format('%d', ms)
end

local function int(v) return string.format('%d', v) end

local function prefix_of(key) return string.match(key, '^df:{[^}]*}:') or '' end

-- Remembers an event's line for the shard's followers.
local function line(lines, at, id, event)
  local n = #lines
  lines[n + 1] = at
  lines[n + 2] = id
  lines[n + 3] = event
  lines[n + 4] = '\n'
end

-- Appends to the job's stream, under `at` or the next id.
local function tell(lines, ev, id, event, at)
  line(lines, redis.call('XADD', ev, at or '*', 'e', event), id, event)
end

-- A job's first event, `queued`, is not stored: it follows from the job's intake entry and has the id <ms>-0.
local function tell_queued(lines, id, entry) line(lines, string.match(entry, '^%d+') .. '-0', id, 'queued -1 {}') end

-- The id of the first event that is stored: behind `queued`, also within its millisecond.
local function first_id(entry, t)
  local ms = string.match(entry, '^%d+')
  if #ms < #t or (#ms == #t and ms < t) then return '*' end
  return ms .. '-1'
end

-- One message for all events of a call. Not kept: who missed it reads the streams.
local function publish(keys, channel, lines)
  if #lines > 0 then redis.call('PUBLISH', prefix_of(keys[1]) .. channel, table.concat(lines, ' ')) end
end

local function not_leader(key, epoch)
  local v = redis.call('GET', key)
  if v and string.match(v, '^(%d+) ') == epoch then return nil end
  return redis.error_reply('EPOCH ' .. epoch .. ' does not lead this shard' .. (v and (', ' .. v .. ' does') or ''))
end

local function badarg(text) return redis.error_reply('BADARG ' .. text) end

local function valid_id(id)
  return #id > 0 and #id <= 64 and (not string.find(id, '%W') or not string.find(id, '[^%w._-]'))
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

local function holds(u, state, nonce) return u and string.find(u, state .. '|' .. nonce .. '|', 1, true) == 1 end

-- The units of a batch: every `stride` arguments from `first` on name one by (id, unit). Nothing for none.
local function members_of(a, first, stride)
  local out = {}
  for p = first, #a, stride do out[#out + 1] = a[p] .. ':' .. a[p + 1] end
  return out
end
local function read_units(key, members)
  if #members == 0 then return {} end
  return redis.call('HMGET', key, unpack(members))
end

-- How long an ended job is kept is `sweep`'s business: two PEXPIREs a job cost more than all its renewals'
-- leases, and what they expire stalls Redis when many jobs end at once.

-- A unit ends as `state`: what stays of it in its job (`u`, its open form), its event, and if it was the last
-- the job's end, which that event tells too: {"job":state, "job_error":…}. The caller takes the unit out of
-- `units` and the sets.
local function conclude(lines, deadlines, job, ev, id, unit, state, u, t, data)
  local rc = redis.call
  local n, dl = string.match(u, '|(%d+)|(%d+)$')
  local left, last = state .. string.match(u, '|.*') .. '|' .. t, state
  if n == '1' then
    rc('HSET', job, 'u' .. unit, left, 'state', state, 'ended', t)
  else
    rc('HSET', job, 'u' .. unit, left)
    if rc('HINCRBY', job, 'left', '-1') > 0 then
      tell(lines, ev, id, state .. ' ' .. unit .. ' ' .. data)
      return
    end
    local fields, seen = {}, {}
    for i = 1, tonumber(n) do fields[i] = 'u' .. int(i - 1) end
    for _, other in ipairs(rc('HMGET', job, unpack(fields))) do seen[string.match(other, '^%a+')] = true end
    last = seen.failed and 'failed' or seen.expired and 'expired' or seen.canceled and 'canceled' or 'succeeded'
    rc('HSET', job, 'state', last, 'ended', t)
  end
  local why = (last == 'failed' or last == 'expired') and rc('HGET', job, 'error')
  tell(lines, ev, id, state .. ' ' .. unit .. ' {"job":"' .. last .. '"' .. (why and ',"job_error":' .. why or '') ..
    (data == '{}' and '}' or ',' .. string.sub(data, 2)))
  if dl ~= '0' then rc('ZREM', deadlines, id) end
end

-- ---- producers --------------------------------------------------------------------------------------------

-- KEYS in jobs deadline units, then (job ev idem) each; without an idempotency key pass the job key for idem.
-- ARGV idempotency_ms, then (id tenant spec sha256 has_key traceparent deadline_ms) each.
local function submit(keys, a)
  local rc = redis.call
  local count = (#a - 1) / 7
  if count == 0 then return {} end
  local _, t = clock()
  local pre = prefix_of(keys[1])
  local out, lines, index, dues, opened, jobs, seen = {}, {}, {}, {}, {}, {}, {}
  for i = 1, count do jobs[i] = keys[2 + 3 * i] end
  local none = rc('EXISTS', unpack(jobs)) == 0
  local p, k = 2, 5
  for i = 1, count do
    local id, tenant, sha, trace, dl = a[p], a[p + 1], a[p + 3], a[p + 5], a[p + 6]
    local job, ev, keyed = keys[k], keys[k + 1], a[p + 4] == '1'
    local verdict
    if not valid_id(id) then verdict = 'invalid id: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif not valid_id(tenant) then verdict = 'invalid tenant: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif job ~= pre .. 'job:' .. id or ev ~= pre .. 'ev:' .. id then verdict = 'invalid keys: they are not those of job ' .. id
    elseif #sha ~= 64 or string.find(sha, '%X') then verdict = 'invalid sha256: 64 hexadecimal digits of the SHA-256 of spec'
    elseif a[p + 4] ~= '0' and not keyed then verdict = 'invalid has_key: 1 if the third key is that of an idempotency key, else 0'
    elseif keyed and string.sub(keys[k + 2], 1, #pre + 6 + #tenant) ~= pre .. 'idem:' .. tenant .. ':' then verdict = 'invalid keys: an idempotency key of tenant ' .. tenant .. ' is ' .. pre .. 'idem:' .. tenant .. ':<key>'
    elseif dl ~= '0' and not string.find(dl, '^%d+$') then verdict = 'invalid deadline_ms: milliseconds since the epoch, 0 for none'
    else
      if (seen[id] or not none) and rc('EXISTS', job) == 1 then
        local was = rc('HMGET', job, 'h', 'tenant')
        verdict = (was[1] == string.sub(sha, 1, 16) and was[2] == tenant) and 'existed ' .. id or 'taken'
      else
        local old = keyed and rc('SET', keys[k + 2], id .. ' ' .. string.sub(sha, 1, 32), 'NX', 'GET', 'PX', a[1])
        if old then
          verdict = (string.sub(old, -32) == string.sub(sha, 1, 32) and 'existed ' or 'mismatch ') .. string.match(old, '^%S+')
        else
          local entry = rc('XADD', keys[1], '*', 'submitted', id .. ' ' .. tenant .. ' ' .. dl, 'spec', a[p + 2], 'traceparent', trace)
          if trace == '' then rc('HSET', job, 'tenant', tenant, 'h', string.sub(sha, 1, 16), 'in', entry)
          else rc('HSET', job, 'tenant', tenant, 'h', string.sub(sha, 1, 16), 'in', entry, 'trace', trace) end
          tell_queued(lines, id, entry)
          seen[id] = true
          index[#index + 1] = t; index[#index + 1] = id
          opened[#opened + 1] = id .. ':0'; opened[#opened + 1] = 'queued|' .. entry
          if dl ~= '0' then dues[#dues + 1] = dl; dues[#dues + 1] = id end
          verdict = 'created'
        end
      end
    end
    out[i] = verdict
    p, k = p + 7, k + 3
  end
  if #index > 0 then rc('ZADD', keys[2], unpack(index)); rc('HSET', keys[4], unpack(opened)) end
  if #dues > 0 then rc('ZADD', keys[3], unpack(dues)) end
  publish(keys, 'feed', lines)
  return out
end

-- A job that has no units yet ends.
local function end_queued(lines, deadlines, job, ev, id, entry, state, t, data)
  redis.call('HSET', job, 'state', state, 'ended', t)
  tell(lines, ev, id, state .. ' -1 ' .. data, first_id(entry, t))
  redis.call('ZREM', deadlines, id)
end

-- KEYS in ready delayed lease deadline units job ev, then mailboxes of workers that may hold its units
-- ARGV id tenant ("" for any), then the owners of those mailboxes
local function cancel(keys, a)
  local rc = redis.call
  local id, tenant, job, ev = a[1], a[2], keys[7], keys[8]
  local v = rc('HMGET', job, 'tenant', 'state', 'plan')
  if not v[1] or (tenant ~= '' and tenant ~= v[1]) then return redis.status_reply('notfound') end
  if v[2] then return redis.status_reply('ended') end
  local _, t = clock()
  local lines = {}
  if not v[3] then
    local u = rc('HGET', keys[6], id .. ':0')
    if not u then return redis.status_reply('notfound') end
    local entry = string.match(u, '^queued|(.*)$')
    rc('XDEL', keys[1], entry)
    rc('HDEL', keys[6], id .. ':0')
    end_queued(lines, keys[5], job, ev, id, entry, 'canceled', t, '{}')
    publish(keys, 'feed', lines)
    return redis.status_reply('canceled')
  end
  local boxes, open = {}, 0
  for i = 9, #keys do boxes[a[i - 6]] = keys[i] end
  for i = 0, tonumber(string.match(v[3], '^%d+')) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    local u = rc('HGET', keys[6], member)
    if u then
      local s, nonce, _, _, _, owner = parts(u)
      if s == 'running' then
        rc('HSET', keys[6], member, 'canceling' .. string.match(u, '|.*'))
        open = open + 1
      elseif s == 'canceling' then open = open + 1
      else
        rc('ZREM', s == 'ready' and keys[2] or s == 'delayed' and keys[3] or keys[4], member)
        rc('HDEL', keys[6], member)
        conclude(lines, keys[5], job, ev, id, unit, 'canceled', u, t, '{}')
      end
      if (s == 'assigned' or s == 'running') and boxes[owner] then
        rc('XADD', boxes[owner], '*', 'm', 'cancel ' .. id .. ' ' .. unit .. ' ' .. nonce)
      end
    end
  end
  publish(keys, 'feed', lines)
  return redis.status_reply(open > 0 and 'requested' or 'canceled')
end

-- ---- scheduler --------------------------------------------------------------------------------------------

-- KEYS leader epoch; ARGV coordinator ttl_ms. The epoch it leads with, 0 if another leads.
local function lead(keys, a)
  local v = redis.call('GET', keys[1])
  if v then
    local epoch, who = string.match(v, '^(%d+) (.*)$')
    if who ~= a[1] then return 0 end
    redis.call('PEXPIRE', keys[1], a[2])
    return tonumber(epoch)
  end
  local epoch = redis.call('INCR', keys[2])
  redis.call('SET', keys[1], int(epoch) .. ' ' .. a[1], 'PX', a[2])
  return epoch
end

-- KEYS leader; ARGV coordinator epoch
local function resign(keys, a)
  if redis.call('GET', keys[1]) == a[2] .. ' ' .. a[1] then return redis.call('DEL', keys[1]) end
  return 0
end

-- A job becomes ready: its plan, its units, their places in the ready set, their events.
local function enter(lines, places, opened, job, ev, entry, id, n, t, spec, class, batch, cost, prio, dl)
  local plan = n .. '|' .. t .. '|' .. cost .. '|' .. prio .. '|' .. dl
  if n == '1' then redis.call('HSET', job, 'spec', spec, 'class', class, 'batch', batch, 'plan', plan)
  else redis.call('HSET', job, 'spec', spec, 'class', class, 'batch', batch, 'plan', plan, 'left', n) end
  for i = 0, tonumber(n) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    places[#places + 1] = t
    places[#places + 1] = member
    opened[#opened + 1] = member
    opened[#opened + 1] = waiting('ready', '0', '0', n, dl)
    tell(lines, ev, id, 'ready ' .. unit .. ' {}', i == 0 and first_id(entry, t) or nil)
  end
end

-- KEYS leader in ready deadline units, then (job ev) each
-- ARGV epoch, then (entry id units spec class batch cost priority deadline_ms) each
local function admit(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local lines, places, opened, dues, entries, members = {}, {}, {}, {}, {}, {}
  for p = 3, #a, 9 do members[#members + 1] = a[p] .. ':0' end
  local us = read_units(keys[5], members)
  local p, k = 2, 6
  for i = 1, #members do
    local entry, id, dl = a[p], a[p + 1], a[p + 8]
    if us[i] == 'queued|' .. entry then
      enter(lines, places, opened, keys[k], keys[k + 1], entry, id, a[p + 2], t, a[p + 3], a[p + 4], a[p + 5], a[p + 6], a[p + 7], dl)
      if dl ~= '0' then dues[#dues + 1] = dl; dues[#dues + 1] = id end
    end
    entries[i] = entry
    p, k = p + 9, k + 2
  end
  if #places > 0 then rc('HSET', keys[5], unpack(opened)); rc('ZADD', keys[3], unpack(places)) end
  if #dues > 0 then rc('ZADD', keys[4], unpack(dues)) end
  if #entries > 0 then rc('XDEL', keys[2], unpack(entries)) end
  publish(keys, 'feed', lines)
  return #places / 2
end

-- Entries that came by XADD become jobs here.
-- KEYS leader in ready deadline units jobs, then (job ev idem) each
-- ARGV epoch idempotency_ms retention_ms, then (entry id units spec class batch cost priority deadline_ms
--      tenant traceparent sha256 has_key) each
-- "created", "existed <id>" (another name of that job), "mismatch <id>", "taken"; the last two leave the
-- entry where it is, for a rejection.
local function admit_raw(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local out, lines, places, opened = {}, {}, {}, {}
  local p, k = 4, 7
  while a[p] do
    local entry, id, dl, tenant, sha = a[p], a[p + 1], a[p + 8], a[p + 9], a[p + 11]
    local job, ev = keys[k], keys[k + 1]
    local was = rc('HMGET', job, 'h', 'tenant', 'same_as')
    local verdict
    if was[3] then verdict = 'existed ' .. was[3]
    elseif was[2] then
      verdict = (was[1] == string.sub(sha, 1, 16) and was[2] == tenant) and 'existed ' .. id or 'taken'
    else
      local old = a[p + 12] == '1' and rc('SET', keys[k + 2], id .. ' ' .. string.sub(sha, 1, 32), 'NX', 'GET', 'PX', a[2])
      if old and string.sub(old, -32) ~= string.sub(sha, 1, 32) then verdict = 'mismatch ' .. string.match(old, '^%S+')
      elseif old then
        local first = string.match(old, '^%S+')
        verdict = 'existed ' .. first
        rc('HSET', job, 'same_as', first, 'tenant', tenant)
        rc('PEXPIRE', job, a[3])
      else
        rc('HSET', job, 'tenant', tenant, 'h', string.sub(sha, 1, 16), 'in', entry, 'trace', a[p + 10])
        tell_queued(lines, id, entry)
        enter(lines, places, opened, job, ev, entry, id, a[p + 2], t, a[p + 3], a[p + 4], a[p + 5], a[p + 6], a[p + 7], dl)
        rc('ZADD', keys[6], string.match(entry, '^%d+'), id)
        if dl ~= '0' then rc('ZADD', keys[4], dl, id) end
        verdict = 'created'
      end
    end
    if verdict == 'created' or string.sub(verdict, 1, 8) == 'existed ' then rc('XDEL', keys[2], entry) end
    out[#out + 1] = verdict
    p, k = p + 13, k + 3
  end
  if #places > 0 then rc('HSET', keys[5], unpack(opened)); rc('ZADD', keys[3], unpack(places)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS leader in jobs deadline units, then (job ev) each
-- ARGV epoch, then (entry id raw error_json tenant spec traceparent) each. 1: rejected, now or before; 0: a raw
-- entry chose the id of another job, and stays where it is.
local function reject(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local lines, out = {}, {}
  local p, k = 2, 6
  while a[p] do
    local entry, id, raw, err, job, ev = a[p], a[p + 1], a[p + 2] == '1', a[p + 3], keys[k], keys[k + 1]
    local was = raw and rc('HGET', job, 'in')
    local fresh = raw and not was and rc('EXISTS', job) == 0
    if fresh then
      rc('HSET', job, 'tenant', a[p + 4], 'in', entry, 'trace', a[p + 6])
      rc('ZADD', keys[3], string.match(entry, '^%d+'), id)
      tell_queued(lines, id, entry)
    end
    if fresh or rc('HGET', keys[5], id .. ':0') == 'queued|' .. entry then
      rc('HDEL', keys[5], id .. ':0')
      rc('HSET', job, 'error', err, 'spec', a[p + 5])
      end_queued(lines, keys[4], job, ev, id, entry, 'rejected', t, err)
    end
    local ok = not raw or fresh or was == entry
    if ok then rc('XDEL', keys[2], entry) end
    out[#out + 1] = ok and 1 or 0
    p, k = p + 7, k + 2
  end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS leader ready lease units mbox, then (job ev) each
-- ARGV epoch owner lease_ms mailbox_ms, then (id unit nonce data) each; data: JSON members for the event
local function assign(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local ms, t = clock()
  local owner, till = a[2], int(ms + a[3])
  local members = members_of(a, 5, 4)
  local us = read_units(keys[4], members)
  local out, lines, leases, gone, held, mail, z = {}, {}, {}, {}, {}, {}, 0
  local p, k = 5, 6
  for i, member in ipairs(members) do
    local u, s, e, c, n, dl, _ = us[i], nil, '0', '0', '1', '0', nil
    if u == fresh then s = 'ready' elseif u then s, _, _, e, c, _, _, n, dl = parts(u) end
    if s == 'ready' then
      local id, unit, nonce = a[p], a[p + 1], a[p + 2]
      local attempt = int(e + c + 1)
      local v = rc('HMGET', keys[k], 'tenant', 'trace', 'class', 'batch', 'spec')
      mail[z + 1] = 'm'
      mail[z + 2] = 'assign ' .. id .. ' ' .. unit .. ' ' .. nonce .. ' ' .. attempt .. ' ' .. dl .. ' ' .. v[1]
      mail[z + 3] = 'c'; mail[z + 4] = v[3]
      mail[z + 5] = 'b'; mail[z + 6] = v[4]
      mail[z + 7] = 'p'; mail[z + 8] = v[2] or ''
      mail[z + 9] = 's'; mail[z + 10] = v[5]
      z = z + 10
      tell(lines, keys[k + 1], id, 'assigned ' .. unit .. ' {"attempt":' .. attempt .. ',' .. a[p + 3] .. '}')
      gone[#gone + 1] = member
      leases[#leases + 1] = till; leases[#leases + 1] = member
      held[#held + 1] = member; held[#held + 1] = packed('assigned', nonce, '0', e, c, owner, t, n, dl)
      out[i] = 1
    else
      out[i] = 0
    end
    p, k = p + 4, k + 2
  end
  if #gone > 0 then
    rc('HSET', keys[4], unpack(held))
    rc('ZREM', keys[2], unpack(gone))
    rc('ZADD', keys[3], unpack(leases))
    rc('XADD', keys[5], '*', unpack(mail))
    rc('PEXPIRE', keys[5], a[4])
  end
  publish(keys, 'feed', lines)
  return out
end

-- A held unit becomes ready again.
local function release(lines, units, leases, ready, ev, id, unit, e, c, n, dl, t, data)
  local member = id .. ':' .. unit
  redis.call('HSET', units, member, waiting('ready', e, c, n, dl))
  redis.call('ZREM', leases, member)
  redis.call('ZADD', ready, t, member)
  tell(lines, ev, id, 'ready ' .. unit .. ' ' .. data)
end

-- KEYS leader lease ready units, then (ev mbox) each; ARGV epoch, then (id unit nonce owner) each
local function revoke(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local out, lines = {}, {}
  local p, k = 2, 5
  while a[p] do
    local id, unit, nonce = a[p], a[p + 1], a[p + 2]
    local u = rc('HGET', keys[4], id .. ':' .. unit)
    if holds(u, 'assigned', nonce) then
      local _, _, _, e, c, owner, _, n, dl = parts(u)
      release(lines, keys[4], keys[2], keys[3], keys[k], id, unit, e, c, n, dl, t, '{"reason":"revoked"}')
      if owner == a[p + 3] then rc('XADD', keys[k + 1], '*', 'm', 'revoke ' .. id .. ' ' .. unit .. ' ' .. nonce) end
      out[#out + 1] = 1
    else
      out[#out + 1] = 0
    end
    p, k = p + 4, k + 2
  end
  publish(keys, 'feed', lines)
  return out
end

-- What remains of a unit that will not be tried again.
local function bury(job, dead, id, unit, e, c, owner, nonce, err)
  redis.call('HSET', job, 'e' .. unit, err, 'error', err)
  redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'job', id, 'unit', unit, 'errors', e, 'crashes', c, 'owner', owner, 'nonce', nonce, 'error', err)
end

-- KEYS lease delayed deadline; ARGV limit. What is due, for `reap`: leases, delayed units, jobs.
local function due(keys, a)
  local rc = redis.call
  local _, t = clock()
  return {rc('ZRANGEBYSCORE', keys[1], '-inf', t, 'LIMIT', '0', a[1]), rc('ZRANGEBYSCORE', keys[2], '-inf', t, 'LIMIT', '0', a[1]),
    rc('ZRANGEBYSCORE', keys[3], '-inf', t, 'LIMIT', '0', a[1])}
end

-- After a restart of Redis, which may have taken longer than a lease, workers get one lease time to come back.
local function in_grace(key, ms, lease_ms)
  local rc = redis.call
  local run = string.match(rc('INFO', 'server'), 'run_id:(%x+)')
  local v = rc('GET', key)
  local was, till = string.match(v or '', '^(%x+) (%d+)$')
  if was == run then return ms < tonumber(till) end
  local grace = v and ms + lease_ms or 0
  rc('SET', key, run .. ' ' .. int(grace))
  return ms < grace
end

local function is_due(key, member, ms)
  local score = redis.call('ZSCORE', key, member)
  return score and tonumber(score) <= ms
end

-- KEYS leader boot lease delayed ready deadline dead in units, then (job ev) each
-- ARGV epoch lease_ms max_crashes hold (1: leave leases alone), then (kind id unit) each;
-- kind is lease, delayed or deadline (unit "0")
local function reap(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local ms, t = clock()
  local units, lines, touched = keys[9], {}, 0
  local hold = in_grace(keys[2], ms, tonumber(a[2])) or a[4] == '1'
  local p, k = 5, 10
  while a[p] do
    local kind, id, unit, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local member = id .. ':' .. unit
    if kind == 'lease' and not hold and is_due(keys[3], member, ms) then
      touched = touched + 1
      local u = rc('HGET', units, member)
      local s, nonce, st, e, c, owner, as, n, dl
      if u then s, nonce, st, e, c, owner, as, n, dl = parts(u) end
      if s == 'running' then c = int(c + 1) end
      if s == 'canceling' then
        rc('HDEL', units, member)
        rc('ZREM', keys[3], member)
        conclude(lines, keys[6], job, ev, id, unit, 'canceled', u, t, '{}')
      elseif s == 'running' and tonumber(c) >= tonumber(a[3]) then
        local err = cjson.encode({code = 'unavailable', message = '[queue] ' .. c .. ' workers were lost while they ran this unit, the last was ' .. owner})
        rc('HDEL', units, member)
        rc('ZREM', keys[3], member)
        bury(job, keys[7], id, unit, e, c, owner, nonce, err)
        conclude(lines, keys[6], job, ev, id, unit, 'failed', packed(s, nonce, st, e, c, owner, as, n, dl), t, err)
      elseif s == 'running' or s == 'assigned' then
        release(lines, units, keys[3], keys[5], ev, id, unit, e, c, n, dl, t,
          '{"reason":"lease lapsed","owner":' .. cjson.encode(owner) .. ',"crashes":' .. c .. '}')
      else
        rc('ZREM', keys[3], member)
      end
    elseif kind == 'delayed' and is_due(keys[4], member, ms) then
      touched = touched + 1
      local u = rc('HGET', units, member)
      if u and string.sub(u, 1, 8) == 'delayed|' then
        local _, _, _, e, c, _, _, n, dl = parts(u)
        release(lines, units, keys[4], keys[5], ev, id, unit, e, c, n, dl, t, '{"reason":"retry is due"}')
      else
        rc('ZREM', keys[4], member)
      end
    elseif kind == 'deadline' and is_due(keys[6], id, ms) then
      rc('ZREM', keys[6], id)
      local v = rc('HMGET', job, 'tenant', 'state', 'plan', 'error')
      if v[1] and not v[2] then
        touched = touched + 1
        local err = '{"code":"deadline_exceeded","message":"[queue] the deadline passed before the job ended"}'
        if not v[4] then rc('HSET', job, 'error', err) end
        if not v[3] then
          local u = rc('HGET', units, id .. ':0')
          local entry = string.match(u or '', '^queued|(.*)$') or '0-0'
          rc('XDEL', keys[8], entry)
          rc('HDEL', units, id .. ':0')
          end_queued(lines, keys[6], job, ev, id, entry, 'expired', t, err)
        else
          for i = 0, tonumber(string.match(v[3], '^%d+')) - 1 do
            local one = int(i)
            member = id .. ':' .. one
            local u = rc('HGET', units, member)
            if u then
              local s = string.match(u, '^%a+')
              rc('ZREM', s == 'ready' and keys[5] or s == 'delayed' and keys[4] or keys[3], member)
              rc('HDEL', units, member)
              conclude(lines, keys[6], job, ev, id, one, 'expired', u, t, err)
            end
          end
        end
      end
    end
    p, k = p + 3, k + 2
  end
  publish(keys, 'feed', lines)
  return touched
end

-- KEYS jobs, then (job ev) each; ARGV retention_ms, then their ids. Forgets those that ended so long ago, and
-- drops from the index what is not there any more.
local function sweep(keys, a)
  local rc = redis.call
  local limit = clock() - a[1]
  local gone, old = {}, {}
  for i = 2, #a do
    local job = keys[2 * i - 2]
    local v = rc('HMGET', job, 'tenant', 'ended')
    if not v[1] or (v[2] and tonumber(v[2]) <= limit) then
      gone[#gone + 1] = a[i]
      old[#old + 1] = job
      old[#old + 1] = keys[2 * i - 1]
    end
  end
  if #gone > 0 then rc('UNLINK', unpack(old)); rc('ZREM', keys[1], unpack(gone)) end
  return #gone
end

-- KEYS leader tenants; ARGV epoch, then (tenant microseconds) each
local function virtual_times(keys, a)
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  if #a > 1 then redis.call('HSET', keys[2], unpack(a, 2)) end
  return redis.status_reply('OK')
end

-- KEYS units delayed lease. Every open unit, and when delayed and held ones are due, at one moment.
local function open(keys)
  return {redis.call('HGETALL', keys[1]), redis.call('ZRANGE', keys[2], '0', '-1', 'WITHSCORES'),
    redis.call('ZRANGE', keys[3], '0', '-1', 'WITHSCORES')}
end

-- ---- workers ----------------------------------------------------------------------------------------------

-- KEYS workers worker mbox; ARGV name boot info_json keep_ms mailbox_ms
local function heartbeat(keys, a)
  local rc = redis.call
  local ms, t = clock()
  rc('HSET', keys[2], 'boot', a[2], 'info', a[3], 'heartbeat', t)
  rc('PEXPIRE', keys[2], a[4])
  rc('ZADD', keys[1], t, a[1])
  rc('ZREMRANGEBYSCORE', keys[1], '-inf', int(ms - a[4]))
  rc('PEXPIRE', keys[3], a[5])
  return ms
end

-- KEYS workers worker mbox; ARGV name boot
local function deregister(keys, a)
  local rc = redis.call
  rc('DEL', keys[3])
  if rc('HGET', keys[2], 'boot') ~= a[2] then return 0 end
  rc('DEL', keys[2])
  return rc('ZREM', keys[1], a[1])
end

-- KEYS lease units, then ev each; ARGV lease_ms, then (id unit nonce) each. 1: running under this nonce.
local function start(keys, a)
  local rc, find, sub, match = redis.call, string.find, string.sub, string.match
  local ms, t = clock()
  local till, out, lines, leases, held = int(ms + a[1]), {}, {}, {}, {}
  local members = members_of(a, 2, 3)
  local us = read_units(keys[2], members)
  local p = 2
  for i, member in ipairs(members) do
    local u, nonce, ok = us[i], a[p + 2], 0
    local want = 'assigned|' .. nonce .. '|0|'
    if u and find(u, want, 1, true) == 1 then
      local rest = sub(u, #want + 1)
      local e, c, worker = match(rest, '^(%d+)|(%d+)|([^:|]*)')
      held[#held + 1] = member; held[#held + 1] = 'running|' .. nonce .. '|' .. t .. '|' .. rest
      tell(lines, keys[i + 2], a[p], 'started ' .. a[p + 1] .. ' {"attempt":' .. int(e + c + 1) .. ',"worker":"' .. worker .. '"}')
      leases[#leases + 1] = till; leases[#leases + 1] = member
      ok = 1
    elseif holds(u, 'running', nonce) then ok = 1 end
    out[i] = ok
    p = p + 3
  end
  if #held > 0 then rc('HSET', keys[2], unpack(held)); rc('ZADD', keys[1], unpack(leases)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease units, then ev each; ARGV lease_ms, then (id unit nonce event) each; event "": none, else
-- "step <unit> <data>". 0 renewed, 1 lost, 2 renewed and asked to stop.
local function renew(keys, a)
  local rc, find = redis.call, string.find
  local ms = clock()
  local till, out, lines, leases = int(ms + a[1]), {}, {}, {}
  local members = members_of(a, 2, 4)
  local us = read_units(keys[2], members)
  local p, z, l = 2, 0, 0
  for i, member in ipairs(members) do
    local u, nonce, event = us[i], a[p + 2], a[p + 3]
    local verdict = 1
    if u and find(u, 'running|' .. nonce, 1, true) == 1 then
      verdict = 0
      if event ~= '' then
        lines[l + 1] = rc('XADD', keys[i + 2], '*', 'e', event)
        lines[l + 2] = a[p]
        lines[l + 3] = event
        lines[l + 4] = '\n'
        l = l + 4
      end
    elseif holds(u, 'assigned', nonce) then verdict = 0
    elseif holds(u, 'canceling', nonce) then verdict = 2 end
    if verdict ~= 1 then leases[z + 1] = till; leases[z + 2] = member; z = z + 2 end
    out[i] = verdict
    p = p + 4
  end
  if z > 0 then rc('ZADD', keys[1], unpack(leases)) end
  publish(keys, 'steps', lines)
  return out
end

-- KEYS units ev; ARGV id unit nonce type data
local function emit(keys, a)
  local u = redis.call('HGET', keys[1], a[1] .. ':' .. a[2])
  if not holds(u, 'running', a[3]) and not holds(u, 'canceling', a[3]) then
    return redis.error_reply('CONFLICT unit ' .. a[1] .. ':' .. a[2] .. ' is not running under this nonce')
  end
  local lines = {}
  tell(lines, keys[2], a[1], a[4] .. ' ' .. a[2] .. ' ' .. a[5])
  publish(keys, 'steps', lines)
  return redis.status_reply('OK')
end

-- KEYS lease deadline units, then (job ev) each
-- ARGV (id unit nonce manifest phases warnings) each; phases and warnings JSON or "".
-- 1: this attempt completed the unit, now or before.
local function complete(keys, a)
  local rc = redis.call
  local _, t = clock()
  local out, lines, gone, done = {}, {}, {}, {}
  local members = members_of(a, 1, 6)
  local us = read_units(keys[3], members)
  local p, k = 1, 4
  for i, member in ipairs(members) do
    local u, id, unit, nonce, job = us[i], a[p], a[p + 1], a[p + 2], keys[k]
    local ok = 0
    if done[member] then
      ok = done[member] == nonce and 1 or 0
    elseif holds(u, 'running', nonce) and a[p + 5] == '' and string.sub(u, -4) == '|1|0' then
      -- The usual case of the general one below: one unit, no deadline, no warnings.
      rc('HSET', job, 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4], 'u' .. unit, 'succeeded' .. string.sub(u, 8) .. '|' .. t, 'state', 'succeeded', 'ended', t)
      tell(lines, keys[k + 1], id, 'succeeded ' .. unit .. ' {"job":"succeeded"}')
      gone[#gone + 1] = member
      done[member] = nonce
      ok = 1
    elseif holds(u, 'running', nonce) or holds(u, 'canceling', nonce) then
      if a[p + 5] == '' then rc('HSET', job, 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4])
      else rc('HSET', job, 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4], 'w' .. unit, a[p + 5]) end
      conclude(lines, keys[2], job, keys[k + 1], id, unit, 'succeeded', u, t, '{}')
      gone[#gone + 1] = member
      done[member] = nonce
      ok = 1
    elseif not u and holds(rc('HGET', job, 'u' .. unit), 'succeeded', nonce) then ok = 1 end
    out[i] = ok
    p, k = p + 6, k + 2
  end
  if #gone > 0 then rc('HDEL', keys[3], unpack(gone)); rc('ZREM', keys[1], unpack(gone)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease delayed deadline dead units job ev
-- ARGV max_attempts max_crashes backoff_ms backoff_max_ms jitter (0..1000) id unit nonce
--      error_json retryable crash
local function fail(keys, a)
  local rc = redis.call
  local units, job, ev, id, unit, nonce, err = keys[5], keys[6], keys[7], a[6], a[7], a[8], a[9]
  local member = id .. ':' .. unit
  local u = rc('HGET', units, member)
  if not (holds(u, 'running', nonce) or holds(u, 'assigned', nonce) or holds(u, 'canceling', nonce)) then
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not held under this nonce')
  end
  local s, _, st, e, c, owner, as, n, dl = parts(u)
  local ms, t = clock()
  local lines = {}
  rc('ZREM', keys[1], member)
  if s == 'canceling' then
    rc('HDEL', units, member)
    conclude(lines, keys[3], job, ev, id, unit, 'canceled', u, t, '{}')
  else
    local crash = a[11] == '1'
    if crash then c = c + 1 else e = e + 1 end
    local tries = e + c
    e, c = int(e), int(c)
    if (crash or a[10] == '1') and tonumber(e) < tonumber(a[1]) and tonumber(c) < tonumber(a[2]) then
      local wait = math.min(tonumber(a[4]), a[3] * 2 ^ math.min(tries - 1, 30))
      local at = int(ms + math.floor(wait * (1000 + a[5]) / 2000))
      rc('HSET', units, member, waiting('delayed', e, c, n, dl))
      rc('HSET', job, 'e' .. unit, err)
      rc('ZADD', keys[2], at, member)
      tell(lines, ev, id, 'ready ' .. unit .. ' {"reason":"retry","not_before_ms":' .. at .. ',"errors":' .. e .. ',"crashes":' .. c .. ',' .. string.sub(err, 2))
    else
      rc('HDEL', units, member)
      bury(job, keys[4], id, unit, e, c, owner, nonce, err)
      conclude(lines, keys[3], job, ev, id, unit, 'failed', packed(s, nonce, st, e, c, owner, as, n, dl), t, err)
    end
  end
  publish(keys, 'feed', lines)
  return redis.status_reply('OK')
end

-- KEYS lease ready deadline units, then (job ev) each; ARGV (id unit nonce) each.
-- 1: handed back.
local function hand_back(keys, a)
  local rc = redis.call
  local _, t = clock()
  local out, lines = {}, {}
  local p, k = 1, 5
  while a[p] do
    local id, unit, nonce, ok = a[p], a[p + 1], a[p + 2], 0
    local member = id .. ':' .. unit
    local u = rc('HGET', keys[4], member)
    if holds(u, 'running', nonce) or holds(u, 'assigned', nonce) then
      local _, _, _, e, c, _, _, n, dl = parts(u)
      release(lines, keys[4], keys[1], keys[2], keys[k + 1], id, unit, e, c, n, dl, t, '{"reason":"handed back"}')
      ok = 1
    elseif holds(u, 'canceling', nonce) then
      rc('ZREM', keys[1], member)
      rc('HDEL', keys[4], member)
      conclude(lines, keys[3], keys[k], keys[k + 1], id, unit, 'canceled', u, t, '{}')
      ok = 1
    end
    out[#out + 1] = ok
    p, k = p + 3, k + 2
  end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease deadline units job ev; ARGV id unit nonce
local function canceled(keys, a)
  local rc = redis.call
  local id, unit, nonce, job, ev = a[1], a[2], a[3], keys[4], keys[5]
  local member = id .. ':' .. unit
  local u = rc('HGET', keys[3], member)
  if not holds(u, 'canceling', nonce) then
    if not u and holds(rc('HGET', job, 'u' .. unit), 'canceled', nonce) then return redis.status_reply('OK') end
    return redis.error_reply('CONFLICT unit ' .. member .. ' was not asked to stop under this nonce')
  end
  local _, t = clock()
  local lines = {}
  rc('ZREM', keys[1], member)
  rc('HDEL', keys[3], member)
  conclude(lines, keys[2], job, ev, id, unit, 'canceled', u, t, '{}')
  publish(keys, 'feed', lines)
  return redis.status_reply('OK')
end

-- ---- readers ----------------------------------------------------------------------------------------------

-- KEYS job ev in units; ARGV id. {all fields of the job, its open units as (unit, packed), the latest step of
-- each running one as (unit, data), its spec and its deadline while it is queued}
local function job(keys, a)
  local rc = redis.call
  local all = rc('HGETALL', keys[1])
  if #all == 0 then return {all, {}, {}, '', '0'} end
  local f, open, want, left = {}, {}, {}, 0
  for i = 1, #all, 2 do f[all[i]] = all[i + 1] end
  if f.same_as then return {all, {}, {}, '', '0'} end
  for i = 0, tonumber(string.match(f.plan or '0', '^%d+')) - 1 do
    local unit = int(i)
    local u = rc('HGET', keys[4], a[1] .. ':' .. unit)
    if u then
      open[#open + 1] = unit; open[#open + 1] = u
      if string.match(u, '^running|') or string.match(u, '^canceling|') then want[unit] = true; left = left + 1 end
    end
  end
  local steps, upto = {}, '+'
  while left > 0 do
    local page = rc('XREVRANGE', keys[2], upto, '-', 'COUNT', '100')
    for _, entry in ipairs(page) do
      local kind, unit, data = string.match(entry[2][2], '^(%a+) (%S+) (.*)$')
      if want[unit] and (kind == 'step' or kind == 'started') then
        want[unit] = nil; left = left - 1
        if kind == 'step' then steps[#steps + 1] = unit; steps[#steps + 1] = data end
      end
    end
    if #page < 100 then break end
    upto = '(' .. page[#page][1]
  end
  local spec, dl = '', '0'
  if not f.spec and f['in'] then
    local found = rc('XRANGE', keys[3], f['in'], f['in'])
    local fields = found[1] and found[1][2] or {}
    for i = 1, #fields, 2 do
      if fields[i] == 'spec' then spec = fields[i + 1] end
      if fields[i] == 'submitted' then dl = string.match(fields[i + 1], '%d+$') end
    end
  end
  return {all, open, steps, spec, dl}
end

-- Checks the shape of a call before its Function runs: {fixed, each} keys and arguments, each as many times as
-- the call has jobs or units, and which arguments are numbers.
local function checked(name, f, keys_fixed, keys_each, args_fixed, args_each, numbers)
  local shape = name .. ' takes ' .. keys_fixed .. ' keys' .. (keys_each > 0 and ' and ' .. keys_each .. ' each' or '') .. ', ' ..
    args_fixed .. ' arguments' .. (args_each > 0 and ' and ' .. args_each .. ' each' or '')
  return function(keys, a)
    local n = 0
    if args_each > 0 then n = (#a - args_fixed) / args_each end
    if n < 0 or n % 1 ~= 0 or #a ~= args_fixed + n * args_each or #keys ~= keys_fixed + n * keys_each then
      return badarg(shape .. '; got ' .. int(#keys) .. ' and ' .. int(#a))
    end
    for _, i in ipairs(numbers) do
      if not string.find(a[i], '^%d+$') then return badarg(name .. ': argument ' .. int(i) .. ' is a whole number of at least 0; got ' .. string.sub(a[i], 1, 40)) end
    end
    return f(keys, a)
  end
end

-- allow-oom: what ends or keeps work must go on when Redis is at its memory limit; taking new work must not.
local function register(name, f, shape, numbers, ...)
  redis.register_function{function_name = 'ditfleet_v1_' .. name, flags = {...},
    callback = checked(name, f, shape[1], shape[2], shape[3], shape[4], numbers)}
end
register('submit', submit, {4, 3, 1, 7}, {1})
register('cancel', cancel, {8, 1, 2, 1}, {}, 'allow-oom')
register('lead', lead, {2, 0, 2, 0}, {2}, 'allow-oom')
register('resign', resign, {1, 0, 2, 0}, {2}, 'allow-oom')
register('admit', admit, {5, 2, 1, 9}, {1})
register('admit_raw', admit_raw, {6, 3, 3, 13}, {1, 2, 3})
register('reject', reject, {5, 2, 1, 7}, {1}, 'allow-oom')
register('assign', assign, {5, 2, 4, 4}, {1, 3, 4})
register('revoke', revoke, {4, 2, 1, 4}, {1}, 'allow-oom')
register('due', due, {3, 0, 1, 0}, {1}, 'no-writes')
register('reap', reap, {9, 2, 4, 3}, {1, 2, 3}, 'allow-oom')
register('sweep', sweep, {1, 2, 1, 1}, {1}, 'allow-oom')
register('virtual_times', virtual_times, {2, 0, 1, 2}, {1}, 'allow-oom')
register('open', open, {3, 0, 0, 0}, {}, 'no-writes')
register('heartbeat', heartbeat, {3, 0, 5, 0}, {4, 5}, 'allow-oom')
register('deregister', deregister, {3, 0, 2, 0}, {}, 'allow-oom')
register('start', start, {2, 1, 1, 3}, {1}, 'allow-oom')
register('renew', renew, {2, 1, 1, 4}, {1}, 'allow-oom')
register('emit', emit, {2, 0, 5, 0}, {}, 'allow-oom')
register('complete', complete, {3, 2, 0, 6}, {}, 'allow-oom')
register('fail', fail, {7, 0, 11, 0}, {1, 2, 3, 4, 5}, 'allow-oom')
register('hand_back', hand_back, {4, 2, 0, 3}, {}, 'allow-oom')
register('canceled', canceled, {5, 0, 3, 0}, {}, 'allow-oom')
register('job', job, {4, 0, 1, 0}, {}, 'no-writes')
