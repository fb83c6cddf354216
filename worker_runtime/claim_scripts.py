"""What Redis does for a feed of claims, in one step each: entries behind the last one, a snapshot, a look at both.

Every script first refuses a worker whose id a newer generation has taken over, and touches keys of one hash tag only,
as a Redis Cluster demands. Its first write needs no memory: where Redis is full, what follows goes through (see
`registration`), and what is claimed stays true.
"""

_FENCE = """
local function last_id(key)
  local info = redis.pcall('XINFO', 'STREAM', key)
  if info.err then return nil end
  for at = 1, #info, 2 do
    if info[at] == 'last-generated-id' then return info[at + 1] end
  end
end
local last = last_id(KEYS[1])
if last and tonumber(string.match(last, '^%d+')) > tonumber(ARGV[1]) then return 'superseded' end
"""
# KEYS: stream. ARGV: generation, id of the entry written last, expiry, then id and batch of each entry.
# Where an answer was lost, the first entries are there already.
WRITE = (
    _FENCE
    + """
local first = nil
if last == ARGV[2] then first = 4 end
for at = 4, #ARGV, 2 do
  if last == ARGV[at] then first = at + 2 end
end
if not first then return 'lost' end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for at = first, #ARGV, 2 do
  redis.call('XADD', KEYS[1], ARGV[at], 'b', ARGV[at + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'ok'
"""
)
# KEYS: stream, snapshot, resync. ARGV: generation, id of the entry that the snapshot includes, expiry, snapshot,
# id of the oldest entry that stays.
SNAPSHOT = (
    _FENCE
    + """
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if last == ARGV[2] then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[5])
else
  redis.call('XADD', KEYS[1], ARGV[2], 'b', '')
  redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[3])
redis.call('DEL', KEYS[3])
return 'ok'
"""
)
# KEYS: stream, snapshot, resync. ARGV: generation, id of the entry written last, expiry.
CHECK = (
    _FENCE
    + """
if last ~= ARGV[2] or redis.call('EXISTS', KEYS[2]) == 0 then return 'lost' end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
if redis.call('EXISTS', KEYS[3]) == 1 then return 'resync' end
return 'ok'
"""
)
