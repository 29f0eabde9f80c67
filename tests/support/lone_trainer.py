"""A trainer of a whole model without an I/O thread: what it posts is kept."""

from typing import Any

from murmuration.algorithms.plan import Plan
from murmuration.worker.tasks import Cursor, Task
from murmuration.worker.training.loop import Trainer
from murmuration.worker.training.mailbox import Mailbox, Started, ToIO, TrainingEvent
from murmuration.worker.training.model import schema_of
from murmuration.worker.training.optimizers import InnerConfig
from murmuration.worker.training.replica import InnerReplica


class LoneTrainer(Trainer):
    """Peer `w0`, whose run has started. Args: more: of the trainer."""

    def __init__(
        self, task: Task, plan: Plan, steps: int, inner: InnerConfig | None = None, **more: Any
    ) -> None:
        self.box, self.posted = Mailbox(), list[ToIO]()
        self.box.connect(self.posted.append)
        self.box.answer(Started(("w0",)))
        self.model, cursor = task.model(), Cursor(seed=0, stream="w0")
        replica = InnerReplica(task, self.model, inner or InnerConfig(), cursor, steps)
        given: dict[str, Any] = {"mailbox": self.box, "between_steps": lambda _: None, **more}
        fragments = plan.cut(schema_of(self.model))
        super().__init__(replica=replica, fragments=fragments, plan=plan, steps=steps, **given)

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The events of that kind."""
        events = [each.event for each in self.posted if isinstance(each, TrainingEvent)]
        return [event for event in events if event["event"] == kind]
