"""python monitor.py RUN …: print the report of a run, or compare runs.

    python monitor.py runs/001                        where its time went, whether and why it slowed
    python monitor.py runs/001 --html run.html        also as a page to look at, or to send
    python monitor.py old new                         side by side
"""

import json
import math
import pkgutil
import sys
from pathlib import Path

from steady.guard.process import run_command
from steady.options import ConfigError, Parser, read_flags, reading_paths
from steady.watch.findings import Finding
from steady.watch.report import report, report_text
from tools.page import write_page


def side_by_side(reports: list[dict]) -> str:
    """A table with a column for each run, and the ratio of each value to the first run's."""
    rows = {f"{name} s": [r["seconds"][name] for r in reports] for name in reports[0]["seconds"]}
    names = dict.fromkeys(name for r in reports for name in r["figures"])
    rows |= {name: [r["figures"].get(name, math.nan) for r in reports] for name in names}
    lines = [" " * 24 + "".join(f"{Path(r['run']).name[-20:]:>22s}" for r in reports)]
    for name, values in rows.items():
        if not any(values):  # a phase of no run
            continue
        cells = []
        for value in values:
            known = cells and values[0] and math.isfinite(value / values[0])
            ratio = f" ({value / values[0]:.2f}x)" if known else ""
            cells.append("-" if math.isnan(value) else f"{value:.4g}{ratio}")
        lines.append(f"{name:24s}" + "".join(f"{cell:>22s}" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Exit code 0; 2 if a run cannot be read."""
    others = {"compare": "tools.compare:compare", "try": "tools.trial:main"}
    if argv and argv[0] in others:  # imports all of training
        other = pkgutil.resolve_name(others[argv[0]])
        return run_command(f"monitor.py {argv[0]}", other, argv[1:])
    return run_command("monitor.py", print_reports, argv)


def print_reports(argv: list[str]) -> int:
    parser = Parser("monitor.py", allow_abbrev=False, description="Report where "
                    "the time of a run went, and whether, when and why it slowed down.",
                    epilog="`monitor.py compare A B` trains two variants: is B better than A? "
                    "`monitor.py try RUN` measures what other options would gain.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="two or more are shown side by side")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--html", metavar="FILE", help="also write a page with charts, one file "
                        "that opens without a network; runs lie on top of one another")
    args = read_flags(parser, argv)
    for path in args.run_dir:
        if not (path / "metrics.jsonl").is_file():  # a FIFO would block
            raise ConfigError(f"{path}: no such run, there is no metrics.jsonl in it")
    with reading_paths():
        reports = [report(path) for path in args.run_dir]
    if args.json:
        text = json.dumps(reports, default=Finding.row)
        finite = json.loads(text, parse_constant=lambda name: None)  # JSON has no NaN
        print(json.dumps(finite, indent=1))
    else:
        for r in reports:
            print(f"run     {r['run']}: step {r['step']}\n{report_text(r)}\n")
        if len(reports) > 1:
            print(side_by_side(reports))
    if args.html is not None:
        try:
            print(write_page(args.run_dir, Path(args.html)), file=sys.stderr, flush=True)
        except OSError as e:
            raise ConfigError(f"--html {args.html}: {e.strerror}") from e
    return 0
