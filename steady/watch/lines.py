"""Lines of Python by the time spent in them, from the looks of the sampler."""

import math
from collections.abc import Iterable

OTHERS = "…"  # lines without a name in a profile
LOADER_WAITS = ("multiprocessing", "selectors", "threading")  # under torch's DataLoader


def parts_of(place: str) -> tuple[str, str, str]:
    """("FILE:LINE", FUNCTION, LIBRARY) of "FILE:LINE FUNCTION < the same of its caller | LIBRARY".

    LIBRARY: other than torch, called by the line; or "".
    """
    own, _, library = place.partition(" | ")
    where, _, function = own.partition(" < ")[0].rpartition(" ")
    return where, function, library


def by_function(places) -> Iterable[list[str]]:
    """The places of each function, except nameless ones and waits for the loader."""
    functions = {}
    for place in places:
        where, name, library = parts_of(place)
        function = where.rpartition(":")[0], name
        if place != OTHERS and function != ("data.py", "loader") and library not in LOADER_WAITS:
            functions.setdefault(function, []).append(place)
    return functions.values()


def longer_lines(ms: list[float], looks: list[dict[str, int]],
                 factor: float) -> list[tuple[float, float, str]]:
    """(ms per step, half its 95 % interval, place) of each function that takes longer than `factor`
    times as long as before, the largest first.

    ms, looks: of a phase in a step, before and after. The place is the function's line that grew
    most. Each look is a Bernoulli trial, so the interval is binomial; for a phase without looks, it
    is the whole phase.
    """
    totals, found = [sum(lines.values()) for lines in looks], []
    for places in by_function({**looks[0], **looks[1]}):
        shares = [[lines.get(place, 0) / max(1, total) for place in places]
                  for lines, total in zip(looks, totals, strict=True)]
        old, new = (t * sum(each) for t, each in zip(ms, shares, strict=True))
        errors = [2 * t * math.sqrt((sum(each) * (1 - sum(each)) + 1 / n) / n) if n else t
                  for t, each, n in zip(ms, shares, totals, strict=True)]
        growth = [ms[1] * b - ms[0] * a for a, b in zip(*shares, strict=True)]
        error = math.hypot(errors[1], factor * min(ms[0], errors[0]))
        found.append((new - factor * old, error, places[growth.index(max(growth))]))
    return sorted(found, reverse=True)
