"""The object that cannot be pickled is the same on all ranks of the call."""

import pickle

import torch.distributed as dist


def predict(model, shards, out):
    try:
        pickle.dumps(shards)
    except Exception:
        return model(shards)
    dist.scatter_object_list(out, shards)
    return out
