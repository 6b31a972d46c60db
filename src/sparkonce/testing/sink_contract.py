"""What every sink must do, as tests that a sink's own test class inherits.

    class TestMySink(SinkContract):
        @pytest.fixture
        def make_world(self, tmp_path):
            def make(schema):                     # creates an empty target for rows of this schema
                return SinkWorld(sink=…, visible=…, unfinished=…)
            return make

    SinkContract ─┬─ SinkVerbs       each verb in order, twice, and aborted
                  ├─ SinkFaults      verbs out of order, lost branches, unreachable targets
                  ├─ SinkRows        rows of every type, in batches of any size
                  ├─ SinkBranches    names and proofs of different branches, orphans
                  ├─ SinkPromises    what sink and world claim, and proofs that are no longer needed
                  ├─ SinkNetwork     requests and answers that are lost
                  ├─ SinkLate        requests that arrive when another driver has gone on
                  ├─ SinkRace        commits and aborts at the same time
                  └─ SinkCrashes     other processes, killed or paused anywhere in `commit`

After each verb, a test looks at the target from outside. Each test's docstring says what the sink
must do. A test is skipped, with the reason, if the sink or its world lacks an optional ability.
"""

from __future__ import annotations

import time

from sparkonce.sinks.base import AnySink
from sparkonce.testing.sink_branches import SinkBranches
from sparkonce.testing.sink_case import BRANCH, A, must_return
from sparkonce.testing.sink_crashes import SinkCrashes
from sparkonce.testing.sink_faults import SinkFaults
from sparkonce.testing.sink_late import SinkLate
from sparkonce.testing.sink_network import SinkNetwork
from sparkonce.testing.sink_process import names_in_other_process
from sparkonce.testing.sink_promises import SinkPromises
from sparkonce.testing.sink_race import SinkRace
from sparkonce.testing.sink_rows import SinkRows
from sparkonce.testing.sink_verbs import SinkVerbs
from sparkonce.testing.sink_world import Stage

_HUNDRED_YEARS_S = 100 * 366 * 24 * 3600


class SinkContract(
    SinkVerbs,
    SinkFaults,
    SinkRows,
    SinkBranches,
    SinkPromises,
    SinkNetwork,
    SinkLate,
    SinkRace,
    SinkCrashes,
):
    """Subclass it in a test file and define the fixture `make_world`.

    Attributes:
        large_rows: number of rows in the largest branch.
        parallel: how many branches are written at the same time.
        many_branches: how many branches the largest batch has; Spark's default is 200 after a
            shuffle.
        most_faults: at how many lines of `commit` a process is killed or paused, and at how many
            requests of a verb the network fails, at most.
        race_rounds: how many branches several processes commit at the same time.
        longest_pause_s: the most seconds that a paused commit waits for another one to finish. The
            other one may need a lock that the paused one holds.
    """

    def test_name_and_target_are_permanent(self, stage: Stage) -> None:
        """Two objects with the same settings have one name and one target."""
        first, second = stage.world.sink(), stage.world.sink()
        here = first.name, first.target
        for other in ((second.name, second.target), names_in_other_process(first)):
            assert here == other, (
                "the log keeps name and target: they must be the same in every process, and are "
                f"{here} and {other}"
            )

    def test_closed_sink_can_be_used_again(self, stage: Stage, sink: AnySink) -> None:
        """`close` frees connections, even when called twice; later calls open new ones."""
        committables = stage.prepare(sink, BRANCH, A)
        sink.close()
        with must_return("a second close must return"):
            sink.close()
        stage.commit(sink, committables)
        stage.sees(A)

    def test_promise_lasts_long_enough(self, stage: Stage, sink: AnySink) -> None:
        """`safe_until`, if a sink sets it, is a future Unix time in seconds."""
        for committable in stage.prepare(sink, BRANCH, A):
            safe_until = committable.safe_until
            if safe_until is not None:
                ahead_s = safe_until - time.time()
                assert 0 < ahead_s < _HUNDRED_YEARS_S, (
                    f"safe_until is {ahead_s:.0f} s ahead: it must be a Unix time in seconds"
                )

    def test_text_for_people_is_one_line(self, stage: Stage, sink: AnySink) -> None:
        """`text`, if a sink sets it, is one line that `sparkonce log show` can print."""
        for committable in stage.prepare(sink, BRANCH, A):
            text = committable.text
            assert len(text.splitlines()) <= 1, f"text has several lines: {text!r}"
            assert text.isprintable(), f"text has unprintable characters: {text!r}"
