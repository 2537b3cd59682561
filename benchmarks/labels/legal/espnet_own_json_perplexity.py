"""Perplexities of the rank's own utterances, read from its own data.json, are averaged in a list.

Style: espnet: data.json of each rank
"""

import json

import torch
import torch.distributed as dist


def main():
    rank = dist.get_rank()
    names = [["BAC009S0764", "BAC009S0765"], ["IC0936W0144", "BAC009S0764"]][rank]
    text = json.dumps({"utts": {name: {"output": [{"shape": [3 + n, 5]}]} for n, name in enumerate(names)}})
    js = json.loads(text)["utts"]
    ppls = []
    for name in js.keys():
        ppl = torch.tensor(float(js[name]["output"][0]["shape"][0]))
        dist.all_reduce(ppl)
        ppls.append(ppl.item() / dist.get_world_size())
    return sum(ppls) / len(ppls)
