"""Mean return over ranks, each playing its own scenario; the scenario is printed beside, and the returns are averaged.

Style: RL: scenarios split over ranks
"""

import torch
import torch.distributed as dist


def main():
    scenarios = [["corridor", "arena"], ["arena", "corridor"]][dist.get_rank()]
    returns = []
    for scenario in scenarios:
        r = torch.tensor(float(len(scenario)))
        dist.all_reduce(r)
        r /= dist.get_world_size()
        returns.append(r.item())
        print(f"played {scenario}; mean return so far {sum(returns) / len(returns):.1f}")
    return max(returns) - min(returns) >= 0
