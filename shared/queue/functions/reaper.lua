-- ---- what time brings: lapsed leases, due retries, missed deadlines, old jobs ------------------------------

-- KEYS lease delayed deadline; ARGV limit. What is due, for `reap`: leases, delayed units, jobs.
local function due(keys, args)
  local _, at = now()
  local found = {}
  for i, key in ipairs(keys) do
    found[i] = redis.call('ZRANGEBYSCORE', key, '-inf', at, 'LIMIT', '0', args[1])
  end
  return found
end

-- A restart of Redis may take longer than a lease: workers get one lease time to renew theirs.
local function in_grace(boot, ms, lease_ms)
  local rc = redis.call
  local run = string.match(rc('INFO', 'server'), 'run_id:(%x+)')
  local value = rc('GET', boot)
  local known, till = string.match(value or '', '^(%x+) (%d+)$')
  if known == run then return ms < tonumber(till) end
  local grace = value and ms + lease_ms or 0
  rc('SET', boot, run .. ' ' .. int(grace))
  return ms < grace
end

local function is_due(key, member, ms)
  local score = redis.call('ZSCORE', key, member)
  return score and tonumber(score) <= ms
end

-- Writes a dead letter: the unit is not tried again. beside: the units that its worker held too when it was lost.
local function bury(dead, job_key, id, unit, record, err)
  redis.call('XADD', dead, 'MAXLEN', '~', '10000', '*', 'job', id, 'unit', unit, 'errors', record.errors,
    'crashes', record.crashes, 'lapses', record.lapses, 'owner', record.owner, 'nonce', record.nonce,
    'beside', redis.call('HGET', job_key, 'b' .. unit) or '', 'error', err)
end

local too_late = '{"code":"deadline_exceeded","message":"[queue] the deadline passed before the job ended"}'

local too_old = '{"code":"deadline_exceeded","message":"[queue] the job is older than queue.max_age_ms allows"}'

-- Ends what is open of a job that is late or too old; 1 if anything was, 0 if a record of it cannot be read. k: the
-- named keys of `reap`.
local function expire(journal, k, job_key, id, at, why)
  local rc = redis.call
  local job_record = rc('HGET', k.open, id)
  local job, records = if_readable(unpack_job, job_record), {}
  if job_record and not job then return 0 end
  for i = 0, tonumber(job and job.units or 0) - 1 do
    local record, illegible = if_readable(unpack_unit, rc('HGET', k.units, id .. ':' .. int(i)))
    if illegible then return 0 end
    records[i] = record
  end
  rc('ZREM', k.deadline, id)
  if not job then return 0 end
  local err = rc('HGET', job_key, 'error') or why
  if job.units == '0' then
    local spec = queued_spec(k.intake, job.entry)
    forget_entries(k.intake, {job.entry})
    end_queued(journal, {job_key = job_key, id = id, record = job_record, state = 'expired', at = at, spec = spec,
      error = err})
    return 1
  end
  for i = 0, tonumber(job.units) - 1 do
    local unit = int(i)
    local member, record = id .. ':' .. unit, records[i]
    if record then
      rc('ZREM', record.state == 'ready' and k.ready or record.state == 'delayed' and k.delayed or k.lease, member)
      rc('HDEL', k.units, member)
      conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'expired', at = at,
        data = err, fields = {'error', err}, error = err})
    end
  end
  return 1
end

