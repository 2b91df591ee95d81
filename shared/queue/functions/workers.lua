-- ---- workers ----------------------------------------------------------------------------------------------

-- KEYS workers worker mailbox; ARGV name boot info_json keep_ms mailbox_ms. The boot that had the name before.
local function heartbeat(keys, args)
  local workers, worker, mailbox = unpack(keys)
  local name, boot, info, keep_ms, mailbox_ms = unpack(args)
  local rc = redis.call
  local ms, at = now()
  local before = rc('HGET', worker, 'boot')
  rc('HSET', worker, 'boot', boot, 'info', info, 'heartbeat', at)
  rc('PEXPIRE', worker, keep_ms)
  rc('ZADD', workers, at, name)
  rc('ZREMRANGEBYSCORE', workers, '-inf', int(ms - keep_ms))
  rc('PEXPIRE', mailbox, mailbox_ms)
  return before or ''
end

-- KEYS workers worker mailbox; ARGV name boot
-- What the worker has not read is released, and it gets nothing more: its end costs no unit a lapse.
local function deregister(keys, args)
  local workers, worker, mailbox = unpack(keys)
  local name, boot = unpack(args)
  local rc, prefix = redis.call, prefix_of(workers)
  local _, at = now()
  local journal = new_journal('feed', {events = prefix .. 'events', last = prefix .. 'last'})
  local sets = {units = prefix .. 'units', ready = prefix .. 'ready', from = prefix .. 'lease'}
  for _, entry in ipairs(rc('XRANGE', mailbox, '-', '+')) do
    for i = 1, #entry[2], 2 do
      local id, unit, nonce = string.match(entry[2][i + 1], '^assign (%S+) (%d+) (%x+)')
      local record = entry[2][i] == 'm' and id and if_readable(unpack_unit, rc('HGET', sets.units, id .. ':' .. unit))
      if held_state(record, nonce) == 'assigned' then
        release(journal, sets, id, unit, record, at, '"reason":"handed back"')
      end
    end
  end
  write(journal)
  rc('SET', gone_key(workers, boot), '1', 'PX', '60000')
  rc('DEL', mailbox)
  if rc('HGET', worker, 'boot') ~= boot then return 0 end
  rc('DEL', worker)
  return rc('ZREM', workers, name)
end

-- A worker reports an attempt that it no longer holds. If its lease lapsed while it ran, the worker was only cut off:
-- that lapse is no crash. Only the worker that held the lease has the nonce.
local function forgive(units, member, record, nonce)
  if not record or nonce == '' or record.mark ~= nonce then return end
  record.crashes, record.mark = int(record.crashes - 1), ''
  redis.call('HSET', units, member, pack_unit(record))
end

-- KEYS lease units last events; ARGV lease_ms id unit nonce. 1: the unit runs under this nonce, now or before; 0: it is
-- not held under it.
local function start(keys, args)
  local lease, units, last, events = unpack(keys)
  local lease_ms, id, unit, nonce = unpack(args)
  local rc, member = redis.call, id .. ':' .. unit
  local record = unpack_unit(rc('HGET', units, member))
  local state = held_state(record, nonce)
  if state == 'running' then return 1 end
  if state ~= 'assigned' then return 0 end
  local ms, at = now()
  record.state, record.started = 'running', at
  rc('HSET', units, member, pack_unit(record))
  rc('ZADD', lease, lease_until(ms, lease_ms), member)
  local journal = new_journal('feed', {events = events, last = last})
  note(journal, id, member, 'started ' .. unit .. ' {"attempt":' .. attempt_of(record) .. ',"worker":"' ..
    string.match(record.owner, '^[^:]*') .. '"}')
  write(journal)
  post_start(events, id)
  return 1
end

