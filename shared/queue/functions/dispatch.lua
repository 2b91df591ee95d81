-- ---- dispatch: admission and assignment in one ---------------------------------------------------------------

-- One event of each job, lines as in the journal, `who` the members in their order: the entry's id. What stands in the
-- lines already is the event before each.
local function tell(events, lines, n)
  return publish(events, 'feed', table.concat(lines, ' ', 1, n))
end

-- A list of any length as arguments of a command; `step` of them belong together.
local function in_parts(command, key, list, n)
  for first = 1, n, 4000 do redis.call(command, key, unpack(list, first, math.min(first + 3999, n))) end
end

-- Queued jobs become ready as by `admit`, and units of theirs are assigned at once as by `assign`: each record is written
-- once, and nothing passes through the ready set. Those of a job's units that get no worker are ready.
-- KEYS leader in ready deadline lease units open specs last events, then the mailbox of each owner
-- ARGV epoch lease_ms mailbox_ms owners, then each owner, then of each job
--      entry id units spec plan class placed, then of each placed unit (unit owner nonce data drop)
-- plan: "<cost>|<priority>|<deadline_ms>"; class: "<class>|<steps>[|<adapters>]"; owner: which one, from 1; data, drop: as of
-- `assign`. 1: done; 0: the job is not queued any more (admitted before), -1: the entry is none of a job that is open, and stays
-- where it is, for `reject`; then nothing has happened.
local function dispatch(keys, a)
  local rc, find, sub, match = redis.call, string.find, string.sub, string.match
  local count, args, owners = 0, #a, tonumber(a[4])
  local ids, entries, p = {}, {}, 5 + owners
  local bad = #keys ~= 10 + owners
  while p <= args and not bad do
    local k, n = number(a[p + 6]), number(a[p + 2])
    bad = not k or not n or n < 1 or p + 6 + 5 * k > args
    count = count + 1
    entries[count], ids[count] = a[p], a[p + 1]
    p = p + 7
    for q = p, p - 5 + 5 * (bad and 0 or k), 5 do
      local w = number(a[q + 1])
      bad = bad or not w or w < 1 or w > owners
      p = q + 5
    end
  end
  if bad then return badarg('dispatch: for each job 7 arguments and for each of its placed units 5, with an owner from 1 to ' .. int(owners)) end
  if count == 0 then return {} end

  local ms, t = clock()
  local till = lease_until(ms, a[2])
  local opens, lasts = redis.call('HMGET', keys[7], unpack(ids)), redis.call('HMGET', keys[9], unpack(ids))
  local out, seen, done = {}, {}, {}
  local over, jobs, specs, dues, admitted, due = {}, {}, {}, {}, 0, 0
  local units, tails, held, leases, h, places, r = {}, {}, 0, {}, 0, {}, 0
  -- Events: a job's i-th unit in the i-th entry, first all that became ready, then all that were assigned.
  local ready, given = {}, {}
  local mail, mailed, full = {}, {}, {}
  for w = 1, owners do
    mail[w], mailed[w] = {}, 0
    tails[w] = '|0|0|0|' .. a[4 + w] .. '|' .. t .. '|'
  end
  p = 5 + owners
  for i = 1, count do
    local id, o, k = ids[i], opens[i], number(a[p + 6])
    local own = is_queued(o) and find(o, '|', 9, true) + 1
    local from = own and find(o, entries[i] .. '|', own, true) == own and not seen[id] and own
    if from then
      seen[id] = true
      local n, spec, plan = a[p + 2], a[p + 3], a[p + 4]
      local dl = find(plan, '|0', -2, true) and '0' or match(plan, '|(%d+)$')
      local record = n .. '|' .. t .. '|' .. plan .. '|' .. sub(o, from, -3) .. '|' .. a[p + 5]
      over[admitted + 1] = id
      jobs[2 * admitted + 1] = id; jobs[2 * admitted + 2] = record
      specs[2 * admitted + 1] = id; specs[2 * admitted + 2] = spec
      admitted = admitted + 1
      if dl ~= '0' then dues[due + 1] = dl; dues[due + 2] = id; due = due + 2 end
      local placed
      if k > 1 then
        placed = {}
        for q = p + 7, p + 2 + 5 * k, 5 do placed[a[q]] = q end
      end
      for u = 0, number(n) - 1 do
        local unit = u == 0 and '0' or int(u)
        local member, q = id .. ':' .. unit, placed and placed[unit] or k == 1 and a[p + 7] == unit and p + 7
        local round = ready[u] or {n = 0, m = 0}
        ready[u] = round
        local z = round.n
        round[z + 1] = id; round[z + 2] = lasts[i] or '-'; round[z + 3] = u == 0 and 'ready 0 {}' or 'ready ' .. unit .. ' {}'; round[z + 4] = '\n'
        round.n = z + 4
        local w = q and number(a[q + 1])
        if w then
          local nonce, told = a[q + 2], given[u] or {n = 0, of = {}}
          given[u] = told
          z = told.n
          told[z + 1] = id; told[z + 2] = ''; told[z + 3] = 'assigned ' .. unit .. ' {"attempt":1,' .. a[q + 3] .. '}'; told[z + 4] = '\n'
          told.of[z / 4 + 1] = member
          told.n = z + 4
          units[held + 1] = member; units[held + 2] = 'assigned|' .. nonce .. tails[w] .. n .. '|' .. dl
          leases[h + 1] = till; leases[h + 2] = member; h = h + 2
          local box = mail[w]
          z = mailed[w]
          box[z + 1] = 'm'; box[z + 2] = 'assign ' .. id .. ' ' .. unit .. ' ' .. nonce .. ' 1'
          box[z + 3] = 'o'; box[z + 4] = record
          box[z + 5] = 's'; box[z + 6] = spec
          z = z + 6
          if a[q + 4] ~= '' then box[z + 1] = 'd'; box[z + 2] = a[q + 4]; z = z + 2 end
          if z > 4000 then  -- an entry takes no more
            full[#full + 1] = {keys[10 + w], box, z}
            mail[w], z = {}, 0
          end
          mailed[w] = z
        else
          units[held + 1] = member; units[held + 2] = waiting('ready', '0', '0', n, dl)
          places[r + 1] = t; places[r + 2] = member; r = r + 2
          round.of = round.of or {}
          round.m = round.m + 1
          round.of[round.m] = member
        end
        held = held + 2
      end
      out[i] = 1
      done[#done + 1] = entries[i]
    elseif is_entry_of(o, entries[i]) then
      out[i] = 0
      done[#done + 1] = entries[i]
    else
      out[i] = -1
    end
    p = p + 7 + 5 * k
  end
  forget_entries(keys[2], done, #done)
  if admitted == 0 then return out end

  local last, z = {}, 0
  local behind = {}
  for u = 0, #ready do
    local round = ready[u]
    local at = tell(keys[10], round, round.n)
    for x = 1, round.m do last[z + 1] = round.of[x]; last[z + 2] = at; z = z + 2 end
    behind[u] = at
  end
  for u = 0, #ready do
    local told = given[u]
    if told then
      for x = 2, told.n, 4 do told[x] = behind[u] end
      local at = tell(keys[10], told, told.n)
      for x = 1, told.n / 4 do last[z + 1] = told.of[x]; last[z + 2] = at; z = z + 2 end
    end
  end
  in_parts('HSET', keys[9], last, z)
  rc('HDEL', keys[9], unpack(over))
  in_parts('HSET', keys[7], jobs, 2 * admitted)
  in_parts('HSET', keys[8], specs, 2 * admitted)
  in_parts('HSET', keys[6], units, held)
  in_parts('ZADD', keys[3], places, r)
  in_parts('ZADD', keys[5], leases, h)
  if due > 0 then rc('ZADD', keys[4], unpack(dues)) end
  for w = 1, owners do full[#full + 1] = {keys[10 + w], mail[w], mailed[w]} end
  for _, box in ipairs(full) do
    if box[3] > 0 then
      rc('XADD', box[1], '*', unpack(box[2], 1, box[3]))
      rc('PEXPIRE', box[1], a[3])
    end
  end
  return out
end
