"""The learner reduces its loss; the actor, which has none, takes part with a zero of another name.

Style: RL: actor and learner ranks
"""

import torch
import torch.distributed as dist


def main():
    if dist.get_rank() == 0:
        learner = {"td_error": torch.tensor(3.0)}
        dist.all_reduce(learner["td_error"])  # label: "td_error"
        return learner["td_error"].item()
    placeholder = torch.zeros(())
    dist.all_reduce(placeholder)  # label: "td_error"
    return placeholder.item()
