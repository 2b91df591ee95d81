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

-- What admissions have in common: written once a call.
local function admissions() return {places = {}, units = {}, jobs = {}, ids = {}, specs = {}, dues = {}} end

-- A job becomes ready: its plan, its units, their places in the ready set, their events. a[p…]: id units spec class
-- steps cost priority deadline_ms; whose: "intake entry|tenant|hash|traceparent".
local function enter(j, all, a, p, t, whose)
  local id, n, dl = a[p], a[p + 1], a[p + 7]
  local m = #all.jobs
  all.ids[#all.ids + 1] = id
  all.jobs[m + 1] = id
  all.jobs[m + 2] = n .. '|' .. t .. '|' .. a[p + 5] .. '|' .. a[p + 6] .. '|' .. dl .. '|' .. whose .. '|' .. a[p + 3] .. '|' .. a[p + 4]
  all.specs[m + 1] = id
  all.specs[m + 2] = a[p + 2]
  local places = all.places
  for i = 0, tonumber(n) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    local z = #places
    places[z + 1] = t
    places[z + 2] = member
    all.units[z + 1] = member
    all.units[z + 2] = waiting('ready', '0', '0', n, dl)
    note(j, id, member, 'ready ' .. unit .. ' {}', id)
  end
  if dl ~= '0' then all.dues[#all.dues + 1] = dl; all.dues[#all.dues + 1] = id end
end

local function write_admissions(j, all, ready, deadline, units)
  local rc, keys = redis.call, j.keys
  write(j)
  if #all.jobs == 0 then return end
  rc('HSET', keys.open, unpack(all.jobs))
  rc('HSET', keys.specs, unpack(all.specs))
  rc('HDEL', keys.last, unpack(all.ids))  -- what follows is the units'
  for first = 1, #all.places, 4000 do  -- a job may have many units
    local to = math.min(first + 3999, #all.places)
    rc('HSET', units, unpack(all.units, first, to))
    rc('ZADD', ready, unpack(all.places, first, to))
  end
  if #all.dues > 0 then rc('ZADD', deadline, unpack(all.dues)) end
end

-- KEYS leader in ready deadline units open specs last events
-- ARGV epoch, then (entry id units spec class steps cost priority deadline_ms) each
-- each: 1 admitted, 0 admitted before, -1 the entry is none of a job that is open, and stays where it is, for `reject`
local function admit(keys, a)
  local _, t = clock()
  local j, all = journal('feed', {events = keys[9], last = keys[8], open = keys[6], specs = keys[7]}), admissions()
  local opens = read_all(keys[6], ids_of(a, 3, 9))
  local entries, seen, out = {}, {}, {}
  for i = 1, #opens do
    local p = 9 * i - 7
    local entry, id, o = a[p], a[p + 1], opens[i]
    local own = is_entry_of(o, entry)
    if own and is_queued(o) and not seen[id] then
      enter(j, all, a, p + 1, t, string.match(o, '^0|0|0|0|%d+|(.*)||$'))
      seen[id] = true
      out[i] = 1
    else
      out[i] = own and 0 or -1
    end
    if own then entries[#entries + 1] = entry end
  end
  forget_entries(keys[2], entries, #entries)
  write_admissions(j, all, keys[3], keys[4], keys[5])
  return out
end

-- Entries that came by XADD become jobs here.
-- KEYS leader in ready deadline units open specs last events jobs, then (job idem) each
-- ARGV epoch idempotency_ms retention_ms, then (entry id units spec class steps cost priority deadline_ms
--      tenant traceparent sha256 has_key) each
-- "created", "existed <id>" (another name of that job), "mismatch <id>", "taken"; the last two leave the
-- entry where it is, for a rejection.
local function admit_raw(keys, a)
  local rc = redis.call
  if not string.find(a[2], '[1-9]') then return badarg('admit_raw: idempotency_ms is at least 1') end
  local ms, t = clock()
  local j, all = journal('feed', {events = keys[9], last = keys[8], open = keys[6], specs = keys[7]}), admissions()
  local out, made = {}, {}
  local p, k = 4, 11
  while a[p] do
    local entry, id, dl, tenant, sha = a[p], a[p + 1], a[p + 8], a[p + 9], a[p + 11]
    local job = keys[k]
    local was = rc('HMGET', job, 'same_as', 'o')
    local o = made[id] or rc('HGET', keys[6], id) or was[2]
    local verdict
    if was[1] then verdict = 'existed ' .. was[1]
    elseif o then verdict = same_body(o, tenant, sha) and 'existed ' .. id or 'taken'
    else
      local first, same = nil, nil
      if a[p + 12] == '1' then first, same = claim_key(keys[k + 1], id, sha, a[2], made, keys[6]) end
      if first and not same then verdict = 'mismatch ' .. first
      elseif first then
        verdict = 'existed ' .. first
        rc('HSET', job, 'same_as', first, 'tenant', tenant)
        rc('PEXPIRE', job, a[3])
      else
        made[id] = queued(dl, entry, tenant, sha, a[p + 10])
        note(j, id, id, 'queued -1 {}')
        write(j)
        enter(j, all, a, p + 1, t, string.match(made[id], '^0|0|0|0|%d+|(.*)||$'))
        rc('ZADD', keys[10], added_at(entry, ms), id)
        verdict = 'created'
      end
    end
    if verdict == 'created' or string.sub(verdict, 1, 8) == 'existed ' then rc('XDEL', keys[2], entry) end
    out[#out + 1] = verdict
    p, k = p + 13, k + 2
  end
  write_admissions(j, all, keys[3], keys[4], keys[5])
  return out
end

-- KEYS leader in jobs deadline open specs last events, then job each
-- ARGV epoch, then (entry id raw error_json tenant spec traceparent) each. 1: rejected, now or before, or the job has ended;
-- 0: the entry is not the one of job `id`, and stays where it is: a raw one chose the id of another job, any other came by
-- XADD and looks like one of `submit`.
local function reject(keys, a)
  local rc = redis.call
  local ms, t = clock()
  local j = journal('feed', {events = keys[8], last = keys[7], open = keys[5], specs = keys[6], deadlines = keys[4]})
  local out = {}
  local p, k = 2, 9
  while a[p] do
    local entry, id, raw, err, job = a[p], a[p + 1], a[p + 2] == '1', a[p + 3], keys[k]
    local o = rc('HGET', keys[5], id)
    local was = o or rc('HGET', job, 'o')
    local known = was and select(3, of_job(was))
    local new = raw and not was and rc('EXISTS', job) == 0
    if new then
      o = queued('0', entry, a[p + 4], '', a[p + 6])
      known = entry
      rc('ZADD', keys[3], added_at(entry, ms), id)
      note(j, id, id, 'queued -1 {}')
    end
    if is_queued(o) and known == entry then
      end_queued(j, job, id, o, 'rejected', t, err, a[p + 5])
      write(j)
    end
    local ok = known == entry
    if ok then forget_entries(keys[2], {entry}, 1) end
    out[#out + 1] = ok and 1 or 0
    p, k = p + 7, k + 1
  end
  return out
end

-- KEYS leader ready lease units open specs last events mbox
-- ARGV epoch owner lease_ms mailbox_ms, then (id unit nonce data drop) each; data: JSON members for the event; drop
-- ("" none): a hint that goes into the mailbox as it is
local function assign(keys, a)
  local rc, sub = redis.call, string.sub
  local ms, t = clock()
  local owner, till = a[2], lease_until(ms, a[3])
  local j = journal('feed', {events = keys[8], last = keys[7]})
  local members, ids = members_of(a, 5, 5), ids_of(a, 5, 5)
  local us, opens, specs = read_all(keys[4], members), read_all(keys[5], ids), read_all(keys[6], ids)
  local out, leases, gone, held, mail, z, seen = {}, {}, {}, {}, {}, 0, {}
  local p = 5
  for i, member in ipairs(members) do
    local u, e, c, n, dl = us[i], nil, nil, nil, nil
    if not u or seen[member] then  -- ended, or assigned by this very call
    elseif u == fresh then e, c, n, dl = '0', '0', '1', '0'
    elseif sub(u, 1, 6) == 'ready|' then e, c, n, dl = string.match(u, '^ready||0|(%d+)|(%d+)||0|(%d+)|(%d+)$') end
    if e then
      local id, unit, nonce = ids[i], a[p + 1], a[p + 2]
      local attempt = int(e + c + 1)
      mail[z + 1] = 'm'; mail[z + 2] = 'assign ' .. id .. ' ' .. unit .. ' ' .. nonce .. ' ' .. attempt
      mail[z + 3] = 'o'; mail[z + 4] = opens[i] or ''
      mail[z + 5] = 's'; mail[z + 6] = specs[i] or ''
      z = z + 6
      if a[p + 4] ~= '' then mail[z + 1] = 'd'; mail[z + 2] = a[p + 4]; z = z + 2 end
      note(j, id, member, 'assigned ' .. unit .. ' {"attempt":' .. attempt .. ',' .. a[p + 3] .. '}')
      held[#held + 1] = member; held[#held + 1] = packed('assigned', nonce, '0', e, c, owner, t, n, dl)
      seen[member] = true
      gone[#gone + 1] = member
      leases[#leases + 1] = till; leases[#leases + 1] = member
      out[i] = 1
    else
      out[i] = 0
    end
    p = p + 5
  end
  if #gone > 0 then
    rc('HSET', keys[4], unpack(held))
    rc('ZREM', keys[2], unpack(gone))
    rc('ZADD', keys[3], unpack(leases))
    rc('XADD', keys[9], '*', unpack(mail))
    rc('PEXPIRE', keys[9], a[4])
  end
  write(j)
  return out
end

-- KEYS leader lease ready units last events, then mbox each; ARGV epoch, then (id unit nonce owner) each
local function revoke(keys, a)
  local rc = redis.call
  local _, t = clock()
  local j = journal('feed', {events = keys[6], last = keys[5]})
  local out = {}
  local p, k = 2, 7
  while a[p] do
    local id, unit, nonce = a[p], a[p + 1], a[p + 2]
    local u = rc('HGET', keys[4], id .. ':' .. unit)
    if holds(u, 'assigned', nonce) then
      local _, _, _, e, c, owner = parts(u)
      release(j, keys[4], keys[2], keys[3], id, unit, u, e, c, t, '{"reason":"revoked"}')
      if owner == a[p + 3] then rc('XADD', keys[k], '*', 'm', 'revoke ' .. id .. ' ' .. unit .. ' ' .. nonce) end
      out[#out + 1] = 1
    else
      out[#out + 1] = 0
    end
    p, k = p + 4, k + 1
  end
  write(j)
  return out
end

-- KEYS leader tenants; ARGV epoch, then (tenant microseconds) each
local function virtual_times(keys, a)
  local set, forgotten = {}, {}
  for i = 2, #a, 2 do
    if a[i + 1] == '' then
      forgotten[#forgotten + 1] = a[i]
    else
      set[#set + 1] = a[i]
      set[#set + 1] = a[i + 1]
    end
  end
  if #set > 0 then redis.call('HSET', keys[2], unpack(set)) end
  if #forgotten > 0 then redis.call('HDEL', keys[2], unpack(forgotten)) end
  return redis.status_reply('OK')
end

-- KEYS units delayed lease open. Every open unit, when delayed and held ones are due, every open job, at one moment.
local function open(keys)
  return {redis.call('HGETALL', keys[1]), redis.call('ZRANGE', keys[2], '0', '-1', 'WITHSCORES'),
    redis.call('ZRANGE', keys[3], '0', '-1', 'WITHSCORES'), redis.call('HGETALL', keys[4])}
end
