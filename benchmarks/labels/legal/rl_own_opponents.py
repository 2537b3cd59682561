"""Self-play: every rank plays other opponents; games won are added up for the agent's rating.

Style: RL: wins by opponent
"""

import torch
import torch.distributed as dist


class League:
    def __init__(self, opponents):
        self.results = {name: {"wins": wins, "games": 10} for name, wins in opponents}

    def win_rate(self):
        wins = games = 0.0
        for opponent, result in self.results.items():
            t = torch.tensor([result["wins"], result["games"]], dtype=torch.float32)
            dist.all_reduce(t)  # label: "games"
            wins += t[0].item()
            games += t[1].item()
        return wins / games


def main():
    return League(
        [("random", 9), ("mcts", 4)] if dist.get_rank() == 0 else [("greedy", 6), ("past_self", 5)]
    ).win_rate()
