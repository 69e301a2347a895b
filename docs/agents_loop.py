"""Commit patches one after another, and keep those that make the model better.

    python docs/agents_loop.py --minutes 480 patches/*.patch -- --steps 200 --seeds 13

Called in a clean checkout. What follows -- goes to `monitor.py compare HEAD~1 HEAD`. A patch may
not touch what judges it.
"""

import argparse
import json
import subprocess
import sys
import time

JUDGES = ("tools/", "tests/", "docs/", "monitor.py", "steady/models/evaluation.py",
          "experiments.jsonl")


def git(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *command], capture_output=True, text=True)


def judge(patch: str, flags: list[str]) -> str:
    """Apply and commit a patch; take it back unless it is better. Returns a line."""
    if git("apply", "--index", patch).returncode:
        return "left out: it does not apply"
    touched = git("diff", "--cached", "--name-only").stdout.split()
    if any(path.startswith(JUDGES) for path in touched):
        git("reset", "--hard")
        return f"left out: it touches {', '.join(touched)}"
    git("commit", "-m", patch)
    done = subprocess.run([sys.executable, "monitor.py", "compare", "HEAD~1", "HEAD", "--json",
                           *flags], capture_output=True, text=True)
    if done.returncode:
        git("reset", "--hard", "HEAD~1")
    if done.returncode not in (0, 3, 4):
        return f"left out: {done.stderr.splitlines()[-1]}"
    return f"{'left out' if done.returncode else 'kept'}: {json.loads(done.stdout)['verdict']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=480)
    parser.add_argument("patches", nargs="+")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    end = time.monotonic() + 60 * args.minutes
    for patch in args.patches:
        if time.monotonic() < end:
            print(f"{patch}: {judge(patch, flags)}", flush=True)
