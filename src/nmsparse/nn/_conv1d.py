"""transformers' Conv1D, a linear layer that stores its weight as (I, O), recognised without importing transformers."""


def is_hf_conv1d(kind: type) -> bool:
    """transformers' Conv1D, told by name: the core does not import transformers."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
