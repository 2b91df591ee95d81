#!/bin/sh
# A picture by redis-cli alone: adds a job to the queue, waits for it and writes redis.png. DITFLEET_REDIS is the socket
# that `ditfleet up` prints, or arguments of redis-cli such as "-h HOST -p PORT".
set -eu
case ${DITFLEET_REDIS:-build/demo/data/redis/redis.sock} in
  -*) connection=$DITFLEET_REDIS ;;
  *) connection="-s ${DITFLEET_REDIS:-build/demo/data/redis/redis.sock}" ;;
esac
# shellcheck disable=SC2086
redis() { redis-cli $connection "$@"; }
job=x-$(redis XADD 'df:{0}:in' '*' spec '{"model": "demo", "prompt": "a blue ring"}')
until state=$(redis HGET "df:{0}:job:$job" state) && [ -n "$state" ]; do sleep 0.1; done
[ "$state" = succeeded ] || { redis HGET "df:{0}:job:$job" error >&2; exit 1; }
key=$(redis HGET "df:{0}:job:$job" m0 | sed 's/.*"key":"\([^"]*\)".*/\1/')
redis --raw GET "$key" | head -c -1 > redis.png
echo redis.png
