-- The library of a later version, for tests: every packed record has one more field, and begins with its format. Reads
-- both formats and writes the newer one.
format, readable = '2', {['1'] = true, ['2'] = true}

-- "2:<field>|<record of format 1>"
local function split_record(text)
  local field, record = string.match(text, '^2:(%d+)|(.*)$')
  return tonumber(field or 0), record or text
end

-- The field counts how often the record was written.
local function with_one_more_field(unpack_1, pack_1, shown_1)
  local function unpack_2(text)
    if not text then return nil end
    local writes, record = split_record(text)
    local out = unpack_1(record)
    out.writes = writes
    return out
  end
  local function pack_2(record) return '2:' .. int((record.writes or 0) + 1) .. '|' .. pack_1(record) end
  local function shown_2(text)
    if not text then return text end
    local _, record = split_record(text)
    return shown_1(record)
  end
  return unpack_2, pack_2, shown_2
end

unpack_unit, pack_unit, shown_unit = with_one_more_field(unpack_unit, pack_unit, shown_unit)
unpack_job, pack_job, shown_job = with_one_more_field(unpack_job, pack_job, shown_job)
