"""The same tests on every older Postgres that starts here; all others run on the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from integration_tests.postgres import test_direct as straight
from integration_tests.postgres import test_one_phase as one_phase
from integration_tests.postgres import test_sink as staged
from sparkonce.testing.services import PostgresServer, postgres_versions, start_services

STAGED = (
    staged.test_each_verb_and_what_stands_after_it,
    staged.test_commit_twice_changes_nothing,
    staged.test_commit_after_the_preparing_process_was_killed,
    staged.test_executor_killed_in_the_middle_of_its_copy_leaves_nothing,
    staged.test_two_processes_commit_at_the_same_time,
    staged.test_server_killed_between_prepare_and_commit,
    staged.test_answer_of_the_commit_is_lost,
    staged.test_prepared_transaction_rolled_back_by_an_operator_is_merged_again,
    staged.test_staging_dropped_as_well_is_a_loss,
    staged.test_merged_branch_is_aborted,
    staged.test_merge_of_a_dead_driver_is_found_and_aborted,
    staged.test_nothing_of_others_is_found_or_dropped,
    staged.test_violated_constraint_is_found_before_the_decision,
    staged.test_lock_that_is_not_given_ends_the_vote,
    staged.test_deadlock_with_another_writer_is_tried_again,
    staged.test_names_of_every_kind,
    staged.test_columns_that_the_batch_lacks_get_their_defaults,
    staged.test_partitioned_table_and_domain_are_targets_too,
    staged.test_missing_right_or_unfit_table_is_named,
    staged.test_role_with_the_least_rights_can_do_everything,
)
PREPARED = {
    f"test_direct_load_{test.__name__.removeprefix('test_')}": test
    for test in (
        straight.test_each_verb_and_what_stands_after_it,
        straight.test_commit_twice_changes_nothing,
        straight.test_upsert_updates_the_rows_whose_key_is_there,
        straight.test_key_that_comes_twice_in_a_task_is_named,
        straight.test_types_and_columns_reach_the_target_straight,
        straight.test_query_changes_its_mode,
        straight.test_nothing_of_others_is_found_or_ended,
        straight.test_processes_and_threads_commit_at_the_same_time,
        straight.test_server_killed_between_prepare_and_commit,
        straight.test_answer_of_the_commit_is_lost,
        straight.test_answer_of_the_prepare_is_lost,
        straight.test_transaction_that_failed_or_ended_does_not_pass_as_prepared,
        straight.test_branch_rolled_back_by_an_operator_is_lost,
        straight.test_other_role_may_not_end_a_branch,
        straight.test_other_database_of_the_server_proves_nothing,
        straight.test_role_with_the_least_rights_can_do_everything,
    )
}
ONE_PHASE = (
    one_phase.test_rows_marker_and_record_are_of_one_transaction,
    one_phase.test_role_of_the_sink,
    one_phase.test_answer_to_the_commit_is_lost,
    one_phase.test_newer_driver_claims_between_merge_and_commit,
    one_phase.test_newer_driver_claims_behind_the_read,
    one_phase.test_driver_that_stands_still_is_ended_by_the_server,
)
cut = straight.cut
pipeline, prepares = one_phase.pipeline, one_phase.prepares
behind_proxy = one_phase.behind_proxy
globals().update({test.__name__: test for test in ONE_PHASE})
globals().update({test.__name__: test for test in STAGED})
globals().update(PREPARED)

OLDER = postgres_versions()[:-1]


@pytest.fixture(
    scope="module",
    autouse=True,  # `world` asks for its server while it runs, too late for parameters
    params=[pytest.param(n, marks=pytest.mark.slow) for n in OLDER]
    or [pytest.param(None, marks=pytest.mark.skip("only one version of Postgres starts here"))],
)
def version(request: pytest.FixtureRequest) -> int:
    """Every older one, with the slow tests."""
    return int(request.param)


@pytest.fixture(scope="module")
def postgres(version: int) -> Iterator[PostgresServer]:
    with start_services(["postgres"], postgres_version=version) as services:
        yield services.postgres


@pytest.fixture(scope="module")
def open_server(version: int) -> Iterator[PostgresServer]:
    config = {"max_prepared_transactions": "0"}
    with start_services(["postgres"], postgres_version=version, postgres_config=config) as services:
        yield services.postgres


def test_older_server_is_what_runs(
    postgres: PostgresServer, version: int, fresh_name: Callable[[], str]
) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        assert connection.info.server_version // 10_000 == version
