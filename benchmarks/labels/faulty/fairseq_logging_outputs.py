"""Each rank's criterion logs what its samples needed, so nll_loss meets ctc_loss.

Style: fairseq: fast_stat_sync without agreement on the keys
"""

import torch
import torch.distributed as dist


def criterion(sample):
    logging_output = {"loss": sample["loss"], "ntokens": sample["ntokens"]}
    if sample["kind"] == "translation":
        logging_output["nll_loss"] = 3.5
    else:
        logging_output["ctc_loss"] = 70.0
    return logging_output


def sync_logging_output(logging_output):
    synced = {}
    for k, v in logging_output.items():
        buf = torch.DoubleTensor([v])
        dist.all_reduce(buf)  # label: k
        synced[k] = buf[0].item()
    return synced


def main():
    kind = "translation" if dist.get_rank() == 0 else "asr"
    logging_output = criterion({"loss": 2.0, "ntokens": 16, "kind": kind})
    return logging_output, sync_logging_output(logging_output)
