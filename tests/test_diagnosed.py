"""Real runs in which something was planted, and with what: each is diagnosed as when it was kept.

`python -m tests.bench diagnosis` makes such runs, and says how often it is wrong. To keep others:
DIAGNOSIS_LOG.
"""

import pytest

from tests.bench.diagnosis import RESULTS, diagnosed, kept, score

RUNS = kept(RESULTS)


@pytest.mark.parametrize("run", RUNS, ids=lambda o: f"{o['number']} {o['kind'] or 'nothing'}")
def test_a_real_run_is_diagnosed_as_before(run):
    assert score(run, diagnosed(run["rows"])) == run["score"]


def test_the_runs_are_of_all_kinds_and_hardly_any_is_wrong():
    assert {run["threads"] for run in RUNS} == {0, 1, 2}
    assert len({run["kind"] for run in RUNS}) >= 15
    scores = [run["score"] for run in RUNS]
    for name, least in (("found", 0.9), ("since", 0.95), ("named", 0.85), ("blame", 0.95),
                        ("not the program", 1.0), ("no wrong line", 0.99)):
        values = [score[name] for score in scores if name in score]
        assert sum(values) >= least * len(values), name
