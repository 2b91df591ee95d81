-- ---- producers --------------------------------------------------------------------------------------------

-- KEYS in jobs deadline open last events, then (job idem) each; without an idempotency key pass the job key for idem.
-- ARGV idempotency_ms, then (id tenant spec sha256 has_key traceparent deadline_ms) each.
local function submit(keys, a)
  local rc, find, sub = redis.call, string.find, string.sub
  local count = (#a - 1) / 7
  if count == 0 then return {} end
  if not find(a[1], '[1-9]') then return badarg('submit: idempotency_ms is at least 1') end
  local _, t = clock()
  local pre = prefix_of(keys[1])
  local stem = pre .. 'job:'
  local j = journal('feed', {events = keys[6], last = keys[5]})
  local out, jobs, made = {}, {}, {}
  for i = 1, count do jobs[i] = keys[5 + 2 * i] end
  local none = rc('EXISTS', unpack(jobs)) == 0
  local opens = read_all(keys[4], ids_of(a, 2, 7))
  local good, begins = nil, nil  -- a tenant that is valid, and how its idempotency keys begin
  local new, n, taken = {}, 0, {}
  local p = 2
  for i = 1, count do
    local id, tenant, sha, dl = a[p], a[p + 1], a[p + 3], a[p + 6]
    local job, keyed = jobs[i], a[p + 4] == '1'
    if tenant ~= good and valid_id(tenant) then good = tenant; begins = pre .. 'idem:' .. tenant .. ':' end
    local verdict
    if not valid_id(id) then verdict = 'invalid id: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif tenant ~= good then verdict = 'invalid tenant: 1 to 64 characters of A-Z a-z 0-9 . _ -'
    elseif #job ~= #stem + #id or find(job, stem, 1, true) ~= 1 or find(job, id, #stem + 1, true) ~= #stem + 1 then verdict = 'invalid keys: they are not those of job ' .. id
    elseif #sha ~= 64 or not find(sha, '^%x+$') then verdict = 'invalid sha256: 64 hexadecimal digits of the SHA-256 of spec'
    elseif not keyed and a[p + 4] ~= '0' then verdict = 'invalid has_key: 1 if the second key is that of an idempotency key, else 0'
    elseif keyed and find(keys[6 + 2 * i], begins, 1, true) ~= 1 then verdict = 'invalid keys: an idempotency key of tenant ' .. tenant .. ' is ' .. begins .. '<key>'
    elseif dl ~= '0' and (#dl > 15 or not find(dl, '^%d+$')) then verdict = 'invalid deadline_ms: milliseconds since the epoch in at most 15 digits, 0 for none'
    else
      local first = made[id]
      local o = opens[i] or (not none and rc('HGET', job, 'o'))
      if first then
        verdict = a[first + 1] == tenant and sub(a[first + 3], 1, 16) == sub(sha, 1, 16) and 'existed ' .. id or 'taken'
      elseif o or (not none and rc('EXISTS', job) == 1) then
        verdict = (o and same_body(o, tenant, sha)) and 'existed ' .. id or 'taken'
      else
        local other, same = nil, nil
        if keyed then other, same = claim_key(keys[6 + 2 * i], id, sha, a[1], made, keys[4]) end
        if other then
          verdict = (same and 'existed ' or 'mismatch ') .. other
        else
          n = n + 1
          new[n] = p
          made[id] = p
          if keyed then taken[#taken + 1] = keys[6 + 2 * i] end
          verdict = 'created'
        end
      end
    end
    out[i] = verdict
    p = p + 7
  end

  -- What was submitted together waits in one entry; a long one is cut.
  local index, opened, dues = {}, {}, {}
  local first = 1
  while first <= n do
    local fields, bytes, to = {}, 0, first
    repeat
      p = new[to]
      local trace, f = a[p + 5], 6 * (to - first)
      if #trace ~= 55 or not find(trace, '^%x+%-%x+%-%x+%-%x+$') then trace = '' end  -- as W3C wants: what is none is ignored
      a[p + 5] = trace
      fields[f + 1] = 'submitted'; fields[f + 2] = a[p] .. ' ' .. a[p + 1] .. ' ' .. a[p + 6]
      fields[f + 3] = 'spec'; fields[f + 4] = a[p + 2]
      fields[f + 5] = 'traceparent'; fields[f + 6] = trace
      bytes = bytes + #a[p + 2]
      to = to + 1
    until to > n or bytes > 65536 or to - first == 128
    local entry = redis.pcall('XADD', keys[1], '*', unpack(fields))
    if type(entry) == 'table' then  -- an entry was added under the last id there is, and is still there
      for i = 1, #taken do rc('DEL', taken[i]) end  -- or a repeated key would name a job that never was
      return redis.error_reply('TRYAGAIN the intake takes no entry just now: ' .. entry.err)
    end
    local alone = to - first == 1
    for i = first, to - 1 do
      p = new[i]
      local id = a[p]
      index[2 * i - 1] = t; index[2 * i] = id
      opened[2 * i - 1] = id
      opened[2 * i] = queued(a[p + 6], alone and entry or entry .. '/' .. (i - first + 1), a[p + 1], a[p + 3], a[p + 5])
      note(j, id, id, 'queued -1 {}')
      if a[p + 6] ~= '0' then dues[#dues + 1] = a[p + 6]; dues[#dues + 1] = id end
    end
    first = to
  end
  if n > 0 then rc('ZADD', keys[2], unpack(index)); rc('HSET', keys[4], unpack(opened)) end
  if #dues > 0 then rc('ZADD', keys[3], unpack(dues)) end
  write(j, true)
  return out
end

-- KEYS in ready delayed lease deadline units open specs last events job, then mailboxes of workers that may hold its units
-- ARGV id tenant ("" for any), then the owners of those mailboxes
local function cancel(keys, a)
  local rc = redis.call
  local id, tenant, units, job = a[1], a[2], keys[6], keys[11]
  local o = rc('HGET', keys[7], id)
  local was = o or rc('HGET', job, 'o')
  if not was then return redis.status_reply('notfound') end
  local n, _, entry, whose = of_job(was)
  if tenant ~= '' and tenant ~= whose then return redis.status_reply('notfound') end
  if not o then return redis.status_reply('ended') end
  local _, t = clock()
  local j = journal('feed', {events = keys[10], last = keys[9], open = keys[7], specs = keys[8], deadlines = keys[5]})
  if n == '0' then
    local spec = queued_spec(keys[1], entry)
    forget_entries(keys[1], {entry}, 1)
    end_queued(j, job, id, o, 'canceled', t, '{}', spec)
    write(j)
    return redis.status_reply('canceled')
  end
  local boxes, left = {}, 0
  for i = 12, #keys do boxes[a[i - 9]] = keys[i] end
  for i = 0, tonumber(n) - 1 do
    local unit = int(i)
    local member = id .. ':' .. unit
    local u = rc('HGET', units, member)
    if u then
      local s, nonce, _, _, _, owner = parts(u)
      if s == 'running' then
        rc('HSET', units, member, 'canceling' .. string.match(u, '|.*'))
        left = left + 1
      elseif s == 'canceling' then left = left + 1
      else
        rc('ZREM', s == 'ready' and keys[2] or s == 'delayed' and keys[3] or keys[4], member)
        rc('HDEL', units, member)
        conclude(j, job, id, unit, 'canceled', u, t, '{}', {})
      end
      if (s == 'assigned' or s == 'running') and boxes[owner] then
        rc('XADD', boxes[owner], '*', 'm', 'cancel ' .. id .. ' ' .. unit .. ' ' .. nonce)
      end
    end
  end
  write(j)
  return redis.status_reply(left > 0 and 'requested' or 'canceled')
end
