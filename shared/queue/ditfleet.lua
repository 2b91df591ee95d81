#!lua name=ditfleet_v1
-- Every state transition of the queue, one Function each. README.md beside this file documents KEYS, ARGV
-- and replies; it is the interface for clients in other languages.
--
-- Rules of this file:
--  * Keys come in KEYS only; a channel is the shard's prefix plus its name.
--  * No rollback exists: a transition checks everything it needs, then writes.
--  * TIME is read once a call. Numbers are made strings by string.format('%d'), never by '..'.
--  * redis.call, math, string are hidden while a library loads: functions look them up when they run.
--
-- A unit is one field u<i> of its job's hash:
--   state|nonce|errors|crashes|owner|assigned_ms|started_ms|ended_ms
-- where state is also one of "delayed" (ready, but not before its back-off) and "canceling" (running, asked
-- to stop). u0 is the first field of the hash, so that the check every renewal makes finds it at once.

local function clock()
  local t = redis.call('TIME')
  local ms = t[1] * 1000 + math.floor(t[2] / 1000)
  return ms, string.format('%d', ms)
end

local function int(v) return string.format('%d', v) end

local function prefix_of(key) return string.match(key, '^df:{[^}]*}:') or '' end

-- Appends to the job's stream and remembers the line for the shard's followers.
local function tell(lines, ev, id, kind, unit, data)
  local entry = redis.call('XADD', ev, '*', 't', kind, 'u', unit, 'd', data)
  lines[#lines + 1] = entry .. ' ' .. id .. ' ' .. kind .. ' ' .. unit .. ' ' .. data
end

-- One message for all events of a call. Not kept: who missed it reads the streams.
local function publish(keys, channel, lines)
  if #lines > 0 then redis.call('PUBLISH', prefix_of(keys[1]) .. channel, table.concat(lines, '\n')) end
end

local function not_leader(key, epoch)
  local v = redis.call('GET', key)
  if v and string.match(v, '^(%d+) ') == epoch then return nil end
  return redis.error_reply('EPOCH ' .. epoch .. ' does not lead this shard' .. (v and (', ' .. v .. ' does') or ''))
end

local function badarg(text) return redis.error_reply('BADARG ' .. text) end

local function valid_id(id) return #id > 0 and #id <= 64 and not string.find(id, '[^%w._-]') end

-- state, nonce, errors, crashes, owner, assigned, started, ended
local function parts(u) return string.match(u, '^(%a+)|([^|]*)|(%d+)|(%d+)|([^|]*)|(%d+)|(%d+)|(%d+)$') end

local function holds(u, state, nonce)
  local want = state .. '|' .. nonce .. '|'
  return u and string.sub(u, 1, #want) == want
end

local ended = {succeeded = true, failed = true, canceled = true, expired = true, rejected = true}
local rank = {ready = 1, delayed = 1, assigned = 2, running = 3, canceling = 3}
local shown = {'ready', 'assigned', 'running'}

-- The job's state from all its units, and whether it has ended.
local function tally(job, n)
  local fields = {}
  for i = 0, n - 1 do fields[i + 1] = 'u' .. int(i) end
  local us = redis.call('HMGET', job, unpack(fields))
  local open, best, seen = 0, 1, {}
  for i = 1, n do
    local s = string.match(us[i] or '', '^%a+') or 'ready'
    if ended[s] then seen[s] = true; best = 3 else
      open = open + 1
      if rank[s] > best then best = rank[s] end
    end
  end
  if open > 0 then return shown[best], false end
  local last = seen.failed and 'failed' or seen.expired and 'expired' or seen.canceled and 'canceled' or 'succeeded'
  return last, true
end

-- Writes the new state of a job whose unit changed; n is the string stored as its number of units.
-- The caller has written the unit. Returns the job's final state once it has one.
local function settle(job, n, unit_state)
  if n == '1' then
    redis.call('HSET', job, 'state', unit_state)
    return ended[unit_state] and unit_state
  end
  local state, done = tally(job, tonumber(n))
  redis.call('HSET', job, 'state', state)
  return done and state
end

-- The last unit has ended: tell it, and let everything of the job expire.
local function finish(lines, deadlines, job, ev, id, state, deadline, retention, t, data)
  redis.call('HSET', job, 'ended', t)
  tell(lines, ev, id, state, '-1', data)
  redis.call('PEXPIRE', job, retention)
  redis.call('PEXPIRE', ev, retention)
  if deadline and deadline ~= '0' then redis.call('ZREM', deadlines, id) end
end

-- ---- producers --------------------------------------------------------------------------------------------

-- KEYS in jobs deadline, then (job ev idem) each; without an idempotency key pass the job key for idem.
-- ARGV idempotency_ms, then (id tenant spec sha256 has_key traceparent deadline_ms) each.
local function submit(keys, a)
  local rc = redis.call
  local count = (#a - 1) / 7
  if count < 1 or count ~= math.floor(count) or #keys ~= 3 + 3 * count then
    return badarg('submit takes 3 keys and 3 a job, 1 argument and 7 a job; got ' .. int(#keys) .. ' and ' .. int(#a))
  end
  local _, t = clock()
  local pre = prefix_of(keys[1])
  local out, lines, index, dues = {}, {}, {}, {}
  local p, k = 2, 4
  for i = 1, count do
    local id, tenant, sha, trace, deadline = a[p], a[p + 1], a[p + 3], a[p + 5], a[p + 6]
    local job, ev, idem, keyed = keys[k], keys[k + 1], keys[k + 2], a[p + 4] == '1'
    local verdict
    if not valid_id(id) then verdict = 'invalid id: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif not valid_id(tenant) then verdict = 'invalid tenant: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif job ~= pre .. 'job:' .. id or ev ~= pre .. 'ev:' .. id then verdict = 'invalid keys: they are not those of job ' .. id
    elseif #sha ~= 64 then verdict = 'invalid sha256: 64 hexadecimal digits of the SHA-256 of spec'
    elseif not string.find(deadline, '^%d+$') then verdict = 'invalid deadline_ms: milliseconds since the epoch, 0 for none'
    else
      local was = rc('HMGET', job, 'h', 'tenant')
      if was[2] then
        verdict = (was[1] == string.sub(sha, 1, 16) and was[2] == tenant) and 'existed ' .. id or 'taken'
      else
        local old = keyed and rc('SET', idem, id .. ' ' .. sha, 'NX', 'GET', 'PX', a[1])
        if old then
          verdict = (string.sub(old, -64) == sha and 'existed ' or 'mismatch ') .. string.match(old, '^%S+')
        else
          local entry = rc('XADD', keys[1], '*', 'job', id, 'tenant', tenant, 'spec', a[p + 2], 'traceparent', trace, 'deadline_ms', deadline)
          rc('HSET', job, 'u0', 'queued', 'state', 'queued', 'tenant', tenant, 'created', t, 'h', string.sub(sha, 1, 16),
            'in', entry, 'trace', trace, 'deadline', deadline)
          tell(lines, ev, id, 'queued', '-1', '{}')
          index[#index + 1] = t; index[#index + 1] = id
          if deadline ~= '0' then dues[#dues + 1] = deadline; dues[#dues + 1] = id end
          verdict = 'created'
        end
      end
    end
    out[i] = verdict
    p, k = p + 7, k + 3
  end
  if #index > 0 then rc('ZADD', keys[2], unpack(index)) end
  if #dues > 0 then rc('ZADD', keys[3], unpack(dues)) end
  publish(keys, 'feed', lines)
  return out
end

-- Ends a unit that is not running under anybody, or takes it from whom it runs under.
local function end_unit(job, field, u, state, t)
  local _, nonce, e, c, owner, as, st = parts(u)
  redis.call('HSET', job, field, state .. '|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. st .. '|' .. t)
end

-- KEYS in ready delayed lease deadline job ev, then mailboxes of workers that may hold its units
-- ARGV retention_ms id tenant ("" for any), then the owners of those mailboxes
local function cancel(keys, a)
  local rc = redis.call
  if #keys < 7 or #a ~= 3 + #keys - 7 then
    return badarg('cancel takes 7 keys and the mailboxes, 3 arguments and their owners; got ' .. int(#keys) .. ' and ' .. int(#a))
  end
  local retention, id, tenant, job, ev = a[1], a[2], a[3], keys[6], keys[7]
  local v = rc('HMGET', job, 'state', 'tenant', 'n', 'in', 'deadline')
  if not v[1] or (tenant ~= '' and tenant ~= v[2]) then return redis.status_reply('notfound') end
  if ended[v[1]] then return redis.status_reply('ended') end
  local _, t = clock()
  local lines, n = {}, tonumber(v[3] or '0')
  if n == 0 then
    rc('XDEL', keys[1], v[4])
    rc('HSET', job, 'u0', 'canceled', 'state', 'canceled')
    finish(lines, keys[5], job, ev, id, 'canceled', v[5], retention, t, '{}')
    publish(keys, 'feed', lines)
    return redis.status_reply('canceled')
  end
  local boxes, open = {}, 0
  for i = 8, #keys do boxes[a[i - 4]] = keys[i] end
  for i = 0, n - 1 do
    local unit = int(i)
    local field, member = 'u' .. unit, id .. ':' .. unit
    local u = rc('HGET', job, field)
    local s, nonce, e, c, owner, as, st = parts(u)
    if s == 'ready' or s == 'delayed' or s == 'assigned' then
      rc('ZREM', s == 'ready' and keys[2] or s == 'delayed' and keys[3] or keys[4], member)
      end_unit(job, field, u, 'canceled', t)
      tell(lines, ev, id, 'canceled', unit, '{}')
    elseif s == 'running' then
      rc('HSET', job, field, 'canceling|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. st .. '|0')
      open = open + 1
    elseif s == 'canceling' then open = open + 1 end
    if (s == 'assigned' or s == 'running') and boxes[owner] then
      rc('XADD', boxes[owner], '*', 'k', 'cancel', 'j', id, 'u', unit, 'n', nonce)
    end
  end
  local state, done = tally(job, n)
  rc('HSET', job, 'state', state)
  if done then finish(lines, keys[5], job, ev, id, state, v[5], retention, t, '{}') end
  publish(keys, 'feed', lines)
  return redis.status_reply(done and 'canceled' or 'requested')
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

-- Units of a job that is becoming ready: their fields, their places in the ready set, their events.
local function enter(lines, places, job, ev, id, n, t)
  local fields = {}
  for i = 0, n - 1 do
    local unit = int(i)
    fields[2 * i + 1] = 'u' .. unit
    fields[2 * i + 2] = 'ready||0|0||0|0|0'
    places[#places + 1] = t
    places[#places + 1] = id .. ':' .. unit
    tell(lines, ev, id, 'ready', unit, '{}')
  end
  redis.call('HSET', job, unpack(fields))
end

-- KEYS leader in ready deadline, then (job ev) each
-- ARGV epoch, then (entry id units spec class batch cost priority deadline_ms) each
local function admit(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local lines, places, dues, entries = {}, {}, {}, {}
  local p, k = 2, 5
  while a[p] do
    local id, n, deadline, job, ev = a[p + 1], a[p + 2], a[p + 8], keys[k], keys[k + 1]
    local v = rc('HMGET', job, 'state', 'in', 'deadline')
    if v[1] == 'queued' and v[2] == a[p] then
      rc('HSET', job, 'u0', 'ready||0|0||0|0|0', 'state', 'ready', 'n', n, 'ready', t, 'spec', a[p + 3], 'class', a[p + 4],
        'batch', a[p + 5], 'cost', a[p + 6], 'prio', a[p + 7], 'deadline', deadline)
      if n == '1' then
        places[#places + 1] = t
        places[#places + 1] = id .. ':0'
        tell(lines, ev, id, 'ready', '0', '{}')
      else
        enter(lines, places, job, ev, id, tonumber(n), t)
      end
      if deadline ~= v[3] and deadline ~= '0' then dues[#dues + 1] = deadline; dues[#dues + 1] = id end
    end
    entries[#entries + 1] = a[p]
    p, k = p + 9, k + 2
  end
  if #places > 0 then rc('ZADD', keys[3], unpack(places)) end
  if #dues > 0 then rc('ZADD', keys[4], unpack(dues)) end
  if #entries > 0 then rc('XDEL', keys[2], unpack(entries)) end
  publish(keys, 'feed', lines)
  return #places / 2
end

-- Entries that came by XADD become jobs here.
-- KEYS leader in ready deadline jobs, then (job ev idem) each
-- ARGV epoch idempotency_ms retention_ms, then (entry id units spec class batch cost priority deadline_ms
--      tenant traceparent sha256 has_key) each
-- "created", "existed <id>" (another name of that job), "mismatch <id>", "taken"; the last two leave the
-- entry where it is, for a rejection.
local function admit_raw(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local out, lines, places = {}, {}, {}
  local p, k = 4, 6
  while a[p] do
    local entry, id, n, deadline, tenant, sha = a[p], a[p + 1], a[p + 2], a[p + 8], a[p + 9], a[p + 11]
    local job, ev, idem = keys[k], keys[k + 1], keys[k + 2]
    local was = rc('HMGET', job, 'h', 'tenant', 'same_as')
    local verdict
    if was[3] then verdict = 'existed ' .. was[3]
    elseif was[2] then
      verdict = (was[1] == string.sub(sha, 1, 16) and was[2] == tenant) and 'existed ' .. id or 'taken'
    else
      local old = a[p + 12] == '1' and rc('SET', idem, id .. ' ' .. sha, 'NX', 'GET', 'PX', a[2])
      if old and string.sub(old, -64) ~= sha then verdict = 'mismatch ' .. string.match(old, '^%S+')
      elseif old then
        local first = string.match(old, '^%S+')
        verdict = 'existed ' .. first
        rc('HSET', job, 'same_as', first, 'tenant', tenant)
        rc('PEXPIRE', job, a[3])
      else
        local created = string.match(entry, '^%d+')
        rc('HSET', job, 'u0', 'ready||0|0||0|0|0', 'state', 'ready', 'tenant', tenant, 'created', created, 'h', string.sub(sha, 1, 16),
          'in', entry, 'trace', a[p + 10], 'deadline', deadline, 'n', n, 'ready', t, 'spec', a[p + 3], 'class', a[p + 4],
          'batch', a[p + 5], 'cost', a[p + 6], 'prio', a[p + 7])
        tell(lines, ev, id, 'queued', '-1', '{}')
        enter(lines, places, job, ev, id, tonumber(n), t)
        rc('ZADD', keys[5], created, id)
        if deadline ~= '0' then rc('ZADD', keys[4], deadline, id) end
        verdict = 'created'
      end
    end
    if verdict == 'created' or string.sub(verdict, 1, 8) == 'existed ' then rc('XDEL', keys[2], entry) end
    out[#out + 1] = verdict
    p, k = p + 13, k + 3
  end
  if #places > 0 then rc('ZADD', keys[3], unpack(places)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS leader in jobs deadline, then (job ev) each
-- ARGV epoch retention_ms, then (entry id raw error_json tenant spec traceparent) each
local function reject(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local lines, done = {}, 0
  local p, k = 3, 5
  while a[p] do
    local entry, id, raw, err, job, ev = a[p], a[p + 1], a[p + 2] == '1', a[p + 3], keys[k], keys[k + 1]
    local v = rc('HMGET', job, 'state', 'in', 'deadline', 'tenant')
    local fresh = raw and not v[4]
    if fresh then
      local created = string.match(entry, '^%d+')
      rc('HSET', job, 'u0', 'rejected', 'tenant', a[p + 4], 'created', created, 'trace', a[p + 6], 'deadline', '0')
      rc('ZADD', keys[3], created, id)
    end
    if fresh or (v[1] == 'queued' and v[2] == entry) then
      rc('HSET', job, 'u0', 'rejected', 'state', 'rejected', 'error', err, 'spec', a[p + 5])
      finish(lines, keys[4], job, ev, id, 'rejected', v[3], a[2], t, err)
      done = done + 1
    end
    rc('XDEL', keys[2], entry)
    p, k = p + 7, k + 2
  end
  publish(keys, 'feed', lines)
  return done
end

-- KEYS leader ready lease mbox, then (job ev) each
-- ARGV epoch owner lease_ms mailbox_ms, then (id unit nonce data) each; data: JSON members for the event
local function assign(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local ms, t = clock()
  local owner, till = a[2], int(ms + a[3])
  local out, lines, leases, gone = {}, {}, {}, {}
  local p, k = 5, 5
  while a[p] do
    local id, unit, nonce, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field = 'u' .. unit
    local v = rc('HMGET', job, field, 'n', 'tenant', 'trace', 'deadline', 'spec', 'class', 'batch')
    local e, c = string.match(v[1] or '', '^ready|[^|]*|(%d+)|(%d+)|')
    if e then
      local attempt = int(e + c + 1)
      local now_is = 'assigned|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. t .. '|0|0'
      if v[2] == '1' then rc('HSET', job, field, now_is, 'state', 'assigned')
      else rc('HSET', job, field, now_is); settle(job, v[2], 'assigned') end
      rc('XADD', keys[4], '*', 'k', 'assign', 'j', id, 'u', unit, 'n', nonce, 'a', attempt, 's', v[6], 'c', v[7], 'b', v[8],
        't', v[3], 'p', v[4], 'd', v[5])
      tell(lines, ev, id, 'assigned', unit, '{"attempt":' .. attempt .. ',' .. a[p + 3] .. '}')
      local member = id .. ':' .. unit
      gone[#gone + 1] = member
      leases[#leases + 1] = till; leases[#leases + 1] = member
      out[#out + 1] = 1
    else
      out[#out + 1] = 0
    end
    p, k = p + 4, k + 2
  end
  if #gone > 0 then
    rc('ZREM', keys[2], unpack(gone))
    rc('ZADD', keys[3], unpack(leases))
    rc('PEXPIRE', keys[4], a[4])
  end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS leader lease ready, then (job ev mbox) each; ARGV epoch, then (id unit nonce owner) each
local function revoke(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local _, t = clock()
  local out, lines = {}, {}
  local p, k = 2, 4
  while a[p] do
    local id, unit, nonce, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field, member = 'u' .. unit, id .. ':' .. unit
    local v = rc('HMGET', job, field, 'n')
    if holds(v[1], 'assigned', nonce) then
      local _, _, e, c, owner = parts(v[1])
      rc('HSET', job, field, 'ready||' .. e .. '|' .. c .. '||0|0|0')
      settle(job, v[2], 'ready')
      rc('ZREM', keys[2], member)
      rc('ZADD', keys[3], t, member)
      if owner == a[p + 3] then rc('XADD', keys[k + 2], '*', 'k', 'revoke', 'j', id, 'u', unit, 'n', nonce) end
      tell(lines, ev, id, 'ready', unit, '{"reason":"revoked"}')
      out[#out + 1] = 1
    else
      out[#out + 1] = 0
    end
    p, k = p + 4, k + 3
  end
  publish(keys, 'feed', lines)
  return out
end

-- A unit that will not be tried again: failed, with its cause, kept as a dead letter too.
local function bury(lines, dead, job, ev, id, unit, u, err, t)
  local _, nonce, e, c, owner = parts(u)
  end_unit(job, 'u' .. unit, u, 'failed', t)
  redis.call('HSET', job, 'e' .. unit, err, 'error', err)
  redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'job', id, 'unit', unit, 'errors', e, 'crashes', c, 'owner', owner, 'nonce', nonce, 'error', err)
  tell(lines, ev, id, 'failed', unit, err)
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

-- KEYS leader boot lease delayed ready deadline dead in, then (job ev) each
-- ARGV epoch retention_ms lease_ms max_crashes hold (1: leave leases alone), then (kind id unit) each;
-- kind is lease, delayed or deadline (unit "")
local function reap(keys, a)
  local rc = redis.call
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  local ms, t = clock()
  local retention, lines, touched = a[2], {}, 0
  local hold = in_grace(keys[2], ms, tonumber(a[3])) or a[5] == '1'
  local p, k = 6, 9
  while a[p] do
    local kind, id, unit, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field, member = 'u' .. unit, id .. ':' .. unit
    if kind == 'lease' and not hold then
      local score = rc('ZSCORE', keys[3], member)
      if score and tonumber(score) <= ms then
        touched = touched + 1
        rc('ZREM', keys[3], member)
        local v = rc('HMGET', job, field, 'n', 'deadline', 'error')
        local s, _, e, c, owner
        if v[1] then s, _, e, c, owner = parts(v[1]) end
        local last
        if s == 'canceling' then
          end_unit(job, field, v[1], 'canceled', t)
          tell(lines, ev, id, 'canceled', unit, '{}')
          last = settle(job, v[2], 'canceled')
        elseif s == 'assigned' or s == 'running' then
          if s == 'running' then c = int(c + 1) end
          local crashed = s .. '||' .. e .. '|' .. c .. '|' .. owner .. '|0|0|0'
          if tonumber(c) >= tonumber(a[4]) and s == 'running' then
            local err = cjson.encode({code = 'unavailable', message = '[queue] ' .. c .. ' workers were lost while they ran this unit, the last was ' .. owner})
            v[4] = err
            bury(lines, keys[7], job, ev, id, unit, crashed, err, t)
            last = settle(job, v[2], 'failed')
          else
            rc('HSET', job, field, 'ready||' .. e .. '|' .. c .. '||0|0|0')
            rc('ZADD', keys[5], t, member)
            settle(job, v[2], 'ready')
            tell(lines, ev, id, 'ready', unit, '{"reason":"lease lapsed","owner":' .. cjson.encode(owner) .. ',"crashes":' .. c .. '}')
          end
        end
        if last then finish(lines, keys[6], job, ev, id, last, v[3], retention, t, v[4] or '{}') end
      end
    elseif kind == 'delayed' then
      local score = rc('ZSCORE', keys[4], member)
      if score and tonumber(score) <= ms then
        touched = touched + 1
        rc('ZREM', keys[4], member)
        local u = rc('HGET', job, field)
        local s, _, e, c = parts(u or '')
        if s == 'delayed' then
          rc('HSET', job, field, 'ready||' .. e .. '|' .. c .. '||0|0|0')
          rc('ZADD', keys[5], t, member)
          tell(lines, ev, id, 'ready', unit, '{"reason":"retry is due"}')
        end
      end
    elseif kind == 'deadline' then
      local score = rc('ZSCORE', keys[6], id)
      if score and tonumber(score) <= ms then
        rc('ZREM', keys[6], id)
        local v = rc('HMGET', job, 'state', 'n', 'in')
        if v[1] and not ended[v[1]] then
          touched = touched + 1
          local n, last, err = tonumber(v[2] or '0'), 'expired', '{"code":"deadline_exceeded","message":"[queue] the deadline passed before the job ended"}'
          if n == 0 then
            rc('XDEL', keys[8], v[3])
            rc('HSET', job, 'u0', 'expired')
          else
            for i = 0, n - 1 do
              local one = int(i)
              local u = rc('HGET', job, 'u' .. one)
              local s = string.match(u, '^%a+')
              if not ended[s] then
                rc('ZREM', s == 'ready' and keys[5] or s == 'delayed' and keys[4] or keys[3], id .. ':' .. one)
                end_unit(job, 'u' .. one, u, 'expired', t)
                tell(lines, ev, id, 'expired', one, err)
              end
            end
            last = tally(job, n)
          end
          rc('HSET', job, 'state', last)
          if not rc('HGET', job, 'error') then rc('HSET', job, 'error', err) end
          finish(lines, keys[6], job, ev, id, last, '0', retention, t, err)
        end
      end
    end
    p, k = p + 3, k + 2
  end
  publish(keys, 'feed', lines)
  return touched
end

-- KEYS jobs, then job keys; ARGV the ids of those keys. Drops from the index what has expired.
local function trim(keys, a)
  local gone = {}
  for i = 1, #a do
    if redis.call('EXISTS', keys[i + 1]) == 0 then gone[#gone + 1] = a[i] end
  end
  if #gone > 0 then redis.call('ZREM', keys[1], unpack(gone)) end
  return #gone
end

-- KEYS leader tenants; ARGV epoch, then (tenant microseconds) each
local function virtual_times(keys, a)
  local refused = not_leader(keys[1], a[1])
  if refused then return refused end
  if #a > 1 then redis.call('HSET', keys[2], unpack(a, 2)) end
  return redis.status_reply('OK')
end

-- KEYS ready delayed lease. Members and scores of each, at one moment.
local function open(keys)
  local out = {}
  for i = 1, 3 do out[i] = redis.call('ZRANGE', keys[i], '0', '-1', 'WITHSCORES') end
  return out
end

-- KEYS job keys. What a scheduler needs of each: n tenant class batch cost created ready deadline prio spec, units.
local function units(keys)
  local out = {}
  for i = 1, #keys do
    local v = redis.call('HMGET', keys[i], 'n', 'tenant', 'class', 'batch', 'cost', 'created', 'ready', 'deadline', 'prio', 'spec')
    local us = {}
    for u = 0, tonumber(v[1] or '0') - 1 do us[u + 1] = redis.call('HGET', keys[i], 'u' .. int(u)) end
    v[#v + 1] = us
    out[i] = v
  end
  return out
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

-- KEYS lease, then (job ev) each; ARGV lease_ms, then (id unit nonce) each. 1: running under this nonce.
local function start(keys, a)
  local rc = redis.call
  local ms, t = clock()
  local till, out, lines, leases = int(ms + a[1]), {}, {}, {}
  local p, k = 2, 2
  while a[p] do
    local id, unit, nonce, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field = 'u' .. unit
    local v = rc('HMGET', job, field, 'n')
    local ok = 0
    if holds(v[1], 'assigned', nonce) then
      local _, _, e, c, owner, as = parts(v[1])
      local now_is = 'running|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. t .. '|0'
      if v[2] == '1' then rc('HSET', job, field, now_is, 'state', 'running')
      else rc('HSET', job, field, now_is); settle(job, v[2], 'running') end
      tell(lines, ev, id, 'started', unit, '{"attempt":' .. int(e + c + 1) .. ',"worker":"' .. string.match(owner, '^[^:]*') .. '"}')
      leases[#leases + 1] = till; leases[#leases + 1] = id .. ':' .. unit
      ok = 1
    elseif holds(v[1], 'running', nonce) then ok = 1 end
    out[#out + 1] = ok
    p, k = p + 3, k + 2
  end
  if #leases > 0 then rc('ZADD', keys[1], unpack(leases)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease, then (job ev) each; ARGV lease_ms, then (id unit nonce step total) each; step "": no event.
-- 0 renewed, 1 lost, 2 renewed and asked to stop.
local function renew(keys, a)
  local rc = redis.call
  local ms = clock()
  local till, out, lines, leases = int(ms + a[1]), {}, {}, {}
  local p, k = 2, 2
  while a[p] do
    local id, unit, nonce, step = a[p], a[p + 1], a[p + 2], a[p + 3]
    local u = rc('HGET', keys[k], 'u' .. unit)
    local verdict = 1
    if holds(u, 'running', nonce) then
      verdict = 0
      if step ~= '' then tell(lines, keys[k + 1], id, 'step', unit, '{"step":' .. step .. ',"total":' .. a[p + 4] .. '}') end
    elseif holds(u, 'assigned', nonce) then verdict = 0
    elseif holds(u, 'canceling', nonce) then verdict = 2 end
    if verdict ~= 1 then leases[#leases + 1] = till; leases[#leases + 1] = id .. ':' .. unit end
    out[#out + 1] = verdict
    p, k = p + 5, k + 2
  end
  if #leases > 0 then rc('ZADD', keys[1], unpack(leases)) end
  publish(keys, 'steps', lines)
  return out
end

-- KEYS job ev; ARGV id unit nonce type data
local function emit(keys, a)
  local u = redis.call('HGET', keys[1], 'u' .. a[2])
  if not holds(u, 'running', a[3]) and not holds(u, 'canceling', a[3]) then
    return redis.error_reply('CONFLICT unit ' .. a[1] .. ':' .. a[2] .. ' is not running under this nonce')
  end
  local lines = {}
  tell(lines, keys[2], a[1], a[4], a[2], a[5])
  publish(keys, 'steps', lines)
  return redis.status_reply('OK')
end

-- KEYS lease deadline, then (job ev) each
-- ARGV retention_ms, then (id unit nonce manifest phases warnings) each; phases and warnings JSON or "".
-- 1: this attempt completed the unit, now or before.
local function complete(keys, a)
  local rc = redis.call
  local _, t = clock()
  local out, lines, gone = {}, {}, {}
  local p, k = 2, 3
  while a[p] do
    local id, unit, nonce, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field = 'u' .. unit
    local v = rc('HMGET', job, field, 'n', 'deadline')
    local ok = 0
    if holds(v[1], 'running', nonce) or holds(v[1], 'canceling', nonce) then
      local _, _, e, c, owner, as, st = parts(v[1])
      local now_is = 'succeeded|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. st .. '|' .. t
      tell(lines, ev, id, 'succeeded', unit, '{}')
      local last = 'succeeded'
      if v[2] == '1' then
        rc('HSET', job, field, now_is, 'state', 'succeeded', 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4])
      else
        rc('HSET', job, field, now_is, 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4])
        last = settle(job, v[2], 'succeeded')
      end
      if a[p + 5] ~= '' then rc('HSET', job, 'w' .. unit, a[p + 5]) end
      if last then
        finish(lines, keys[2], job, ev, id, last, v[3], a[1], t, last == 'failed' and rc('HGET', job, 'error') or '{}')
      end
      gone[#gone + 1] = id .. ':' .. unit
      ok = 1
    elseif holds(v[1], 'succeeded', nonce) then ok = 1 end
    out[#out + 1] = ok
    p, k = p + 6, k + 2
  end
  if #gone > 0 then rc('ZREM', keys[1], unpack(gone)) end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease delayed deadline dead job ev
-- ARGV retention_ms max_attempts max_crashes backoff_ms backoff_max_ms jitter (0..1000) id unit nonce
--      error_json retryable crash
local function fail(keys, a)
  local rc = redis.call
  local job, ev, id, unit, nonce, err = keys[5], keys[6], a[7], a[8], a[9], a[10]
  local field, member = 'u' .. unit, id .. ':' .. unit
  local v = rc('HMGET', job, field, 'n', 'deadline')
  local s, held, e, c, owner, as, st
  if v[1] then s, held, e, c, owner, as, st = parts(v[1]) end
  if held ~= nonce or (s ~= 'running' and s ~= 'assigned' and s ~= 'canceling') then
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not held under this nonce')
  end
  local ms, t = clock()
  local lines, last, data = {}, nil, '{}'
  rc('ZREM', keys[1], member)
  if s == 'canceling' then
    end_unit(job, field, v[1], 'canceled', t)
    tell(lines, ev, id, 'canceled', unit, '{}')
    last = settle(job, v[2], 'canceled')
  else
    local crash = a[12] == '1'
    if crash then c = c + 1 else e = e + 1 end
    local tries = e + c
    local again = (crash or a[11] == '1') and tonumber(e) < tonumber(a[2]) and tonumber(c) < tonumber(a[3])
    e, c = int(e), int(c)
    if again then
      local wait = math.min(tonumber(a[5]), a[4] * 2 ^ math.min(tries - 1, 30))
      local at = int(ms + math.floor(wait * (1000 + a[6]) / 2000))
      rc('HSET', job, field, 'delayed||' .. e .. '|' .. c .. '||0|0|0', 'e' .. unit, err)
      rc('ZADD', keys[2], at, member)
      settle(job, v[2], 'ready')
      tell(lines, ev, id, 'ready', unit, '{"reason":"retry","not_before_ms":' .. at .. ',"errors":' .. e .. ',"crashes":' .. c .. ',' .. string.sub(err, 2))
    else
      bury(lines, keys[4], job, ev, id, unit, s .. '|' .. nonce .. '|' .. e .. '|' .. c .. '|' .. owner .. '|' .. as .. '|' .. st .. '|0', err, t)
      last, data = settle(job, v[2], 'failed'), err
    end
  end
  if last then finish(lines, keys[3], job, ev, id, last, v[3], a[1], t, data) end
  publish(keys, 'feed', lines)
  return redis.status_reply('OK')
end

-- KEYS lease ready deadline, then (job ev) each; ARGV retention_ms, then (id unit nonce) each. 1: handed back.
local function hand_back(keys, a)
  local rc = redis.call
  local _, t = clock()
  local out, lines = {}, {}
  local p, k = 2, 4
  while a[p] do
    local id, unit, nonce, job, ev = a[p], a[p + 1], a[p + 2], keys[k], keys[k + 1]
    local field, member, ok = 'u' .. unit, id .. ':' .. unit, 0
    local v = rc('HMGET', job, field, 'n', 'deadline')
    if holds(v[1], 'running', nonce) or holds(v[1], 'assigned', nonce) then
      local _, _, e, c = parts(v[1])
      rc('HSET', job, field, 'ready||' .. e .. '|' .. c .. '||0|0|0')
      settle(job, v[2], 'ready')
      rc('ZREM', keys[1], member)
      rc('ZADD', keys[2], t, member)
      tell(lines, ev, id, 'ready', unit, '{"reason":"handed back"}')
      ok = 1
    elseif holds(v[1], 'canceling', nonce) then
      rc('ZREM', keys[1], member)
      end_unit(job, field, v[1], 'canceled', t)
      tell(lines, ev, id, 'canceled', unit, '{}')
      local last = settle(job, v[2], 'canceled')
      if last then finish(lines, keys[3], job, ev, id, last, v[3], a[1], t, '{}') end
      ok = 1
    end
    out[#out + 1] = ok
    p, k = p + 3, k + 2
  end
  publish(keys, 'feed', lines)
  return out
end

-- KEYS lease deadline job ev; ARGV retention_ms id unit nonce
local function canceled(keys, a)
  local rc = redis.call
  local id, unit, nonce, job, ev = a[2], a[3], a[4], keys[3], keys[4]
  local field = 'u' .. unit
  local v = rc('HMGET', job, field, 'n', 'deadline')
  if holds(v[1], 'canceled', nonce) then return redis.status_reply('OK') end
  if not holds(v[1], 'canceling', nonce) then
    return redis.error_reply('CONFLICT unit ' .. id .. ':' .. unit .. ' was not asked to stop under this nonce')
  end
  local _, t = clock()
  local lines = {}
  rc('ZREM', keys[1], id .. ':' .. unit)
  end_unit(job, field, v[1], 'canceled', t)
  tell(lines, ev, id, 'canceled', unit, '{}')
  local last = settle(job, v[2], 'canceled')
  if last then finish(lines, keys[2], job, ev, id, last, v[3], a[1], t, '{}') end
  publish(keys, 'feed', lines)
  return redis.status_reply('OK')
end

-- ---- readers ----------------------------------------------------------------------------------------------

-- KEYS job ev in. {all fields of the job, latest step of each running unit as (unit, data), spec while queued}
local function job(keys)
  local rc = redis.call
  local all = rc('HGETALL', keys[1])
  if #all == 0 then return {all, {}, ''} end
  local f, want, left = {}, {}, 0
  for i = 1, #all, 2 do f[all[i]] = all[i + 1] end
  for i = 0, tonumber(f.n or '0') - 1 do
    local unit = int(i)
    local s = string.match(f['u' .. unit], '^%a+')
    if s == 'running' or s == 'canceling' then want[unit] = true; left = left + 1 end
  end
  local steps, upto = {}, '+'
  while left > 0 do
    local page = rc('XREVRANGE', keys[2], upto, '-', 'COUNT', '100')
    for _, entry in ipairs(page) do
      local kind, unit, data = entry[2][2], entry[2][4], entry[2][6]
      if want[unit] and (kind == 'step' or kind == 'started') then
        want[unit] = nil; left = left - 1
        if kind == 'step' then steps[#steps + 1] = unit; steps[#steps + 1] = data end
      end
    end
    if #page < 100 then break end
    upto = '(' .. page[#page][1]
  end
  local spec = ''
  if f.state == 'queued' and f['in'] then
    local found = rc('XRANGE', keys[3], f['in'], f['in'])
    local fields = found[1] and found[1][2] or {}
    for i = 1, #fields, 2 do if fields[i] == 'spec' then spec = fields[i + 1] end end
  end
  return {all, steps, spec}
end

-- allow-oom: what ends or keeps work must go on when Redis is at its memory limit; taking new work must not.
local function register(name, callback, ...)
  redis.register_function{function_name = 'ditfleet_v1_' .. name, callback = callback, flags = {...}}
end
register('submit', submit)
register('cancel', cancel, 'allow-oom')
register('lead', lead, 'allow-oom')
register('resign', resign, 'allow-oom')
register('admit', admit)
register('admit_raw', admit_raw)
register('reject', reject, 'allow-oom')
register('assign', assign)
register('revoke', revoke, 'allow-oom')
register('due', due, 'no-writes')
register('reap', reap, 'allow-oom')
register('trim', trim, 'allow-oom')
register('virtual_times', virtual_times, 'allow-oom')
register('open', open, 'no-writes')
register('units', units, 'no-writes')
register('heartbeat', heartbeat, 'allow-oom')
register('deregister', deregister, 'allow-oom')
register('start', start, 'allow-oom')
register('renew', renew, 'allow-oom')
register('emit', emit, 'allow-oom')
register('complete', complete, 'allow-oom')
register('fail', fail, 'allow-oom')
register('hand_back', hand_back, 'allow-oom')
register('canceled', canceled, 'allow-oom')
register('job', job, 'no-writes')
