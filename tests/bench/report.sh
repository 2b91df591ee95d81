#!/usr/bin/env bash
# Makes tables of figures from results/*.csv; figures.csv lists the figures and their targets.
#
#   tests/bench/report.sh           print all figures
#   tests/bench/report.sh --write   replace the table of selected figures in README.md
#   tests/bench/report.sh --check   exit with status 1 if that table is not up to date; the CTest entry `report`
#   tests/bench/report.sh --reduce  keep one row per figure in results/*.csv: the median of the newest run
#
# A value is the median of the rows that one run has for it (figures.csv may ask for their maximum instead). A run is
# a sequence of rows of one revision and machine without a gap of more than 30 minutes. The latest run that measured
# the figure counts; for a target that is relative to the peer, runs that also measured the peer come first. Rows of
# revisions that are not in the history do not count. The table of all figures says how many commits ago a row was taken.
set -euo pipefail
case ${1:-} in
  '' | --write | --check | --reduce) ;;
  -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "report.sh: unknown argument '$1'; usage: tests/bench/report.sh [--write | --check | --reduce]" >&2; exit 2 ;;
esac
cd "$(dirname "$0")"
exec python3 - "${1:-}" <<'PY'
import csv
import datetime
import pathlib
import functools
import statistics
import subprocess
import sys

GAP = datetime.timedelta(minutes=30)
BEGIN = "<!-- figures: made by tests/bench/report.sh --write -->"
END = "<!-- end of figures -->"
UNITS = {"x": "×", "us": "µs", "1": "", "programs": ""}


def when(row):
    return datetime.datetime.fromisoformat(row["date"].replace("Z", ""))


