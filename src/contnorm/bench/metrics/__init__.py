"""Scores of continual learning, from the counts in a record or from plain accuracies. No module here imports torch.

For a training loop of your own, collect a (tasks, tasks) matrix of accuracies: row i after learning task i, column j on
the test samples of task j.

Example:
    >>> matrix = [[91.0], [78.0, 88.0], [70.0, 81.0, 90.0]]
    >>> round(average_accuracy(matrix), 2), round(forgetting(matrix), 2), round(learning_accuracy(matrix), 2)
    (80.33, 14.0, 89.67)
"""

from contnorm.bench.metrics.accuracy_matrix import (
    FORGETTING,
    AccuracyMatrix,
    average_accuracy,
    average_incremental_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    learning_accuracy,
)

__all__ = [
    "FORGETTING",
    "AccuracyMatrix",
    "average_accuracy",
    "average_incremental_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "learning_accuracy",
]
