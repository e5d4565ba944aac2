"""The hooks of a strategy: which ones it has, whether a run can call them, and what they are called with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.norm_hooks import NormHooks
from contnorm.bench.plan import Plan
from contnorm.bench.strategies.base import Strategy, TaskInfo
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.errors import UserError

__all__ = ["TASK_HOOKS", "check_hooks", "hooks_of", "task_info", "task_items"]

TASK_HOOKS = frozenset({"on_task_start", "on_task_end"})
_STEP_HOOKS = ("on_step_start", "on_step_end")


def hooks_of(strategy: Strategy) -> set[str]:
    """Return the names of the hooks that the class of a strategy overrides.

    Example:
        >>> from contnorm.bench import EWC
        >>> sorted(hooks_of(EWC()))
        ['on_task_end']
    """
    hooks = ("after_backward", *TASK_HOOKS, *_STEP_HOOKS)
    return {hook for hook in hooks if getattr(type(strategy), hook) is not getattr(Strategy, hook)}


def check_hooks(config: RunConfig, stream: TaskSequence, strategy: Strategy, norm_hooks: NormHooks) -> None:
    """Reject hooks that this run can't call, and streams that the strategy does not support."""
    name, hooks = config.strategy.name, hooks_of(strategy)
    step_hooks = [hook for hook in _STEP_HOOKS if hook in hooks]
    if step_hooks and config.train.graph == "on":
        raise UserError(
            f"strategy {name!r}: {step_hooks[0]} runs on the host at every step, which captured steps can't do. "
            f"Set train.graph=off, or use after_backward(grads)."
        )
    if stream.task_free and (norm_hooks.on_tasks or hooks & TASK_HOOKS):
        of_norm = norm_hooks.on_tasks
        owner = f"norm {config.norm.name!r}" if of_norm else f"strategy {name!r}"
        raise UserError(
            f"stream.scenario=free: a task-free stream has no task boundaries, at which {owner} has hooks. Use "
            f"another {'' if stream.multi_label else 'scenario or '}{'norm' if of_norm else 'strategy'}."
        )
    _check_norm(config, stream, strategy, norm_hooks)
    if stream.multi_label and not strategy.multi_label:
        raise UserError(
            f"strategy {name!r}: does not support multi-label streams such as {config.stream.name}. Use "
            f"another strategy, such as er or prs."
        )


def _check_norm(config: RunConfig, stream: TaskSequence, strategy: Strategy, norm_hooks: NormHooks) -> None:
    norm = config.norm.name
    if norm_hooks.need_joint_forward and strategy.draws and config.strategy.forward == "separate":
        raise UserError(
            f"strategy.forward=separate: norm {norm!r} is not defined for separate forward passes of stream and "
            f"memory samples. Use strategy.forward=joint."
        )
    if norm_hooks.max_tasks is not None and stream.tasks > norm_hooks.max_tasks:
        raise UserError(
            f"norm {norm!r}: has num_tasks={norm_hooks.max_tasks}, and the stream has {stream.tasks} tasks. Set "
            f"norm.num_tasks={stream.tasks} or more."
        )


def task_info(stream: TaskSequence, plan: Plan, task: int) -> TaskInfo:
    """Return the description of a task that hooks get."""
    labels = stream.train.label[stream.train.task == task]
    classes = np.flatnonzero(labels.any(0)) if labels.ndim == 2 else np.unique(labels)
    return TaskInfo(task, tuple(classes.tolist()), len(plan.ends))


def task_items(plan: Plan, task: int) -> Tensor:
    """Return the training items of a task that the plan has, in its order, each once."""
    ends = (0, *plan.ends)
    shown = np.concatenate([step.stream for step in plan.steps[ends[task] : ends[task + 1]]])
    _, first = np.unique(shown, return_index=True)
    return torch.from_numpy(shown[np.sort(first)])
