-- ---- scheduler --------------------------------------------------------------------------------------------

-- KEYS leader epoch; ARGV coordinator ttl_ms. The epoch it leads with, 0 if another leads.
local function lead(keys, args)
  local leader, counter = unpack(keys)
  local coordinator, ttl_ms = unpack(args)
  local rc = redis.call
  local value = rc('GET', leader)
  -- A key that outlives its time by far is from before Redis' clock was set back.
  if value and rc('PTTL', leader) <= 10 * ttl_ms then
    local epoch, name = string.match(value, '^(%d+) (.*)$')
    if name ~= coordinator then return 0 end
    rc('PEXPIRE', leader, ttl_ms)
    return tonumber(epoch)
  end
  -- A power failure may lose the latest epoch. An epoch is not below the clock, so that it is never given twice.
  local epoch = math.max((tonumber(rc('GET', counter)) or 0) + 1, (now()))
  rc('SET', counter, int(epoch))
  rc('SET', leader, int(epoch) .. ' ' .. coordinator, 'PX', ttl_ms)
  return epoch
end

-- KEYS leader; ARGV coordinator epoch
local function resign(keys, args)
  local leader = keys[1]
  local coordinator, epoch = unpack(args)
  if redis.call('GET', leader) == epoch .. ' ' .. coordinator then return redis.call('DEL', leader) end
  return 0
end

-- What the admissions of a call write, once for all of them.
local function new_admissions()
  return {places = {}, units = {}, jobs = {}, ids = {}, counts = {}, specs = {}, deadlines = {}}
end

-- The data of the event that a job is admitted. needs: steps[|adapters].
local function admitted_event(job, needs)
  local steps, adapters = string.match(needs, '^(%d*)|?(.*)$')
  local _, count = string.gsub(adapters, '[^,]+', '')
  return '{"tenant":' .. cjson.encode(job.tenant) .. ',"class":' .. cjson.encode(string.match(job.class, '^[^|]*')) ..
    ',"units":' .. job.units .. ',"steps":' .. (steps == '' and '0' or steps) .. ',"adapters":' .. int(count) ..
    ',"cost_us":' .. job.cost .. '}'
end

