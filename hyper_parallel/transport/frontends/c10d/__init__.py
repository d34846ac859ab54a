"""``torch.distributed`` on simulated ranks, and its messages on ranks whose calls are checked."""
