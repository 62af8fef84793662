"""A dataset whose items a server computes. The workers of a DataLoader import it, and cannot import test modules."""

import torch


class Attended(torch.utils.data.Dataset):
    """Six items of that width, computed in the process that asks for them."""

    def __init__(self, remote, width):
        self.remote, self.width = remote, width

    def __len__(self):
        return 6

    def __getitem__(self, i):
        x = torch.full((2, self.width), float(i), dtype=torch.float64)
        return self.remote(x, x, x)[0]
