"""A memory worker that comes to rest behind the loss of another worker: what it says it has, and what it then keeps."""

from __future__ import annotations

from msgspec import structs
from test_memory_process import Driver, begin, bind, bound, knock, receive, send, step, threaded, token

from lamina.protocol.control import Connect, ControlLink, Failed, Halt, Halted, MemoryReady, Stats
from lamina.protocol.plan import Keep, Key, Kind, New, Rows, StepPlan, encode

WAIT_S = 30.0


def halt(driver: Driver, view: int) -> dict[int, int]:
    driver.link = ControlLink(driver.link._sock, MemoryReady | Stats | Failed | Halted)
    driver.link.send(Halt(view=view))
    message = driver.link.recv(WAIT_S)
    assert isinstance(message, Halted)
    assert message.view == view
    return message.kept


def test_it_says_what_it_has_in_all_layers_and_keeps_what_it_is_told_to() -> None:
    """A step that has begun counts for nothing; one that is sent anew gives what it would have given."""
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        assert halt(driver, 1) == {}
        channel = bound(driver, fabric, url, 2)
        whole = [step(channel, 0, view=2), *(step(channel, n, view=2, sequence=0, first=n) for n in range(1, 4))]
        step(channel, 7, view=2)
        begin(channel, 2)
        kept = halt(driver, 3)
        assert kept.pop(102, 0) == 0, "its plan may have been read, or not"
        assert kept == {0: 4, 7: 1}
        driver.link.send(Connect(view=4, keep=[Keep(0, 2)]))
        channel = knock(fabric, url, 4)
        send(channel, Key(Kind.BIND), encode(bind(4)))
        receive(channel, Kind.BOUND)
        assert [step(channel, n + 10, view=4, sequence=0, first=n) for n in (2, 3)] == whole[2:]
        step(channel, 7, view=4)  # it was not kept: another one of that number may come
        assert halt(driver, 5) == {0: 4, 7: 1}


def test_of_a_round_that_ended_half_way_the_steps_that_were_done_count() -> None:
    with threaded() as (driver, fabric, _):
        channel = bound(driver, fabric, driver.ready())
        for batch in (0, 1):
            plan = StepPlan(view=1, batch=batch, step=5, ops=[New(batch)], rows=[Rows(batch, 0, 1)], more=not batch)
            send(channel, Key(Kind.PLAN, 5, batch, 1), encode(plan))
        for kind in (Kind.Q, Kind.KV):
            send(channel, Key(kind, 5, 0, 1, layer=0), 2 * token(0))
        receive(channel, Kind.O)
        assert halt(driver, 2) == {0: 1, 1: 0}


def test_what_it_has_not_it_cannot_keep() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        channel = bound(driver, fabric, url)
        step(channel, 0)
        for view, keep in ((2, Keep(0, 2)), (3, Keep(1, 1))):
            driver.link.send(Connect(view=view, keep=[keep]))
            channel = knock(fabric, url, view)
            send(channel, Key(Kind.BIND), encode(bind(view)))
            assert f"sequence {keep.sequence}" in receive(channel, Kind.REFUSED).decode()
        driver.link.send(Connect(view=4))
        channel = knock(fabric, url, 4)
        send(channel, Key(Kind.BIND), encode(structs.replace(bind(4), kv_bytes=1)))
        receive(channel, Kind.BOUND)
        step(channel, 1, view=4, sequence=0, first=1)
