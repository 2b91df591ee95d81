-- ---- readers ----------------------------------------------------------------------------------------------

-- The event of a job in one entry: the id of the entry before, and "<type> <unit> <data>". Nothing if it was trimmed.
local function event_at(events, entry, id)
  local found = redis.call('XRANGE', events, entry, entry)[1]
  if not found then return nil end
  local lines = '\n' .. found[2][2] .. '\n'
  local _, from = string.find(lines, '\n' .. id .. ' ', 1, true)
  if not from then return nil end
  return string.match(lines, '^(%S+) ([^\n]*)', from + 1)
end

-- Whether one entry id comes before another.
local function earlier(left, right)
  local left_ms, left_number = string.match(left, '^(%d+)-(%d+)$')
  local right_ms, right_number = string.match(right, '^(%d+)-(%d+)$')
  left_ms, right_ms = tonumber(left_ms), tonumber(right_ms)
  return left_ms < right_ms or (left_ms == right_ms and tonumber(left_number) < tonumber(right_number))
end

-- The data of a running unit's latest step; nil: none yet.
local function latest_step(last, events, id, unit)
  local entry = redis.call('HGET', last, id .. ':' .. unit)
  while entry do
    local before, event = event_at(events, entry, id)
    local kind, data = string.match(event or 'started', '^(%a+) ?%S* ?(.*)$')
    if kind == 'step' then return data end
    if kind == 'started' then return nil end
    entry = before
  end
end

-- The record of an open unit as callers get it: one that waits until its job goes on is paused.
local function shown_open_unit(units, member, record)
  local shown = shown_unit(record)
  local waits = shown and string.match(shown, '^delayed(.*)')
  return waits and is_paused(units, member) and 'paused' .. waits or shown
end

-- KEYS job in units open specs last events; ARGV id. {all fields of the job, its open record, its open units as (unit,
-- record), the latest step of each running one as (unit, data), its spec while it is open}
local function job(keys, args)
  local job_key, in_key, units, open, specs, last, events = unpack(keys)
  local id = args[1]
  local rc = redis.call
  local open_record = rc('HGET', open, id)
  local fields = rc('HGETALL', job_key)
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == 'o' then fields[i + 1] = shown_job(fields[i + 1]) end
    if string.find(name, '^u%d') then fields[i + 1] = shown_unit(fields[i + 1]) end
  end
  if not open_record then return {fields, '', {}, {}, ''} end
  local record, shown = unpack_job(open_record), shown_job(open_record)
  if record.units == '0' then
    if is_paused(units, id) then append(fields, {'state', 'paused'}) end
    return {fields, shown, {}, {}, queued_spec(in_key, record.entry)}
  end
  local open_units, steps = {}, {}
  for i = 0, tonumber(record.units) - 1 do
    local unit = int(i)
    local unit_record = shown_open_unit(units, id .. ':' .. unit, rc('HGET', units, id .. ':' .. unit))
    if unit_record then
      append(open_units, {unit, unit_record})
      local state = string.match(unit_record, '^%a+')
      local step = (state == 'running' or state == 'canceling' or state == 'paused') and
        latest_step(last, events, id, unit)
      if step then append(steps, {unit, step}) end
    end
  end
  return {fields, shown, open_units, steps, rc('HGET', specs, id) or ''}
end