def git(*arguments):
    done = subprocess.run(["git", *arguments], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def commits_since(revision):
    """How many commits ago it was; None if the history does not have it."""
    count = git("rev-list", "--count", f"{revision.removesuffix('-dirty')}..HEAD")
    return None if count is None else int(count)


# A source archive has no history, a shallow clone not all of it.
HISTORY = git("rev-parse", "--is-shallow-repository") == "false"


def runs_of(path):
    """The file's rows as a list of runs, oldest first."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    unknown = [r for r in rows if HISTORY and commits_since(r["revision"]) is None]
    if unknown and len(unknown) < len(rows):
        names = ", ".join(sorted({r["revision"] for r in unknown}))
        print(f"report.sh: {path} has {len(unknown)} rows of {names}, not in the history", file=sys.stderr)
        rows = [r for r in rows if r not in unknown]
    runs = []
    for row in rows:
        last = runs[-1][-1] if runs else None
        if last and (row["revision"], row["machine"]) == (last["revision"], last["machine"]) \
                and abs(when(row) - when(last)) <= GAP:
            runs[-1].append(row)
        else:
            runs.append([row])
    return sorted(runs, key=lambda run: when(run[-1]))


def reduce(path):
    """Keeps the median row of each figure in the newest run that measured it, with the date of the run's end."""
    kept, seen = [], set()
    for run in reversed(runs_of(path)):
        figures = {}
        for row in run:
            figures.setdefault((row["system"], row["scenario"], row["metric"]), []).append(row)
        for key in [k for k in figures if k not in seen]:
            rows = sorted(figures[key], key=lambda r: float(r["value"]))
            median = statistics.median(float(r["value"]) for r in rows)
            value = rows[len(rows) // 2]["value"] if len(rows) % 2 else f"{median:.6g}"
            kept.append({**rows[len(rows) // 2], "value": value, "date": run[-1]["date"]})
        seen |= set(figures)
    kept.sort(key=when)
    with open(path, "w", newline="") as file:
        out = csv.DictWriter(file, kept[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(kept)


def rows_of(run, system, scenario, metric):
    return [r for r in run
            if r["system"] == system and r["metric"] == metric and scenario in ("*", r["scenario"])]


def number(value, unit, precision=3):
    if unit in ("1", "x") and abs(value) < 2:
        digits = f"{value:.3f}" if abs(1 - value) >= 0.0005 else f"{value:.6f}"
        digits = digits.rstrip("0").rstrip(".")
    elif abs(value) >= 1000:
        digits = f"{value:,.0f}"
    else:
        digits = f"{value:.{precision}g}"
    if digits == "-0":
        digits = "0"
    name = UNITS.get(unit, unit)
    return digits + ("" if not name or name.startswith("/") else "\N{NO-BREAK SPACE}") + name


def bound_of(target, peer):
    """The bound of a target: "≤ 4", "≤ peer", "≤ 0.82 peer" or "≥ peer - 0.002"; None if the run has no peer."""
    words = target.split(" ")[1:]
    if "peer" not in words:
        return float(words[0])
    factor, _, rest = " ".join(words).partition("peer")
    return None if peer is None else float(factor or 1) * peer + float(rest.replace(" ", "") or 0)


def met(target, value, bound):
    return value <= bound if target[0] == "≤" else value >= bound


def measured(figure, runs):
    """The cells of a figure's row; None if no run measured it."""
    key = figure["system"], figure["scenario"], figure["metric"]
    peer_key = figure["peer_system"], figure["peer_scenario"] or figure["scenario"], figure["metric"]
    ours = [run for run in runs if rows_of(run, *key)]
    if not ours:
        return None
    with_peer = [run for run in ours if rows_of(run, *peer_key)] if "peer" in figure["target"] else []
    run = (with_peer or ours)[-1]
    rows, peer_rows = rows_of(run, *key), rows_of(run, *peer_key)
    pick = max if figure["pick"] == "max" else statistics.median
    value, unit = pick(float(r["value"]) for r in rows), rows[-1]["unit"]
    peer, peer_text = None, ""
    if peer_rows:
        peer = statistics.median(float(r["value"]) for r in peer_rows)
        peer_text = f"{number(peer, unit)} ({figure['peer']})"
    shown, target = number(value, unit), figure["target"]
    bound = bound_of(target, peer) if target else None
    if target and bound is None:
        shown += ", no peer"
    elif target and not met(target, value, bound):
        if shown == number(bound, unit):
            shown = number(value, unit, precision=4)
        shown = f"**{shown}**, missed"
    if target and "peer" not in target:
        target = f"{target[0]}\N{NO-BREAK SPACE}{number(bound_of(target, None), unit)}"
    target = target.replace(" peer", " × peer") if target[2:3].isdigit() else target
    machine = rows[-1]["machine"].split(" driver ")[0].split(" (driver")[0].replace(" x ", " × ")
    machine = machine.replace(" ", "\N{NO-BREAK SPACE}")
    age = f"{commits_since(rows[-1]['revision'])} commits ago" if HISTORY else rows[-1]["date"][:10]
    return [figure["figure"].replace(";", ","), target, shown, peer_text, rows[-1]["date"][:10], machine, age]


def table(rows):
    head = ["figure", "target", "value", "compared with", "date", "machine"][:max(map(len, rows))]
    lines = [head, ["---"] * len(head), *rows]
    return [("| " + " | ".join(line) + " |").replace("  ", " ") for line in lines]


def tables(figures):
    """The table of all figures, which has a row per file, date and machine, and the one of README.md."""
    everything, top, runs = [], [], {}
    source = None
    for figure in figures:
        name = figure["csv"]
        if name not in runs:
            runs[name] = runs_of(f"results/{name}.csv")
            source = None
        cells = measured(figure, runs[name])
        if cells is None:
            everything.append([figure["figure"].replace(";", ","), figure["target"], "not measured", ""])
            continue
        if cells[-3:] != source:
            source = cells[-3:]
            everything.append([f"[**{name}**](results/{name}.csv), {source[1]}, {source[0]}, {source[2]}", "", "", ""])
        everything.append(cells[:-3])
        if figure["top"]:
            top.append([figure["top"].replace(";", ","), *cells[1:-1]])
    return table(everything), table(top)


def between_markers(path, lines, mode):
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"report.sh: {path} has no lines '{BEGIN}' and '{END}'")
    wanted = before + begin + "\n".join(lines) + "\n" + end + after
    if mode == "--write":
        path.write_text(wanted)
    elif text != wanted:
        print(f"report.sh: the figures in {path.resolve()} are not up to date; run tests/bench/report.sh --write")
        return False
    return True


with open("figures.csv", newline="") as file:
    figures = list(csv.DictReader(file))
mode = sys.argv[1]
if mode == "--reduce":
    for name in sorted({figure["csv"] for figure in figures}):
        reduce(f"results/{name}.csv")
    sys.exit(0)
everything, top = tables(figures)
if not mode:
    print("\n".join(everything))
else:
    sys.exit(0 if between_markers(pathlib.Path("../../README.md"), top, mode) else 1)
PY
