-- ---- workers ----------------------------------------------------------------------------------------------

-- KEYS workers worker mbox; ARGV name boot info_json keep_ms mailbox_ms. The boot that had the name before.
local function heartbeat(keys, a)
  local rc = redis.call
  local ms, t = clock()
  local was = rc('HGET', keys[2], 'boot')
  rc('HSET', keys[2], 'boot', a[2], 'info', a[3], 'heartbeat', t)
  rc('PEXPIRE', keys[2], a[4])
  rc('ZADD', keys[1], t, a[1])
  rc('ZREMRANGEBYSCORE', keys[1], '-inf', int(ms - a[4]))
  rc('PEXPIRE', keys[3], a[5])
  return was or ''
end

-- KEYS workers worker mbox; ARGV name boot
local function deregister(keys, a)
  local rc = redis.call
  rc('DEL', keys[3])
  if rc('HGET', keys[2], 'boot') ~= a[2] then return 0 end
  rc('DEL', keys[2])
  return rc('ZREM', keys[1], a[1])
end

-- KEYS lease units last events; ARGV lease_ms, then (id unit nonce) each. 1: running under this nonce.
local function start(keys, a)
  local rc, find, byte = redis.call, string.find, string.byte
  local ms, t = clock()
  local till, out, leases, held, seen = lease_until(ms, a[1]), {}, {}, {}, {}
  local z = 0
  local j = journal('feed', {events = keys[4], last = keys[3]})
  local members = members_of(a, 2, 3)
  local us = read_all(keys[2], members)
  local p = 2
  for i, member in ipairs(members) do
    local u, nonce, ok = us[i], a[p + 2], 0
    local rest = 13 + #nonce  -- behind assigned|<nonce>|0|
    if seen[member] then ok = seen[member] == nonce and 1 or 0
    elseif u and byte(u, 1) == 97 and find(u, nonce, 10, true) == 10 and find(u, '|0|', rest - 3, true) == rest - 3 then
      local e, c, worker = string.match(u, '^(%d+)|(%d+)|([^:|]*)', rest)
      local attempt = e == '0' and c == '0' and '1' or int(e + c + 1)
      note(j, a[p], member, 'started ' .. a[p + 1] .. ' {"attempt":' .. attempt .. ',"worker":"' .. worker .. '"}')
      z = z + 2
      held[z - 1] = member; held[z] = 'running|' .. nonce .. '|' .. t .. '|' .. string.sub(u, rest)
      leases[z - 1] = till; leases[z] = member
      seen[member] = nonce
      ok = 1
    elseif holds(u, 'running', nonce) then ok = 1 end
    out[i] = ok
    p = p + 3
  end
  if z > 0 then rc('HSET', keys[2], unpack(held)); rc('ZADD', keys[1], unpack(leases)) end
  write(j)
  return out
end

-- KEYS lease units last events; ARGV lease_ms, then (id unit nonce event) each; event "": none, else
-- "step <unit> <data>". 0 renewed, 1 lost, 2 renewed and asked to stop.
local function renew(keys, a)
  local ms = clock()
  local till, out, leases, z = lease_until(ms, a[1]), {}, {}, 0
  local j = journal('steps', {events = keys[4], last = keys[3]})
  local members = members_of(a, 2, 4)
  for p = 5, #a, 4 do
    if string.find(a[p], '\n', 1, true) then return badarg('renew: an event is one line') end
  end
  local us = read_all(keys[2], members)
  local p = 2
  for i, member in ipairs(members) do
    local u, nonce, event = us[i], a[p + 2], a[p + 3]
    local verdict = 1
    if runs(u, nonce) then
      verdict = 0
      if event ~= '' then note(j, a[p], member, event) end
    elseif holds(u, 'assigned', nonce) then verdict = 0
    elseif holds(u, 'canceling', nonce) then verdict = 2 end
    if verdict ~= 1 then leases[z + 1] = till; leases[z + 2] = member; z = z + 2 end
    out[i] = verdict
    p = p + 4
  end
  if z > 0 then redis.call('ZADD', keys[1], unpack(leases)) end
  write(j)
  return out
