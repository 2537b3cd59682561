"""Each entry is padded to the same length, whichever entry the other ranks pad at the time."""

from accelerate.utils import pad_across_processes


def split(inputs, start, end):
    if isinstance(inputs, dict):
        for key in inputs.keys():
            inputs[key] = split(inputs[key], start, end)
        return inputs
    return pad_across_processes(inputs[start:end])