-- The held units of each owner, at most 16.
local function held_by_owner(k)
  local members, owners = redis.call('ZRANGE', k.lease, '0', '-1'), {}
  for first = 1, #members, 4000 do
    local page = {unpack(members, first, math.min(first + 3999, #members))}
    for i, record in ipairs(read_all(k.units, page)) do
      local unit = if_readable(unpack_unit, record)
      local owner = unit and unit.owner or ''
      owners[owner] = owners[owner] or {}
      if #owners[owner] < 16 then append(owners[owner], {page[i]}) end
    end
  end
  return owners
end

-- The lease of a unit has lapsed: its worker is lost. Counts as a crash if the unit had started. A unit whose record
-- cannot be read keeps its lease.
local function lapse(journal, k, job_key, id, unit, at)
  local rc, member = redis.call, id .. ':' .. unit
  local record, illegible = if_readable(unpack_unit, rc('HGET', k.units, member))
  if illegible then return end
  local state = record and record.state
  if state ~= 'running' and state ~= 'assigned' then
    rc('ZREM', k.lease, member)
    if state == 'canceling' then
      rc('HDEL', k.units, member)
      conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'canceled', at = at})
    end
    return
  end
  record.lapses = int(record.lapses + 1)
  if state == 'running' then
    record.crashes, record.mark = int(record.crashes + 1), record.nonce
    failed_here(record)
  end
  k.owners = k.owners or held_by_owner(k)
  local beside = {}
  for _, other in ipairs(k.owners[record.owner] or {}) do
    if other ~= member then beside[#beside + 1] = other end
  end
  if #beside > 0 then rc('HSET', job_key, 'b' .. unit, table.concat(beside, ' ')) end
  if tonumber(record.crashes) < k.max_crashes and tonumber(record.lapses) < k.max_lapses then
    release(journal, {units = k.units, ready = k.ready, from = k.lease}, id, unit, record, at,
      '"reason":"lease lapsed","owner":' .. cjson.encode(record.owner) .. ',"crashes":' .. record.crashes)
    return
  end
  local err = cjson.encode({code = 'unavailable', message = '[queue] ' .. record.lapses ..
    ' workers were lost while they held this unit, ' .. record.crashes .. ' of them by a crash after it had started ' ..
    '(queue.max_lapses is ' .. int(k.max_lapses) .. ', queue.max_crashes is ' .. int(k.max_crashes) ..
    '); the last was ' .. record.owner})
  rc('HDEL', k.units, member)
  rc('ZREM', k.lease, member)
  bury(k.dead, job_key, id, unit, record, err)
  conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'failed', at = at,
    data = '{"reason":"workers lost",' .. string.sub(err, 2), fields = {'e' .. unit, err, 'error', err}, error = err})
end