-- Admits a queued job (unpacked): its plan, its units, their places among the ready ones, their events.
-- plan: units spec class steps cost priority deadline_ms
local function admit_job(journal, admissions, id, job, plan, at)
  local spec, steps
  job.units, spec, job.class, steps, job.cost, job.priority, job.deadline = unpack(plan)
  job.ready, job.class = at, job.class .. '|' .. steps
  append(admissions.ids, {id})
  append(admissions.counts, {tonumber(job.units)})
  append(admissions.jobs, {id, pack_job(job)})
  append(admissions.specs, {id, spec})
  name_input(journal.keys.events, id, job.tenant, spec)
  if has_webhook(spec) then
    local prefix = prefix_of(journal.keys.events)
    redis.call('HSET', prefix .. 'hooked', id, '0')
    if string.find(spec, '"job.progress"', 1, true) then redis.call('SADD', prefix .. 'watched', id) end
  end
  if job.deadline ~= '0' then append(admissions.deadlines, {job.deadline, id}) end
  local places, units = admissions.places, admissions.units
  local record = pack_unit(set_waiting({errors = '0', crashes = '0', units = job.units, deadline = job.deadline,
    lapses = '0', mark = '', failed_on = ''}, 'ready'))
  for i = 0, tonumber(job.units) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    places[#places + 1] = at
    places[#places + 1] = member
    units[#units + 1] = member
    units[#units + 1] = record
    -- One event describes the job.
    note(journal, id, member, 'ready ' .. unit .. ' ' .. (i == 0 and admitted_event(job, steps) or '{}'), id)
  end
end

local function write_admissions(journal, admissions, ready, deadline, units)
  local rc, keys = redis.call, journal.keys
  write(journal)
  if #admissions.ids == 0 then return end
  rc('HSET', keys.open, unpack(admissions.jobs))
  rc('HSET', keys.specs, unpack(admissions.specs))
  rc('HDEL', keys.last, unpack(admissions.ids))  -- the job's event is behind those of its units
  for first = 1, #admissions.places, 4000 do  -- unpack fails at 8,000
    local to = math.min(first + 3999, #admissions.places)
    rc('HSET', units, unpack(admissions.units, first, to))
    rc('ZADD', ready, unpack(admissions.places, first, to))
  end
  if #admissions.deadlines > 0 then rc('ZADD', deadline, unpack(admissions.deadlines)) end
end

-- The job was paused before its admission.
local function put_all_by(journal, sets, id, count)
  for i = 0, count - 1 do
    local unit = int(i)
    put_by(journal, sets, id, unit, unpack_unit(redis.call('HGET', sets.units, id .. ':' .. unit)))
  end
end

-- KEYS leader in ready deadline units open specs last events
-- ARGV epoch, then (entry id units spec class steps cost priority deadline_ms) each
-- each: 1 admitted, 0 admitted before or the job's record cannot be read, -1 the entry is not that of an open job and
-- stays where it is, for `reject`
local function admit(keys, args)
  local _, in_key, ready, deadline, units, open, specs, last, events = unpack(keys)
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs})
  local admissions, entries, seen, out = new_admissions(), {}, {}, {}
  local records = read_all(open, ids_of(args, 3, 9))
  for i, record in ipairs(records) do
    local first = 9 * i - 7
    local entry, id = args[first], args[first + 1]
    local job, illegible = if_readable(unpack_job, record)
    if illegible then
      out[i] = 0
    elseif not job or job.entry ~= entry then
      out[i] = -1
    else
      entries[#entries + 1] = entry
      out[i] = 0
      if job.units == '0' and not seen[id] then
        seen[id] = true
        admit_job(journal, admissions, id, job, {unpack(args, first + 2, first + 8)}, at)
        out[i] = 1
      end
    end
  end
  forget_entries(in_key, entries)
  write_admissions(journal, admissions, ready, deadline, units)
  for i, marked in ipairs(#admissions.ids > 0 and
    redis.call('SMISMEMBER', prefix_of(units) .. 'paused', unpack(admissions.ids)) or {}) do
    if marked == 1 then put_all_by(journal, {units = units, from = ready}, admissions.ids[i], admissions.counts[i]) end
  end
  write(journal)
  return out
end

-- Entries that came by XADD become jobs.
-- KEYS leader in ready deadline units open specs last events jobs, then (job idem) each
-- ARGV epoch idempotency_ms retention_ms, then (entry id units spec class steps cost priority deadline_ms
--      tenant traceparent sha256 has_key quota) each
-- "created", "existed <id>" (another name of that job), "mismatch <id>", "taken", "quota …"; the last three leave the
-- entry where it is, for `reject`
local function admit_raw(keys, args)
  local _, in_key, ready, deadline, units, open, specs, last, events, jobs = unpack(keys, 1, 10)
  local idempotency_ms, retention_ms = args[2], args[3]
  local rc = redis.call
  if not string.find(idempotency_ms, '[1-9]') then return badarg('admit_raw: idempotency_ms is at least 1') end
  local ms, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs})

  local function admit_entry(job_key, idem_key, first)
    local entry, id, job_deadline = args[first], args[first + 1], args[first + 8]
    local tenant, trace, sha256, has_key = unpack(args, first + 9, first + 12)
    local same_as, ended = unpack(rc('HMGET', job_key, 'same_as', 'o'))
    if same_as then return 'existed ' .. same_as end
    local known, illegible = if_readable(unpack_job, rc('HGET', open, id) or ended)
    if illegible then return 'taken' end
    if known then return same_body(known, tenant, sha256) and 'existed ' .. id or 'taken' end
    if has_key == '1' then
      local other, same = claim_key(idem_key, id, sha256, idempotency_ms, open)
      if other and not same then return 'mismatch ' .. other end
      if other then
        rc('HSET', job_key, 'same_as', other, 'tenant', tenant)
        rc('PEXPIRE', job_key, retention_ms)
        return 'existed ' .. other
      end
    end
    local use = use_of(tonumber(args[first + 2]), args[first + 3])
    local over = take(in_key, tenant, use, args[first + 13])
    if over then
      if has_key == '1' then rc('DEL', idem_key) end
      return over
    end
    local admissions = new_admissions()
    note(journal, id, id, queued_event(tenant))
    admit_job(journal, admissions, id, queued_job(job_deadline, entry, tenant, sha256, trace, use),
      {unpack(args, first + 2, first + 8)}, at)
    write_admissions(journal, admissions, ready, deadline, units)
    rc('ZADD', jobs, added_at(entry, ms), id)
    return 'created'
  end

  local out = {}
  for i = 1, (#args - 3) / 14 do
    local first = 14 * i - 10
    out[i] = admit_entry(keys[9 + 2 * i], keys[10 + 2 * i], first)
    if out[i] == 'created' or string.find(out[i], '^existed ') then forget_entries(in_key, {args[first]}) end
  end
  return out
end

-- KEYS leader in jobs deadline open specs last events, then job each
-- ARGV epoch, then (entry id raw error_json tenant spec traceparent) each
-- each: 1 rejected, now or before, or the job has ended; 0 the entry is not that of job `id` and stays where it is: it
-- came by XADD, and chose the id of another job (raw) or looks like an entry of `submit`; 2 the job's record cannot be
-- read, and the entry stays where it is
local function reject(keys, args)
  local _, in_key, jobs, deadline, open, specs, last, events = unpack(keys, 1, 8)
  local rc = redis.call
  local ms, at = now()
  local journal = new_journal('feed', {events = events, last = last, open = open, specs = specs, deadline = deadline})
  local out = {}
  for i = 1, (#args - 1) / 7 do
    local first, job_key = 7 * i - 5, keys[8 + i]
    local entry, id, raw, err, tenant, spec, trace = unpack(args, first, first + 6)
    local record = rc('HGET', open, id)
    local job, illegible = if_readable(unpack_job, record or rc('HGET', job_key, 'o'))
    if not job and not illegible and raw == '1' and rc('EXISTS', job_key) == 0 then
      job = queued_job('0', entry, tenant, '', trace, '0')
      record = pack_job(job)
      rc('ZADD', jobs, added_at(entry, ms), id)
      note(journal, id, id, queued_event(tenant))
    end
    out[i] = illegible and 2 or 0
    if job and job.entry == entry then
      if record and job.units == '0' then
        end_queued(journal, {job_key = job_key, id = id, record = record, state = 'rejected', at = at, spec = spec,
          error = err})
        write(journal)
      end
      forget_entries(in_key, {entry})
      out[i] = 1
    end
  end
  return out
end

local most_mail_bytes = 1048576  -- of specs in an entry of a mailbox; with the spec that exceeds it, the entry ends

-- KEYS leader ready lease units open specs last events mailbox
-- ARGV epoch owner lease_ms mailbox_ms, then (id unit nonce data drop) each; data: JSON for the event, at least
-- one member; drop ("" none): adapters, for the mailbox as it is
-- each: 1 assigned, 0 not ready, or the worker has left
local function assign(keys, args)
  local _, ready, lease, units, open, specs, last, events, mailbox = unpack(keys)
  local _, owner, lease_ms, mailbox_ms = unpack(args, 1, 4)
  local rc = redis.call
  local ms, at = now()
  local lease_end = lease_until(ms, lease_ms)
  local journal = new_journal('feed', {events = events, last = last})
  local members, ids = members_of(args, 5, 5), ids_of(args, 5, 5)
  local records, jobs, job_specs = read_all(units, members), read_all(open, ids), read_all(specs, ids)
  local out, leases, assigned, updates, mail, mail_bytes = {}, {}, {}, {}, {}, 0
  local left = rc('EXISTS', gone_key(mailbox, string.match(owner, '[^:]*$'))) == 1
  for i, member in ipairs(members) do
    local first = 5 * i
    local id, unit, nonce, data, drop = unpack(args, first, first + 4)
    local record = if_readable(unpack_unit, records[i])
    local job, illegible = if_readable(shown_job, jobs[i])
    out[i] = 0
    if record and not illegible and not left and record.state == 'ready' and not assigned[member] then
      local attempt = attempt_of(record)
      if mail_bytes > most_mail_bytes then
        rc('XADD', mailbox, '*', unpack(mail))
        mail, mail_bytes = {}, 0
      end
      mail_bytes = mail_bytes + #(job_specs[i] or '')
      append(mail, {'m', 'assign ' .. id .. ' ' .. unit .. ' ' .. nonce .. ' ' .. attempt,
        'o', job or '', 's', job_specs[i] or '', 'r', data})
      if drop ~= '' then append(mail, {'d', drop}) end
      note(journal, id, member, 'assigned ' .. unit .. ' {"attempt":' .. attempt .. ',' .. string.sub(data, 2))
      record.state, record.nonce, record.owner, record.assigned = 'assigned', nonce, owner, at
      append(updates, {member, pack_unit(record)})
      append(leases, {lease_end, member})
      assigned[member] = true
      assigned[#assigned + 1] = member
      out[i] = 1
    end
  end
  if #assigned > 0 then
    rc('HSET', units, unpack(updates))
    rc('ZREM', ready, unpack(assigned))
    rc('ZADD', lease, unpack(leases))
    rc('XADD', mailbox, '*', unpack(mail))
    rc('PEXPIRE', mailbox, mailbox_ms)
  end
  write(journal)
  return out
end

-- KEYS leader lease ready units last events, then mailbox each; ARGV epoch lost, then (id unit nonce owner) each
-- lost: 1 if their workers are lost; their leases then end now, and `reap` counts the lapses
-- each: 1 revoked, 0 it had started or ended
local function revoke(keys, args)
  local _, lease, ready, units, last, events = unpack(keys, 1, 6)
  local rc = redis.call
  local _, at = now()
  local journal = new_journal('feed', {events = events, last = last})
  local sets, out = {units = units, ready = ready, from = lease}, {}
  for i = 1, (#args - 2) / 4 do
    local first = 4 * i - 1
    local id, unit, nonce, owner = unpack(args, first, first + 3)
    local record = if_readable(unpack_unit, rc('HGET', units, id .. ':' .. unit))
    out[i] = 0
    if held_state(record, nonce) == 'assigned' and args[2] == '1' then
      rc('ZADD', lease, at, id .. ':' .. unit)
      out[i] = 1
    elseif held_state(record, nonce) == 'assigned' then
      if record.owner == owner then
        rc('XADD', keys[6 + i], '*', 'm', 'revoke ' .. id .. ' ' .. unit .. ' ' .. nonce)
      end
      release(journal, sets, id, unit, record, at, '"reason":"revoked"')
      out[i] = 1
    end
  end
  write(journal)
  return out
end

-- KEYS leader tenants; ARGV epoch, then (tenant microseconds) each; microseconds "": forgets it
local function virtual_times(keys, args)
  local tenants = keys[2]
  local times, forgotten = {}, {}
  for i = 2, #args, 2 do
    local tenant, time = args[i], args[i + 1]
    if time == '' then forgotten[#forgotten + 1] = tenant else append(times, {tenant, time}) end
  end
  if #times > 0 then redis.call('HSET', tenants, unpack(times)) end
  if #forgotten > 0 then redis.call('HDEL', tenants, unpack(forgotten)) end
  return redis.status_reply('OK')
end

-- KEYS units delayed open; ARGV cursor count. A page of the open units: {the next cursor ("0": this is the last page),
-- then of each unit its member, its record, when its retry is due ("": it is not delayed), its job's record}. HSCAN
-- explains which units pages may lack or repeat. They lack those whose records cannot be read.
local function open_units(keys, args)
  local units, delayed, open = unpack(keys)
  local rc = redis.call
  local cursor, page = unpack(rc('HSCAN', units, args[1], 'COUNT', args[2]))
  local ids, out = {}, {cursor}
  for at = 1, #page, 2 do ids[#ids + 1] = string.match(page[at], '^(.*):') end
  for i, job_record in ipairs(read_all(open, ids)) do
    local member, record = page[2 * i - 1], page[2 * i]
    local unit, job, illegible = if_readable(unpack_unit, record), if_readable(shown_job, job_record)
    if unit and not illegible then
      local due_at = unit.state == 'delayed' and rc('ZSCORE', delayed, member)
      append(out, {member, shown_unit(record), due_at or '', job or ''})
    end
  end
  return out
end
