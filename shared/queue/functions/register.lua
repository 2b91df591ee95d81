-- ---- the library ------------------------------------------------------------------------------------------

-- The error for a shard whose records have a format that this library cannot read; nil: it can. Stores the format with
-- the first record.
local function foreign_format(key, writes)
  local name = prefix_of(key) .. 'format'
  local stored = redis.call('GET', name)
  if stored and not readable[stored] then
    return redis.error_reply('FORMAT the queue has records of format ' .. string.sub(stored, 1, 20) ..
      '; this version of DiTFleet reads format ' .. format)
  end
  if writes and stored ~= format then redis.call('SET', name, format) end
end

-- Checks a call before its Function runs. shape has
--   keys, args: how many
--   keys_each, args_each: how many more for each job or unit of the call
--   numbers: which arguments are whole numbers
local function checked(name, run, shape, writes)
  local keys_each, args_each = shape.keys_each or 0, shape.args_each or 0
  local function each(count) return count > 0 and ' and ' .. count .. ' each' or '' end
  local takes = name .. ' takes ' .. shape.keys .. ' keys' .. each(keys_each) .. ', ' ..
    shape.args .. ' arguments' .. each(args_each)
  return function(keys, args)
    local count = args_each > 0 and (#args - shape.args) / args_each or 0
    if count < 0 or count % 1 ~= 0 or #args ~= shape.args + count * args_each or
      #keys ~= shape.keys + count * keys_each then
      return badarg(takes .. '; got ' .. int(#keys) .. ' and ' .. int(#args))
    end
    for _, i in ipairs(shape.numbers or {}) do
      -- Redis would refuse a longer number as a time after the first write.
      if #args[i] > 15 or not string.find(args[i], '^%d+$') then
        return badarg(name .. ': argument ' .. int(i) .. ' is a whole number of at most 15 digits; got ' ..
          string.sub(args[i], 1, 40))
      end
    end
    return foreign_format(keys[1], writes) or run(keys, args)
  end
end

-- For the leader of the shard alone: the first key is that of the leader, the first argument the caller's epoch.
local function led(run)
  return function(keys, args)
    local leader = redis.call('GET', keys[1])
    if not leader or string.match(leader, '^(%d+) ') ~= args[1] then
      return redis.error_reply('EPOCH ' .. args[1] .. ' does not lead this shard' ..
        (leader and (', ' .. leader .. ' does') or ''))
    end
    return run(keys, args)
  end
end

local function register(name, run, shape, flag)
  redis.register_function{function_name = 'ditfleet_v3_' .. name, flags = {flag},
    callback = checked(name, run, shape, flag ~= 'no-writes')}
end

-- allow-oom: what ends, keeps or runs work goes on when Redis is at its memory limit; what takes new work does not.
register('submit', submit, {keys = 8, args = 10, numbers = {1, 9}})
register('cancel', cancel, {keys = 11, keys_each = 1, args = 2, args_each = 1}, 'allow-oom')
register('pause', pause, {keys = 8, args = 2}, 'allow-oom')
register('resume', resume, {keys = 7, args = 2}, 'allow-oom')
register('lead', lead, {keys = 2, args = 2, numbers = {2}}, 'allow-oom')
register('resign', resign, {keys = 1, args = 2, numbers = {2}}, 'allow-oom')
register('admit', led(admit), {keys = 9, args = 1, args_each = 9, numbers = {1}})
register('admit_raw', led(admit_raw), {keys = 10, keys_each = 2, args = 3, args_each = 14, numbers = {1, 2, 3}})
register('reject', led(reject), {keys = 8, keys_each = 1, args = 1, args_each = 7, numbers = {1}}, 'allow-oom')
register('assign', led(assign), {keys = 9, args = 4, args_each = 5, numbers = {1, 3, 4}}, 'allow-oom')
register('revoke', led(revoke), {keys = 6, keys_each = 1, args = 2, args_each = 4, numbers = {1}}, 'allow-oom')
register('due', due, {keys = 3, args = 1, numbers = {1}}, 'no-writes')
register('reap', led(reap), {keys = 13, keys_each = 1, args = 5, args_each = 3, numbers = {1, 2, 3, 4}}, 'allow-oom')
register('mend', led(mend), {keys = 5, args = 4, numbers = {1, 3, 4}}, 'allow-oom')
register('sweep', sweep, {keys = 3, keys_each = 1, args = 2, args_each = 1, numbers = {1, 2}}, 'allow-oom')
register('sweep_led', led(sweep_led), {keys = 4, keys_each = 1, args = 3, args_each = 1, numbers = {1, 2, 3}},
  'allow-oom')
register('virtual_times', led(virtual_times), {keys = 2, args = 1, args_each = 2, numbers = {1}}, 'allow-oom')
register('open', open_units, {keys = 3, args = 2, numbers = {2}}, 'no-writes')
register('heartbeat', heartbeat, {keys = 3, args = 5, numbers = {4, 5}}, 'allow-oom')
register('deregister', deregister, {keys = 3, args = 2}, 'allow-oom')
register('start', start, {keys = 4, args = 4, numbers = {1}}, 'allow-oom')
register('renew', renew, {keys = 4, args = 1, args_each = 4, numbers = {1}}, 'allow-oom')
register('emit', emit, {keys = 3, args = 5}, 'allow-oom')
register('complete', complete, {keys = 8, args = 6}, 'allow-oom')
register('fail', fail, {keys = 10, args = 11, numbers = {1, 2, 3, 4, 5}}, 'allow-oom')
register('hand_back', hand_back, {keys = 8, keys_each = 1, args = 0, args_each = 3}, 'allow-oom')
register('hold', hold, {keys = 4, args = 3}, 'allow-oom')
register('store_checkpoint', store_checkpoint, {keys = 2, args = 5, numbers = {1}})
register('canceled', canceled, {keys = 8, args = 3}, 'allow-oom')
register('job', job, {keys = 7, args = 1}, 'no-writes')
register('list', list, {keys = 2, keys_each = 1, args = 0, args_each = 1}, 'no-writes')
register('events', events, {keys = 4, args = 3, args_each = 1, numbers = {3}}, 'no-writes')
register('keep_input', keep_input, {keys = 1, args = 6, numbers = {3, 4, 5, 6}})
register('remove_input', remove_input, {keys = 1, args = 2}, 'allow-oom')
register('expire_inputs', expire_inputs, {keys = 1, args = 1, numbers = {1}}, 'allow-oom')
register('workers', workers, {keys = 2, args = 1}, 'no-writes')