-- KEYS lease units last events; ARGV lease_ms, then (id unit nonce event) each; event "": none, else one line
-- "step <unit> <data>". each: 0 renewed, 1 lost, 2 renewed and asked to stop. A unit that has not stopped for twelve
-- leases is lost.
local function renew(keys, args)
  local lease, units, last, events = unpack(keys)
  local members = members_of(args, 2, 4)
  for at = 5, #args, 4 do
    if string.find(args[at], '\n', 1, true) then return badarg('renew: an event is one line') end
  end
  local ms = now()
  local lease_end, leases, out = lease_until(ms, args[1]), {}, {}
  local journal = new_journal('steps', {events = events, last = last})
  local records = read_all(units, members)
  for i, member in ipairs(members) do
    local id, nonce, event = args[4 * i - 2], args[4 * i], args[4 * i + 1]
    local record, illegible = if_readable(unpack_unit, records[i])
    local state = held_state(record, nonce)
    out[i] = 1
    if illegible then
      append(leases, {lease_end, member})
      out[i] = 0
    elseif state == 'running' or state == 'assigned' or (state == 'canceling' and ms < record.mark + 12 * args[1]) then
      if state == 'running' and event ~= '' then note(journal, id, member, event) end
      leases[#leases + 1] = lease_end
      leases[#leases + 1] = member
      out[i] = state == 'canceling' and 2 or 0
    elseif not state then
      forgive(units, member, record, nonce)
    end
  end
  if #leases > 0 then redis.call('ZADD', lease, unpack(leases)) end
  write(journal)
  return out
end

-- KEYS units last events; ARGV id unit nonce type data
local function emit(keys, args)
  local units, last, events = unpack(keys)
  local id, unit, nonce, kind, data = unpack(args)
  local member = id .. ':' .. unit
  local state = held_state(unpack_unit(redis.call('HGET', units, member)), nonce)
  if state ~= 'running' and state ~= 'canceling' then
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not running under this nonce')
  end
  if string.find(kind, '%s') or string.find(data, '\n') then
    return badarg('emit: a type is one word, data JSON on one line')
  end
  local journal = new_journal('steps', {events = events, last = last})
  note(journal, id, member, kind .. ' ' .. unit .. ' ' .. data)
  write(journal)
  return redis.status_reply('OK')
end

-- KEYS lease deadline units open specs last events job; ARGV id unit nonce manifest phases warnings (JSON or "").
-- 1: this attempt completed the unit, now or before; 0: it does not hold it.
local function complete(keys, args)
  local lease, deadline, units, open, specs, last, events, job_key = unpack(keys)
  local id, unit, nonce, manifest, phases, warnings = unpack(args)
  local rc, member = redis.call, id .. ':' .. unit
  local record = unpack_unit(rc('HGET', units, member))
  local state = held_state(record, nonce)
  if state ~= 'running' and state ~= 'canceling' then
    forgive(units, member, record, nonce)
    local ended = not record and unpack_unit(rc('HGET', job_key, 'u' .. unit))
    return held_state(ended, nonce) == 'succeeded' and 1 or 0
  end
  local ms, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  local still_open = rc('HGET', open, id)
  local job = if_readable(unpack_job, still_open)
  if job then count_use(events, ms, job.tenant, manifest) end
  local fields = {'m' .. unit, manifest, 'p' .. unit, phases}
  if warnings ~= '' then append(fields, {'w' .. unit, warnings}) end
  rc('HDEL', units, member)
  rc('ZREM', lease, member)
  local told = #phases <= 2048 and string.find(phases, '^{[^\n]+}$') and '{"phases_us":' .. phases .. '}'
  conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'succeeded', at = at,
    open = still_open, data = told, fields = fields})
  write(journal)
  return 1
end

-- KEYS lease delayed deadline dead units open specs last events job
-- ARGV max_attempts max_crashes backoff_ms backoff_max_ms jitter (0..1000) id unit nonce error_json retryable crash
local function fail(keys, args)
  local lease, delayed, deadline, dead, units, open, specs, last, events, job_key = unpack(keys)
  local max_attempts, max_crashes, backoff_ms, backoff_max_ms, jitter = unpack(args, 1, 5)
  local id, unit, nonce, err, retryable, crash = unpack(args, 6)
  local rc, member = redis.call, id .. ':' .. unit
  local record = unpack_unit(rc('HGET', units, member))
  local state = held_state(record, nonce)
  if state ~= 'running' and state ~= 'assigned' and state ~= 'canceling' then
    forgive(units, member, record, nonce)
    return redis.error_reply('CONFLICT unit ' .. member .. ' is not held under this nonce')
  end
  if string.find(err, '\n') then return badarg('fail: the error is JSON on one line') end
  local ms, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  local ending = {job_key = job_key, id = id, unit = unit, record = record, at = at}
  rc('ZREM', lease, member)
  if state == 'canceling' then
    rc('HDEL', units, member)
    ending.state = 'canceled'
    conclude(journal, ending)
    write(journal)
    return redis.status_reply('OK')
  end
  if crash == '1' then
    record.crashes, record.lapses = int(record.crashes + 1), int(record.lapses + 1)
  else
    record.errors = int(record.errors + 1)
  end
  local left = tonumber(record.errors) < tonumber(max_attempts) and tonumber(record.crashes) < tonumber(max_crashes)
  if left and (crash == '1' or retryable == '1') then
    local tries = record.errors + record.crashes
    failed_here(record)
    local wait = math.min(tonumber(backoff_max_ms), backoff_ms * 2 ^ math.min(tries - 1, 30))
    local due_at = int(ms + math.floor(wait * (1000 + jitter) / 2000))
    rc('HSET', job_key, 'e' .. unit, err)
    rc('ZADD', delayed, due_at, member)
    rc('HSET', units, member, pack_unit(set_waiting(record, 'delayed')))
    note(journal, id, member, 'ready ' .. unit .. ' {"reason":"retry","not_before_ms":' .. due_at .. ',"errors":' ..
      record.errors .. ',"crashes":' .. record.crashes .. past_of(record) .. ',' .. string.sub(err, 2))
  else
    rc('HDEL', units, member)
    bury(dead, job_key, id, unit, record, err)
    ending.state, ending.data, ending.error = 'failed', err, err
    ending.fields = {'e' .. unit, err, 'error', err}
    conclude(journal, ending)
  end
  write(journal)
  return redis.status_reply('OK')
