-- ---- readers ----------------------------------------------------------------------------------------------

-- The event of a job in one entry: the one before it, and "<type> <unit> <data>". Nothing if it was trimmed.
local function event_at(events, at, id)
  local entry = redis.call('XRANGE', events, at, at)[1]
  if not entry then return nil end
  local text = entry[2][2]
  local from = 1
  if string.sub(text, 1, #id + 1) ~= id .. ' ' then
    from = string.find(text, '\n ' .. id .. ' ', 1, true)
    if not from then return nil end
    from = from + 2
  end
  local line = string.sub(text, from + #id + 1, string.find(text, ' \n', from, true) - 1)
  return string.match(line, '^(%S+) (.*)$')
end

-- Whether event id x comes before y.
local function earlier(x, y)
  local xm, xs = string.match(x, '^(%d+)-(%d+)$')
  local ym, ys = string.match(y, '^(%d+)-(%d+)$')
  xm, ym = tonumber(xm), tonumber(ym)
  return xm < ym or (xm == ym and tonumber(xs) < tonumber(ys))
end

-- KEYS job in units open specs last events; ARGV id. {all fields of the job, its open form, its open units as (unit,
-- packed), the latest step of each running one as (unit, data), its spec while it is open}
local function job(keys, a)
  local rc = redis.call
  local id = a[1]
  local o = rc('HGET', keys[4], id)
  local all = rc('HGETALL', keys[1])
  if not o then return {all, '', {}, {}, ''} end
  local n, _, entry = of_job(o)
  if n == '0' then return {all, o, {}, {}, queued_spec(keys[2], entry)} end
  local units, steps = {}, {}
  for i = 0, tonumber(n) - 1 do
    local unit = int(i)
    local u = rc('HGET', keys[3], id .. ':' .. unit)
    if u then
      units[#units + 1] = unit; units[#units + 1] = u
      if string.match(u, '^running|') or string.match(u, '^canceling|') then
        local at, event = rc('HGET', keys[6], id .. ':' .. unit) or '-', nil
        repeat
          at, event = event_at(keys[7], at, id)
          local kind, data = string.match(event or 'started', '^(%a+) ?%S* ?(.*)$')
          if kind == 'step' then steps[#steps + 1] = unit; steps[#steps + 1] = data end
        until kind == 'step' or kind == 'started'
      end
    end
  end
  return {all, o, units, steps, rc('HGET', keys[5], id) or ''}
end

-- KEYS job open last events; ARGV id after. The job's events from the id `after` on ("0-0": all), in order, as
-- (id, "<type> <unit> <data>"): followed from each unit's last one backwards, down to where they join.
local function events(keys, a)
  local rc = redis.call
  local id, after = a[1], a[2]
  if not string.find(after, '^%d+%-%d+$') then return badarg('events: an event id looks like 1763700000000-0; got ' .. string.sub(after, 1, 40)) end
  local n = string.match(rc('HGET', keys[2], id) or rc('HGET', keys[1], 'o') or '', '^%d+')
  if not n then return {} end
  local heads = {n == '0' and (rc('HGET', keys[3], id) or rc('HGET', keys[1], 'l')) or nil}
  for i = 0, tonumber(n) - 1 do
    heads[#heads + 1] = rc('HGET', keys[3], id .. ':' .. int(i)) or
      string.match(rc('HGET', keys[1], 'u' .. int(i)) or '', '[^|]*$')
  end
  local found, out = {}, {}
  for _, at in ipairs(heads) do
    while string.find(at, '^%d') and not found[at] and not earlier(at, after) do
      local before, event = event_at(keys[4], at, id)
      if not before then break end
      found[at] = event
      out[#out + 1] = at
      at = before
    end
  end
  table.sort(out, earlier)
  local flat = {}
  for _, at in ipairs(out) do flat[#flat + 1] = at; flat[#flat + 1] = found[at] end
  return flat
end
