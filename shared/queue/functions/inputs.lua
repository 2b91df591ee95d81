-- ---- the images that tenants have stored (inputs) -----------------------------------------------------------
-- inputs: <tenant>:<sha256> → until when the image is kept, longer if an open job names it
-- inputs:<tenant>: <sha256> → its bytes. input_use: <tenant> → their sum; <tenant>: → their number
-- input_refs: <sha256> → how many tenants have it; <tenant>:<sha256> → how many open jobs name it
-- input_of: <job> → <tenant>:<sha256> of each image that an open job names, separated by spaces

-- Adds to a field that exists only while it is positive. Its new value.
local function add_to(key, field, by)
  local sum = redis.call('HINCRBY', key, field, by)
  if sum <= 0 then redis.call('HDEL', key, field) end
  return sum
end

-- The open job `id` keeps its tenant's images that its spec names. Quotes in a spec's texts are escaped, so that only
-- the fields match.
local function name_input(key, id, tenant, spec)
  local rc, prefix = redis.call, prefix_of(key)
  local members, seen = {}, {}
  for _, field in ipairs({'"image":', '"images":', '"mask":'}) do
    local _, before = string.find(spec, field, 1, true)
    for sha256 in string.gmatch(before and string.match(spec, '^%[?[%x",]+', before + 1) or '', '%x+') do
      if not seen[sha256] and rc('HEXISTS', prefix .. 'inputs:' .. tenant, sha256) == 1 then
        members[#members + 1] = tenant .. ':' .. sha256
      end
      seen[sha256] = true
    end
  end
  if #members == 0 or rc('HSETNX', prefix .. 'input_of', id, table.concat(members, ' ')) == 0 then return end
  for _, member in ipairs(members) do add_to(prefix .. 'input_refs', member, '1') end
end

-- The job has ended.
local function unname_input(key, id)
  local rc, prefix = redis.call, prefix_of(key)
  local members = rc('HGET', prefix .. 'input_of', id)
  if not members then return end
  rc('HDEL', prefix .. 'input_of', id)
  for member in string.gmatch(members, '[^ ]+') do add_to(prefix .. 'input_refs', member, '-1') end
end

-- Counts an image of a tenant (sign '') or no longer ('-'). How many tenants have it now.
local function count_input(prefix, tenant, sha256, sign, bytes)
  add_to(prefix .. 'input_use', tenant, sign .. bytes)
  add_to(prefix .. 'input_use', tenant .. ':', sign .. '1')
  return add_to(prefix .. 'input_refs', sha256, sign .. '1')
end

-- Whether no other tenant has the image.
local function drop_input(inputs, tenant, sha256)
  local rc, prefix = redis.call, prefix_of(inputs)
  local own = prefix .. 'inputs:' .. tenant
  local bytes = rc('HGET', own, sha256)
  rc('ZREM', inputs, tenant .. ':' .. sha256)
  if rc('HDEL', own, sha256) == 0 then return false end
  return count_input(prefix, tenant, sha256, '-', bytes) <= 0
end

-- KEYS inputs; ARGV tenant sha256 bytes keep_ms most most_bytes
-- Keeps an image, and counts a new one. bytes 0: only if the tenant has it.
-- "created", "existed", "unknown", "inputs <number> <bytes>", "input_bytes …": the limit that the image exceeds, and
-- what the tenant has
local function keep_input(keys, args)
  local rc, prefix = redis.call, prefix_of(keys[1])
  local tenant, sha256, bytes, keep_ms, most, most_bytes = unpack(args)
  local own, ms = prefix .. 'inputs:' .. tenant, now()
  local known = rc('HEXISTS', own, sha256) == 1
  if not known and bytes == '0' then return 'unknown' end
  if not known then
    local used, count = rc('HGET', prefix .. 'input_use', tenant) or '0', rc('HLEN', own)
    local over = count >= tonumber(most) and 'inputs' or used + bytes > tonumber(most_bytes) and 'input_bytes'
    if over then return over .. ' ' .. int(count) .. ' ' .. used end
    rc('HSET', own, sha256, bytes)
    count_input(prefix, tenant, sha256, '', bytes)
  end
  rc('ZADD', keys[1], 'GT', int(ms + keep_ms), tenant .. ':' .. sha256)
  return known and 'existed' or 'created'
end

-- KEYS inputs; ARGV tenant sha256
-- "unknown", "named <open jobs>" (nothing is done), "shared" (another tenant has the image too), "gone"
local function remove_input(keys, args)
  local rc, prefix = redis.call, prefix_of(keys[1])
  local tenant, sha256 = unpack(args)
  if rc('HEXISTS', prefix .. 'inputs:' .. tenant, sha256) == 0 then return 'unknown' end
  local named = rc('HGET', prefix .. 'input_refs', tenant .. ':' .. sha256)
  if named then return 'named ' .. named end
  return drop_input(keys[1], tenant, sha256) and 'gone' or 'shared'
end

-- KEYS inputs; ARGV limit
-- Drops images whose time is over, unless an open job names them: those are looked at again in two seconds. The SHA-256
-- of images that no tenant has any more.
local function expire_inputs(keys, args)
  local rc, refs = redis.call, prefix_of(keys[1]) .. 'input_refs'
  local ms, at = now()
  local gone = {}
  for _, member in ipairs(rc('ZRANGEBYSCORE', keys[1], '-inf', at, 'LIMIT', '0', args[1])) do
    local tenant, sha256 = string.match(member, '^(.*):(.*)$')
    if rc('HEXISTS', refs, member) == 1 then
      rc('ZADD', keys[1], int(ms + 2000), member)
    elseif drop_input(keys[1], tenant, sha256) then
      gone[#gone + 1] = sha256
    end
  end
  return gone
end
