"""What exists once in a process: one object for all threads, and another one in a forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkonce.once import forget, once


class Thing:
    def __init__(self, name: str = "") -> None:
        self.name = name


def test_one_object_for_each_key() -> None:
    assert once(Thing, "a") is once(Thing, "a")
    assert once(Thing, "a") is not once(Thing, "b")
    assert once(Thing, "a").name == "a"


def test_all_threads_get_the_same_object() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Thing:
        assert not begun.is_set(), "made twice"
        begun.set()
        go_on.wait(10)
        return Thing()

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(once, make) for _ in range(8)]
        assert begun.wait(10)
        other = once(Thing, "while another object is made")  # waits for nobody
        go_on.set()
        found = {id(future.result(10)) for future in waiting}
    assert len(found) == 1
    assert id(other) not in found


def test_forgotten_object_is_made_again() -> None:
    first = once(Thing, "forgotten")
    assert forget(Thing, "forgotten") is first
    assert forget(Thing, "forgotten") is None
    assert once(Thing, "forgotten") is not first


def test_nothing_is_kept_of_a_failure() -> None:
    tries = iter([OSError("not yet"), None])

    def make() -> Thing:
        if (error := next(tries)) is not None:
            raise error
        return Thing()

    with pytest.raises(OSError, match="not yet"):
        once(make)
    assert once(make) is once(make)


def test_forked_child_makes_its_own_and_waits_for_no_thread_of_its_parent() -> None:
    mine = once(Thing, "forked")
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Thing:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait(30)
        return Thing()

    thread = threading.Thread(target=once, args=(make,))
    thread.start()
    assert begun.wait(10)
    child = os.fork()  # while another thread holds the lock of a slot
    if child == 0:
        os._exit(0 if once(make) and once(Thing, "forked") is not mine else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert once(Thing, "forked") is mine
    finally:
        go_on.set()
        thread.join()
