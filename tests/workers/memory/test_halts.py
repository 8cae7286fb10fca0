"""A memory worker that quiesces after the loss of another worker: the KV that it reports, and the KV that it then
keeps.
"""

from __future__ import annotations

from msgspec import structs
from test_memory_process import Driver, begin, bind, bound, knock, receive, send, step, threaded, token

from lamina.protocol.control import Connect, Quiesce, Quiesced
from lamina.protocol.step_plan import MessageKey, MessageKind, New, RowRange, StepPlan, SurvivingKv, encode

WAIT_S = 30.0


def halt(driver: Driver, view: int) -> dict[int, int]:
    driver.link.send(Quiesce(epoch=view))
    message = driver.link.recv(WAIT_S)
    assert isinstance(message, Quiesced)
    assert message.epoch == view
    return message.surviving_tokens


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
        driver.link.send(Connect(epoch=4, surviving=[SurvivingKv(0, 2)]))
        channel = knock(fabric, url, 4)
        send(channel, MessageKey(MessageKind.BIND), encode(bind(4)))
        receive(channel, MessageKind.BOUND)
        assert [step(channel, n + 10, view=4, sequence=0, first=n) for n in (2, 3)] == whole[2:]
        step(channel, 7, view=4)  # it was not kept: another one of that number may come
        assert halt(driver, 5) == {0: 4, 7: 1}


def test_of_a_round_that_ended_half_way_the_steps_that_were_done_count() -> None:
    with threaded() as (driver, fabric, _):
        channel = bound(driver, fabric, driver.ready())
        for batch in (0, 1):
            plan = StepPlan(
                epoch=1, batch=batch, step=5, ops=[New(batch)], rows=[RowRange(batch, 0, 1)], has_more=not batch
            )
            send(channel, MessageKey(MessageKind.PLAN, 5, batch, 1), encode(plan))
        for kind in (MessageKind.Q, MessageKind.KV):
            send(channel, MessageKey(kind, 5, 0, 1, layer=0), 2 * token(0))
        receive(channel, MessageKind.O)
        assert halt(driver, 2) == {0: 1, 1: 0}


def test_what_it_has_not_it_cannot_keep() -> None:
    with threaded() as (driver, fabric, _):
        url = driver.ready()
        channel = bound(driver, fabric, url)
        step(channel, 0)
        for view, keep in ((2, SurvivingKv(0, 2)), (3, SurvivingKv(1, 1))):
            driver.link.send(Connect(epoch=view, surviving=[keep]))
            channel = knock(fabric, url, view)
            send(channel, MessageKey(MessageKind.BIND), encode(bind(view)))
            assert f"sequence {keep.sequence}" in receive(channel, MessageKind.REFUSED).decode()
        driver.link.send(Connect(epoch=4))
        channel = knock(fabric, url, 4)
        send(channel, MessageKey(MessageKind.BIND), encode(structs.replace(bind(4), kv_bytes=1)))
        receive(channel, MessageKind.BOUND)
        step(channel, 1, view=4, sequence=0, first=1)