end

-- KEYS units last events; ARGV id unit nonce type data
local function emit(keys, a)
  local member = a[1] .. ':' .. a[2]
  local u = redis.call('HGET', keys[1], member)
  if not holds(u, 'running', a[3]) and not holds(u, 'canceling', a[3]) then
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not running under this nonce')
  end
  if string.find(a[4], '%s') or string.find(a[5], '\n') then return badarg('emit: a type is one word, data JSON on one line') end
  local j = journal('steps', {events = keys[3], last = keys[2]})
  note(j, a[1], member, a[4] .. ' ' .. a[2] .. ' ' .. a[5])
  write(j)
  return redis.status_reply('OK')
end

-- KEYS lease deadline units open specs last events, then job each
-- ARGV (id unit nonce manifest phases warnings) each; phases and warnings JSON or "".
-- 1: this attempt completed the unit, now or before.
local function complete(keys, a)
  local rc = redis.call
  local _, t = clock()
  local out, gone, done, z = {}, {}, {}, 0
  local members, ids = members_of(a, 1, 6), ids_of(a, 1, 6)
  local j = journal('feed', {events = keys[7], last = keys[6], open = keys[4], specs = keys[5], deadlines = keys[2]})
  local us, opens, specs = read_all(keys[3], members), read_all(keys[4], ids), read_all(keys[5], ids)
  local p = 1
  for i, member in ipairs(members) do
    local u, unit, nonce, job = us[i], a[p + 1], a[p + 2], keys[7 + i]
    local ok = 0
    if done[member] then
      ok = done[member] == nonce and 1 or 0
    elseif runs(u, nonce) or holds(u, 'canceling', nonce) then
      if string.byte(u, 1) == 114 and string.find(u, '|1|0', -4, true) and a[p + 5] == '' and opens[i] and specs[i] then
        -- The usual case of the general one below: one unit, no deadline, no warnings.
        note(j, ids[i], member, 'succeeded ' .. unit .. ' {"job":"succeeded"}')
        j.ended[member] = {job, 'u' .. unit, string.sub(u, 8), 'm' .. unit, a[p + 3], 'p' .. unit, a[p + 4],
          'state', 'succeeded', 'ended', t, 'o', opens[i], 'spec', specs[i], head = 'succeeded', tail = '|' .. t .. '|'}
        j.gone[#j.gone + 1] = ids[i]
      else
        local more = {'m' .. unit, a[p + 3], 'p' .. unit, a[p + 4]}
        if a[p + 5] ~= '' then more[5] = 'w' .. unit; more[6] = a[p + 5] end
        conclude(j, job, ids[i], unit, 'succeeded', u, t, '{}', more, nil, opens[i], specs[i])
      end
      z = z + 1
      gone[z] = member
      done[member] = nonce
      ok = 1
    elseif not u and holds(rc('HGET', job, 'u' .. unit), 'succeeded', nonce) then ok = 1 end
    out[i] = ok
    p = p + 6
  end
  if z > 0 then rc('HDEL', keys[3], unpack(gone)); rc('ZREM', keys[1], unpack(gone)) end
  write(j)
  return out
end

-- KEYS lease delayed deadline dead units open specs last events job
-- ARGV max_attempts max_crashes backoff_ms backoff_max_ms jitter (0..1000) id unit nonce
--      error_json retryable crash
local function fail(keys, a)
  local rc = redis.call
  local units, job, id, unit, nonce, err = keys[5], keys[10], a[6], a[7], a[8], a[9]
  local member = id .. ':' .. unit
  local u = rc('HGET', units, member)
  if not (holds(u, 'running', nonce) or holds(u, 'assigned', nonce) or holds(u, 'canceling', nonce)) then
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not held under this nonce')
  end
  if string.find(err, '\n') then return badarg('fail: the error is JSON on one line') end
  local s, _, st, e, c, owner, as, n, dl = parts(u)
  local ms, t = clock()
  local j = journal('feed', {events = keys[9], last = keys[8], open = keys[6], specs = keys[7], deadlines = keys[3]})
  rc('ZREM', keys[1], member)
  if s == 'canceling' then
    rc('HDEL', units, member)
    conclude(j, job, id, unit, 'canceled', u, t, '{}', {})
  else
    local crash = a[11] == '1'
    if crash then c = c + 1 else e = e + 1 end
    local tries = e + c
    e, c = int(e), int(c)
    if (crash or a[10] == '1') and tonumber(e) < tonumber(a[1]) and tonumber(c) < tonumber(a[2]) then
      local wait = math.min(tonumber(a[4]), a[3] * 2 ^ math.min(tries - 1, 30))
      local at = int(ms + math.floor(wait * (1000 + a[5]) / 2000))
      rc('HSET', job, 'e' .. unit, err)
      rc('ZADD', keys[2], at, member)
      rc('HSET', units, member, waiting('delayed', e, c, n, dl))
      note(j, id, member, 'ready ' .. unit .. ' {"reason":"retry","not_before_ms":' .. at .. ',"errors":' .. e .. ',"crashes":' .. c .. ',' .. string.sub(err, 2))
    else
      rc('HDEL', units, member)
      bury(keys[4], id, unit, e, c, owner, nonce, err)
      conclude(j, job, id, unit, 'failed', packed(s, nonce, st, e, c, owner, as, n, dl), t, err, {'e' .. unit, err, 'error', err}, err)
    end
  end
  write(j)
  return redis.status_reply('OK')
end

-- KEYS lease ready deadline units open specs last events, then job each; ARGV (id unit nonce) each.
-- 1: handed back.
local function hand_back(keys, a)
  local rc = redis.call
  local _, t = clock()
  local j = journal('feed', {events = keys[8], last = keys[7], open = keys[5], specs = keys[6], deadlines = keys[3]})
  local out = {}
  local p, k = 1, 9
  while a[p] do
    local id, unit, nonce, ok = a[p], a[p + 1], a[p + 2], 0
    local member = id .. ':' .. unit
    local u = rc('HGET', keys[4], member)
    if holds(u, 'running', nonce) or holds(u, 'assigned', nonce) then
      local _, _, _, e, c = parts(u)
      release(j, keys[4], keys[1], keys[2], id, unit, u, e, c, t, '{"reason":"handed back"}')
      ok = 1
    elseif holds(u, 'canceling', nonce) then
      rc('ZREM', keys[1], member)
      rc('HDEL', keys[4], member)
      conclude(j, keys[k], id, unit, 'canceled', u, t, '{}', {})
      ok = 1
    end
    out[#out + 1] = ok
    p, k = p + 3, k + 1
  end
  write(j)
  return out
end

-- KEYS lease deadline units open specs last events job; ARGV id unit nonce
local function canceled(keys, a)
  local rc = redis.call
  local id, unit, nonce, job = a[1], a[2], a[3], keys[8]
  local member = id .. ':' .. unit
  local u = rc('HGET', keys[3], member)
  if not holds(u, 'canceling', nonce) then
    if not u and holds(rc('HGET', job, 'u' .. unit), 'canceled', nonce) then return redis.status_reply('OK') end
    return redis.error_reply('CONFLICT unit ' .. member .. ' was not asked to stop under this nonce')
  end
  local _, t = clock()
  local j = journal('feed', {events = keys[7], last = keys[6], open = keys[4], specs = keys[5], deadlines = keys[2]})
  rc('ZREM', keys[1], member)
  rc('HDEL', keys[3], member)
  conclude(j, job, id, unit, 'canceled', u, t, '{}', {})
  write(j)
  return redis.status_reply('OK')
end
