import pytest

from murmuration.worker.training.inbox import Mailbox, Started, Stop, ToIO, TrainingEvent


def test_messages_to_the_train_thread_arrive_in_order() -> None:
    mailbox = Mailbox()
    sent = [Started(("a", "b")), Stop("the end"), Stop("again", OSError())]
    for message in sent:
        mailbox.answer(message)
    assert [mailbox.poll(), mailbox.wait(), mailbox.wait(0.0)] == sent
    assert mailbox.poll() is None


def test_an_empty_mailbox_gives_nothing_in_time() -> None:
    assert Mailbox().poll() is None
    assert Mailbox().wait(0.0) is None


def test_messages_to_the_io_thread_go_where_it_said() -> None:
    mailbox = Mailbox()
    delivered: list[ToIO] = []
    mailbox.connect(delivered.append)
    sent = [TrainingEvent({"event": "progress"}), TrainingEvent({"event": "warning"})]
    for message in sent:
        mailbox.post(message)
    assert delivered == sent


def test_posting_before_the_io_thread_runs_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="the I/O thread is not running"):
        Mailbox().post(TrainingEvent({}))
