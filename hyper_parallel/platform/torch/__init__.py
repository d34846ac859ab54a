"""PyTorch behind the platform contract."""
