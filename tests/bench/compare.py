#!/usr/bin/env python3
"""Finds regressions between two CSVs of nightly.sh.

    compare.py BASE NEW [--relative SHARE] [--absolute METRIC=VALUE ...]

Compares the latest row of each mode, format, offload and size, on the same machine. A metric regresses if it grows by
more than the relative AND the absolute threshold. Counts (recompiles, fallbacks) regress with any growth. A row of BASE
that fails or is missing in NEW is a regression. If BASE has no rows of a machine, its latest machine serves instead,
with a warning. NEW may lack a machine, with a warning.

Exit status: 0 no regression; 1 regressions, printed as a table; 2 a file or an argument is unusable.
"""
import argparse
import csv
import math
import sys

KEY = ("mode", "format", "offload", "size")
# The absolute thresholds are above the noise of the demo model's figures, where a relative one is too narrow.
ABSOLUTE = {"first_step_s": 0.03, "steady_step_s": 0.005, "image_s": 0.04, "peak_bytes": 4 << 20,
            "model_bytes": 1 << 16, "load_s": 0.2, "compile_s": 0.1}
COUNTS = ("recompiles", "fallbacks")
COLUMNS = ("date", "machine", *KEY, *ABSOLUTE, *COUNTS, "error")


class Unusable(Exception):
    pass


def number(text, where):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise Unusable(f"{where} is \"{text}\"; it must be a number that is not negative")
    return value


def read(path):
    """{machine: {key: the latest row}}, the machine of the latest row last."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise Unusable(f"cannot read {path}: {e}; it must be a CSV of nightly.sh") from e
    missing = [c for c in COLUMNS if c not in columns]
    if missing:
        raise Unusable(f"{path} has no column {', '.join(missing)}; it must be a CSV of nightly.sh")
    if not rows:
        raise Unusable(f"{path} has no rows; run nightly.sh first")
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise Unusable(f"{path}:{line} has {'more' if None in row else 'fewer'} cells than the header")
        if not row["error"]:
            for metric in (*ABSOLUTE, *COUNTS):
                row[metric] = number(row[metric], f"{path}:{line}: {metric}")
    machines = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        of_machine = machines.pop(row["machine"], {})
        of_machine[tuple(row[k] for k in KEY)] = row
        machines[row["machine"]] = of_machine
    return machines


def regressions(base, new, relative, absolute):
    """[(configuration, metric, base, new, change)] of one machine."""
    found = []
    for key, was in base.items():
        name = " ".join(key)
        now = new.get(key)
        if was["error"]:
            continue
        if now is None:
            found.append((name, "row", "measured", "missing", ""))
        elif now["error"]:
            found.append((name, "row", "measured", "failed: " + now["error"], ""))
        else:
            for metric in (*absolute, *COUNTS):
                a, b = was[metric], now[metric]
                if (b > a) if metric in COUNTS else (b - a > absolute[metric] and b - a > relative * a):
                    found.append((name, metric, f"{a:.15g}", f"{b:.15g}", f"{b / a - 1:+.1%}" if a else ""))
    return found


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def thresholds(pairs):
    absolute = dict(ABSOLUTE)
    for pair in pairs:
        metric, _, value = pair.partition("=")
        if metric not in absolute:
            raise Unusable(f"--absolute is \"{pair}\"; it must be METRIC=VALUE with one of {', '.join(absolute)}")
        absolute[metric] = number(value, f"--absolute {metric}")
    return absolute


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--relative", metavar="SHARE", default="0.05", help="default: 0.05")
    parser.add_argument("--absolute", metavar="METRIC=VALUE", action="append", default=[],
                        help="defaults: " + ", ".join(f"{m}={v}" for m, v in ABSOLUTE.items()))
    flags = parser.parse_args()
    relative, absolute = number(flags.relative, "--relative"), thresholds(flags.absolute)
    base, new = read(flags.base), read(flags.new)
    found, compared, used = [], 0, set()
    for machine, rows in new.items():
        other = machine if machine in base else list(base)[-1]
        if other != machine:
            print(f"warning: {flags.base} has no rows of \"{machine}\"; compared with those of \"{other}\"",
                  file=sys.stderr)
        found += regressions(base[other], rows, relative, absolute)
        compared += len(base[other])
        used.add(other)
    for machine in base.keys() - used:
        print(f"warning: {flags.new} has no rows of \"{machine}\"", file=sys.stderr)
    if found:
        print_table([("configuration", "metric", "base", "new", "change"), *found])
    print(f"{len(found)} regressions in {compared} configurations")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unusable as e:
        print(f"compare.py: {e}", file=sys.stderr)
        sys.exit(2)
