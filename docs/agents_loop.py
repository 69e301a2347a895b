"""Commit patches one after another, and keep those that make the model better.

    python docs/agents_loop.py --minutes 480 patches/*.patch -- --steps 200 --seeds 13

Stops at uncommitted changes. Commit hooks do not run. Flags after -- go to `monitor.py compare`.
A patch may not touch the code that judges it. One that hangs is left out after --each minutes.
"""

import argparse
import json
import subprocess
import sys
import time

JUDGES = ("tools/", "tests/", "docs/", "monitor.py", "steady/models/evaluation.py",
          "experiments.jsonl")


def git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout


def judge(patch: str, minutes: float, flags: list[str]) -> str:
    """Make a commit of a patch, and merge it if it is known to be better. Returns a line."""
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        sys.exit(f"commit or stash these first, as patches are taken back:\n{changed}")
    before = git("rev-parse", "HEAD").strip()
    try:
        git("apply", "--index", patch)
        # both names of a renamed file; relative to this folder, if it is in a larger repository
        touched = git("diff", "--cached", "--name-only", "--no-renames", "--relative").splitlines()
        if any(path.startswith(JUDGES) for path in touched):
            return f"left out: it touches {', '.join(touched)}"
        tree = git("write-tree").strip()  # no branch moves: a kill keeps nothing that is not judged
        change = git("commit-tree", tree, "-p", before, "-m", patch).strip()
    finally:
        git("reset", "--hard", before)
    limit = ["timeout", "--foreground", f"{minutes}m"]  # foreground: Ctrl-C ends it, too
    done = subprocess.run([*limit, sys.executable, "monitor.py", "compare", before, change,
                           "--json", *flags], capture_output=True, text=True)
    if done.returncode not in (0, 3, 4):
        return f"left out: exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    said = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    if kept := said["better"] == "B":
        git("merge", "--ff-only", change)
    return f"{'kept' if kept else 'left out'}: {said['verdict']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=480)
    parser.add_argument("--each", type=float, default=60, help="minutes of a comparison, at most")
    parser.add_argument("patches", nargs="+")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    end = time.monotonic() + 60 * args.minutes
    for patch in args.patches:
        if time.monotonic() < end:
            try:
                said = judge(patch, args.each, flags)
            except subprocess.CalledProcessError as e:  # as after a commit or an edit meanwhile
                said = f"left out: {(e.stderr or e.stdout).strip()}"
            print(f"{patch}: {said}", flush=True)