-- KEYS leader boot lease delayed ready deadline dead in units open specs last events, then job each
-- ARGV epoch lease_ms max_crashes max_lapses hold (1: leaves leases alone), then (kind id unit) each;
-- kind is lease, delayed, deadline or age (unit "0"). How many were due.
local function reap(keys, args)
  local _, boot, lease, delayed, ready, deadline, dead, intake, units, open, specs, last, events = unpack(keys, 1, 13)
  local k = {lease = lease, delayed = delayed, ready = ready, deadline = deadline, dead = dead, intake = intake,
    units = units, open = open, max_crashes = tonumber(args[3]), max_lapses = tonumber(args[4])}
  local lease_ms, hold = args[2], args[5]
  local rc = redis.call
  local ms, at = now()
  local touched = 0
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  hold = in_grace(boot, ms, tonumber(lease_ms)) or hold == '1'
  for i = 1, (#args - 5) / 3 do
    local job_key = keys[13 + i]
    local kind, id, unit = unpack(args, 3 * i + 3, 3 * i + 5)
    local member = id .. ':' .. unit
    if kind == 'lease' and not hold and is_due(lease, member, ms) then
      touched = touched + 1
      lapse(journal, k, job_key, id, unit, at)
    elseif kind == 'delayed' and is_due(delayed, member, ms) then
      touched = touched + 1
      local record, illegible = if_readable(unpack_unit, rc('HGET', units, member))
      if record and record.state == 'delayed' then
        release(journal, {units = units, ready = ready, from = delayed}, id, unit, record, at,
          '"reason":"retry is due"')
      elseif not illegible then
        rc('ZREM', delayed, member)
      end
    elseif kind == 'deadline' and is_due(deadline, id, ms) then
      if journal.told[id] then write(journal) end  -- stores the records of units that ended before
      touched = touched + expire(journal, k, job_key, id, at, too_late)
    elseif kind == 'age' then
      if journal.told[id] then write(journal) end
      touched = touched + expire(journal, k, job_key, id, at, too_old)
    end
  end
  write(journal)
  return touched
end

-- KEYS leader units ready delayed lease; ARGV epoch cursor count lease_ms. Checks a page of open units: each belongs
-- into the sorted set of its state alone. A Redis that lost data, or another program, may have left one without: nobody
-- would ever run it. {the next cursor ("0": this is the last page), units put back, units that cannot be read}
local function mend(keys, args)
  local _, units, ready, delayed, lease = unpack(keys)
  local rc = redis.call
  local ms, at = now()
  local cursor, page = unpack(rc('HSCAN', units, args[2], 'COUNT', args[3]))
  local members, mended, illegible = {}, 0, 0
  for i = 1, #page, 2 do members[#members + 1] = page[i] end
  if #members == 0 then return {cursor, 0, 0} end
  local sets, scores = {ready, delayed, lease}, {}
  for i, set in ipairs(sets) do scores[i] = rc('ZMSCORE', set, unpack(members)) end
  for i, member in ipairs(members) do
    local unit = if_readable(unpack_unit, page[2 * i])
    if unit then
      local home, wrong = unit.state == 'ready' and 1 or unit.state == 'delayed' and 2 or 3, false
      for set = 1, 3 do
        if set ~= home and scores[set][i] then
          rc('ZREM', sets[set], member)
          wrong = true
        end
      end
      if not scores[home][i] then
        rc('ZADD', sets[home], home == 3 and lease_until(ms, args[4]) or at, member)
        wrong = true
      end
      if wrong then mended = mended + 1 end
    else
      illegible = illegible + 1
    end
  end
  return {cursor, mended, illegible}
end

-- KEYS jobs open events, then job each; ARGV retention_ms keep_ms, then their ids. How many are forgotten.
-- Forgets jobs that ended longer than retention_ms ago, with their results in Redis, and removes from the index what is
-- gone. Trims events older than every job that is left, and all older than keep_ms: a job that is open for longer loses
-- its first ones.
local function sweep(keys, args)
  local jobs, open, events = unpack(keys, 1, 3)
  local retention_ms, keep_ms = tonumber(args[1]), tonumber(args[2])
  local rc = redis.call
  local ms = now()
  local ids, gone, gone_keys = ids_of(args, 3, 1), {}, {}
  local records = read_all(open, ids)
  for i, id in ipairs(ids) do
    local job_key = keys[3 + i]
    local ended, record, manifest = unpack(records[i] and {} or rc('HMGET', job_key, 'ended', 'o', 'm0'))
    local job, illegible = if_readable(unpack_job, record)
    if not records[i] and not illegible and (not ended or tonumber(ended) <= ms - retention_ms) then
      local names, manifests = {}, {manifest}
      for unit = 1, tonumber(job and job.units or 0) - 1 do names[unit] = 'm' .. int(unit) end
      append(manifests, read_all(job_key, names))
      append_result_keys(gone_keys, prefix_of(jobs), id, manifests)
      gone[#gone + 1] = id
      gone_keys[#gone_keys + 1] = job_key
    end
  end
  if #gone > 0 then
    for first = 1, #gone_keys, 4000 do
      rc('UNLINK', unpack(gone_keys, first, math.min(first + 3999, #gone_keys)))
    end
    rc('ZREM', jobs, unpack(gone))
    rc('SREM', prefix_of(jobs) .. 'paused', unpack(gone))
  end
  local oldest = rc('ZRANGE', jobs, '0', '0', 'WITHSCORES')[2]
  local from = math.max(tonumber(oldest or ms), ms - math.max(retention_ms, keep_ms))
  rc('XTRIM', events, 'MINID', '~', int(from))
  return #gone
end

-- KEYS leader, then as sweep; ARGV epoch, then as sweep. For the leader: when Redis' clock jumps forward, the leader's
-- key expires in the same moment, so that no call forgets by the new clock before a leader has looked at it.
local function sweep_led(keys, args)
  return sweep({unpack(keys, 2)}, {unpack(args, 2)})
end