end

-- KEYS lease ready deadline units open specs last events, then job each; ARGV (id unit nonce) each.
-- each: 1 handed back, or canceled if it was asked to stop; 0 it is not held under this nonce, and a crash that was
-- counted for this nonce's lapse is forgiven, or its record cannot be read
local function hand_back(keys, args)
  local lease, ready, deadline, units, open, specs, last, events = unpack(keys, 1, 8)
  local rc = redis.call
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  local sets, out = {units = units, ready = ready, from = lease}, {}
  for i = 1, #args / 3 do
    local id, unit, nonce = unpack(args, 3 * i - 2, 3 * i)
    local member = id .. ':' .. unit
    local record, illegible = if_readable(unpack_unit, rc('HGET', units, member))
    local state = held_state(record, nonce)
    out[i] = 0
    if state == 'running' or state == 'assigned' then
      release(journal, sets, id, unit, record, at, '"reason":"handed back"')
      out[i] = 1
    elseif state == 'canceling' then
      rc('ZREM', lease, member)
      rc('HDEL', units, member)
      conclude(journal, {job_key = keys[8 + i], id = id, unit = unit, record = record, state = 'canceled', at = at})
      out[i] = 1
    elseif not state and not illegible then
      forgive(units, member, record, nonce)
    end
  end
  write(journal)
  return out
end

-- KEYS lease units last events; ARGV id unit nonce. The unit has reached the step at which its job is to be looked at
-- and waits for `resume`. 1: it does; 0: it is not held under this nonce or was asked to stop, and is to be handed back
local function hold(keys, args)
  local lease, units, last, events = unpack(keys)
  local id, unit, nonce = unpack(args)
  local record = unpack_unit(redis.call('HGET', units, id .. ':' .. unit))
  if held_state(record, nonce) ~= 'running' then return 0 end
  local journal = new_journal('feed', {events = events, last = last})
  put_by(journal, {units = units, from = lease}, id, unit, record)
  write(journal)
  return 1
end

-- KEYS units checkpoint; ARGV keep_ms id unit nonce text. 1: it is stored; 0: the unit does not run under this nonce,
-- another attempt may have gone on, and may have ended.
local function store_checkpoint(keys, args)
  local units, checkpoint = unpack(keys)
  local keep_ms, id, unit, nonce, text = unpack(args)
  local record = unpack_unit(redis.call('HGET', units, id .. ':' .. unit))
  if held_state(record, nonce) ~= 'running' then return 0 end
  redis.call('SET', checkpoint, text, 'PX', keep_ms)
  return 1
end

-- KEYS lease deadline units open specs last events job; ARGV id unit nonce
local function canceled(keys, args)
  local lease, deadline, units, open, specs, last, events, job_key = unpack(keys)
  local id, unit, nonce = unpack(args)
  local rc, member = redis.call, id .. ':' .. unit
  local record = unpack_unit(rc('HGET', units, member))
  if held_state(record, nonce) ~= 'canceling' then
    local ended = not record and unpack_unit(rc('HGET', job_key, 'u' .. unit))
    if held_state(ended, nonce) == 'canceled' then return redis.status_reply('OK') end
    return redis.error_reply('CONFLICT unit ' .. member .. ' was not asked to stop under this nonce')
  end
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  rc('ZREM', lease, member)
  rc('HDEL', units, member)
  conclude(journal, {job_key = job_key, id = id, unit = unit, record = record, state = 'canceled', at = at})
  write(journal)
  return redis.status_reply('OK')
end
