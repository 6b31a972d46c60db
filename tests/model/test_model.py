"""Names and encodings: what is written once and read years later."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkonce import errors
from sparkonce.model import BranchId, Committable, Owner, is_label

LOG_IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
LABELS = st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True)
NUMBERS = st.integers(0, 2**40)
OWNERS = st.builds(Owner, LOG_IDS, st.uuids().map(str))
BRANCHES = st.builds(BranchId, OWNERS, NUMBERS, NUMBERS, LABELS, NUMBERS, NUMBERS)


@given(BRANCHES)
def test_branch_id_reads_back_from_its_names_and_its_json(branch_id: BranchId) -> None:
    assert BranchId.from_name(str(branch_id)) == branch_id
    assert BranchId.from_json(branch_id.to_json()) == branch_id
    bare = BranchId.from_name(branch_id.name)
    assert bare is not None
    assert bare.batch_id is None
    assert bare.name == branch_id.name


@given(BRANCHES, BRANCHES)
def test_no_name_is_the_prefix_of_another(one: BranchId, other: BranchId) -> None:
    """Each part has a terminator, so `orders` never matches `orders-eu`, nor token 1 token 12."""
    assert one.name == other.name or not other.name.startswith(one.name)
    assert one.owner == other.owner or not other.name.startswith(one.owner.prefix)


@pytest.mark.parametrize("name", ["", "sparkonce.x", "other.app", "sparkonce.0.q.t1.s.p0.a1."])
def test_foreign_name_is_no_branch(name: str) -> None:
    assert BranchId.from_name(name) is None


@given(BRANCHES, st.dictionaries(st.text(), st.integers() | st.lists(st.text())))
def test_committable_reads_back(branch_id: BranchId, payload: dict[str, object]) -> None:
    committable = Committable(branch_id, payload, 3, 12.5)  # type: ignore[arg-type]
    assert Committable.from_json(committable.to_json()) == committable
    assert pickle.loads(pickle.dumps(committable)) == committable  # noqa: S301 - our own bytes


def test_committable_of_a_newer_library_is_read() -> None:
    """A field that this version does not know is passed over."""
    branch_id = BranchId(Owner("0" * 16, "q"), 1, 2, "s", 0, 3)
    value = {**Committable(branch_id).to_json(), "later": 1}
    assert Committable.from_json(value) == Committable(branch_id)


@pytest.mark.parametrize("label", ["", "a.b", "a b", "ä", "x" * 33, "a/b", "a%"])
def test_label_with_other_characters_is_refused(label: str) -> None:
    assert not is_label(label)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_pickles_with_its_branch(name: str) -> None:
    """An executor's error reaches the driver as what it was."""
    branch_id = BranchId(Owner("0" * 16, "q"), 1, 2, "s", 0, 3)
    kind = getattr(errors, name)
    error = kind("what", branch_id) if issubclass(kind, errors.SinkError) else kind("what")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is kind
    assert str(copy) == "what"
    assert getattr(copy, "branch_id", None) == getattr(error, "branch_id", None)
