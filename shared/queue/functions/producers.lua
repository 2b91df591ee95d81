-- ---- producers --------------------------------------------------------------------------------------------

-- What is wrong with a submission; nil: nothing.
local function invalid_submission(in_key, job_key, idem_key, id, tenant, sha256, has_key, deadline)
  local prefix = prefix_of(in_key)
  if not valid_id(id) then return 'id: 1 to 64 characters of A-Z a-z 0-9 . _ -' end
  if not valid_id(tenant) then return 'tenant: 1 to 64 characters of A-Z a-z 0-9 . _ -' end
  if job_key ~= prefix .. 'job:' .. id then return 'keys: they are not those of job ' .. id end
  if not string.find(sha256, '^%x+$') or #sha256 ~= 64 then
    return 'sha256: 64 hexadecimal digits of the SHA-256 of spec'
  end
  if has_key ~= '0' and has_key ~= '1' then
    return 'has_key: 1 if the second key is that of an idempotency key, else 0'
  end
  local idem = prefix .. 'idem:' .. tenant .. ':'
  if has_key == '1' and string.sub(idem_key, 1, #idem) ~= idem then
    return 'keys: an idempotency key of tenant ' .. tenant .. ' is ' .. idem .. '<key>'
  end
  -- A longer number is no score of a sorted set, which Redis would find after the first write.
  if #deadline > 15 or not string.find(deadline, '^%d+$') then
    return 'deadline_ms: milliseconds since the epoch in at most 15 digits, 0 for none'
  end
end

-- KEYS in jobs deadline open last events job idem (the job key again if there is no idempotency key)
-- ARGV idempotency_ms id tenant spec sha256 has_key traceparent deadline_ms units quota
-- "created", "existed <id>", "mismatch <id>", "taken", "quota …", "invalid …"
local function submit(keys, args)
  local in_key, jobs, deadlines, open, last, events, job_key, idem_key = unpack(keys)
  local idempotency_ms, id, tenant, spec, sha256, has_key, trace, deadline = unpack(args, 1, 8)
  local rc = redis.call
  if not string.find(idempotency_ms, '[1-9]') then return badarg('submit: idempotency_ms is at least 1') end
  local wrong = invalid_submission(in_key, job_key, idem_key, id, tenant, sha256, has_key, deadline)
  if wrong then return 'invalid ' .. wrong end

  local record = rc('HGET', open, id)
  if record or rc('EXISTS', job_key) == 1 then
    local known = unpack_job(record or rc('HGET', job_key, 'o'))
    return known and same_body(known, tenant, sha256) and 'existed ' .. id or 'taken'
  end
  if has_key == '1' then
    local other, same = claim_key(idem_key, id, sha256, idempotency_ms, open)
    if other then return (same and 'existed ' or 'mismatch ') .. other end
  end

  local use = use_of(tonumber(args[9]), spec)
  local over = take(in_key, tenant, use, args[10])
  if over then
    if has_key == '1' then rc('DEL', idem_key) end
    return over
  end

  -- W3C: an invalid traceparent is ignored.
  if #trace ~= 55 or not string.find(trace, '^%x+%-%x+%-%x+%-%x+$') then trace = '' end
  local entry = redis.pcall('XADD', in_key, '*', 'submitted', id .. ' ' .. tenant .. ' ' .. deadline, 'spec', spec,
    'traceparent', trace)
  if type(entry) == 'table' then  -- an entry with the last possible id is still in the intake
    if has_key == '1' then rc('DEL', idem_key) end
    give_back(in_key, tenant, use)
    return redis.error_reply('TRYAGAIN the intake takes no entry just now: ' .. entry.err)
  end
  local _, at = now()
  rc('ZADD', jobs, at, id)
  rc('HSET', open, id, pack_job(queued_job(deadline, entry, tenant, sha256, trace, use)))
  if deadline ~= '0' then rc('ZADD', deadlines, deadline, id) end
  name_input(in_key, id, tenant, spec)
  local journal = new_journal('feed', {events = events, last = last})
  note(journal, id, id, queued_event(tenant))
  write(journal, true)
  return 'created'
end

-- KEYS in ready delayed lease deadline units open specs last events job, then mailboxes of workers that may hold units
-- ARGV id tenant ("" any), then the owners of those mailboxes
local function cancel(keys, args)
  local in_key, ready, delayed, lease, deadline, units, open, specs, last, events, job_key = unpack(keys, 1, 11)
  local id, tenant = args[1], args[2]
  local rc, reply = redis.call, redis.status_reply
  local still_open = rc('HGET', open, id)
  local job = unpack_job(still_open or rc('HGET', job_key, 'o'))
  if not job or (tenant ~= '' and tenant ~= job.tenant) then return reply('notfound') end
  if not still_open then return reply('ended') end
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  if job.units == '0' then
    local spec = queued_spec(in_key, job.entry)
    forget_entries(in_key, {job.entry})
    end_queued(journal, {job_key = job_key, id = id, record = still_open, state = 'canceled', at = at, spec = spec})
    write(journal)
    return reply('canceled')
  end
  local mailboxes, records, running = {}, {}, false
  for i = 12, #keys do mailboxes[args[i - 9]] = keys[i] end
  for i = 0, tonumber(job.units) - 1 do records[i] = unpack_unit(rc('HGET', units, id .. ':' .. int(i))) end
  for i = 0, tonumber(job.units) - 1 do
    local unit = int(i)
    local member, record = id .. ':' .. unit, records[i]
    local state = record and record.state
    if state == 'running' or state == 'assigned' then
      local mailbox = mailboxes[record.owner]
      if mailbox then rc('XADD', mailbox, '*', 'm', 'cancel ' .. id .. ' ' .. unit .. ' ' .. record.nonce) end
    end
    if state == 'running' then
      record.state, record.mark = 'canceling', at
      rc('HSET', units, member, pack_unit(record))
    end
    if state == 'running' or state == 'canceling' then
      running = true
    elseif record then
      rc('ZREM', state == 'ready' and ready or state == 'delayed' and delayed or lease, member)
      rc('HDEL', units, member)
      conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'canceled', at = at})
    end
  end
  write(journal)
  return reply(running and 'requested' or 'canceled')
