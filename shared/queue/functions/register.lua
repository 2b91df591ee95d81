-- ---- the library ------------------------------------------------------------------------------------------

-- Checks the shape of a call before its Function runs: {fixed, each} keys and arguments, each as many times as
-- the call has jobs or units, and which arguments are numbers.
local function checked(name, f, keys_fixed, keys_each, args_fixed, args_each, numbers)
  local shape = name .. ' takes ' .. keys_fixed .. ' keys' .. (keys_each > 0 and ' and ' .. keys_each .. ' each' or '') .. ', ' ..
    args_fixed .. ' arguments' .. (args_each > 0 and ' and ' .. args_each .. ' each' or '')
  return function(keys, a)
    local n = 0
    if args_each > 0 then n = (#a - args_fixed) / args_each end
    if n < 0 or n % 1 ~= 0 or #a ~= args_fixed + n * args_each or #keys ~= keys_fixed + n * keys_each then
      return badarg(shape .. '; got ' .. int(#keys) .. ' and ' .. int(#a))
    end
    for _, i in ipairs(numbers) do
      if #a[i] > 15 or not string.find(a[i], '^%d+$') then  -- what is longer Redis takes for no time, in the midst of what is written
        return badarg(name .. ': argument ' .. int(i) .. ' is a whole number of at most 15 digits; got ' .. string.sub(a[i], 1, 40))
      end
    end
    return f(keys, a)
  end
end

-- For the leader of the shard alone: the call's first key is its name, its first argument the epoch it leads with.
local function led(f)
  return function(keys, a)
    local v = redis.call('GET', keys[1])
    if not v or string.match(v, '^(%d+) ') ~= a[1] then
      return redis.error_reply('EPOCH ' .. a[1] .. ' does not lead this shard' .. (v and (', ' .. v .. ' does') or ''))
    end
    return f(keys, a)
  end
end

-- Of another shape than the others: it checks its own.
local function checked_dispatch(keys, a)
  local owners = tonumber(a[4])
  if #keys < 10 or not owners or #keys ~= 10 + owners or #a < 4 + owners or not string.find(a[1] .. a[2] .. a[3] .. a[4], '^%d+$') then
    return badarg('dispatch takes 10 keys and a mailbox for each owner, 4 whole numbers, each owner, then the jobs; got ' .. int(#keys) .. ' and ' .. int(#a))
  end
  return led(dispatch)(keys, a)
end

-- allow-oom: what ends or keeps work must go on when Redis is at its memory limit; taking new work must not.
local function register(name, f, shape, numbers, ...)
  redis.register_function{function_name = 'ditfleet_v1_' .. name, flags = {...},
    callback = checked(name, f, shape[1], shape[2], shape[3], shape[4], numbers)}
end
register('submit', submit, {6, 2, 1, 7}, {1})
register('cancel', cancel, {11, 1, 2, 1}, {}, 'allow-oom')
register('lead', lead, {2, 0, 2, 0}, {2}, 'allow-oom')
register('resign', resign, {1, 0, 2, 0}, {2}, 'allow-oom')
register('admit', led(admit), {9, 0, 1, 9}, {1})
register('admit_raw', led(admit_raw), {10, 2, 3, 13}, {1, 2, 3})
register('reject', led(reject), {8, 1, 1, 7}, {1}, 'allow-oom')
register('assign', led(assign), {9, 0, 4, 5}, {1, 3, 4})
redis.register_function{function_name = 'ditfleet_v1_dispatch', callback = checked_dispatch}
register('revoke', led(revoke), {6, 1, 1, 4}, {1}, 'allow-oom')
register('due', due, {3, 0, 1, 0}, {1}, 'no-writes')
register('reap', led(reap), {13, 1, 4, 3}, {1, 2, 3}, 'allow-oom')
register('sweep', sweep, {3, 1, 2, 1}, {1, 2}, 'allow-oom')
register('virtual_times', led(virtual_times), {2, 0, 1, 2}, {1}, 'allow-oom')
register('open', open, {4, 0, 0, 0}, {}, 'no-writes')
register('heartbeat', heartbeat, {3, 0, 5, 0}, {4, 5}, 'allow-oom')
register('deregister', deregister, {3, 0, 2, 0}, {}, 'allow-oom')
register('start', start, {4, 0, 1, 3}, {1}, 'allow-oom')
register('renew', renew, {4, 0, 1, 4}, {1}, 'allow-oom')
register('emit', emit, {3, 0, 5, 0}, {}, 'allow-oom')
register('complete', complete, {7, 1, 0, 6}, {}, 'allow-oom')
register('fail', fail, {10, 0, 11, 0}, {1, 2, 3, 4, 5}, 'allow-oom')
register('hand_back', hand_back, {8, 1, 0, 3}, {}, 'allow-oom')
register('canceled', canceled, {8, 0, 3, 0}, {}, 'allow-oom')
register('job', job, {7, 0, 1, 0}, {}, 'no-writes')
register('events', events, {4, 0, 2, 0}, {}, 'no-writes')
