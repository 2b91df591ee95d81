-- ---- what time brings: lapsed leases, due retries, missed deadlines, old jobs ------------------------------

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

-- A unit that will not be tried again.
local function bury(dead, id, unit, e, c, owner, nonce, err)
  redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'job', id, 'unit', unit, 'errors', e, 'crashes', c, 'owner', owner, 'nonce', nonce, 'error', err)
end

-- A job's deadline has passed: what is open of it ends. k: the KEYS of `reap`.
local function expire(j, k, job, id, t)
  local rc = redis.call
  local o = rc('HGET', k[10], id)
  if not o then return 0 end
  local n, _, entry = of_job(o)
  local err = rc('HGET', job, 'error') or '{"code":"deadline_exceeded","message":"[queue] the deadline passed before the job ended"}'
  if n == '0' then
    local spec = queued_spec(k[8], entry)
    forget_entries(k[8], {entry}, 1)
    end_queued(j, job, id, o, 'expired', t, err, spec)
    return 1
  end
  for i = 0, tonumber(n) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    local u = rc('HGET', k[9], member)
    if u then
      local s = string.match(u, '^%a+')
      rc('ZREM', s == 'ready' and k[5] or s == 'delayed' and k[4] or k[3], member)
      rc('HDEL', k[9], member)
      conclude(j, job, id, unit, 'expired', u, t, err, {'error', err}, err)
    end
  end
  return 1
end

-- KEYS leader boot lease delayed ready deadline dead in units open specs last events, then job each
-- ARGV epoch lease_ms max_crashes hold (1: leave leases alone), then (kind id unit) each;
-- kind is lease, delayed or deadline (unit "0")
local function reap(keys, a)
  local rc = redis.call
  local ms, t = clock()
  local units, touched = keys[9], 0
  local j = journal('feed', {events = keys[13], last = keys[12], open = keys[10], specs = keys[11], deadlines = keys[6]})
  local hold = in_grace(keys[2], ms, tonumber(a[2])) or a[4] == '1'
  local p, k = 5, 14
  while a[p] do
    local kind, id, unit, job = a[p], a[p + 1], a[p + 2], keys[k]
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
        conclude(j, job, id, unit, 'canceled', u, t, '{}', {})
      elseif s == 'running' and tonumber(c) >= tonumber(a[3]) then
        local err = cjson.encode({code = 'unavailable', message = '[queue] ' .. c .. ' workers were lost while they ran this unit, the last was ' .. owner})
        rc('HDEL', units, member)
        rc('ZREM', keys[3], member)
        bury(keys[7], id, unit, e, c, owner, nonce, err)
        conclude(j, job, id, unit, 'failed', packed(s, nonce, st, e, c, owner, as, n, dl), t, err, {'e' .. unit, err, 'error', err}, err)
      elseif s == 'running' or s == 'assigned' then
        release(j, units, keys[3], keys[5], id, unit, u, e, c, t, '{"reason":"lease lapsed","owner":' .. cjson.encode(owner) .. ',"crashes":' .. c .. '}')
      else
        rc('ZREM', keys[3], member)
      end
    elseif kind == 'delayed' and is_due(keys[4], member, ms) then
      touched = touched + 1
      local u = rc('HGET', units, member)
      if u and string.sub(u, 1, 8) == 'delayed|' then
        local _, _, _, e, c = parts(u)
        release(j, units, keys[4], keys[5], id, unit, u, e, c, t, '{"reason":"retry is due"}')
      else
        rc('ZREM', keys[4], member)
      end
    elseif kind == 'deadline' and is_due(keys[6], id, ms) then
      -- What this call has told of the job's units must stand in their records first.
      if j.told[id] then write(j) end
      rc('ZREM', keys[6], id)
      touched = touched + expire(j, keys, job, id, t)
    end
    p, k = p + 3, k + 1
  end
  write(j)
  return touched
end

-- KEYS jobs open events, then job each; ARGV retention_ms keep_ms, then their ids. Forgets those that ended so long
-- ago, drops from the index what is not there any more, and the events from before the oldest job that is left, or of
-- keep_ms ago: a job that is open for longer than that loses its first ones.
local function sweep(keys, a)
  local rc = redis.call
  local ms = clock()
  local ids, gone, old = ids_of(a, 3, 1), {}, {}
  local opens = read_all(keys[2], ids)
  for i, id in ipairs(ids) do
    local job = keys[3 + i]
    local ended = not opens[i] and rc('HGET', job, 'ended')
    if not opens[i] and (not ended or tonumber(ended) <= ms - a[1]) then
      gone[#gone + 1] = id
      old[#old + 1] = job
    end
  end
  if #gone > 0 then rc('UNLINK', unpack(old)); rc('ZREM', keys[1], unpack(gone)) end
  local oldest = rc('ZRANGE', keys[1], '0', '0', 'WITHSCORES')[2]
  local from = math.max(tonumber(oldest or ms), ms - math.max(tonumber(a[1]), tonumber(a[2])))
  rc('XTRIM', keys[3], 'MINID', '~', int(from))
  return #gone
end
