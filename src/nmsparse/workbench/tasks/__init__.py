"""Tasks by name: examples for training and validation, facts for the model, and how outputs are measured."""

from nmsparse.workbench.tasks._facts import Facts, Kind
from nmsparse.workbench.tasks._registry import TaskInfo, load_task, tasks
from nmsparse.workbench.tasks._task import IGNORED, Batch, Examples, Outputs, Task

__all__ = ["IGNORED", "Batch", "Examples", "Facts", "Kind", "Outputs", "Task", "TaskInfo", "load_task", "tasks"]
