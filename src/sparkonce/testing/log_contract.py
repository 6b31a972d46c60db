"""What every transaction log promises, as tests: inherit them for a backend of your own.

    class TestMyLog(LogContract):
        @pytest.fixture
        def address(self, tmp_path):                  # a fresh, empty log
            return f"mylog://{tmp_path}"

        @staticmethod
        def open_log(address):                        # called in other processes too
            return MyLog(address, patience_s=0.2)

The methods of `log_under_test.LogUnderTest` that raise `NotImplementedError` are the faults: how a
stored record is damaged, how the answer to a write is lost, and how the log is out of reach. A
backend reports its round trips with `sparkonce.failpoints.reach("log.before" | "log.after",
request=…)`; the contract kills a process at each of them, and lets a newer driver pass between any
two. A backend that keeps connections or locks passes itself to
`sparkonce.txn_log.forks.closed_at_forks`.

The module of your test class must be importable by its name in another process.
"""

from __future__ import annotations

from sparkonce.testing.log_faults import LogFaults, LogSizes
from sparkonce.testing.log_races import LogRaces
from sparkonce.testing.log_verbs import LogVerbs


class LogContract(LogVerbs, LogRaces, LogFaults, LogSizes):
    """Give it an `address` fixture of an empty log, and the faults.

    Attributes:
        secrets: parts of the address that must be shown nowhere.
        long_history: batches of the long test.
    """
