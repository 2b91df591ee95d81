-- ---- the journal: what a call tells ------------------------------------------------------------------------
-- A call's events are one entry of the stream `events`: lines "<job> <the event before it> <type> <unit> <data>",
-- which its followers get as two messages, its id and its lines. At most one line a job, so that the entry's id names the event. Messages
-- are not kept: who missed one reads the stream.

-- Adds an entry of these lines, and tells its id and its lines as two messages: joined they would be another string, and of every
-- string that is made Lua hashes every byte.
local function publish(events, channel, text)
  local rc, to = redis.call, prefix_of(events) .. channel
  local at = rc('XADD', events, '*', 'e', text)
  rc('PUBLISH', to, at)
  rc('PUBLISH', to, text)
  return at
end

-- keys: events, last, and where jobs may end open, specs, deadlines.
local function journal(channel, keys)
  return {channel = channel, keys = keys, lines = {}, n = 0, told = {}, whose = {}, behind = {}, ended = {}, gone = {}}
end

-- Writes what was noted; the entry it is in. What follows in this call is an entry of its own. first: nothing has happened
-- to these jobs before.
local function write(j, first)
  local lines, n, whose = j.lines, j.n, j.whose
  if n == 0 then return nil end
  local rc, keys = redis.call, j.keys
  local before = first and {} or rc('HMGET', keys.last, unpack(j.behind))
  for i = 1, #whose do lines[4 * i - 2] = before[i] or '-' end
  local text = table.concat(lines, ' ', 1, n)
  local at = publish(keys.events, j.channel, text)
  local last, m, over, gone = {}, 0, {}, 0
  for i = 1, #whose do
    local member = whose[i]
    local fields = j.ended[member]
    if fields then
      fields[3] = (fields.head or '') .. fields[3] .. (fields.tail or '') .. at
      rc('HSET', unpack(fields))
      gone = gone + 1
      over[gone] = member
    else
      last[m + 1] = member
      last[m + 2] = at
      m = m + 2
    end
  end
  if m > 0 then rc('HSET', keys.last, unpack(last)) end
  if gone > 0 then rc('HDEL', keys.last, unpack(over)) end
  if #j.gone > 0 then rc('HDEL', keys.open, unpack(j.gone)); rc('HDEL', keys.specs, unpack(j.gone)) end
  j.lines, j.n, j.told, j.whose, j.behind, j.ended, j.gone = {}, 0, {}, {}, {}, {}, {}
  return at
end

-- An event of a job's unit (member), or of the job (member: its id), behind the newest of `from`, else of its own.
local function note(j, id, member, event, from)
  if j.told[id] then write(j) end
  j.told[id] = true
  local lines, n = j.lines, j.n
  lines[n + 1] = id
  lines[n + 2] = ''
  lines[n + 3] = event
  lines[n + 4] = '\n'
  n = n + 4
  j.n = n
  j.whose[n / 4] = member
  j.behind[n / 4] = from or member
end

-- A unit ends as `state`: what stays of it in its job (`u`: its open form; more: further fields), its event, and if
-- it was the last the job's end, which that event tells too: {"job":state, "job_error":…}. The caller takes the unit
-- out of `units` and the sets. How long an ended job is kept is `sweep`'s business: two PEXPIREs a job cost more
-- than all its renewals' leases, and what they expire stalls Redis when many jobs end at once.
-- err: the job's error if this was what ended it. open, spec: the job's, if the caller has them.
local function conclude(j, job, id, unit, state, u, t, data, more, err, open, spec)
  local rc, keys = redis.call, j.keys
  if j.told[id] then write(j) end
  local member = id .. ':' .. unit
  local body, n, dl = string.match(u, '^%a+(|.*|(%d+)|(%d+))$')
  local fields = {job, 'u' .. unit, state .. body .. '|' .. t .. '|'}
  for _, v in ipairs(more) do fields[#fields + 1] = v end
  j.ended[member] = fields
  local final = state
  if n ~= '1' then
    if rc('HINCRBY', job, 'done', '1') < tonumber(n) then
      note(j, id, member, state .. ' ' .. unit .. ' ' .. data)
      return
    end
    local names, seen = {}, {[state] = true}
    for i = 0, tonumber(n) - 1 do
      if int(i) ~= unit then names[#names + 1] = 'u' .. int(i) end
    end
    for _, other in ipairs(rc('HMGET', job, unpack(names))) do seen[string.match(other, '^%a+')] = true end
    final = seen.failed and 'failed' or seen.expired and 'expired' or seen.canceled and 'canceled' or 'succeeded'
  end
  local why = (final == 'failed' or final == 'expired') and (err or rc('HGET', job, 'error'))
  for _, v in ipairs({'state', final, 'ended', t, 'o', open or rc('HGET', keys.open, id) or '', 'spec', spec or rc('HGET', keys.specs, id) or ''}) do
    fields[#fields + 1] = v
  end
  if why then fields[#fields + 1] = 'error'; fields[#fields + 1] = why end
  j.gone[#j.gone + 1] = id
  note(j, id, member, state .. ' ' .. unit .. ' {"job":"' .. final .. '"' .. (why and ',"job_error":' .. why or '') ..
    (data == '{}' and '}' or ',' .. string.sub(data, 2)))
  if dl ~= '0' then rc('ZREM', keys.deadlines, id) end
end

-- A job that has no units yet ends; o: its open form.
local function end_queued(j, job, id, o, state, t, data, spec)
  if j.told[id] then write(j) end
  local fields = {job, 'l', '', 'state', state, 'ended', t, 'o', o, 'spec', spec}
  if data ~= '{}' then fields[12] = 'error'; fields[13] = data end
  j.ended[id] = fields
  j.gone[#j.gone + 1] = id
  note(j, id, id, state .. ' -1 ' .. data)
  redis.call('ZREM', j.keys.deadlines, id)
end

-- A held or delayed unit becomes ready again; from: the set it was in.
local function release(j, units, from, ready, id, unit, u, e, c, t, data)
  local rc, member = redis.call, id .. ':' .. unit
  local n, dl = string.match(u, '|(%d+)|(%d+)$')
  rc('HSET', units, member, waiting('ready', e, c, n, dl))
  rc('ZREM', from, member)
  rc('ZADD', ready, t, member)
  note(j, id, member, 'ready ' .. unit .. ' ' .. data)
end