end

-- Of a call to pause or resume: the job's open record and its open units by number, or nil and the reply.
local function paused_job(units, open, job_key, id, tenant)
  local rc, reply = redis.call, redis.status_reply
  local still_open, records = rc('HGET', open, id), {}
  local job = unpack_job(still_open or rc('HGET', job_key, 'o'))
  local same_as = not job and rc('HGET', job_key, 'same_as')
  if same_as then return nil, reply('same ' .. same_as) end
  if not job or (tenant ~= '' and tenant ~= job.tenant) then return nil, reply('notfound') end
  if not still_open then return nil, reply('ended') end
  for i = 0, tonumber(job.units) - 1 do
    local unit = int(i)
    local record = unpack_unit(rc('HGET', units, id .. ':' .. unit))
    if record then records[#records + 1] = {unit, record} end
    if record and record.state == 'canceling' then return nil, reply('canceling') end
  end
  return job, records
end

-- KEYS ready delayed lease units open last events job; ARGV id tenant ("" any)
-- "paused"; "requested": running units were asked to stop at their next step; "ended", "canceling", "notfound",
-- "same <id>": another name of that job
-- Workers of builds before this message do not read it and finish their units.
local function pause(keys, args)
  local ready, delayed, lease, units, open, last, events, job_key = unpack(keys)
  local id, tenant = unpack(args)
  local rc, prefix = redis.call, prefix_of(units)
  local job, records = paused_job(units, open, job_key, id, tenant)
  if not job then return records end
  local journal = new_journal('feed', {events = events, last = last})
  local first, running = rc('SADD', prefix .. 'paused', id) == 1, false
  if first and job.units == '0' then note(journal, id, id, 'paused -1 {}') end
  for _, open_unit in ipairs(records) do
    local unit, record = unpack(open_unit)
    local state, mailbox = record.state, prefix .. 'mbox:' .. record.owner
    local which = id .. ' ' .. unit .. ' ' .. record.nonce
    if state == 'running' then
      rc('XADD', mailbox, 'NOMKSTREAM', '*', 'pause', which)
      running = true
    else
      if state == 'assigned' then rc('XADD', mailbox, 'NOMKSTREAM', '*', 'm', 'revoke ' .. which) end
      local from = state == 'ready' and ready or state == 'delayed' and delayed or lease
      put_by(journal, {units = units, from = from}, id, unit, record)
    end
  end
  write(journal)
  return redis.status_reply(running and 'requested' or 'paused')
end

-- KEYS ready delayed units open last events job; ARGV id tenant ("" any). "resumed", also if it was not paused; or as
-- `pause`. A unit that was asked to stop still stops, and goes on when its worker has handed it back.
local function resume(keys, args)
  local ready, delayed, units, open, last, events, job_key = unpack(keys)
  local id, tenant = unpack(args)
  local rc, prefix = redis.call, prefix_of(units)
  local job, records = paused_job(units, open, job_key, id, tenant)
  if not job then return records end
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last})
  if rc('SREM', prefix .. 'paused', id) == 1 and job.units == '0' then note(journal, id, id, 'resumed -1 {}') end
  for _, open_unit in ipairs(records) do
    local unit, record = unpack(open_unit)
    if record.state == 'delayed' and rc('SREM', prefix .. 'paused', id .. ':' .. unit) == 1 then
      release(journal, {units = units, ready = ready, from = delayed}, id, unit, record, at, '"reason":"resumed"')
    end
  end
  write(journal)
  return redis.status_reply('resumed')
end
