"""The program in which bugs are seeded, for PyTorch."""
