"""Errors of integrations whose framework can't be imported."""

from contnorm.integrations.extras import missing_extra


def test_framework_that_fails_to_import_is_not_called_missing() -> None:
    """transformers raises a ModuleNotFoundError without a name for any error of its own imports."""
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'.")
    error.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert str(missing_extra("transformers", error)) == (
        "contnorm.integrations.transformers: the installed framework can't be imported: "
        "RuntimeError: operator torchvision::nms does not exist"
    )
