-- ---- the journal: the events of a call --------------------------------------------------------------------
-- The events of a call are one entry of the stream `events`, a line each:
--   <job> <id of the entry with its event before> <type> <unit> <data>
-- An entry has one line per job at most, so that its id names the event. Followers get the id and the lines as one
-- message of the channel. Messages are not kept: a follower that missed one reads the stream.

-- channel: 'feed' or 'steps'. keys: events, last; where a job may end also open, specs, deadline.
local function new_journal(channel, keys)
  return {channel = channel, keys = keys, jobs = {}, lines = {}, members = {}, after = {}, told = {}, ended = {},
    closed = {}}
end

-- Writes what was noted. Later events of the same call get an entry of their own. first: these jobs have no event yet.
local function write(journal, first)
  local lines, members = journal.lines, journal.members
  if #lines == 0 then return end
  local rc, keys = redis.call, journal.keys
  local before = first and {} or rc('HMGET', keys.last, unpack(journal.after))
  for i, event in ipairs(lines) do lines[i] = journal.jobs[i] .. ' ' .. (before[i] or '-') .. ' ' .. event end
  local text = table.concat(lines, '\n')
  local entry = rc('XADD', keys.events, '*', 'e', text)
  rc('PUBLISH', prefix_of(keys.events) .. journal.channel, entry .. '\n' .. text)
  local last, removed = {}, {}
  for _, member in ipairs(members) do
    local record = journal.ended[member]
    if record then
      record[3] = record[3] .. entry
      rc('HSET', unpack(record))
      removed[#removed + 1] = member
    else
      last[#last + 1] = member
      last[#last + 1] = entry
    end
  end
  if #last > 0 then rc('HSET', keys.last, unpack(last)) end
  if #removed > 0 then rc('HDEL', keys.last, unpack(removed)) end
  if #journal.closed > 0 then
    rc('HDEL', keys.open, unpack(journal.closed))
    rc('HDEL', keys.specs, unpack(journal.closed))
  end
  journal.jobs, journal.lines, journal.members, journal.after = {}, {}, {}, {}
  journal.told, journal.ended, journal.closed = {}, {}, {}
end

-- Notes an event ("<type> <unit> <data>") of a unit (member), or of the job (member: its id). after: whose event comes
-- before it, if not its own.
local function note(journal, id, member, event, after)
  if journal.told[id] then write(journal) end
  journal.told[id] = true
  local at = #journal.lines + 1
  journal.jobs[at], journal.lines[at], journal.members[at] = id, event, member
  journal.after[at] = after or member
end

-- ---- paused jobs ----------------------------------------------------------------------------------------------
-- paused: <job> of each open job that is paused, and <job>:<unit> of each unit that therefore waits. Such a unit is
-- delayed until 2100, so that programs that do not know of pauses leave it alone.
local paused_until = '4102444800000'

local function is_paused(key, member) return redis.call('SISMEMBER', prefix_of(key) .. 'paused', member) == 1 end

-- Sets a unit that no worker runs aside until `resume`. sets: units, and from, the sorted set that it leaves.
local function put_by(journal, sets, id, unit, record)
  local rc, prefix, member = redis.call, prefix_of(sets.units), id .. ':' .. unit
  rc('HSET', sets.units, member, pack_unit(set_waiting(record, 'delayed')))
  rc('ZREM', sets.from, member)
  rc('ZADD', prefix .. 'delayed', paused_until, member)
  if rc('SADD', prefix .. 'paused', member) == 0 then return end
  note(journal, id, member,
    'ready ' .. unit .. ' {"reason":"paused","not_before_ms":' .. paused_until .. past_of(record) .. '}')
end

-- Appends the keys of what a job has stored in Redis: <key>, <key>:1, … of 1 MiB each. A manifest is the worker's: a
-- key that is not of this job is left alone.
local function append_result_keys(list, prefix, id, manifests)
  local own = prefix .. 'blob:' .. id .. ':'
  for _, manifest in ipairs(manifests) do
    local key = manifest and string.match(manifest, '"key":"([^"]*)"')
    if key and string.sub(key, 1, #own) == own then
      list[#list + 1] = key
      local bytes = tonumber(string.match(manifest, '"bytes":(%d+)')) or 0
      for chunk = 1, math.min(math.ceil(bytes / 1048576), 4096) - 1 do list[#list + 1] = key .. ':' .. int(chunk) end
    end
  end
end

-- The checkpoint of a unit that ends. A state in files or S3 is the worker's to remove.
local function drop_checkpoint(key, id, unit)
  local rc, prefix = redis.call, prefix_of(key)
  local name = prefix .. 'checkpoint:' .. id .. ':' .. unit
  local record = rc('GET', name)
  if not record then return end
  local stored = {name}
  append_result_keys(stored, prefix, id, {record})
  rc('UNLINK', unpack(stored))
end

-- ---- what tenants use ------------------------------------------------------------------------------------------
-- usage:<month>: <tenant> → microseconds of GPUs for its results, kept for some months

-- "2026-11", of milliseconds since 1970 (https://howardhinnant.github.io/date_algorithms.html, civil_from_days).
local function month_of(ms)
  local floor = math.floor
  local days = floor(ms / 86400000) + 719468
  local era = floor(days / 146097)
  local of_era = days - era * 146097
  local year = floor((of_era - floor(of_era / 1460) + floor(of_era / 36524) - floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + floor(year / 4) - floor(year / 100))
  local month = floor((5 * of_year + 2) / 153)
  month = month < 10 and month + 3 or month - 9
  return string.format('%04d-%02d', year + era * 400 + (month <= 2 and 1 or 0), month)
end

local function count_use(key, ms, tenant, manifest)
  local us = string.match(manifest, '"gpu_us":(%d+)')
  if not us or #us > 15 then return end
  local usage = prefix_of(key) .. 'usage:' .. month_of(ms)
  redis.call('HINCRBY', usage, tenant, us)
  redis.call('PEXPIRE', usage, '34560000000')  -- 400 days
end

-- ---- webhooks -------------------------------------------------------------------------------------------------
-- outbox: a stream with an entry for each change that a receiver may want, e = "<job> <change>": started, succeeded,
-- failed or canceled. hooked: <job>, admitted and open, with a webhook → '0' until it starts, '1'. watched: those that
-- want their progress. Quotes in a spec's texts are escaped, so that only the fields match.
local function has_webhook(spec) return string.find(spec, '"webhook"%s*:') ~= nil end

local function post(key, id, change) redis.call('XADD', prefix_of(key) .. 'outbox', '*', 'e', id .. ' ' .. change) end

local function post_start(key, id)
  local hooked = prefix_of(key) .. 'hooked'
  if redis.call('HGET', hooked, id) ~= '0' then return end
  redis.call('HSET', hooked, id, '1')
  post(key, id, 'started')
end

-- The end of a job. batch:<batch> counts the ends of its jobs, "<batch>-<line>".
local function post_end(key, id, state, spec)
  local batch = string.match(id, '^(batch_%w+)%-%d+$')
  local counts = batch and prefix_of(key) .. 'batch:' .. batch
  if counts and redis.call('HEXISTS', counts, 'total') == 1 then
    redis.call('HINCRBY', counts, (state == 'succeeded' or state == 'canceled') and state or 'failed', '1')
  end
  if not has_webhook(spec) then return end
  redis.call('HDEL', prefix_of(key) .. 'hooked', id)
  redis.call('SREM', prefix_of(key) .. 'watched', id)
  post(key, id, (state == 'succeeded' or state == 'canceled') and state or 'failed')
end

-- The event of a new job.
local function queued_event(tenant) return 'queued -1 {"tenant":' .. cjson.encode(tenant) .. '}' end

-- How a job ends whose last unit ended as `state`.
local function outcome_of(job_key, units, unit, state)
  local names, seen = {}, {[state] = true}
  for i = 0, tonumber(units) - 1 do
    if int(i) ~= unit then names[#names + 1] = 'u' .. int(i) end
  end
  for _, record in ipairs(redis.call('HMGET', job_key, unpack(names))) do
    seen[string.match(record or '', '%a+') or ''] = true
  end
  return seen.failed and 'failed' or seen.expired and 'expired' or seen.canceled and 'canceled' or 'succeeded'
end

-- What a job that ends took of its tenant's quotas, and the image that it names.
local function return_use(journal, id, record)
  unname_input(journal.keys.events, id)
  local job = if_readable(unpack_job, record)
  if job and job.use ~= '' and job.use ~= '0' then give_back(journal.keys.events, job.tenant, job.use) end
end

-- Ends a unit. The caller removes it from `units` and from the sorted sets. ending has
--   job_key, id, unit: which
--   record: its open record, unpacked
--   state, at: how and when
--   data: the event's JSON object; none: {}
--   fields: further fields of the job's hash
--   error: JSON, if this end is the reason for the job's
--   open, spec: the job's, if the caller has read them
-- The last unit's end is the job's end too, and its event says so: {"job":state, "job_error":…}.
local function conclude(journal, ending)
  local rc, keys = redis.call, journal.keys
  local id, unit, record, state, job_key = ending.id, ending.unit, ending.record, ending.state, ending.job_key
  if journal.told[id] then write(journal) end  -- stores the records of units that ended before
  local member, data = id .. ':' .. unit, ending.data or '{}'
  if state ~= 'succeeded' then rc('SREM', prefix_of(keys.events) .. 'paused', member) end
  drop_checkpoint(keys.events, id, unit)
  record.state = state
  local fields = {job_key, 'u' .. unit, pack_unit(record) .. '|' .. ending.at .. '|'}
  append(fields, ending.fields or {})
  journal.ended[member] = fields
  local outcome = state
  if record.units ~= '1' then
    if rc('HINCRBY', job_key, 'done', '1') < tonumber(record.units) then
      note(journal, id, member, state .. ' ' .. unit .. ' ' .. data)
      return
    end
    outcome = outcome_of(job_key, record.units, unit, state)
  end
  local open = ending.open or rc('HGET', keys.open, id) or ''
  local spec = ending.spec or rc('HGET', keys.specs, id) or ''
  return_use(journal, id, open)
  append(fields, {'state', outcome, 'ended', ending.at, 'o', open, 'spec', spec})
  post_end(keys.events, id, outcome, spec)
  local told = '{"job":"' .. outcome .. '"'
  if outcome == 'failed' or outcome == 'expired' then
    local reason = ending.error or rc('HGET', job_key, 'error')
    if reason then
      append(fields, {'error', reason})
      told = told .. ',"job_error":' .. reason
    end
  end
  journal.closed[#journal.closed + 1] = id
  -- Of a job that succeeded although it was to be paused, `sweep` removes the mark.
  if outcome ~= 'succeeded' then rc('SREM', prefix_of(keys.events) .. 'paused', id) end
  told = told .. (data == '{}' and '}' or ',' .. string.sub(data, 2))
  note(journal, id, member, state .. ' ' .. unit .. ' ' .. told)
  if record.deadline ~= '0' then rc('ZREM', keys.deadline, id) end
end

-- Ends a job that has no units yet. ending has job_key, id, record (packed), state, at, spec; error: JSON or nil.
local function end_queued(journal, ending)
  local id = ending.id
  if journal.told[id] then write(journal) end
  local fields = {ending.job_key, 'l', '', 'state', ending.state, 'ended', ending.at, 'o', ending.record,
    'spec', ending.spec}
  if ending.error then append(fields, {'error', ending.error}) end
  journal.ended[id] = fields
  journal.closed[#journal.closed + 1] = id
  return_use(journal, id, ending.record)
  drop_checkpoint(journal.keys.events, id, '0')  -- a job with resume_from has a checkpoint from the beginning
  redis.call('SREM', prefix_of(journal.keys.events) .. 'paused', id)
  post_end(journal.keys.events, id, ending.state, ending.spec)
  note(journal, id, id, ending.state .. ' -1 ' .. (ending.error or '{}'))
  redis.call('ZREM', journal.keys.deadline, id)
end

-- Makes a held or delayed unit ready, unless its job is paused. sets: units, ready, and from, the sorted set that it
-- leaves. data: members of a JSON object.
local function release(journal, sets, id, unit, record, at, data)
  local rc, member = redis.call, id .. ':' .. unit
  if is_paused(sets.units, id) or is_paused(sets.units, member) then
    return put_by(journal, sets, id, unit, record)
  end
  rc('HSET', sets.units, member, pack_unit(set_waiting(record, 'ready')))
  rc('ZREM', sets.from, member)
  rc('ZADD', sets.ready, at, member)
  note(journal, id, member, 'ready ' .. unit .. ' {' .. data .. past_of(record) .. '}')
end
