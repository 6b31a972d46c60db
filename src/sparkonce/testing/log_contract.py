"""What every transaction log promises, as tests that a backend's own test class inherits.

    class TestMyLog(LogContract):
        @pytest.fixture
        def address(self, tmp_path):                  # of a new, empty log
            return f"mylog://{tmp_path}"

        @staticmethod
        def open_log(address):                        # called in other processes too
            return MyLog(address, patience_s=0.2)

Override the methods of `log_under_test.LogUnderTest` that raise `NotImplementedError`. They make
the faults: damage a stored record, lose the answer to a write, make the log unreachable, delete it.

A backend reports its round trips with `sparkonce.failpoints.reach("log.before" | "log.after",
request=…)`. The contract kills a process at each of them, and lets a newer driver write between any
two. A backend that keeps connections or locks passes itself to
`sparkonce.txn_log.forks.closed_at_forks`.

Another process must be able to import the module of your test class by its name.
"""

from __future__ import annotations

from sparkonce.testing.log_faults import LogFaults, LogSizes
from sparkonce.testing.log_objects import LogObjects
from sparkonce.testing.log_races import LogRaces
from sparkonce.testing.log_records import LogRecords
from sparkonce.testing.log_verbs import LogVerbs


class LogContract(LogVerbs, LogRecords, LogRaces, LogObjects, LogFaults, LogSizes):
    """Subclass it; define the fixture `address` and the faults.

    Attributes:
        secrets: parts of the address that may appear in no output.
        long_history: the number of batches in the slow test of a long history.
    """
