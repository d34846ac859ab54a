"""What operations, training steps and the harness cost: the command ``bench``."""
