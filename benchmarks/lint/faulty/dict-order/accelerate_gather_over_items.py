"""The metrics are gathered by accelerate in the order of the dict."""


def log(accelerator, metrics):
    return {k: accelerator.gather(v).mean() for k, v in metrics.items()}  # expect: dict-order
