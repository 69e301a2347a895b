"""Real runs in which something was planted, kept with the answer: how many are diagnosed rightly.

`python -m tests.bench diagnosis` makes such runs. To keep others: DIAGNOSIS_LOG.
"""

from tests.bench.diagnosis import RESULTS, diagnosed, kept, score


def test_real_runs_are_diagnosed_as_well_as_ever():
    runs = kept(RESULTS)
    assert {run["threads"] for run in runs} == {0, 1, 2}
    assert len({run["kind"] for run in runs}) >= 15
    scores = [score(run, diagnosed(run["rows"])) for run in runs]
    for name, least in (("found", 0.94), ("since", 0.98), ("named", 0.86), ("blame", 0.97),
                        ("not the program", 1.0), ("quiet", 0.75), ("no wrong line", 0.99),
                        ("no wrong cause", 0.95)):
        values = [each[name] for each in scores if name in each]
        assert sum(values) >= least * len(values), name
