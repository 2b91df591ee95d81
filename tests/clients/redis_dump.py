"""Dumps a Redis as JSON and loads it at another time: times in milliseconds are shifted, so that a dump does not age."""
import re
import time

READ = {b"string": lambda r, k: r("GET", k), b"hash": lambda r, k: r("HGETALL", k),
        b"zset": lambda r, k: r("ZRANGE", k, 0, -1, "WITHSCORES"), b"set": lambda r, k: r("SMEMBERS", k),
        b"list": lambda r, k: r("LRANGE", k, 0, -1), b"stream": lambda r, k: r("XRANGE", k, "-", "+")}


def dump(redis, leave_out=()):
    """Returns everything in the database of an `adapters.Redis` but keys that begin with one of `leave_out`, and the Function libraries."""
    keys = []
    for key in sorted(redis("KEYS", "*")):
        if not key.startswith(tuple(p.encode() for p in leave_out)):
            kind = redis("TYPE", key)
            keys.append([key, kind, redis("PTTL", key), READ[kind](redis, key)])
    libraries = [entry[entry.index(b"library_code") + 1] for entry in redis("FUNCTION", "LIST", "WITHCODE")]

    def text(value):
        """JSON has no bytes: Latin-1 keeps each as a character."""
        if isinstance(value, list):
            return [text(v) for v in value]
        return value.decode("latin-1") if isinstance(value, bytes) else value
    return {"time_ms": int(time.time() * 1000), "keys": text(keys), "libraries": text(libraries)}


def moved(value, dumped):
    """Returns a value of the dump as of now."""
    if isinstance(value, list):
        return [moved(v, dumped) for v in value]
    if not isinstance(value, str) or not value.isascii():  # the bytes of a file
        return value
    shift, month = dumped.setdefault("shift_ms", int(time.time() * 1000) - dumped["time_ms"]), 30 * 86_400_000

    def later(match):
        number = int(match[0])
        return str(number + shift) if abs(number - dumped["time_ms"]) < month else match[0]
    return re.sub(r"(?<!\d)\d{13}(?!\d)", later, value)


def load(redis, dumped):
    """Loads a dump as if it had been made now."""
    def raw(value):
        if isinstance(value, list):
            return [raw(v) for v in value]
        return value.encode("latin-1") if isinstance(value, str) else value

    for library in dumped["libraries"]:
        redis("FUNCTION", "LOAD", "REPLACE", library.encode("latin-1"))
    for key, kind, ttl, content in dumped["keys"]:
        key, content = raw(moved(key, dumped)), raw(moved(content, dumped))
        if kind == "string":
            redis("SET", key, content)
        elif kind == "hash":
            redis("HSET", key, *content)
        elif kind == "zset":
            redis("ZADD", key, *[x for i in range(0, len(content), 2) for x in (content[i + 1], content[i])])
        elif kind == "set":
            redis("SADD", key, *content)
        elif kind == "list":
            redis("RPUSH", key, *content)
        else:
            for entry, fields in content:
                redis("XADD", key, entry, *fields)
        if ttl > 0:
            redis("PEXPIRE", key, ttl)
