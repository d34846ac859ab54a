"""Programs of plain PyTorch: users' code, imported by nothing, run by the corpus."""
