"""The tasks of ``surgery eval --tasks``, each a class and a line here."""

from surgery.errors import UsageError
from surgery.evaluation.tasks.aggregation import CommonWords, FrequentWords, VariableTracing
from surgery.evaluation.tasks.base import Task
from surgery.evaluation.tasks.listing import ListRecall, ListUpdate
from surgery.evaluation.tasks.needles import (
    MultiKey1,
    MultiKey2,
    MultiKey3,
    MultiQuery,
    MultiValue,
    Single1,
    Single2,
    Single3,
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Single1(),
        Single2(),
        Single3(),
        MultiKey1(),
        MultiKey2(),
        MultiKey3(),
        MultiValue(),
        MultiQuery(),
        VariableTracing(),
        CommonWords(),
        FrequentWords(),
        ListRecall(),
        ListUpdate(),
    )
}


def chosen_tasks(names: list[str]) -> list[Task]:
    """Return the tasks of these names; ``all`` alone stands for every one.

    Raises:
        UsageError: an unknown name, or one twice.
    """
    if names == ["all"]:
        return list(TASKS.values())
    for name in names:
        if name not in TASKS:
            raise UsageError(f"task {name!r}: choose among {', '.join(TASKS)}, or all")
    if len(set(names)) < len(names):
        raise UsageError(f"tasks {','.join(names)}: each task once")
    return [TASKS[name] for name in names]
