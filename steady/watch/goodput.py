"""Goodput: how much of a run's wall time was training, over all processes that worked on it."""

from steady.watch.proc import process_age_seconds
from steady.watch.sinks import OUTSIDE_PHASES

KINDS = ("startup", "data", "training", *OUTSIDE_PHASES, "lost")
COLUMNS = {f"goodput/{kind}" for kind in (*KINDS, "wall_s")}


class Goodput:
    """Seconds of wall time since the run began, by kind, continued from process to process.

    "startup" includes the first step of each process, "training" all other phases of a step but
    "data"; "lost" is the time of steps that had to be repeated. kept, dropped: rows as in Sinks.
    """

    accounted = 0.0  # age of this process when its previous Goodput ended, as before a rollback

    def __init__(self, kept: list[dict], dropped: list[dict]):
        self.seconds = dict.fromkeys(KINDS, 0.0) | seconds_so_far(kept)
        with_lost = seconds_so_far(dropped)
        if with_lost:
            self.seconds["lost"] += sum(with_lost.values()) - sum(self.seconds.values())
        self.startup = 0.0  # of this process
        self.add_startup(max(0.0, process_age_seconds() - Goodput.accounted))

    def add_startup(self, seconds: float):
        self.startup += seconds
        self.seconds["startup"] += seconds

    def add(self, seconds: dict[str, float]):
        """Seconds by phase since the last call."""
        for phase, s in seconds.items():
            self.seconds[phase if phase in KINDS else "training"] += s

    def row(self) -> dict[str, float]:
        wall = sum(self.seconds.values())
        shares = {f"goodput/{kind}": s / wall for kind, s in self.seconds.items()}
        return shares | {"goodput/wall_s": wall}

    def close(self):
        Goodput.accounted = process_age_seconds()


def seconds_so_far(rows: list[dict]) -> dict[str, float]:
    """Seconds by kind up to the newest of these rows that has them; {} if none has."""
    for row in reversed(rows):
        row = row.get("end", row)
        if row.keys() >= COLUMNS:
            return {kind: row[f"goodput/{kind}"] * row["goodput/wall_s"] for kind in KINDS}
    return {}