-- KEYS units open, then job each; ARGV their ids. Of each job {its record, or false if it has ended; of its hash o,
-- state, ended, u0; the records of its units while it is open, false for those that have ended}, or {} if it does not
-- exist or cannot be read. A queued job that is paused has the state "paused".
local function list(keys, args)
  local units, open = unpack(keys, 1, 2)
  local rc = redis.call
  local function shown(i, id, record)
    local row, own = {shown_job(record) or false}, rc('HMGET', keys[2 + i], 'o', 'state', 'ended', 'u0')
    if not record and not own[1] then return {} end
    own[1], own[4] = shown_job(own[1]), shown_unit(own[4])
    local members, units_of_job = {}, record and unpack_job(record).units
    if units_of_job == '0' and is_paused(units, id) then own[2] = 'paused' end
    append(row, own)
    for unit = 0, tonumber(units_of_job or 0) - 1 do members[unit + 1] = id .. ':' .. int(unit) end
    for unit, unit_record in ipairs(read_all(units, members)) do
      row[#row + 1] = shown_open_unit(units, members[unit], unit_record)
    end
    return row
  end
  local out = {}
  for i, record in ipairs(read_all(open, args)) do
    local read, row = pcall(shown, i, args[i], record)
    out[i] = read and row or {}
  end
  return out
end

-- KEYS job open last events; ARGV id after limit, then ids of entries: where to go on. {the ids where to go on, each
-- event as (id, "<type> <unit> <data>")…}: events of the job from the id `after` on ("0-0": all), in order. They are
-- followed backwards from the last one of each unit, at most `limit` (500 at most) a call. No ids are left once all are
-- read. Another call may repeat an event.
local function events(keys, args)
  local job_key, open, last, stream = unpack(keys)
  local id, after, limit = unpack(args, 1, 3)
  local rc = redis.call
  local newest = ids_of(args, 4, 1)
  for _, entry in ipairs({after, unpack(newest)}) do
    if not string.find(entry, '^%d+%-%d+$') then
      return badarg('events: an event id looks like 1763700000000-0; got ' .. string.sub(entry, 1, 40))
    end
  end
  if #newest == 0 then
    local record = unpack_job(rc('HGET', open, id) or rc('HGET', job_key, 'o'))
    local units = record and record.units
    if units == '0' then newest[1] = rc('HGET', last, id) or rc('HGET', job_key, 'l') or nil end
    for i = 0, tonumber(units or 0) - 1 do
      local unit = int(i)
      newest[#newest + 1] = rc('HGET', last, id .. ':' .. unit) or
        string.match(rc('HGET', job_key, 'u' .. unit) or '', '[^|]*$')
    end
  end
  local found, order, rest = {}, {}, {}
  limit = math.max(1, math.min(tonumber(limit), 500))
  for _, entry in ipairs(newest) do
    while string.find(entry, '^%d') and not found[entry] and not earlier(entry, after) do
      if #order == limit then
        rest[#rest + 1] = entry
        break
      end
      local before, event = event_at(stream, entry, id)
      if not before then break end
      found[entry] = event
      order[#order + 1] = entry
      entry = before
    end
  end
  table.sort(order, earlier)
  local out = {rest}
  for _, entry in ipairs(order) do append(out, {entry, found[entry]}) end
  return out
end

-- The jobs that a worker's record says it holds units of.
local function held_jobs(info)
  local read, record = pcall(cjson.decode, info)
  local jobs = {}
  if read and type(record) == 'table' and type(record.units) == 'table' then
    for _, unit in ipairs(record.units) do
      if type(unit) == 'table' and type(unit[1]) == 'string' then jobs[#jobs + 1] = unit[1] end
    end
  end
  return jobs
end

-- KEYS workers open; ARGV with_tenants (0, 1). The time in milliseconds, then for each worker {name, info_json,
-- heartbeat_ms, the jobs it holds units of and their tenants as (id, tenant)}. A record that is no hash has info "".
local function workers(keys, args)
  local names, open = unpack(keys)
  local rc, prefix = redis.call, prefix_of(names)
  local ms = now()
  local out = {ms}
  for _, name in ipairs(rc('ZRANGE', names, '0', '-1')) do
    local worker = redis.pcall('HMGET', prefix .. 'worker:' .. name, 'info', 'heartbeat')
    local info, tenants = not worker.err and worker[1], {}
    if info and args[1] == '1' then
      for _, id in ipairs(held_jobs(info)) do
        local record = if_readable(unpack_job, rc('HGET', open, id) or rc('HGET', prefix .. 'job:' .. id, 'o'))
        if record then append(tenants, {id, record.tenant}) end
      end
    end
    if worker.err or info then out[#out + 1] = {name, info or '', worker[2] or '0', tenants} end
  end
  return out
end
