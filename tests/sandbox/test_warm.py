"""Sandboxes started ahead: they are the same, they are bounded, and none is left."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from skyrl_thundersync.sandbox.base import SandboxError
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.sandbox.warm import Kind, WarmSandboxes

PLAIN, OTHER = Kind("plain", False), Kind("other", True)


class Box:
    """Counts what is open."""

    def __init__(self, kind, live):
        self.kind, self.live, self.taken = kind, live, False
        live.append(self)

    def close(self):
        self.live.remove(self)


def slowly(live, seconds):
    def start(kind):
        time.sleep(seconds)
        return Box(kind, live)

    return start


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.005)


@pytest.fixture
def live():
    return []


@pytest.fixture
def make_warm(live):
    made = []

    def make(room, start=None):
        made.append(WarmSandboxes(start or (lambda kind: Box(kind, live)), PLAIN, room))
        return made[-1]

    yield make
    for warm in made:
        warm.close()
    assert all(box.taken for box in live), "what nobody took was closed"


def take(warm, kind):
    box = warm.take(kind)
    if box is not None:
        box.taken = True
    return box


def test_what_is_announced_is_started_in_order_and_no_more_than_there_is_room_for(make_warm, live):
    warm = make_warm(2)
    for kind in (OTHER, PLAIN, OTHER):
        warm.expect(kind)
    wait_until(lambda: warm.ready_count == 2)
    time.sleep(0.05)
    assert [box.kind for box in live] == [OTHER, PLAIN]
    assert take(warm, OTHER).kind == OTHER
    wait_until(lambda: len(live) == 3)
    assert take(warm, OTHER).kind == OTHER and take(warm, PLAIN).kind == PLAIN


def test_one_that_is_not_there_is_left_to_the_caller_and_not_started_again(make_warm, live):
    warm = make_warm(1, slowly(live, 0.1))
    warm.expect(OTHER)
    warm.expect(Kind("third", False))
    wait_until(lambda: warm.ready_count == 1)
    assert take(warm, Kind("third", False)) is None, "it waits behind the first"
    time.sleep(0.2)
    assert [box.kind for box in live] == [], "the first was never asked for and made room"


def test_a_start_under_way_is_waited_for(make_warm, live):
    warm = make_warm(1, slowly(live, 0.3))
    warm.expect(OTHER)
    time.sleep(0.1)
    assert take(warm, OTHER).kind == OTHER and len(live) == 1


def test_the_plain_kind_is_kept_once_it_is_used(make_warm, live):
    warm = make_warm(3)
    time.sleep(0.05)
    assert live == []
    assert take(warm, PLAIN) is None
    wait_until(lambda: warm.ready_count == 3)
    assert take(warm, PLAIN) is not None
    wait_until(lambda: warm.ready_count == 3)


def test_settled_is_when_all_that_is_kept_ahead_is_there(make_warm, live):
    warm = make_warm(3, slowly(live, 0.1))
    warm.settle()
    assert warm.ready_count == 0, "nobody has asked for any"
    assert take(warm, PLAIN) is None
    for _ in range(2):
        warm.settle()
        assert warm.ready_count == 3
        take(warm, PLAIN)


def test_a_start_that_fails_does_not_keep_it_from_settling(make_warm):
    def start(kind):
        raise SandboxError("no engine")

    warm = make_warm(2, start)
    warm.expect(OTHER)
    warm.expect(PLAIN)
    warm.settle()
    assert warm.ready_count == 0


def test_one_that_waited_too_long_is_replaced(make_warm, live, monkeypatch):
    warm = make_warm(1)
    warm.expect(OTHER)
    wait_until(lambda: warm.ready_count == 1)
    monkeypatch.setattr("skyrl_thundersync.sandbox.warm.MAX_AGE_S", 0.0)
    assert take(warm, OTHER) is None and live == []


def test_without_room_nothing_is_started(make_warm, live):
    warm = make_warm(0)
    warm.expect(PLAIN)
    assert warm.take(PLAIN) is None and warm.take(PLAIN) is None
    assert live == []


def test_a_start_that_fails_is_left_to_the_one_who_asks(make_warm, live):
    def start(kind):
        raise SandboxError("no engine")

    warm = make_warm(2, start)
    warm.expect(OTHER)
    wait_until(lambda: warm._starting is None and not warm._expected)
    assert take(warm, OTHER) is None
    assert take(warm, PLAIN) is None


def test_a_start_that_breaks_off_keeps_nobody_waiting_and_the_next_is_made(make_warm, live, monkeypatch):
    broken = [True]

    def start(kind):
        time.sleep(0.2)
        if broken:
            broken.pop()
            raise LookupError("not foreseen")
        return Box(kind, live)

    warm = make_warm(1, start)
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: told.append(failed.exc_type))
    warm.expect(OTHER)
    wait_until(lambda: warm._starting == OTHER)
    assert take(warm, OTHER) is None, "nobody waits for it: the caller starts his own"
    wait_until(lambda: told)
    assert told == [LookupError], "nobody swallowed it"
    warm.expect(OTHER)
    wait_until(lambda: warm.ready_count == 1)
    assert take(warm, OTHER).kind == OTHER


def test_a_warm_sandbox_is_as_fresh_as_any_other(pool, config):
    first = pool.create()
    assert not first.started_ahead
    wait_until(lambda: pool.ready_count == config.warm)
    first.run("echo x >file; sleep 100 &", 5.0)
    second = pool.create()
    assert second.started_ahead and second.name != first.name
    assert second.run("pwd; ls -A; id -u; jobs", 5.0).output == "/workspace\n1000\n"
    assert pool.open_count == 2


def test_episodes_at_once_get_one_each_and_nothing_is_left(config):
    with SandboxPool(replace(config, warm=3), "test") as pool:
        for _ in range(12):
            pool.expect()

        def episode(index):
            box = pool.create()
            box.write_files({"index": str(index)})
            seen = box.run("cat index; ls -A | wc -l", 20.0).output
            box.close()
            return seen, box.name, box.started_ahead

        with ThreadPoolExecutor(4) as threads:
            seen, names, ahead = zip(*threads.map(episode, range(12)), strict=True)
        assert list(seen) == [f"{index}1\n" for index in range(12)]
        assert len(set(names)) == 12 and any(ahead)
        assert pool.open_count == 0 and pool.ready_count <= 3


def test_a_negative_number_is_refused(config):
    with pytest.raises(ValueError, match="thundersync.sandbox.warm"):
        SandboxPool(replace(config, warm=-1), "test")
